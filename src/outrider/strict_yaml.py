"""YAML as configs need it: the scalars of YAML 1.2, no duplicate keys, and one line for what is wrong.

PyYAML reads YAML 1.1, where ``3e-4`` is a string, ``no`` is False and ``12:30`` is 750. The loader and the dumper
here share one table of scalar types, so that what is written is read back as what it was.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from outrider.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
_SCALARS = (  # tag, pattern, characters it may begin with ("" stands for the empty scalar)
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - declared so by PyYAML; the table above fills it

    def construct_document(self, node: yaml.Node) -> Any:
        """Build values from the leaves up, where one that contains itself is found; by default PyYAML builds it."""
        return self.construct_object(node, deep=True)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; its keys are strings, and there are no two alike."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            where = f"line {key_node.start_mark.line + 1}"
            if not isinstance(key, str):
                raise ConfigError("", "keys that are strings", f"{key!r} ({where})")
            if key in seen:
                raise ConfigError(key, "a key once", f"it a second time ({where})")
            seen.add(key)
        for key_node, value_node in node.value:
            try:
                self.construct_object(value_node, deep=True)  # kept for what follows
            except ConfigError as error:
                raise error.below(str(key_node.value)) from None
        return super().construct_mapping(node, deep=deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Decimal, also ``1_000``, or hexadecimal; a leading 0 does not mean octal."""
        text = str(self.construct_scalar(node)).replace("_", "")
        return int(text, 16) if text.startswith("0x") else int(text)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as above

    def ignore_aliases(self, data: Any) -> bool:
        """Write everything out: people edit these files."""
        return True


_Loader.add_constructor(f"{_TAG}int", _Loader.construct_yaml_int)
_Dumper.add_representer(
    list,
    lambda dumper, data: dumper.represent_sequence(
        f"{_TAG}seq", data, flow_style=not any(isinstance(item, dict | list) for item in data)
    ),
)
for _name, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"{_TAG}{_name}", re.compile(rf"^(?:{_pattern})$"), _first)


def parse_yaml(text: str, name: str) -> Any:
    """Read one YAML document.

    Args:
        text: The document.
        name: What to call it in errors: its path, or the option it was given to.

    Raises:
        ConfigError: It is not YAML, repeats a key, has keys that are not strings, or contains itself.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise ConfigError(name, "YAML that is not nested that deeply", "too many levels") from None
    except ConfigError as error:
        raise ConfigError(error.key or name, error.expected, error.got) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(name, "valid YAML", f"an error{at}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(name, "valid YAML", f"an error: {' '.join(str(error).split())}") from None


def read_yaml(path: Path | str) -> dict[str, Any]:
    """Read a YAML file that holds a mapping; an empty file is an empty one.

    Raises:
        ConfigError: There is no such file, it cannot be read, or it is something else.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(str(path), "a YAML file", "no file at that path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), "a readable YAML file", error) from None
    try:
        data = parse_yaml(text, str(path))
    except ConfigError as error:
        raise error if error.key == str(path) else in_file(error, path) from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(str(path), "a mapping of keys to values", f"a {type(data).__name__}")
    return data


def in_file(error: ConfigError, path: Path | str) -> ConfigError:
    """The same error, with the file that the value came from."""
    return type(error)(error.key, error.expected, f"{error.got} (in {path})")


def dump_yaml(data: Any) -> str:
    """Write plain values (mappings, lists, numbers, strings, None) as YAML, keys in their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
