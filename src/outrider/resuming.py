"""How a run goes on from a checkpoint: what is found, compared and taken back before, and restored then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.announcing import announce
from outrider.checkpoint import Checkpoints
from outrider.checkpoint_files import Checkpoint, newest_checkpoint, set_newer_aside
from outrider.config import require
from outrider.core import EnvSpec
from outrider.learner import Learner
from outrider.recording import rewind
from outrider.run_config import RunConfig, differences
from outrider.run_dir import RunDir
from outrider.run_state import restore_agent
from outrider.state_files import PackedState


def new_config(run_dir: RunDir, overrides: Mapping[str, Any]) -> RunConfig:
    """The config of the run with overrides; says what differs.

    Raises:
        ConfigError: It is not a possible run, or that of another directory.
    """
    require("run_dir" not in overrides, "run_dir", "the directory of the run, as the first argument", "an override")
    file = run_dir.path / "config.yaml"
    config = RunConfig.from_sources(file, overrides)
    for difference in differences(RunConfig.load(file), config):
        announce(f"changed: {difference}")
    return config


def find_checkpoint(run_dir: RunDir, opt_steps: int | None = None) -> Checkpoint | None:
    """The newest checkpoint that is whole, None if there has never been one; says what is wrong with newer ones.

    Args:
        run_dir: The run directory.
        opt_steps: Take this one, and no other.

    Raises:
        CheckpointError: There are some, but none is whole, or not the one asked for.
    """
    found, damages = newest_checkpoint(run_dir.checkpoints, opt_steps)
    for damage in damages:
        announce(f"damaged: {damage}")
    return found


def require_ahead(run_dir: RunDir, config: RunConfig, found: Checkpoint | None) -> None:
    """Refuse a new goal that the run has passed already. One that has reached the goal it had just ends again.

    Raises:
        ConfigError: The run would end at once.
    """
    if found is None:
        return
    before, at = RunConfig.load(run_dir.path / "config.yaml").trainer, found.moment
    reached = {
        "max_opts": at.opt_steps,
        "max_env_steps": at.env_steps,
        "max_time_s": round(at.time_s, 1),
        "target_score": at.score,
    }
    for name, done in reached.items():
        goal = getattr(config.trainer, name)
        if goal is not None and done is not None and goal != getattr(before, name):
            require(goal > done, f"trainer.{name}", f"more than {done}, where the run already is", goal)


def require_restorable(found: Checkpoint | None, config: RunConfig, env_spec: EnvSpec) -> None:
    """Try, before anything is changed, whether the agent can take its state.

    Raises:
        CheckpointError: It is another agent.
    """
    if found is not None:
        restore_agent(found, config.agent.build(env_spec))


def go_back(run_dir: RunDir, found: Checkpoint | None) -> None:
    """Take the metrics back to the checkpoint, and set aside what came after it."""
    if found is None:
        announce(f"{run_dir.checkpoints}: no checkpoint yet, the run starts from the beginning")
        rewind(run_dir.path, -1, -1)
        return
    at = found.moment
    for path in set_newer_aside(run_dir.checkpoints, at.opt_steps):
        announce(f"{path}: set aside, since the run goes on from before it")
    cut, best = rewind(run_dir.path, at.opt_steps, at.env_steps)
    scores = [score for score in (best, found.state["best_score"]) if score is not None]
    found.state["best_score"] = max(scores, default=None)
    lines = f"; {cut} later lines of metrics are cut" if cut else ""
    announce(f"goes on from {found.path}: {at.opt_steps} opt steps, {at.env_steps} env steps ({at.reason}){lines}")
    announce(f"not in the checkpoint: {', '.join(found.manifest.not_contained)}")


def incarnations(checkpoints: Checkpoints | None) -> list[int]:
    """Those of the actors of a run that goes on: new ones, with new seeds."""
    if checkpoints is None or checkpoints.resumed is None:
        return []
    return [incarnation + 1 for incarnation, _ in checkpoints.resumed.state["counters"]["actors"]]


def prepare(learner: Learner, checkpoints: Checkpoints | None) -> None:
    """Give the learner everything that the checkpoint has; says what cannot be restored.

    Raises:
        CheckpointError: The agent cannot take its state, or has one that no checkpoint can store.
    """
    if checkpoints is None:
        return
    if checkpoints.config.keep:
        PackedState({"agent": learner.agent.state_dict()})  # a trial: hours later it would be too late
    if checkpoints.resumed is not None:
        for note in learner.restore(checkpoints.resumed):
            announce(note)
        checkpoints.resumed.state.clear()  # or it would stay in memory beside what was made of it
