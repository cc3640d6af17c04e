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
            if not saved:
                part = _by_env(part)
            gone.append(self._overwrite(len(part["t"])))
            places = self._write(part)
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
        lost = [np.r_[span] for span in self.entries.spans(self.oldest, self.oldest + n)]
        at = np.concatenate(lost)
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
        """Store entries and frames; gives their places."""
        first = self.inserted
        frames = columns["frame"]
        self.entries.push({name: column for name, column in columns.items() if name != "frame"})
        places, done = [], 0
        for span in self.entries.spans(first, self.inserted):
            n = span.stop - span.start
            self.frames[span] = frames[done : done + n]
            places.append(np.arange(span.start, span.stop))
            done += n
        return np.concatenate(places) if places else _NO_PLACES

    def _link(self, places: Array, columns: dict[str, Array]) -> None:
        """Link the newest entries with those before them in their streams."""
        m = len(places)
        streams = columns["actor"].astype(np.int64) << 32 | columns["env"]
        order = np.argsort(streams, kind="stable")
        stream, t, place = streams[order], columns["t"][order], places[order]
        ended = (columns["terminated"] | columns["truncated"])[order]
        before, t_before = np.empty(m, np.int64), np.empty(m, np.int64)
        before[1:], t_before[1:] = place[:-1], np.where(ended[:-1], _ENDED, t[:-1])
        heads = np.flatnonzero(np.r_[True, stream[1:] != stream[:-1]]).tolist() if m else []
        for head, tail in zip(heads, [*heads[1:], m], strict=True):
            key, last = int(stream[head]), tail - 1
            number, t_before[head] = self._last.get(key, (-1, _ENDED))
            before[head] = self.entries.places(np.array(number)) if number >= self.oldest else self._lost
            newest = self.inserted - m + int(order[last])
            self._last[key] = newest, _ENDED if ended[last] else int(t[last])
        follows = (t == t_before + 1) & (before != self._lost)
        self.previous[place] = np.where(follows, before, np.where(t == 0, self._nothing, self._lost))
        self.next[before[follows]] = place[follows]

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


def _by_env(columns: dict[str, Array]) -> dict[str, Array]:
    """The entries of one message, those of an environment side by side in the order of time."""
    env = columns["env"]
    if not (env[1:] < env[:-1]).any():
        return columns
    order = np.argsort(env, kind="stable")
    return {name: column[order] for name, column in columns.items()}
