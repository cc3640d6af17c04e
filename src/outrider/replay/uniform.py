"""Station (3): the replay buffer with uniform sampling.

A row is one aligned record, so a message is copied in as one block and a batch is one gather. Rows are moved
as opaque bytes (numpy's ``void``): assigning structured records walks them field by field, five times slower.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.config import Config, require
from outrider.data import Array, Batch, Items, Layout, column_names, n_rows
from outrider.errors import LayoutMismatch
from outrider.seeding import Role, derive
from outrider.shared_memory import require_memory


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

    def nbytes(self, layout: Layout) -> int:
        """Bytes of its rows: what :meth:`build` reserves."""
        return self.capacity * layout.record_dtype().itemsize


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
        inserted: Rows taken so far, those already overwritten included.
        sampled: Rows drawn so far.

    Raises:
        LayoutMismatch: The layout is no ``transitions``.
        ConfigError: The capacity is less than 1.
    """

    def __init__(self, layout: Layout, capacity: int, seed: int = 0) -> None:
        require(capacity >= 1, "capacity", "at least 1 row", capacity)
        if layout.kind != "transitions":
            raise LayoutMismatch(f"SimpleReplayBuffer stores transitions, the step processor makes {layout.kind}")
        self.layout = layout
        self.capacity = capacity
        self.inserted = 0
        self.sampled = 0
        self._start = 0  # number of the row that lies, or lay, in the first place
        self._rng = np.random.default_rng(seed)
        self._dtype = layout.record_dtype()
        self._void = np.dtype(("V", self._dtype.itemsize))
        require_memory(
            capacity * self._dtype.itemsize, f"replay buffer ({capacity} rows of {self._dtype.itemsize} bytes)"
        )
        self._records = np.zeros(capacity, self._dtype)
        self._rows = self._records.view(self._void)
        self._outputs: dict[int, tuple[Array, Array, Array, Array]] = {}

    def __len__(self) -> int:
        return min(self.inserted - self._start, self.capacity)

    @property
    def oldest(self) -> int:
        """Number of the oldest row that is still there, counted from 0."""
        return self.inserted - len(self)

    @property
    def row_dtype(self) -> np.dtype[Any]:
        """The structured dtype of a row."""
        return self._dtype

    def accepts(self, layout: Layout) -> bool:
        """Whether this is the layout it was built for."""
        return layout == self.layout

    @property
    def nbytes(self) -> int:
        """Bytes of all records, the unused ones included."""
        return self._records.nbytes

    def push(self, items: Items) -> None:
        """Copy rows ``[m]`` in, over the oldest once the buffer is full.

        Args:
            items: A structured array of the layout's record dtype, or the layout's columns by name.

        Raises:
            LayoutMismatch: A column is missing, unknown, or of another shape or dtype.
        """
        m = n_rows(items)
        if isinstance(items, np.ndarray) and items.dtype == self._dtype:
            source: Array | dict[str, Array] = items.view(self._void)
        else:
            source = self._checked(items, m)
        taken = max(0, m - self.capacity)  # rows that this very push would overwrite
        while taken < m:
            at = (self.inserted - self._start + taken) % self.capacity
            n = min(m - taken, self.capacity - at)
            if isinstance(source, dict):
                for name, column in source.items():
                    self._records[name][at : at + n] = column[taken : taken + n]
            else:
                self._rows[at : at + n] = source[taken : taken + n]
            taken += n
        self.inserted += m

    def _checked(self, items: Items, m: int) -> dict[str, Array]:
        """The columns of `items`, refused where storing them would convert, drop or invent something."""
        names = column_names(items)
        for name in names:
            if name not in self.layout.names:
                raise LayoutMismatch(f"column {name!r}: the replay buffer has none, only {list(self.layout.names)}")
        columns: dict[str, Array] = {}
        for field in self.layout.fields:
            if field.name not in names:
                raise LayoutMismatch(f"column {field.name!r}: the replay buffer expects it, the items lack it")
            column = items[field.name]
            if column.dtype != field.dtype or column.shape != (m, *field.shape):
                raise LayoutMismatch(
                    f"column {field.name!r}: the replay buffer expects {[m, *field.shape]} {field.dtype}, "
                    f"the items have {list(column.shape)} {column.dtype}"
                )
            columns[field.name] = column
        return columns

    def batch(self, size: int) -> Batch:
        """Draw `size` rows with replacement; the arrays are reused by the next call with this size.

        Raises:
            ValueError: Nothing has been stored yet.
        """
        stored = len(self)
        if not stored:
            raise ValueError("replay buffer: expected at least one stored row to draw from, it is empty")
        if size not in self._outputs:
            out = np.zeros(size, self._dtype)
            self._outputs[size] = out, out.view(self._void), np.empty(size), np.empty(size, np.int64)
        out, out_rows, uniform, ixs = self._outputs[size]
        # Half the time of `integers`. The product stays below `stored` for every double below 1, and rows differ
        # in probability by less than stored / 2**53.
        self._rng.random(out=uniform)
        np.multiply(uniform, stored, out=uniform)
        ixs[...] = uniform
        self._rows.take(ixs, out=out_rows, mode="clip")  # "raise" would go through a second copy
        self.sampled += size
        return Batch(out, ixs)

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
        if not self.oldest <= first <= stop <= self.inserted:
            raise ValueError(f"rows: expected some of {self.oldest} to {self.inserted}, got {first} to {stop}")
        out = np.empty(stop - first, self._dtype)
        rows, at = out.view(self._void), (first - self._start) % self.capacity
        n = min(stop - first, self.capacity - at)
        rows[:n] = self._rows[at : at + n]
        rows[n:] = self._rows[: stop - first - n]
        return out

    def state_without_rows(self) -> dict[str, Any]:
        """Counters and the random generator."""
        return {
            "capacity": self.capacity,
            "start": self._start,
            "inserted": self.inserted,
            "sampled": self.sampled,
            "rng": self._rng.bit_generator.state,
        }

    def load_rows(self, state: dict[str, Any], blocks: Iterable[tuple[int, Array]]) -> None:
        """Restore rows, counters and random generator; of a larger buffer the newest rows.

        Args:
            state: What :meth:`state_without_rows` gave.
            blocks: First row and rows of consecutive blocks ``[m]``, the last one up to ``inserted``.

        Raises:
            LayoutMismatch: They have other columns.
        """
        inserted = state["inserted"]
        oldest = max(state["start"], inserted - min(self.capacity, state["capacity"]))
        # Of another capacity, rows lie from the first place on; of the same one, where they lay: the draws are equal.
        self._start = state["start"] if state["capacity"] == self.capacity else oldest
        for first, rows in blocks:
            if rows.dtype != self._dtype:
                raise LayoutMismatch(f"rows: the replay buffer stores {self._dtype}, the saved ones are {rows.dtype}")
            skipped = max(0, oldest - first)
            if skipped < len(rows):
                self.inserted = first + skipped
                self.push(np.ascontiguousarray(rows[skipped:]).view(self._dtype))
        self.inserted = inserted
        self.sampled = state["sampled"]
        self._rng.bit_generator.state = state["rng"]
