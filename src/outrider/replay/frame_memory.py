"""Frames of many streams, each stored once, and which of them can start a transition.

Entries lie in one ring in the order of their arrival, whoever sent them, those of one message in the order of their
environments: frames that lie side by side are copied faster. The entries of an episode are linked
both ways. Two places behind the ring stand for what is not there::

    ring      0 .................. capacity - 1
    nothing   capacity             before the first frame of an episode: a frame of zeros
    lost      capacity + 1         overwritten, never arrived, or not there yet

So a stack is a walk back along the links, the successor n steps later a walk forward, and neither needs to know of
ends, gaps or other streams. An entry is *ready* when its stack and all of its n steps are there; only ready ones are
drawn. An entry stops being ready when the oldest frame of its stack is overwritten.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.data import Array, Field, Items, Layout, n_rows
from outrider.errors import LayoutMismatch
from outrider.replay.records import Records, checked_columns
from outrider.replay.storage import zeros

ACTOR = Field("actor", (), np.dtype(np.int32))
"""What a stored entry has besides the columns of the stream."""

LINK_BYTES = 17
"""What the links of an entry take, and whether it is ready."""

_NO_PLACES = np.empty(0, np.int64)
_ENDED = -2  # as the last t of a stream: no entry follows it


class FrameMemory:
    """The newest ``capacity`` entries of a frame stream.

    Process: the learner.
    Owns: frames and entries.
    Blocks: never.
    Closes: nothing; memory and files go with the object.

    Args:
        layout: Columns of an entry; of kind ``frames``.
        capacity: Entries it can hold, at least 1.
        n_steps: Steps of a transition, at least 1; fewer at the end of an episode.
        extra_bytes: Bytes of memory per entry that its owner will reserve beside it.
        disk: Directory on whose disk frames and entries lie, without their links; None: in memory.

    Attributes:
        n_ready: Entries that can start a transition now.
        ready: Which they are, ``[capacity + 2]`` bool by place.
        next: Place of the entry that follows, by place.
        previous: Place of the entry before, by place.
        frames: ``[capacity + 1, ...]`` by place.
        dtype: Of a row, as checkpoints have it.

    Raises:
        LayoutMismatch: The layout is no frame stream.
        ConfigError: The capacity is less than 1.
        ResourceError: Not enough memory or disk.
    """

    def __init__(
        self, layout: Layout, capacity: int, n_steps: int, extra_bytes: int = 0, disk: str | None = None
    ) -> None:
        if layout.kind != "frames" or layout.frame_stack < 1:
            raise LayoutMismatch(f"FrameReplayBuffer stores frames, the step processor makes {layout.kind}")
        frame, *rest = layout.fields
        self._fields = layout.fields
        self._stack, self._n_steps = layout.frame_stack, n_steps
        self._nothing, self._lost = capacity, capacity + 1
        frame_bytes = frame.dtype.itemsize * int(np.prod(frame.shape, dtype=np.int64))
        in_memory = extra_bytes + LINK_BYTES + (frame_bytes if disk is None else 0)
        self.entries = Records((*rest, ACTOR), capacity, in_memory, disk)
        self.dtype = np.dtype([(f.name, f.dtype, f.shape) for f in (*layout.fields, ACTOR)], align=True)
        self.frames: Array = zeros(
            (capacity + 1, *frame.shape), frame.dtype, disk, f"replay buffer ({capacity} frames)"
        )
        self.next: Array = np.zeros(capacity + 2, np.int64)
        self.previous: Array = np.zeros(capacity + 2, np.int64)
        self.ready: Array = np.zeros(capacity + 2, np.bool_)
        self._last: dict[int, tuple[int, int]] = {}  # of each stream: number and t of the entry that came last
        self._unlink()

    @property
    def capacity(self) -> int:
        """Entries it can hold."""
        return self.entries.capacity

    @property
    def inserted(self) -> int:
        """Entries taken so far."""
        return self.entries.inserted

    @property
    def oldest(self) -> int:
        """Number of the oldest entry that is still there."""
        return self.entries.oldest

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        arrays = (self.frames, self.next, self.previous, self.ready)
        return self.entries.nbytes + sum(array.nbytes for array in arrays)

    def push(self, items: Items, actor: int = 0) -> tuple[Array, Array]:
        """Copy entries ``[m]`` in, over the oldest once it is full.

        Args:
            items: Columns or records of the stream; rows that were saved, which know their actors.
            actor: Who made them.

        Returns:
            Places ``[k]`` int64 that are ready no more, and places that have become ready after that.

        Raises:
            LayoutMismatch: A column is missing, unknown, or of another shape or dtype.
        """
        saved = isinstance(items, np.ndarray) and items.dtype == self.dtype
        columns = {f.name: items[f.name] for f in (*self._fields, ACTOR)} if saved else self._columns(items, actor)
        m, gone, ready = n_rows(items), [_NO_PLACES], [_NO_PLACES]
        for first in range(0, m, self.capacity):
            part = {name: column[first : first + self.capacity] for name, column in columns.items()}
            frames = part.pop("frame")
            order = None if saved else _by_env(part["env"])
            if order is not None:
                part = {name: column[order] for name, column in part.items()}
            gone.append(self._overwrite(len(frames)))
            places = self._write(part)
            self._copy(frames, places, order)
            self._link(places, part)
            ready.append(self._complete(places, part["terminated"] | part["truncated"]))
        if m > self.capacity:  # what an earlier part made ready may be gone again
            return np.arange(self.capacity), np.flatnonzero(self.ready)
        return np.concatenate(gone), np.concatenate(ready)

    def _columns(self, items: Items, actor: int) -> dict[str, Array]:
        return {**checked_columns(items, self._fields), "actor": np.full(n_rows(items), actor, np.int32)}

    def _overwrite(self, m: int) -> Array:
        """Make room for m entries; gives the places that were ready until now."""
        n = max(0, self.inserted - self.oldest + m - self.capacity)
        if not n:
            return _NO_PLACES
        at = self.entries.places(np.arange(self.oldest, self.oldest + n))
        self.previous[self.next[at]] = self._lost
        gone = []
        following = at
        for _ in range(self._stack):  # the entry itself, and those whose stacks reach back to it
            gone.append(following[self.ready[following]])
            self.ready[following] = False
            following = self.next[following]
        self.next[at] = self._lost
        found = np.concatenate(gone)
        self.n_ready -= len(found)
        return found

    def _write(self, columns: dict[str, Array]) -> Array:
        """Store entries; gives their places."""
        first = self.inserted
        self.entries.push(columns)
        return self.entries.places(np.arange(first, self.inserted))

    def _copy(self, frames: Array, places: Array, order: Array | None) -> None:
        """Store frames as they came ``[m]``, of which that at ``order[i]`` belongs to the entry in ``places[i]``."""
        if order is not None:
            to = np.empty_like(places)
            to[order] = places
            places = to  # frames are copied once: sorting them first takes longer than all the rest
        self.frames[places] = frames

    def _link(self, places: Array, columns: dict[str, Array]) -> None:
        """Link the newest entries with those before them in their streams."""
        stream = columns["actor"].astype(np.int64) << 32 | columns["env"]
        t, ended = columns["t"], columns["terminated"] | columns["truncated"]
        if (stream[1:] < stream[:-1]).any():
            order = np.argsort(stream, kind="stable")
            stream, t, ended, places = stream[order], t[order], ended[order], places[order]
        t_last = np.where(ended, _ENDED, t)
        before, t_before = np.empty_like(places), np.empty_like(t)
        before[1:], t_before[1:] = places[:-1], t_last[:-1]
        heads = np.flatnonzero(np.concatenate([[True], stream[1:] != stream[:-1]]))
        tails = np.concatenate([heads[1:], [len(t)]]) - 1
        keys, oldest = stream[heads].tolist(), self.oldest
        known = [self._last.get(key, (-1, _ENDED)) for key in keys]
        before[heads] = [self.entries.place(number) if number >= oldest else self._lost for number, _ in known]
        t_before[heads] = [last for _, last in known]
        newest = zip(self.entries.numbers(places[tails]).tolist(), t_last[tails].tolist(), strict=True)
        self._last.update(zip(keys, newest, strict=True))
        follows = (t == t_before + 1) & (before != self._lost)
        self.previous[places] = np.where(follows, before, np.where(t == 0, self._nothing, self._lost))
        self.next[before[follows]] = places[follows]

    def _complete(self, places: Array, ended: Array) -> Array:
        """Entries whose n-th step, or last one, is among these; gives those that are ready now."""
        ready, start = [], places
        for k in range(1, self._n_steps + 1):
            start = self.previous[start]
            complete = start if k == self._n_steps else start[ended]
            complete = complete[complete < self.capacity]
            oldest = complete
            for _ in range(self._stack - 1):
                oldest = self.previous[oldest]
            ready.append(complete[oldest != self._lost])
            self.ready[ready[-1]] = True
        found = np.concatenate(ready)
        self.n_ready += len(found)
        return found

    def copy_rows(self, first: int, stop: int) -> Array:
        """A copy of the entries ``[first, stop)``, frames and actors included.

        Raises:
            ValueError: Some of them are not there (any more).
        """
        self.entries.require_there(first, stop)
        out, done = np.zeros(stop - first, self.dtype), 0
        for span in self.entries.spans(first, stop):
            part = out[done : done + span.stop - span.start]
            part["frame"] = self.frames[span]
            for f in self.entries.fields:
                part[f.name] = self.entries.array[f.name][span]
            done += len(part)
        return out

    def state(self) -> dict[str, Any]:
        """Counters."""
        return self.entries.state()

    def begin_loading(self, state: dict[str, Any]) -> int:
        """Drop all entries, and prepare for those of another memory; see :meth:`Records.begin_loading`."""
        self._unlink()
        return self.entries.begin_loading(state)

    def _unlink(self) -> None:
        """No entry is there."""
        self.next[...] = self.previous[...] = self._lost
        self.next[self._nothing] = self.previous[self._nothing] = self._nothing
        self.ready[...] = False
        self.n_ready = 0
        self._last.clear()


def _by_env(env: Array) -> Array | None:
    """The order in which the entries of an environment lie side by side, by time; None: they do."""
    if not (env[1:] < env[:-1]).any():
        return None
    return np.argsort(env, kind="stable")
