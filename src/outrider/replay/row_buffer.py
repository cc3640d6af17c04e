"""What all replay buffers have in common, however they draw: counters, and rows that checkpoints can share."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np

from outrider.data import Array, Items, Layout
from outrider.errors import LayoutMismatch
from outrider.replay.records import rows_from


class RowMemory(Protocol):
    """Where a buffer keeps its rows; they are numbered from 0 in the order of their insertion."""

    dtype: np.dtype[Any]

    @property
    def capacity(self) -> int:
        """Rows it can hold."""
        ...

    @property
    def inserted(self) -> int:
        """Rows taken so far."""
        ...

    @property
    def oldest(self) -> int:
        """Number of the oldest row that is still there."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        ...

    def push(self, items: Items) -> object:
        """Copy rows in, over the oldest once it is full."""
        ...

    def copy_rows(self, first: int, stop: int) -> Array:
        """A copy of rows."""
        ...

    def state(self) -> dict[str, Any]:
        """Counters."""
        ...

    def begin_loading(self, state: dict[str, Any]) -> int:
        """Drop all rows and prepare for those of a saved memory; gives the number of the first to push."""
        ...


class RowBuffer:
    """A replay buffer without `batch` and `update_priority`.

    Args:
        layout: Columns of a row.
        memory: Keeps the rows.
        seed: Seed of the draws, at least 0.

    Attributes:
        layout: Columns of a row.
        sampled: Rows drawn so far.
    """

    def __init__(self, layout: Layout, memory: RowMemory, seed: int) -> None:
        self.layout = layout
        self.sampled = 0
        self._memory = memory
        self._rng = np.random.default_rng(seed)

    @property
    def capacity(self) -> int:
        """Rows it can hold."""
        return self._memory.capacity

    @property
    def inserted(self) -> int:
        """Rows taken so far, those already overwritten included."""
        return self._memory.inserted

    @property
    def oldest(self) -> int:
        """Number of the oldest row that is still there, counted from 0."""
        return self._memory.oldest

    @property
    def row_dtype(self) -> np.dtype[Any]:
        """The structured dtype of a row."""
        return self._memory.dtype

    @property
    def nbytes(self) -> int:
        """Bytes reserved, unused places included."""
        return self._memory.nbytes

    def accepts(self, layout: Layout) -> bool:
        """Whether this is the layout it was built for."""
        return layout == self.layout

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
        return self._memory.copy_rows(first, stop)

    def state_without_rows(self) -> dict[str, Any]:
        """Counters and the random generator."""
        return {**self._memory.state(), "sampled": self.sampled, "rng": self._rng.bit_generator.state}

    def load_rows(self, state: dict[str, Any], blocks: Iterable[tuple[int, Array]]) -> None:
        """Restore rows, counters and random generator; of a larger buffer the newest rows.

        If that fails, the buffer is empty.

        Args:
            state: What :meth:`state_without_rows` gave.
            blocks: First row and rows of consecutive blocks ``[m]``, the last one up to ``inserted``.

        Raises:
            LayoutMismatch: They have other columns.
        """
        with ExitStack() as undo:
            # or else it would count rows that it does not have
            undo.callback(self._memory.begin_loading, {"capacity": self.capacity, "start": 0, "inserted": 0})
            oldest = self._memory.begin_loading(state)
            for rows in rows_from(oldest, blocks, self.row_dtype):
                self._memory.push(rows)
            undo.pop_all()
        self.sampled = state["sampled"]
        self._rng.bit_generator.state = state["rng"]


def require_transitions(layout: Layout, buffer: str) -> None:
    """Refuse items of which single rows are no transitions.

    Raises:
        LayoutMismatch: The layout is no ``transitions``.
    """
    if layout.kind != "transitions":
        raise LayoutMismatch(f"{buffer} stores transitions, the step processor makes {layout.kind}")
