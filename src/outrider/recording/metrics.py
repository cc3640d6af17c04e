"""Every metric of a run: its name, unit, and how its values between two flushes become one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np

from outrider.data import Record

Reduction: TypeAlias = Literal["mean", "last", "max", "sum"]
Axis: TypeAlias = Literal["opt_steps", "env_steps", "time_s"]
Line: TypeAlias = dict[str, float | int | str]
"""One flush: the three axes and one value per metric."""

AXES: tuple[Axis, ...] = ("opt_steps", "env_steps", "time_s")


@dataclass(frozen=True)
class Metric:
    """A metric, or a family of them.

    Attributes:
        name: Name as it is recorded; ``*`` stands for any text without more meaning, such as an actor's index.
        unit: Unit of the value.
        x: Axis it is best plotted over.
        reduction: How the values between two flushes become one.
        meaning: One sentence.
    """

    name: str
    unit: str
    x: Axis
    reduction: Reduction
    meaning: str


METRICS = (
    Metric("rollout/ep_rew_mean", "reward", "env_steps", "mean", "Unclipped return of the actors' finished episodes."),
    Metric("rollout/ep_len_mean", "env steps", "env_steps", "mean", "Length of the actors' finished episodes."),
    Metric("train/loss", "", "opt_steps", "mean", "Loss of the critic or the Q network."),
    Metric("train/critic_loss", "", "opt_steps", "mean", "Loss of the critics."),
    Metric("train/actor_loss", "", "opt_steps", "mean", "Loss of the policy."),
    Metric("train/ent_coef", "", "opt_steps", "last", "Weight of the entropy in the target."),
    Metric("train/ent_coef_loss", "", "opt_steps", "mean", "Loss of the entropy weight, where it is learned."),
    Metric("train/entropy", "nats", "opt_steps", "mean", "Entropy of the policy in the states of the batch."),
    Metric("train/q_mean", "reward", "opt_steps", "mean", "Value estimated for the actions in the batch."),
    Metric("train/grad_norm", "", "opt_steps", "mean", "Norm of the gradient before it is clipped."),
    Metric("train/learning_rate", "", "opt_steps", "last", "Step size of the optimiser."),
    Metric("train/n_updates", "updates", "opt_steps", "last", "Gradient steps since the start."),
    Metric(
        "train/skipped_updates",
        "updates",
        "opt_steps",
        "last",
        "Updates masked: loss or gradient not finite.",
    ),
    Metric(
        "train/compiled",
        "",
        "opt_steps",
        "last",
        "1 if the updates run compiled, else 0; only where `agent.compile` is not `off`.",
    ),
    Metric(
        "train/compiled_time_ratio",
        "",
        "opt_steps",
        "last",
        "Time of a compiled update as a part of the eager one's; measured where `agent.compile` is `auto`.",
    ),
    Metric("train/max_priority", "", "opt_steps", "last", "Highest priority so far, which new rows get."),
    Metric("train/importance_beta", "", "opt_steps", "last", "Exponent of the importance weights."),
    Metric("eval/mean_reward", "reward", "env_steps", "last", "Mean return of the evaluation's episodes: the score."),
    Metric("eval/best_mean_reward", "reward", "env_steps", "last", "Best score so far."),
    Metric("eval/std_reward", "reward", "env_steps", "last", "Standard deviation of these returns."),
    Metric("eval/min_reward", "reward", "env_steps", "last", "Lowest of these returns."),
    Metric("eval/max_reward", "reward", "env_steps", "last", "Highest of these returns."),
    Metric("eval/mean_ep_length", "env steps", "env_steps", "last", "Mean length of the evaluation's episodes."),
    Metric("eval/n_episodes", "episodes", "env_steps", "last", "Number of the evaluation's episodes."),
    Metric("time/fps", "env steps/s", "time_s", "mean", "Environment steps of all actors per second."),
    Metric("time/time_elapsed", "s", "time_s", "last", "Seconds since the start of training."),
    Metric("time/opt_time_ms", "ms", "opt_steps", "mean", "Time of one opt step, sampling included."),
    Metric("async/inserted", "rows", "time_s", "last", "Rows put into the replay buffer since the start."),
    Metric("async/sampled", "rows", "time_s", "last", "Rows drawn from the replay buffer since the start."),
    Metric("async/samples_per_s", "rows/s", "time_s", "mean", "Rows put into the replay buffer per second."),
    Metric("async/opt_steps_per_s", "opt steps/s", "time_s", "mean", "Opt steps per second."),
    Metric("async/samples_per_insert", "", "time_s", "last", "Rows drawn per row put in after the warm-up."),
    Metric("async/ring_fill", "fraction", "time_s", "mean", "Filled part of the rings between actors and learner."),
    Metric("async/staleness_mean", "opt steps", "time_s", "mean", "Age of the model behind the rows that arrive."),
    Metric("async/staleness_max", "opt steps", "time_s", "max", "Highest such age."),
    Metric("async/learner_wait", "fraction", "time_s", "mean", "Part of its time the learner waits for data."),
    Metric("async/episodes", "episodes", "time_s", "last", "Episodes the actors finished since the start."),
    Metric("async/checkpoint_pause_ms", "ms", "time_s", "max", "Time the learner stood still for a checkpoint."),
    Metric("async/checkpoint_failures", "checkpoints", "time_s", "last", "Checkpoints that could not be written."),
    Metric("async/dropped_rows", "rows", "time_s", "last", "Rows left out because a value was not finite."),
    Metric("async/stale_priorities", "rows", "time_s", "last", "Priorities that came after their row was overwritten."),
    Metric("async/bad_priorities", "rows", "time_s", "last", "Priorities left out because they were not finite."),
    Metric("async/actors_alive", "actors", "time_s", "last", "Actors that are not being restarted."),
    Metric("async/actor_restarts", "restarts", "time_s", "last", "Actors that failed or hung and were started anew."),
    Metric("async/evaluator_failures", "failures", "time_s", "last", "Failures and hangs of the evaluator's process."),
    Metric(
        "async/evaluations_skipped",
        "evaluations",
        "time_s",
        "last",
        "Evaluations that a newer one replaced, while they waited for the end of an earlier one.",
    ),
    Metric("actor/*/state", "", "time_s", "last", "What an actor is doing, a text such as `waiting for room`."),
    Metric("actor/*/env_steps", "env steps", "time_s", "last", "Environment steps of one actor since the start."),
    Metric("actor/*/env_steps_per_s", "env steps/s", "time_s", "mean", "Environment steps of one actor per second."),
    Metric("actor/*/wait", "fraction", "time_s", "mean", "Part of its time an actor waits because its ring is full."),
    Metric("actor/*/ep_rew_mean", "reward", "env_steps", "mean", "Return of the finished episodes of one actor."),
)


@lru_cache(maxsize=4096)
def find_metric(name: str) -> Metric | None:
    """The table's entry for a recorded name, None for a metric of the user's own."""
    return next((metric for metric in METRICS if fnmatchcase(name, metric.name)), None)


def reduction(name: str) -> Reduction:
    """How values of this name are reduced: as in the table, by their mean if they are not in it."""
    if name in AXES:
        return "last"
    metric = find_metric(name)
    return metric.reduction if metric else "mean"


def markdown() -> str:
    """The table as it stands in ``docs/metrics.md``."""
    rows = [f"| `{m.name}` | {m.unit} | `{m.x}` | {m.reduction} | {m.meaning} |" for m in METRICS]
    return "\n".join(
        [
            "# Metrics",
            "",
            "Written by `python docs/make_metrics.py` from `outrider.recording.metrics`.",
            "",
            "Each line of `metrics.jsonl` is one flush: integer `opt_steps` and `env_steps`, float `time_s`, and the",
            "metrics stored since the last flush. NaN and infinities are written as null. TensorBoard's x axis is",
            "`env_steps` for every metric; the axis named here is the one a plot is most telling over. `*` is the",
            "index of an actor. A metric that is not in the table is averaged; an array becomes its `/mean`, `/min`",
            "and `/max`; of a text the last is kept, in `metrics.jsonl` only.",
            "",
            "| name | unit | x axis | between two flushes | meaning |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


class Aggregate:
    """Values stored since the last flush: one running value per metric, however many were stored."""

    def __init__(self) -> None:
        self._values: Line = {}
        self._counts: dict[str, int] = {}
        self._env_steps = 0
        self._start = time.monotonic()

    def add(self, record: Record) -> None:
        """Take the values of a record. What is neither a number nor an array of numbers is kept as its text."""
        for name, value in record.items():
            if hasattr(value, "detach"):  # a loss that somebody forgot to turn into a number
                value = value.detach().cpu()
            array = np.asarray(value)
            if array.dtype.kind not in "biuf":
                self._values[name] = str(value)
            elif array.size == 1:
                self._add(name, array.item())
            elif array.size:
                for part, number in (("mean", array.mean()), ("min", array.min()), ("max", array.max())):
                    self._add(f"{name}/{part}", number.item())

    def _add(self, name: str, value: float | int) -> None:
        how, old = reduction(name), self._values.get(name)
        if how == "last" or old is None or isinstance(old, str):
            self._values[name] = value
            self._counts[name] = 1
        elif how == "max":
            self._values[name] = value if value > old or value != value else old  # NaN stays visible
        else:
            self._values[name] = old + value
            self._counts[name] += 1

    def take(self, opt_steps: int) -> Line | None:
        """One line of the axes and the reduced values, None if nothing was stored; starts anew.

        Args:
            opt_steps: The step of the flush. Env steps and time are the last that were stored; without any, the
                time since this object was made.
        """
        if not self._values:
            return None
        values, counts = self._values, self._counts
        self._values, self._counts = {}, {}
        self._env_steps = int(values.pop("env_steps", self._env_steps))
        time_s = float(values.pop("time_s", time.monotonic() - self._start))
        values.pop("opt_steps", None)
        line: Line = {"opt_steps": int(opt_steps), "env_steps": self._env_steps, "time_s": time_s}
        for name, value in values.items():
            averaged = not isinstance(value, str) and reduction(name) == "mean"
            line[name] = value / counts[name] if averaged else value  # type: ignore[operator]
        return line
