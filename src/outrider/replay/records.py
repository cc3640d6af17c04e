"""What all replay buffers are made of: a ring of records that keeps the newest rows.

A row is one aligned record, so a message is copied in as one block and a batch is one gather. Rows are moved
as opaque bytes (numpy's ``void``): assigning structured records walks them field by field, five times slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from outrider.config import require
from outrider.data import Array, Field, Items, column_names, n_rows
from outrider.errors import LayoutMismatch
from outrider.replay.storage import zeros
from outrider.shared_memory import require_memory


class Records:
    """The newest ``capacity`` rows. They are numbered from 0 in the order of their insertion.

    Process: the learner.
    Owns: the records.
    Blocks: never.
    Closes: nothing; memory and file go with the object.

    Args:
        fields: Columns of a row.
        capacity: Rows it can hold, at least 1.
        extra_bytes: Bytes of memory per row that its owner will reserve beside it.
        disk: Directory on whose disk they lie; None: in memory.

    Attributes:
        inserted: Rows taken so far, those already overwritten included.

    Raises:
        ConfigError: The capacity is less than 1.
        ResourceError: Not enough memory or disk.
    """

    def __init__(self, fields: tuple[Field, ...], capacity: int, extra_bytes: int = 0, disk: str | None = None) -> None:
        require(capacity >= 1, "capacity", "at least 1 row", capacity)
        self.fields = fields
        self.capacity = capacity
        self.inserted = 0
        self._start = 0  # number of the row that lies, or lay, in the first place
        self.dtype = np.dtype([(f.name, f.dtype, f.shape) for f in fields], align=True)
        self._void = np.dtype(("V", self.dtype.itemsize))
        in_memory = extra_bytes + (self.dtype.itemsize if disk is None else 0)
        require_memory(capacity * in_memory, f"replay buffer ({capacity} rows of {in_memory} bytes)")
        self.array: Array = zeros((capacity,), self.dtype, disk, f"replay buffer ({capacity} rows)")
        self._rows = self.array.view(self._void)
        self._outputs: dict[int, tuple[Array, Array]] = {}

    def __len__(self) -> int:
        return min(self.inserted - self._start, self.capacity)

    @property
    def oldest(self) -> int:
        """Number of the oldest row that is still there."""
        return self.inserted - len(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all records, the unused ones included."""
        return self.array.nbytes

    def places(self, numbers: Array) -> Array:
        """Where rows lie, by their numbers."""
        return (numbers - self._start) % self.capacity

    def place(self, number: int) -> int:
        """Where one row lies."""
        return (number - self._start) % self.capacity

    def numbers(self, places: Array) -> Array:
        """Numbers of the rows that lie in these places; all of them hold one."""
        return self.inserted - 1 - (self.inserted - 1 - self._start - places) % self.capacity

    def spans(self, first: int, stop: int) -> Iterator[slice]:
        """The places of the rows ``[first, stop)``, at most `capacity` of them, in one piece or two."""
        at, left = (first - self._start) % self.capacity, stop - first
        while left:
            n = min(left, self.capacity - at)
            yield slice(at, at + n)
            at, left = 0, left - n

    def checked(self, items: Items) -> Items:
        """The items, refused where storing them would convert, drop or invent something.

        Raises:
            LayoutMismatch: A column is missing, unknown, or of another shape or dtype.
        """
        if isinstance(items, np.ndarray) and items.dtype == self.dtype:
            return items
        return checked_columns(items, self.fields)

    def push(self, items: Items) -> None:
        """Copy rows ``[m]`` in, over the oldest once it is full.

        Args:
            items: A structured array of the records' dtype, or the columns by name.

        Raises:
            LayoutMismatch: A column is missing, unknown, or of another shape or dtype.
        """
        m = n_rows(items)
        items = self.checked(items)
        source = items.view(self._void) if isinstance(items, np.ndarray) else items
        taken = max(0, m - self.capacity)  # rows that this very push would overwrite
        for span in self.spans(self.inserted + taken, self.inserted + m):
            n = span.stop - span.start
            if isinstance(source, np.ndarray):
                self._rows[span] = source[taken : taken + n]
            else:
                for name, column in source.items():
                    self.array[name][span] = column[taken : taken + n]
            taken += n
        self.inserted += m

    def take(self, places: Array) -> Array:
        """The rows in these places ``[B]``; the array is reused by the next call with this size."""
        size = len(places)
        if size not in self._outputs:
            out = np.zeros(size, self.dtype)
            self._outputs[size] = out, out.view(self._void)
        out, out_rows = self._outputs[size]
        self._rows.take(places, out=out_rows, mode="clip")  # "raise" would go through a second copy
        return out

    def copy_rows(self, first: int, stop: int) -> Array:
        """A copy of the rows ``[first, stop)``.

        Raises:
            ValueError: Some of them are not there (any more).
        """
        self.require_there(first, stop)
        out = np.empty(stop - first, self.dtype)
        rows, done = out.view(self._void), 0
        for span in self.spans(first, stop):
            n = span.stop - span.start
            rows[done : done + n] = self._rows[span]
            done += n
        return out

    def require_there(self, first: int, stop: int) -> None:
        """Refuse rows that are not there.

        Raises:
            ValueError: Some of ``[first, stop)`` are not there (any more).
        """
        if not self.oldest <= first <= stop <= self.inserted:
            raise ValueError(f"rows: expected some of {self.oldest} to {self.inserted}, got {first} to {stop}")

    def state(self) -> dict[str, Any]:
        """Counters."""
        return {"capacity": self.capacity, "start": self._start, "inserted": self.inserted}

    def begin_loading(self, state: dict[str, Any]) -> int:
        """Drop all rows, and prepare for those of another ring, also one of another capacity, which are pushed next.

        Args:
            state: What its :meth:`state` gave.

        Returns:
            Number of the first row to push: of a larger ring, the newest rows are kept.
        """
        oldest = max(state["start"], state["inserted"] - min(self.capacity, state["capacity"]))
        # Of another capacity, rows lie from the first place on; of the same one, where they lay: the draws are equal.
        self._start = state["start"] if state["capacity"] == self.capacity else oldest
        self.inserted = max(oldest, self._start)
        return int(oldest)


def checked_columns(items: Items, fields: Iterable[Field]) -> dict[str, Array]:
    """The columns of `items`, refused where storing them would convert, drop or invent something.

    Raises:
        LayoutMismatch: A column is missing, unknown, or of another shape or dtype.
    """
    names, m = column_names(items), n_rows(items)
    known = [f.name for f in fields]
    for name in names:
        if name not in known:
            raise LayoutMismatch(f"column {name!r}: the replay buffer has none, only {known}")
    columns: dict[str, Array] = {}
    for field in fields:
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


def rows_from(oldest: int, blocks: Iterable[tuple[int, Array]], dtype: np.dtype[Any]) -> Iterator[Array]:
    """Of consecutive blocks of saved rows, those from the row `oldest` on, in the given dtype.

    Args:
        oldest: Number of the first row that is wanted.
        blocks: Number of the first row, and the rows, of each block.
        dtype: Of the rows.

    Raises:
        LayoutMismatch: They have other columns.
    """
    for first, rows in blocks:
        if rows.dtype != dtype:
            raise LayoutMismatch(f"rows: the replay buffer stores {dtype}, the saved ones are {rows.dtype}")
        if first + len(rows) > oldest:
            yield np.ascontiguousarray(rows[max(0, oldest - first) :]).view(dtype)
