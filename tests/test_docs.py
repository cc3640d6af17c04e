from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from outrider.config import family_of, field_types
from outrider.run_config import RunConfig

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_configuration = script("make_configuration")


def config_classes() -> list[type]:
    found: list[type] = [RunConfig]
    for annotation in field_types(RunConfig).values():
        family = family_of(annotation)
        if family:
            found += [family.resolve(name) for name in family.classes]
        elif dataclasses.is_dataclass(annotation):
            assert isinstance(annotation, type)
            found.append(annotation)
    return found


def test_the_page_of_the_configuration_is_up_to_date() -> None:
    assert (DOCS / "configuration.md").read_text(encoding="utf-8") == make_configuration.main(), "run `make docs`"


@pytest.mark.parametrize("cls", config_classes(), ids=lambda cls: cls.__name__)
def test_every_key_of_a_run_is_documented(cls: type) -> None:
    meanings: dict[str, Any] = make_configuration.attributes(cls)
    assert {name for name in field_types(cls) if not meanings.get(name)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).is_file(), target


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    tomllib.loads(text)
    listed = set(re.findall(r'"([\w/.-]+\.md)"', text))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def blocks(page: str) -> list[str]:
    """The blocks of Python of a page that can be run; those that show a part of something are left out."""
    found = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [block for block in found if "MyAgent(self" not in block]


def test_the_parts_in_the_page_on_extending_keep_their_contracts(tmp_path: Path) -> None:
    env = """
from outrider.testing import check_env_config
check_env_config(GymEnvConfig(id=MyEnv, kwargs={"size": 3}))
"""
    script = tmp_path / "extending.py"
    script.write_text("\n".join([*blocks("extending.md"), env]), encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stderr) == (0, "")
