"""The memory of the item channel: one ring per actor, and how one row gets into it.

::

    heads   n_actors words   messages committed; only the actor writes its own
    tails   n_actors words   messages taken; only the learner writes
    then per actor and slot:
      header                 HEADER, then room for n_buffer finished episodes, each EPISODE
      rows                   n_buffer records of the layout's dtype

All heads lie side by side: one look sees every actor. Slot ``s`` of a ring holds message ``m`` with
``m % n_slots == s``, for ``tail <= m < head``; whatever lies elsewhere is not there for the other side. So a
writer that dies in the middle of a slot leaves nothing visible, and the next one begins at the same slot.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from outrider.core import EnvSpec
from outrider.data import Array, Layout
from outrider.shared_memory import Arena, Backend, LocalArena, aligned, allocate

HEADER = struct.Struct("=7qd")
"""Rows, incarnation, env steps so far, lowest and highest model version, number of episodes, rows dropped so far,
seconds waited so far."""

EPISODE = struct.Struct("=dqq")
"""Return, length, env."""


@dataclass(frozen=True)
class Rings:
    """The rings of all actors; can be handed to a process while it is started."""

    layout: Layout
    n_actors: int
    n_buffer: int
    n_slots: int
    max_message_age_s: float
    arena: Arena | LocalArena
    backend: Backend
    env_spec: EnvSpec | None = None

    @classmethod
    def allocate(
        cls,
        layout: Layout,
        n_actors: int,
        n_buffer: int,
        n_slots: int,
        max_message_age_s: float,
        backend: Backend,
        env_spec: EnvSpec | None = None,
    ) -> Rings:
        """Reserve the memory.

        Raises:
            ResourceError: There is not enough; says needed and free.
        """
        row_bytes = layout.record_dtype().itemsize
        nbytes = rings_bytes(layout, n_actors, n_buffer, n_slots)
        what = f"item channel ({n_actors} actors, {n_slots} slots of {n_buffer} rows of {row_bytes} bytes)"
        arena = allocate(nbytes, backend, what)
        return cls(layout, n_actors, n_buffer, n_slots, max_message_age_s, arena, backend, env_spec)

    def heads(self) -> memoryview:
        """Messages committed by each actor, ``[n_actors]`` words."""
        return self._words(0)

    def tails(self) -> memoryview:
        """Messages taken from each actor, ``[n_actors]`` words."""
        return self._words(_control_bytes(self.n_actors) // 2)

    def _words(self, at: int) -> memoryview:
        return memoryview(self.arena.buf)[at : at + 8 * self.n_actors].cast("Q")

    def header(self, actor: int, slot: int) -> memoryview:
        """Header of a slot with its episodes, as bytes."""
        at = self._slot_at(actor, slot)
        return memoryview(self.arena.buf)[at : at + HEADER.size + self.n_buffer * EPISODE.size]

    def rows(self, actor: int, slot: int) -> Array:
        """Rows of a slot, ``[n_buffer]`` records."""
        return np.ndarray(
            (self.n_buffer,), self.layout.record_dtype(), cast("Any", self.arena.buf), self.rows_at(actor, slot)
        )

    def rows_at(self, actor: int, slot: int) -> int:
        """Where the rows of a slot begin in the arena, in bytes."""
        return self._slot_at(actor, slot) + self._header_bytes

    @property
    def _header_bytes(self) -> int:
        return aligned(HEADER.size + self.n_buffer * EPISODE.size)

    def _slot_at(self, actor: int, slot: int) -> int:
        slot_bytes = self._header_bytes + aligned(self.n_buffer * self.layout.record_dtype().itemsize)
        return _control_bytes(self.n_actors) + (actor * self.n_slots + slot) * slot_bytes

    def close(self) -> None:
        """Free the memory, or leave it to its last view. May be called twice."""
        self.arena.close()


def rings_bytes(layout: Layout, n_actors: int, n_buffer: int, n_slots: int) -> int:
    """Size of the memory."""
    header_bytes = aligned(HEADER.size + n_buffer * EPISODE.size)
    slot_bytes = header_bytes + aligned(n_buffer * layout.record_dtype().itemsize)
    return _control_bytes(n_actors) + n_actors * n_slots * slot_bytes


def _control_bytes(n_actors: int) -> int:
    return 2 * aligned(8 * n_actors)


RowPacker = Callable[[Any, int], bool]
"""``pack(items, at)`` writes the one row of `items` at byte `at`; False, and nothing written, if it may not."""

# Scalars of these dtypes go through a Python number, which is quicker than through bytes and casts as numpy does.
_CODES = {np.dtype(f"={code}").str[1:]: code for code in "bBhHiIqQfd"} | {"b1": "?"}


def row_packer(record: np.dtype[Any], buffer: Any) -> RowPacker:
    """Compile the quickest way to write one row of columns ``[1, ...]`` into `buffer`.

    It is generated, as ``namedtuple`` is, because a loop over the columns costs more than the writing. The
    result, for a record of `obs` and `reward`::

        lambda c, at: (
            (x0 := c['obs']).dtype is d0 and x0.nbytes == 16
            and (pack(buffer, at, x0.tobytes(), c['reward'].item()), True)[1]
        )

    Columns that are arrays, and scalars that ``struct`` does not know, travel as the bytes of the array, if
    dtype and size are those of the layout. What is refused takes the slower way and numpy's casts.
    """
    form, guards, values, at = "=", [], [], 0
    known: dict[str, Any] = {"buffer": buffer}
    for i, name in enumerate(cast("tuple[str, ...]", record.names)):
        dtype, offset = cast("Any", record.fields)[name][:2]
        form += f"{offset - at}x"
        code = _CODES.get(dtype.str[1:]) if dtype.isnative else None
        if code is not None:
            form += code
            values.append(f"c[{name!r}].item()")
        else:
            form += f"{dtype.itemsize}s"
            # A pickled dtype is equal to numpy's own, but only its own is found by identity.
            known[f"d{i}"] = np.dtype(dtype.base.str)
            guards.append(f"(x{i} := c[{name!r}]).dtype is d{i} and x{i}.nbytes == {dtype.itemsize}")
            values.append(f"x{i}.tobytes()")
        at = offset + dtype.itemsize
    pack = struct.Struct(f"{form}{record.itemsize - at}x")
    assert pack.size == record.itemsize, (pack.format, record)
    known["pack"] = pack.pack_into
    write = f"(pack(buffer, at, {', '.join(values)}), True)[1]"
    return cast("RowPacker", eval(f"lambda c, at: {' and '.join([*guards, write])}", known))
