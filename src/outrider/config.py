"""Strict YAML to frozen dataclasses and back.

Every config is a frozen keyword-only dataclass. Reading one from YAML refuses unknown keys, wrong types (``"3"`` is no
number, ``true`` is no integer, an integer is a number) and whatever the dataclass refuses itself, each with one
line that names the dotted key. pydantic validates the values; this module does keys, messages and plug-ins.

A field that may hold one of several classes is annotated with the :class:`Family` of those it knows::

    agent: Annotated[AgentConfig, AGENTS]

Its section in YAML carries the key ``class``, a short name or an import path ``my_package.my_module:MyConfig``.
Classes named by import path are dataclasses; they need not inherit from :class:`Config`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import json
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Self, Union, cast

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, core_schema

from outrider.durable import replace_text
from outrider.errors import ConfigError, UnknownKey
from outrider.strict_yaml import dump_yaml, in_file, read_yaml

FORMAT_VERSION = 1
"""Version of the YAML files that :meth:`Config.save` writes."""

_STRICT = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)


def require(condition: bool, key: str, expected: str, got: object) -> None:
    """Refuse an impossible value.

    Raises:
        ConfigError: The condition does not hold.
    """
    if not condition:
        raise ConfigError(key, expected, got)


class Config:
    """Base of every config: a frozen keyword-only dataclass that can be loaded from and saved to YAML."""

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a YAML file.

        Raises:
            ConfigError: There is no such file, or what it says is not such a config.
        """
        data = read_yaml(path)
        try:
            return cls.from_dict(without_version(data))
        except ConfigError as error:
            raise in_file(error, path) from None

    def save(self, path: Path | str) -> None:
        """Write a YAML file that loads as an equal config, atomically; the directory must exist."""
        replace_text(Path(path), self.to_yaml())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "") -> Self:
        """Build it from plain values, strictly.

        Args:
            data: Values by field name; ready-made configs are taken as they are.
            where: Dotted key of this section, for errors.

        Raises:
            ConfigError: An unknown or missing key, a wrong type or an impossible value.
        """
        return cast(Self, _build(cls, data, where))

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name, None included; sections of a :class:`Family` with their ``class``."""
        return _to_dict(self)

    def to_yaml(self) -> str:
        """What :meth:`save` writes."""
        return dump_yaml({"format_version": FORMAT_VERSION, **self.to_dict()})

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(lambda value: _build(cls, value, ""))


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """The classes a section may hold, by short name; any other by import path. Annotates a field.

    Args:
        classes: Import path ``module:Class`` by short name. Imported when used.
        default: Short name for a section without the key ``class``; None: the key is required.
    """

    classes: Mapping[str, str]
    default: str | None = None

    def build(self, data: Any, where: str = "") -> Any:
        """Build the config that a section describes.

        Args:
            data: The section; only a name stands for a section with nothing but its ``class``.
            where: Dotted key of the section, for errors.

        Raises:
            ConfigError: No such class, or not such values.
        """
        if dataclasses.is_dataclass(data) and not isinstance(data, type):
            return data
        section = {"class": data} if isinstance(data, str) else data
        if not isinstance(section, Mapping):
            raise ConfigError(where, "a mapping, or the name of a class", _show(data))
        name = section.get("class", self.default)
        cls = self.resolve(name, f"{where}.class" if where else "class")
        return _build(cls, {key: value for key, value in section.items() if key != "class"}, where)

    def build_default(self) -> Any:
        """Build the default class with its defaults."""
        return self.build({})

    def resolve(self, name: Any, where: str = "class") -> type:
        """Import the dataclass of that name.

        Raises:
            ConfigError: An unknown short name, a module that cannot be imported, or not a dataclass in it.
        """
        path = self.classes.get(name, name) if isinstance(name, str) else name
        if not isinstance(path, str) or ":" not in path:
            expected = f"one of {_join(self.classes)} or an import path such as my_package.my_module:MyConfig"
            raise ConfigError(where, expected, "nothing" if name is None else _suggest(name, self.classes))
        module_name, _, attribute = path.partition(":")
        try:
            found: Any = importlib.import_module(module_name)
        except ImportError as error:
            top = module_name.partition(".")[0]
            hint = f" (run it where {top} lies, or set PYTHONPATH)" if error.name == top else ""
            raise ConfigError(where, f"a module that can be imported, for {path}", f"{error}{hint}") from error
        for part in attribute.split("."):
            if not hasattr(found, part):
                raise ConfigError(where, f"the name of a class in {module_name}", _suggest(attribute, vars(found)))
            found = getattr(found, part)
        if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
            raise ConfigError(where, "a dataclass", f"{path}, which is {_kind(found)}")
        return found

    def name_of(self, cls: type) -> str:
        """The short name of a class, else its import path."""
        for name, path in self.classes.items():  # a class may be known by the package that shows it
            module, _, attribute = path.partition(":")
            if getattr(sys.modules.get(module), attribute, None) is cls:
                return name
        return _import_path(cls)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.build)


def without_version(data: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a file without their format version, which may be missing.

    Raises:
        ConfigError: It was written by another version.
    """
    values = dict(data)
    version = values.pop("format_version", FORMAT_VERSION)
    require(version == FORMAT_VERSION, "format_version", str(FORMAT_VERSION), version)
    return values


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """A remark that names the nearest of the known names; empty if none is near."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def field_types(cls: type) -> dict[str, Any]:
    """Resolved annotations of the fields of a dataclass that its constructor takes, in order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def family_of(annotation: Any) -> Family | None:
    """The family that a field's annotation names, if it does."""
    if typing.get_origin(annotation) is Annotated:
        return next((item for item in annotation.__metadata__ if isinstance(item, Family)), None)
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return next((found for found in map(family_of, typing.get_args(annotation)) if found), None)
    return None


def _build(cls: type, data: Any, where: str) -> Any:
    """Build a dataclass from plain values; keys of errors are seen from the root that `where` starts at."""
    try:
        if not isinstance(data, Mapping):
            raise ConfigError("", "a mapping of keys to values", _show(data))
        validators = _validators(cls)
        for key in data:
            if key not in validators:
                got = f"an unknown key{did_you_mean(key, validators)}"
                raise UnknownKey(str(key), f"one of {_join(validators)}", got)
        for field in dataclasses.fields(cls):
            missing = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if missing and field.name in validators and field.name not in data:
                raise ConfigError(field.name, "a value", "nothing")
        return _construct(cls, {name: validators[name](value) for name, value in data.items()})
    except ConfigError as error:
        raise (error.below(where) if where else error) from error.__cause__


def _construct(cls: type, values: dict[str, Any]) -> Any:
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:  # a custom class that checks its values in its own way
        raise ConfigError("", f"values that {cls.__name__} takes", error) from error


@functools.cache
def _validators(cls: type) -> dict[str, Callable[[Any], Any]]:
    """For each field a function from a plain value to a valid one; its errors have keys from the class on."""
    try:
        return {name: functools.partial(_validate, name, _validator(tp)) for name, tp in field_types(cls).items()}
    except (NameError, PydanticUserError) as error:
        raise ConfigError("", f"a dataclass {cls.__name__} with field types that can be read", error) from error


def _validator(annotation: Any) -> Callable[[Any], Any]:
    if (family := family_of(annotation)) is not None and typing.get_origin(annotation) is Annotated:
        return family.build
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return lambda value: value if isinstance(value, annotation) else _build(annotation, value, "")
    schema = TypeAdapter(annotation, config=_STRICT)
    # As JSON, because pydantic's strict mode takes a list for a tuple there, and nothing else that it should not.
    return lambda value: schema.validate_json(json.dumps(_plain(value)))


def _validate(name: str, validator: Callable[[Any], Any], value: Any) -> Any:
    try:
        return validator(value)
    except ConfigError as error:
        raise error.below(name) from error.__cause__
    except ValidationError as error:
        raise _explain(error.errors(include_url=False), _plain(value)).below(name) from None


def _explain(errors: list[ErrorDetails], data: Any) -> ConfigError:
    """One ConfigError for what pydantic found: the deepest key of the first wrong value, all that it may be."""
    found = [_as_config_error(error, _key_of(error, data), data) for error in errors]
    # Where several classes are possible, one that knows the key has more to say than those that do not.
    found = [error for error in found if not isinstance(error, UnknownKey)] or found
    section = found[0].key.partition(".")[0]
    first = max((e for e in found if e.key.partition(".")[0] == section), key=lambda e: e.key.count("."))
    expected = dict.fromkeys(error.expected for error in found if error.key == first.key)
    return ConfigError(first.key, " or ".join(expected), first.got)


def _as_config_error(error: ErrorDetails, key: tuple[str | int, ...], data: Any) -> ConfigError:
    dotted = ".".join(map(str, key))
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause.below(dotted) if dotted else cause
    return ConfigError(dotted, _EXPECTED.get(error["type"], _in_words)(error), _show_at(key, data))


def _key_of(error: ErrorDetails, data: Any) -> tuple[str | int, ...]:
    """Pydantic's location without the names of union branches, which are no keys of the data."""
    parts: list[str | int] = []
    for part in error["loc"]:
        if isinstance(part, int):
            parts.append(part)
            data = data[part] if isinstance(data, list) and part < len(data) else None
        elif isinstance(data, dict) and part in data:
            parts.append(part)
            data = data[part]
    if error["type"] == "missing" and error["loc"] and parts[-1:] != [error["loc"][-1]]:
        parts.append(error["loc"][-1])
    return tuple(parts)


def _choice(names: str) -> str:
    return f"one of {names}" if "," in names else names


def _in_words(error: ErrorDetails) -> str:
    return error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")


_EXPECTED: dict[str, Callable[[ErrorDetails], str]] = {
    "int_type": lambda _: "an integer",
    "float_type": lambda _: "a number",
    "string_type": lambda _: "a string",
    "bool_type": lambda _: "true or false",
    "none_required": lambda _: "null",
    "tuple_type": lambda _: "a list",
    "list_type": lambda _: "a list",
    "dict_type": lambda _: "a mapping",
    "dataclass_type": lambda _: "a mapping",
    "missing": lambda _: "a value",
    "unexpected_keyword_argument": lambda _: "no such key",
    "literal_error": lambda error: _choice(error["ctx"]["expected"].replace("'", "").replace(" or ", ", ")),
}


def _to_dict(config: Any) -> dict[str, Any]:
    families = {name: family_of(tp) for name, tp in field_types(type(config)).items()}
    return {name: _plain(getattr(config, name), family) for name, family in families.items()}


def _plain(value: Any, family: Family | None = None) -> Any:
    """A value as YAML has it; for a section of a family with its ``class``."""
    if value is None or (isinstance(value, bool | int | float | str) and type(value).__module__ == "builtins"):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, type | types.FunctionType):
        return _import_path(value)
    if dataclasses.is_dataclass(value):
        section = _to_dict(value)
        return {"class": family.name_of(type(value)), **section} if family else section
    if callable(getattr(value, "item", None)):  # a numpy scalar
        return _plain(value.item())
    if callable(value):  # a partial, an object that can be called: told, but nothing that a file could bring back
        return f"{_import_path(type(value))}()"
    raise ConfigError("", "a number, string, list, mapping, null or config", f"a {type(value).__name__}")


def _import_path(value: type | types.FunctionType) -> str:
    return f"{value.__module__}:{value.__qualname__}"


def _kind(value: Any) -> str:
    return "a class, but no dataclass" if isinstance(value, type) else f"a {type(value).__name__}"


def _join(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing at all"


def _suggest(name: Any, known: Iterable[str]) -> str:
    return f"{_show(name)}{did_you_mean(name, known)}"


def _show(value: Any) -> str:
    """A value in one short line, as YAML writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _show_at(key: tuple[str | int, ...], data: Any) -> str:
    for part in key:
        known = part < len(data) if isinstance(data, list) and isinstance(part, int) else part in data
        if not known:
            return "nothing"
        data = data[part]
    return _show(data)
