"""Station (3): the replay buffer with prioritised sampling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.config import require
from outrider.data import Array, Batch, Items, Layout, Record
from outrider.replay.priorities import TREE_BYTES, Priorities, PriorityConfig, as_array
from outrider.replay.records import Records
from outrider.replay.row_buffer import RowBuffer, require_transitions
from outrider.seeding import Role, derive


@dataclass(frozen=True, kw_only=True)
class PrioritizedReplayBufferConfig(PriorityConfig):
    """Builds a :class:`PrioritizedReplayBuffer`.

    Attributes:
        capacity: Rows it can hold; the oldest are overwritten then. At least 1.
        seed: Seed of the draws, at least 0.
        disk: An existing directory on whose disk the rows are kept, for buffers larger than memory; null: in memory.
    """

    capacity: int = 100_000
    seed: int = 0
    disk: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.capacity >= 1, "capacity", "at least 1 row", self.capacity)
        require(self.seed >= 0, "seed", "a seed of at least 0", self.seed)
        require(self.disk != "", "disk", "a directory, or null", self.disk)

    def nbytes(self, layout: Layout) -> int:
        """Bytes that the rows and their priorities will take."""
        return self.capacity * (layout.record_dtype().itemsize + TREE_BYTES)

    def disk_bytes(self, layout: Layout) -> int:
        """Bytes of :meth:`nbytes` that will lie in `disk`."""
        return self.capacity * layout.record_dtype().itemsize if self.disk else 0

    def build(self, layout: Layout) -> PrioritizedReplayBuffer:
        """Reserve memory or disk for rows of this layout; compile the sum tree, if there is numba.

        Raises:
            LayoutMismatch: The items are a frame stream, of which single rows are no transitions.
            ResourceError: Not enough memory or disk.
        """
        return PrioritizedReplayBuffer(layout, self.capacity, self, derive(self.seed, Role.REPLAY), self.disk)


class PrioritizedReplayBuffer(RowBuffer):
    """The newest ``capacity`` transitions, drawn with probabilities that follow from their latest TD errors.

    A batch's ``ixs`` are the numbers of its rows, counted from 0 in the order of their insertion. So an update that
    comes after its row was overwritten is recognised; it is dropped and counted.

    Process: the learner.
    Owns: the records, their priorities, one reused batch per batch size, and its random generator.
    Blocks: never.
    Closes: nothing; memory and file go with the object.

    Args:
        layout: Columns of a row; of kind ``transitions``.
        capacity: Rows it can hold, at least 1.
        config: Exponents of the priorities and weights.
        seed: Seed of the draws, at least 0.
        disk: Directory on whose disk the rows lie, without their priorities; None: in memory.

    Raises:
        LayoutMismatch: The layout is no ``transitions``.
        ConfigError: The capacity is less than 1.
        ResourceError: Not enough memory or disk.
    """

    def __init__(
        self, layout: Layout, capacity: int, config: PriorityConfig, seed: int = 0, disk: str | None = None
    ) -> None:
        require_transitions(layout, "PrioritizedReplayBuffer")
        self._records = Records(layout.fields, capacity, extra_bytes=TREE_BYTES, disk=disk)
        super().__init__(layout, self._records, seed)
        self._priorities = Priorities(config, capacity)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def nbytes(self) -> int:
        """Bytes of all records and priorities, the unused ones included."""
        return self._records.nbytes + self._priorities.nbytes

    def push(self, items: Items) -> None:
        """Copy rows ``[m]`` in, over the oldest once the buffer is full; they get the highest priority so far.

        Args:
            items: A structured array of the layout's record dtype, or the layout's columns by name.

        Raises:
            LayoutMismatch: A column is missing, unknown, or of another shape or dtype.
        """
        before = self._records.inserted
        self._records.push(items)
        first = max(before, self._records.oldest)
        self._priorities.add(self._records.places(np.arange(first, self._records.inserted)))

    def batch(self, size: int) -> Batch:
        """Draw `size` rows with replacement; the rows and weights are reused by the next call with this size.

        Raises:
            ValueError: Nothing has been stored yet.
        """
        if not len(self):
            raise ValueError("replay buffer: expected at least one stored row to draw from, it is empty")
        places, weights = self._priorities.draw(size, self.sampled, self._rng)
        self.sampled += size
        return Batch(self._records.take(places), self._records.numbers(places), weights)

    def update_priority(self, ixs: Array, td_errors: Any) -> None:
        """Set priorities from TD errors; of equal rows the last one counts.

        Args:
            ixs: A batch's ``ixs`` ``[B]``, also of an earlier one: rows that were overwritten are left out.
            td_errors: ``[B]``, an array or a tensor; NaN and infinite ones are left out and counted. None: nothing.
        """
        if td_errors is not None:
            there = ixs >= self._records.oldest
            self._priorities.update(self._records.places(ixs), as_array(td_errors), there)

    def statistics(self) -> Record:
        """Metrics: updates that were left out, the highest priority, the exponent of the weights."""
        return self._priorities.statistics(self.sampled)

    def state_without_rows(self) -> dict[str, Any]:
        """Counters, priorities and the random generator."""
        return {**super().state_without_rows(), "priorities": self._priorities.state(self._stored())}

    def load_rows(self, state: dict[str, Any], blocks: Iterable[tuple[int, Array]]) -> None:
        """Restore rows, priorities, counters and random generator; of a larger buffer the newest rows.

        Args:
            state: What :meth:`state_without_rows` gave. Without priorities, as of a uniform buffer, all rows get the
                highest.
            blocks: First row and rows of consecutive blocks ``[m]``, the last one up to ``inserted``.

        Raises:
            LayoutMismatch: They have other columns.
        """
        self._priorities.clear()
        super().load_rows(state, blocks)
        if "priorities" in state:
            self._priorities.load_state(state["priorities"], self._stored())
        else:
            self._priorities.add(self._stored())

    def _stored(self) -> Array:
        """The places of all rows, the oldest first."""
        return self._records.places(np.arange(self.oldest, self.inserted))
