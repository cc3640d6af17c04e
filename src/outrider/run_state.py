"""What of a run goes into a checkpoint, and how it comes back."""

from __future__ import annotations

import random
from typing import Any, Protocol

import numpy as np
import torch

from outrider.checkpoint_files import Checkpoint
from outrider.core import Agent, ReplayBuffer, RowStore
from outrider.errors import CheckpointError, LayoutMismatch
from outrider.statistics import Counters


class Resumable(Protocol):
    """A source of rows that goes on where it was."""

    def state_dict(self) -> dict[str, Any]:
        """What it needs for that."""
        ...

    def load_state_dict(self, state: dict[str, Any], opt_steps: int) -> None:
        """Restore it; `opt_steps` are those of the checkpoint."""
        ...


def capture(
    agent: Agent, buffer: ReplayBuffer, source: Resumable, counters: Counters, *, replay: bool, shares_rows: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Everything a resumed run needs, and what is not in it.

    Args:
        agent: The learner's agent.
        buffer: The replay buffer.
        source: Where rows come from.
        counters: Of the run.
        replay: Include the replay buffer.
        shares_rows: Its rows are written by themselves.
    """
    state = {
        "agent": agent.state_dict(),
        "source": source.state_dict(),
        "counters": counters.state_dict(),
        "random": random_states(),
    }
    missing = ["open episodes"]
    if not replay:
        missing.append("the replay buffer (trainer.checkpoint.replay is false)")
    elif shares_rows and isinstance(buffer, RowStore):
        state["replay"] = buffer.state_without_rows()
    else:
        state["replay"] = buffer.state_dict()
    return state, tuple(missing)


def restore(
    checkpoint: Checkpoint, agent: Agent, buffer: ReplayBuffer, source: Resumable, counters: Counters
) -> list[str]:
    """Give everything what it had.

    Returns:
        What could not be restored, a sentence each.

    Raises:
        CheckpointError: The agent cannot take its state.
    """
    state, opt_steps = checkpoint.state, checkpoint.moment.opt_steps
    restore_agent(checkpoint, agent)
    counters.load_state_dict(state["counters"])
    counters.opt_steps = opt_steps
    notes = _restore_replay(checkpoint, buffer)
    source.load_state_dict(state["source"], opt_steps)
    set_random_states(state["random"])
    return notes


def restore_agent(checkpoint: Checkpoint, agent: Agent) -> None:
    """Give an agent its state.

    Raises:
        CheckpointError: It cannot take it.
    """
    try:
        agent.load_state_dict(checkpoint.state["agent"])
    except (KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        expected = f"agent: expected one that can take the state in {checkpoint.path}"
        raise CheckpointError(f"{expected}, got {type(error).__name__}: {error}") from error


def _restore_replay(checkpoint: Checkpoint, buffer: ReplayBuffer) -> list[str]:
    """Without the rows the buffer stays as it is: empty, with both counters of the balance at 0."""
    lost = _load_replay(checkpoint, buffer)
    consequence = "it is filled anew before training goes on, and both counters of the balance start at 0"
    return [f"the replay buffer is not restored: {lost}; {consequence}"] if lost else []


def _load_replay(checkpoint: Checkpoint, buffer: ReplayBuffer) -> str:
    """Restore the replay buffer; returns why it is not."""
    saved, segments = checkpoint.state.get("replay"), checkpoint.manifest.segments
    if saved is None or checkpoint.rows_lost:
        return checkpoint.rows_lost or "it is not in the checkpoint"
    if not isinstance(buffer, RowStore) or "rows" in saved:
        if segments:
            return f"its rows were saved apart, which {type(buffer).__name__} does not know"
        buffer.load_state_dict(saved)
        return ""
    stop = segments[-1].stop if segments else 0
    if stop != saved["inserted"]:
        return f"rows up to {stop} of {saved['inserted']} are there"
    try:
        buffer.load_rows(saved, checkpoint.blocks())
    except LayoutMismatch as error:
        return str(error)
    return ""


def random_states() -> dict[str, Any]:
    """The states of the global random generators, which an own agent may draw from."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Set the global random generators; a GPU's only if there are as many as there were."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available() and torch.cuda.device_count() == len(states["cuda"]):
        torch.cuda.set_rng_state_all(states["cuda"])
