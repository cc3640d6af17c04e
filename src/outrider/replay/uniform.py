"""Station (3): the replay buffer with uniform sampling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.config import Config, require
from outrider.data import Array, Batch, Items, Layout
from outrider.errors import LayoutMismatch
from outrider.replay.records import Records, rows_from
from outrider.seeding import Role, derive


@dataclass(frozen=True, kw_only=True)
class SimpleReplayBufferConfig(Config):
    """Builds a :class:`SimpleReplayBuffer`.

    Attributes:
        capacity: Rows it can hold; the oldest are overwritten then. At least 1.
        seed: Seed of the draws, at least 0.
    """

    capacity: int = 100_000
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.capacity >= 1, "capacity", "at least 1 row", self.capacity)
        require(self.seed >= 0, "seed", "a seed of at least 0", self.seed)

    def build(self, layout: Layout) -> SimpleReplayBuffer:
        """Reserve memory for rows of this layout.

        Raises:
            LayoutMismatch: The items are a frame stream, of which single rows are no transitions.
        """
        return SimpleReplayBuffer(layout, self.capacity, derive(self.seed, Role.REPLAY))


class SimpleReplayBuffer:
    """The newest ``capacity`` transitions, drawn uniformly with replacement.

    Process: the learner.
    Owns: the records, one reused batch per batch size, and its random generator.
    Blocks: never.
    Closes: nothing; the memory goes with the object.

    Args:
        layout: Columns of a row; of kind ``transitions``.
        capacity: Rows it can hold, at least 1.
        seed: Seed of the draws, at least 0.

    Attributes:
        sampled: Rows drawn so far.

    Raises:
        LayoutMismatch: The layout is no ``transitions``.
        ConfigError: The capacity is less than 1.
    """

    def __init__(self, layout: Layout, capacity: int, seed: int = 0) -> None:
        require_transitions(layout, "SimpleReplayBuffer")
        self.layout = layout
        self.sampled = 0
        self._records = Records(layout.fields, capacity)
        self._rng = np.random.default_rng(seed)
        self._draws: dict[int, tuple[Array, Array]] = {}

    def __len__(self) -> int:
        return len(self._records)

    @property
    def capacity(self) -> int:
        """Rows it can hold."""
        return self._records.capacity

    @property
    def inserted(self) -> int:
        """Rows taken so far, those already overwritten included."""
        return self._records.inserted

    @property
    def oldest(self) -> int:
        """Number of the oldest row that is still there, counted from 0."""
        return self._records.oldest

    @property
    def row_dtype(self) -> np.dtype[Any]:
        """The structured dtype of a row."""
        return self._records.dtype

    def accepts(self, layout: Layout) -> bool:
        """Whether this is the layout it was built for."""
        return layout == self.layout

    @property
    def nbytes(self) -> int:
        """Bytes of all records, the unused ones included."""
        return self._records.array.nbytes

    def push(self, items: Items) -> None:
        """Copy rows ``[m]`` in, over the oldest once the buffer is full.

        Args:
            items: A structured array of the layout's record dtype, or the layout's columns by name.

        Raises:
            LayoutMismatch: A column is missing, unknown, or of another shape or dtype.
        """
        self._records.push(items)

    def batch(self, size: int) -> Batch:
        """Draw `size` rows with replacement; the arrays are reused by the next call with this size.

        Raises:
            ValueError: Nothing has been stored yet.
        """
        stored = len(self)
        if not stored:
            raise ValueError("replay buffer: expected at least one stored row to draw from, it is empty")
        if size not in self._draws:
            self._draws[size] = np.empty(size), np.empty(size, np.int64)
        uniform, ixs = self._draws[size]
        # Half the time of `integers`. The product stays below `stored` for every double below 1, and rows differ
        # in probability by less than stored / 2**53.
        self._rng.random(out=uniform)
        np.multiply(uniform, stored, out=uniform)
        ixs[...] = uniform
        self.sampled += size
        return Batch(self._records.take(ixs), ixs)

    def update_priority(self, ixs: Array, td_errors: Any) -> None:
        """Nothing: sampling is uniform."""

    def state_dict(self) -> dict[str, Any]:
        """Stored rows, counters and the random generator."""
        return {**self.state_without_rows(), "rows": self.copy_rows(self.oldest, self.inserted)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave; the same draws follow if the capacity is the same.

        Raises:
            LayoutMismatch: Its rows have other columns.
        """
        rows = state["rows"]
        self.load_rows(state, [(state["inserted"] - len(rows), rows)])

    def copy_rows(self, first: int, stop: int) -> Array:
        """A copy of the rows ``[first, stop)``, counted from 0 in the order of their insertion.

        Raises:
            ValueError: Some of them are not there (any more).
        """
        return self._records.copy_rows(first, stop)

    def state_without_rows(self) -> dict[str, Any]:
        """Counters and the random generator."""
        return {**self._records.state(), "sampled": self.sampled, "rng": self._rng.bit_generator.state}

    def load_rows(self, state: dict[str, Any], blocks: Iterable[tuple[int, Array]]) -> None:
        """Restore rows, counters and random generator; of a larger buffer the newest rows.

        Args:
            state: What :meth:`state_without_rows` gave.
            blocks: First row and rows of consecutive blocks ``[m]``, the last one up to ``inserted``.

        Raises:
            LayoutMismatch: They have other columns.
        """
        oldest = self._records.begin_loading(state)
        for rows in rows_from(oldest, blocks, self.row_dtype):
            self._records.push(rows)
        self.sampled = state["sampled"]
        self._rng.bit_generator.state = state["rng"]


def require_transitions(layout: Layout, buffer: str) -> None:
    """Refuse items of which single rows are no transitions.

    Raises:
        LayoutMismatch: The layout is no ``transitions``.
    """
    if layout.kind != "transitions":
        raise LayoutMismatch(f"{buffer} stores transitions, the step processor makes {layout.kind}")
