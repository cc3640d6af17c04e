from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "outrider"

# From the bottom up. A module or package may import only from lines above its own.
LAYERS = (
    "version",
    "errors",
    "announcing",
    "durable",
    "strict_yaml",
    "config",
    "data",
    "spaces",
    "seeding",
    "core",
    "state_files",
    "replay_segments",
    "checkpoint_files",
    "checkpoint",
    "machine",
    "processes",
    "workers",
    "shared_memory",
    "flags",
    "health",
    "rings",
    "binding",
    "replay_buffer_proxy",
    "channel",
    "model_sync",
    "run_dir",
    "envs",
    "item_rows",
    "single_step",
    "frame_stream",
    "sampling",
    "replay",
    "agents",
    "recording",
    "evaluation",
    "testing",
    "env_trial",
    "balance",
    "statistics",
    "run_state",
    "scoring",
    "evaluator_process",
    "process_scorer",
    "trainer_config",
    "interrupts",
    "learner",
    "watchdog",
    "actor",
    "placement",
    "crew",
    "supervisor",
    "actor_manager",
    "async_trainer",
    "trainer",
    "presets",
    "run_config",
    "loaded_policy",
    "preflight",
    "resuming",
    "wiring",
    "cli",
    "__main__",
)
FORBIDDEN = {"base", "utils", "common", "helpers"}
MODULES = sorted(SOURCE.rglob("*.py"))


def top(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything from outrider that a module imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "outrider")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            if node.module and node.module.split(".")[0] == "outrider":
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    yield node.lineno, whole if node.module == "outrider" or is_module(whole) else node.module


def is_module(dotted: str) -> bool:
    path = SOURCE.joinpath(*dotted.split(".")[1:])
    return path.with_suffix(".py").is_file() or path.is_dir()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_strictly_downwards(path: Path) -> None:
    here = top(path)
    if here == "__init__":  # the public names, from everywhere
        return
    assert here in LAYERS, f"{here} has no place in LAYERS"
    for line, name in imports(path):
        there = name.split(".")[1] if "." in name else ""
        assert there != here or path.parent != SOURCE, f"{path}:{line}: imports itself"
        if there != here:
            assert there in LAYERS[: LAYERS.index(here)], f"{path}:{line}: {here} must not import {name or 'the root'}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_is_imported_through_the_package_root(path: Path) -> None:
    if top(path) != "__init__":
        through_root = [f"{path}:{line}: {name}" for line, name in imports(path) if not is_module(name)]
        assert through_root == []
        assert "outrider" not in {name for _, name in imports(path)}


def test_modules_of_one_package_do_not_import_each_other_in_circles() -> None:
    edges: dict[str, set[str]] = {}
    for path in MODULES:
        name = ".".join(("outrider", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        edges[name] = {there for _, there in imports(path)}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"circle: {' -> '.join([*above, name])}"
        if name not in done:
            for there in edges.get(name, set()):
                visit(there, (*above, name))
            done.add(name)

    for name in edges:
        if name != "outrider":
            visit(name, ())


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_has_a_telling_name_and_fits_on_a_few_pages(path: Path) -> None:
    assert path.stem not in FORBIDDEN
    assert path.parent.name not in FORBIDDEN
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500
