"""Station (3): the replay buffer with uniform sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.config import Config, require
from outrider.data import Array, Batch, Items, Layout
from outrider.replay.records import Records
from outrider.replay.row_buffer import RowBuffer, require_transitions
from outrider.seeding import Role, derive


@dataclass(frozen=True, kw_only=True)
class SimpleReplayBufferConfig(Config):
    """Builds a :class:`SimpleReplayBuffer`.

    Attributes:
        capacity: Rows it can hold; the oldest are overwritten then. At least 1.
        seed: Seed of the draws, at least 0.
        disk: An existing directory on whose disk the rows are kept, for buffers larger than memory; null: in memory.
    """

    capacity: int = 100_000
    seed: int = 0
    disk: str | None = None

    def __post_init__(self) -> None:
        require(self.capacity >= 1, "capacity", "at least 1 row", self.capacity)
        require(self.seed >= 0, "seed", "a seed of at least 0", self.seed)
        require(self.disk != "", "disk", "a directory, or null", self.disk)

    def build(self, layout: Layout) -> SimpleReplayBuffer:
        """Reserve memory or disk for rows of this layout.

        Raises:
            LayoutMismatch: The items are a frame stream, of which single rows are no transitions.
            ResourceError: Not enough memory or disk.
        """
        return SimpleReplayBuffer(layout, self.capacity, derive(self.seed, Role.REPLAY), self.disk)

    def nbytes(self, layout: Layout) -> int:
        """Bytes of its rows: what :meth:`build` reserves."""
        return self.capacity * layout.record_dtype().itemsize

    def disk_bytes(self, layout: Layout) -> int:
        """Bytes of :meth:`nbytes` that will lie in `disk`."""
        return self.nbytes(layout) if self.disk else 0


class SimpleReplayBuffer(RowBuffer):
    """The newest ``capacity`` transitions, drawn uniformly with replacement.

    Process: the learner.
    Owns: the records, one reused batch per batch size, and its random generator.
    Blocks: never.
    Closes: nothing; memory and file go with the object.

    Args:
        layout: Columns of a row; of kind ``transitions``.
        capacity: Rows it can hold, at least 1.
        seed: Seed of the draws, at least 0.
        disk: Directory on whose disk the rows lie; None: in memory.

    Raises:
        LayoutMismatch: The layout is no ``transitions``.
        ConfigError: The capacity is less than 1.
        ResourceError: Not enough memory or disk.
    """

    def __init__(self, layout: Layout, capacity: int, seed: int = 0, disk: str | None = None) -> None:
        require_transitions(layout, "SimpleReplayBuffer")
        self._records = Records(layout.fields, capacity, disk=disk)
        super().__init__(layout, self._records, seed)
        self._draws: dict[int, tuple[Array, Array]] = {}

    def __len__(self) -> int:
        return len(self._records)

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
