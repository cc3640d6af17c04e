"""Priorities of rows: proportional prioritised sampling (Schaul et al. 2016, https://arxiv.org/abs/1511.05952)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.config import Config, require
from outrider.data import Array, Record
from outrider.replay.sum_tree import BELOW_ONE, SumTree

HIGHEST = float(np.finfo(np.float32).max)
"""Higher priorities count as this one, so that no sum overflows."""

TREE_BYTES = 10
"""Bytes of a row's priority and its sums, rounded up."""


@dataclass(frozen=True, kw_only=True)
class PriorityConfig(Config):
    """How rows are drawn by priority.

    Attributes:
        alpha: Exponent of the priorities, from 0 (uniform) to 1 (proportional).
        beta: Exponent of the importance weights at first, from 0 (no correction) to 1 (all of it).
        beta_final: Exponent of the importance weights in the end, from 0 to 1.
        beta_samples: Rows drawn until `beta_final` is reached, in a straight line; 0: from the start.
        epsilon: Added to every absolute TD error, so that no row is lost for ever; above 0.

    Raises:
        ConfigError: A value is out of range.
    """

    alpha: float = 0.6
    beta: float = 0.4
    beta_final: float = 1.0
    beta_samples: int = 10_000_000
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "beta_final"):
            require(0.0 <= getattr(self, name) <= 1.0, name, "a number in [0, 1]", getattr(self, name))
        require(self.beta_samples >= 0, "beta_samples", "at least 0 rows", self.beta_samples)
        require(0.0 < self.epsilon < HIGHEST, "epsilon", "above 0", self.epsilon)

    def beta_at(self, sampled: int) -> float:
        """The exponent of the importance weights after so many rows drawn."""
        progress = min(1.0, sampled / self.beta_samples) if self.beta_samples else 1.0
        return self.beta + (self.beta_final - self.beta) * progress


class Priorities:
    """The priorities of the rows in a replay buffer's places; those of places without a row are 0.

    Place i is drawn with probability ``p_i**alpha / sum(p**alpha)``, p = |TD error| + epsilon (eq. 1). A new row has
    the highest priority there has been (algorithm 1, line 6), so that it is seen soon.

    Process: the learner.
    Owns: the sum tree.
    Blocks: never.
    Closes: nothing.

    Args:
        config: Exponents.
        capacity: Places.

    Attributes:
        highest: The highest priority so far, 1 at first.
        stale: Updates that came too late: the row had been overwritten.
        bad: Updates that were NaN or infinite: the row keeps the priority it had.
    """

    def __init__(self, config: PriorityConfig, capacity: int) -> None:
        self._config = config
        self._tree = SumTree(capacity)
        self.highest = 1.0
        self.stale = 0
        self.bad = 0
        self._outputs: dict[int, tuple[Array, Array, Array, Array]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the sum tree."""
        return self._tree.nbytes

    def add(self, places: Array) -> None:
        """Rows were put into these places ``[m]`` int64."""
        self._tree.set(places, self.highest**self._config.alpha)

    def add_new(self, places: Array) -> None:
        """Rows are in these places ``[m]`` int64; those which have no priority yet get that of new ones."""
        self.add(places[self._tree.leaves[places] == 0.0])

    def clear(self) -> None:
        """All rows are gone."""
        self._tree.set_all(np.zeros(len(self._tree.leaves)))

    def remove(self, places: Array) -> None:
        """The rows in these places ``[m]`` int64 must not be drawn any more."""
        self._tree.set(places, 0.0)

    def draw(self, size: int, sampled: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Draw places, one from each of `size` equal parts of the sum (appendix B.2.1).

        Args:
            size: How many.
            sampled: Rows drawn before, on which the weights' exponent depends.
            rng: Of the buffer.

        Returns:
            Places ``[size]`` int64, and importance weights ``[size]`` float32: ``P(i)**-beta``, divided by the
            highest of the batch (section 3.4). Both are reused by the next call with this size.
        """
        if size not in self._outputs:
            parts = np.arange(size, dtype=np.float64)
            self._outputs[size] = parts, np.empty(size), np.empty(size, np.int64), np.empty(size, np.float32)
        parts, points, places, weights = self._outputs[size]
        total = self._tree.total
        rng.random(out=points)
        points += parts
        points *= total / size
        np.minimum(points, total * BELOW_ONE, out=points)
        self._tree.find(points, places)
        values = self._tree.leaves.take(places)
        np.power(values.min() / values, self._config.beta_at(sampled), out=values)
        weights[...] = values
        return places, weights

    def update(self, places: Array, td_errors: Array, there: Array) -> None:
        """Set priorities.

        Args:
            places: ``[m]`` int64.
            td_errors: ``[m]`` floats; their sign does not count.
            there: ``[m]`` bool: whether the row is still in its place.
        """
        priorities = np.abs(td_errors, dtype=np.float64)
        good = np.isfinite(priorities)
        n_good, n_there = int(np.count_nonzero(good)), int(np.count_nonzero(there))
        if n_good < len(good) or n_there < len(there):
            self.stale += len(there) - n_there
            self.bad += int(np.count_nonzero(there & ~good))
            kept = good & there
            places, priorities = places[kept], priorities[kept]
            if not len(places):
                return
        priorities += self._config.epsilon
        np.minimum(priorities, HIGHEST, out=priorities)
        self.highest = max(self.highest, float(priorities.max()))
        self._tree.set(places, np.power(priorities, self._config.alpha, out=priorities))

    def statistics(self, sampled: int) -> Record:
        """Metrics."""
        return {
            "async/stale_priorities": self.stale,
            "async/bad_priorities": self.bad,
            "train/max_priority": self.highest,
            "train/importance_beta": self._config.beta_at(sampled),
        }

    def state(self, places: Array) -> dict[str, Any]:
        """Counters, and the priorities in these places ``[n]``."""
        values = self._tree.leaves.take(places)
        return {"highest": self.highest, "stale": self.stale, "bad": self.bad, "values": values}

    def load_state(self, state: dict[str, Any], places: Array) -> None:
        """Restore what :meth:`state` gave; there may be fewer places now, which get the last of its priorities."""
        values = np.zeros(len(self._tree.leaves))
        values[places] = np.asarray(state["values"])[len(state["values"]) - len(places) :]
        self._tree.set_all(values)
        self.highest, self.stale, self.bad = state["highest"], state["stale"], state["bad"]


def as_array(td_errors: Any) -> Array:
    """TD errors as an array, also from a tensor on a device."""
    return np.asarray(td_errors.detach().cpu() if hasattr(td_errors, "detach") else td_errors)
