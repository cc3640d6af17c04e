"""Writes docs/configuration.md from the config classes: every key with type, default and meaning."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from outrider.config import family_of, field_types
from outrider.run_config import RunConfig

HEAD = """\
# Configuration

Written by `python docs/make_configuration.py` from the config classes.

A run is described by one YAML file, or a preset with overrides. Its top-level keys are the sections below, beside
`seed` and `run_dir`. `outrider train PRESET --print-config` prints every key with its value, in the form of such a
file; the `config.yaml` of a run directory is one too.

- **Strict.** An unknown key, a wrong type or an impossible value is refused before a process starts, in one line:
  `outrider: error: <dotted key>: expected ..., got ...`. An integer is a number; nothing else is converted.
- **Overrides.** `--trainer.max_opts=1000` or `--trainer.max-opts 1000`; values are YAML, so `--agent.lr=3e-4`,
  `--trainer.target_score=null` and `--env.kwargs='{size: 3}'` are what they look like.
- **Classes.** A section that may hold several classes has the key `class`: a short name from below, or the import
  path of an own dataclass, `my_package.my_env:MyEnvConfig`. `--agent=sac` is short for `--agent.class=sac`. A class
  other than the one in the file begins its section anew: the old class's keys are dropped, overrides stay.
  `agent.explorer` is told by its keys instead; `--agent.explorer='{temperature: 2}'` replaces all of them.
- **Format.** Files carry `format_version: 1`. Scalars are those of YAML 1.2: `3e-4` is a number, `no` is a string.
"""


def main() -> str:
    """The page."""
    parts = [HEAD]
    documented = attributes(RunConfig)
    for name, annotation in field_types(RunConfig).items():
        family = family_of(annotation)
        if family:
            classes = {short: family.resolve(short) for short in family.classes}
        elif dataclasses.is_dataclass(annotation):
            classes = {"": annotation}
        else:
            continue
        parts.append(f"## `{name}`\n\n{documented[name]}\n")
        for short, cls in classes.items():
            heading = f"### `{name}.class: {short}`\n\n" if len(classes) > 1 else ""
            parts.append(f"{heading}{summary(cls)} (`{cls.__module__}:{cls.__name__}`)\n\n{table(cls, name)}\n")
    rest = [key for key in ("seed", "run_dir") if key in documented]
    parts.append("## `seed` and `run_dir`\n\n" + table(RunConfig, "", rest) + "\n")
    return "\n".join(parts)


def table(cls: type, section: str, only: list[str] | None = None) -> str:
    """The keys of one class, those of nested configs with their dotted names."""
    rows = list(_rows(cls, f"{section}." if section else "", only))
    if not rows:
        return "No keys.\n"
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _rows(cls: type, prefix: str, only: list[str] | None = None) -> typing.Iterator[tuple[str, str, str, str]]:
    meanings, annotations = attributes(cls), field_types(cls)
    for field in dataclasses.fields(cls):
        if only is not None and field.name not in only:
            continue
        annotation = annotations[field.name]
        meaning = meanings.get(field.name, "").replace("|", "\\|")
        nested = [] if family_of(annotation) else sections(annotation)
        shown = "" if nested else f"`{_default(field)}`"
        kind = f"section: one of {len(nested)}, told by its keys" if len(nested) > 1 else words(annotation)
        yield f"`{prefix}{field.name}`", kind.replace("|", "\\|"), shown, meaning
        for cls in nested:
            if len(nested) > 1:
                yield "", f"`{cls.__name__}`", "", summary(cls).replace("|", "\\|")
            yield from _rows(cls, f"{prefix}{field.name}.")


def sections(annotation: Any) -> list[type]:
    """The dataclasses that a field may hold."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [cls for part in typing.get_args(annotation) for cls in sections(part)]
    return [annotation] if isinstance(annotation, type) and dataclasses.is_dataclass(annotation) else []


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    elif field.default is not dataclasses.MISSING:
        value = field.default
    else:
        return "required"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value)


def words(annotation: Any) -> str:
    """A field's type as a reader of YAML needs it."""
    if annotation is type(None):
        return "null"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return "section with `class`" if family_of(annotation) else words(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(words, arguments))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (tuple, list):
        return f"list of {words(arguments[0])}"
    if origin is dict or annotation is dict:
        return "mapping"
    if origin is Callable:
        return "callable (in Python)"
    names = {int: "integer", float: "number", str: "string", bool: "true or false", Path: "path"}
    if annotation in names:
        return names[annotation]
    return "section" if dataclasses.is_dataclass(annotation) else str(getattr(annotation, "__name__", annotation))


def summary(cls: type) -> str:
    """First paragraph of a docstring, without its markup, with a full stop."""
    first = plain(inspect.getdoc(cls) or "").split("\n\n")[0]
    return " ".join(first.split())


def attributes(cls: type) -> dict[str, str]:
    """Meaning of each field, from the sections ``Attributes:`` of a class and those that it inherits from."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        section = re.search(r"^Attributes:\n((?:[ ]+.*\n?|\n)+)", inspect.cleandoc(base.__doc__ or ""), re.M)
        for entry in re.split(r"^    (?=\w+(?: \(.*?\))?:)", section[1] if section else "", flags=re.M)[1:]:
            name, _, text = entry.partition(":")
            found[name.partition(" ")[0]] = " ".join(plain(text).split())
    return found


def plain(text: str) -> str:
    """Docstring markup as Markdown."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`")


if __name__ == "__main__":
    Path(__file__).with_name("configuration.md").write_text(main(), encoding="utf-8")
