from __future__ import annotations

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = {canonicalize_name(found.metadata["Name"]): found for found in distributions()}
PINS = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements-dev.lock").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("name", "version"), PINS, ids=[name for name, _ in PINS])
def test_every_pin_accepts_the_oldest_python_that_is_supported(name: str, version: str) -> None:
    found = INSTALLED.get(canonicalize_name(name))
    if found is None or found.version.partition("+")[0] != version:
        pytest.skip(f"{name}=={version} is not installed here")
    supported = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    oldest = supported.removeprefix(">=") + ".0"
    assert oldest in SpecifierSet(found.metadata["Requires-Python"] or "")
