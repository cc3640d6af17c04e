"""Strict YAML to frozen dataclasses and back."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import yaml

from outrider.errors import ConfigError


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
        """Read a YAML file."""
        return cls(**(yaml.safe_load(Path(path).read_text()) or {}))
