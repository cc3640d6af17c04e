"""Scores for the learner's agent: at once in the learner's loop, or later from somewhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.core import Agent, Evaluator
from outrider.data import Record


@dataclass(frozen=True)
class Scored:
    """What came of an evaluation.

    Attributes:
        axes: ``opt_steps``, ``env_steps`` and ``time_s`` of the moment that was evaluated.
        score: Higher is better; NaN if the evaluation was stopped.
        record: The evaluator's metrics.
        agent: Gives an agent with the parameters that were evaluated, to be saved before the next call.
    """

    axes: Record
    score: float
    record: Record
    agent: Callable[[], Agent]


class Scorer(Protocol):
    """Where the learner's loop has its agent evaluated.

    Attributes:
        patience_s: How long to wait, at the end of a run, for evaluations that are still open.
    """

    patience_s: float

    def evaluate(self, axes: Record) -> Scored | None:
        """Evaluate the agent as it is now. None: what comes of it arrives later, if it does."""
        ...

    def arrived(self) -> Scored | None:
        """What has come of an earlier evaluation; asked once per opt step, and while the learner waits."""
        ...

    def open(self) -> Sequence[int]:
        """Opt steps of the evaluations that have not arrived yet, the oldest first."""
        ...

    def statistics(self) -> Record:
        """What there is to say about it."""
        ...


class InlineScorer:
    """Evaluates the live agent in the caller's thread, which waits.

    Process: the learner. Owns, closes: nothing. Blocks: as long as an evaluation takes.

    Args:
        evaluator: Scores the agent.
        agent: The learner's agent.
    """

    patience_s = 0.0

    def __init__(self, evaluator: Evaluator, agent: Agent) -> None:
        self._evaluator, self._agent = evaluator, agent

    def evaluate(self, axes: Record) -> Scored:
        """Evaluate now; whatever the evaluator raises is the caller's."""
        score, record = self._evaluator.evaluate(self._agent)
        return Scored(axes, score, record, lambda: self._agent)

    def arrived(self) -> None:
        """Nothing ever arrives later."""

    def open(self) -> Sequence[int]:
        """None."""
        return ()

    def statistics(self) -> Record:
        """Nothing of its own."""
        return {}
