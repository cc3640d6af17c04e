"""The presets: run configs shipped with the package, one YAML file each; its first line says what it is for."""

from __future__ import annotations

from importlib.resources import files


def names() -> list[str]:
    """Names of the presets, sorted."""
    return sorted(
        entry.name.removesuffix(".yaml") for entry in files(__name__).iterdir() if entry.name.endswith(".yaml")
    )


def text(name: str) -> str:
    """The YAML of a preset.

    Raises:
        FileNotFoundError: There is none of that name; see :func:`names`.
    """
    return files(__name__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")


def summary(name: str) -> str:
    """What a preset is for, in one line."""
    return text(name).partition("\n")[0].lstrip("# ")
