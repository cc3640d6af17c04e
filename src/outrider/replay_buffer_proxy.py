"""The actor's side of station (2): the replay buffer as an actor sees it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from outrider.config import Config, require
from outrider.data import Array, Episode, Items, column_names, n_rows
from outrider.errors import ChannelClosed, LayoutMismatch
from outrider.flags import StopFlag
from outrider.health import BadDataPolicy, RowHealth
from outrider.rings import EPISODE, HEADER, Rings, row_packer
from outrider.shared_memory import Fence

SMALL_BYTES = 8192  # up to here bytes are copied twice in less time than it takes to make a view
NAP_S = 1e-4
LONGEST_NAP_S = 2e-3
"""Waits begin with the first and end at the second: a ring holds several times that of the quickest environments."""


class RingSource(Protocol):
    """Whoever has the rings: an :class:`~outrider.channel.ItemSender`."""

    @property
    def rings(self) -> Rings:
        """The memory of the channel."""
        ...


@dataclass(frozen=True, kw_only=True)
class ReplayBufferProxyConfig(Config):
    """How an actor groups its rows.

    Attributes:
        n_buffer: Rows of a message, >= 1, whatever the number of environments; the size of the ring's slots.
        max_message_age_s: Send an incomplete message when its first row is older than that; > 0.
        bad_data: What to do about rows with NaN or infinite values: ``raise``, or ``drop`` and count them.
    """

    n_buffer: int = 64
    max_message_age_s: float = 1.0
    bad_data: BadDataPolicy = "raise"

    def __post_init__(self) -> None:
        require(self.n_buffer >= 1, "n_buffer", "at least 1", self.n_buffer)
        require(self.max_message_age_s > 0, "max_message_age_s", "a time above 0", self.max_message_age_s)


class ReplayBufferProxy:
    """The replay buffer as an actor sees it: takes items, and sends them a message at a time.

    A message holds exactly `n_buffer` rows; fewer when it got older than `max_message_age_s`, and at the end.

    Process: actor; one thread uses it.
    Owns: the head of its ring.
    Blocks: in :meth:`push`, before the first row of a message, while the ring is full; never when committing.
    Closes: nothing; :meth:`flush` sends what is left.

    Attributes:
        env_steps: Env steps of this incarnation so far, goes into the header; set it before pushing.
        model_version: Version of the model in use, for layouts without such a column. Where there is one, the
            header is computed from it when a message is sent: 2 µs a message, and exact for n-step items.
        wait_s: Time spent waiting for a full ring so far.
        on_wait: Called with True before, and with False after such a wait.
        on_commit: Called after each message.
        rows: Rows sent so far.
    """

    def __init__(
        self, rings: Rings, config: ReplayBufferProxyConfig, actor: int, incarnation: int, stop: StopFlag
    ) -> None:
        self.env_steps = 0
        self.model_version = 0
        self.wait_s = 0.0
        self.on_wait: Callable[[bool], None] = lambda waiting: None
        self.on_commit: Callable[[], None] = lambda: None
        self.rows = 0
        self._rings, self._actor, self._incarnation, self._stop = rings, actor, incarnation, stop
        self._n_buffer, self._n_slots, self._max_age_s = rings.n_buffer, rings.n_slots, config.max_message_age_s
        self._health = RowHealth(rings.layout, config.bad_data, actor)
        self._record = rings.layout.record_dtype()
        self._itemsize = self._record.itemsize
        self._own_dtype: np.dtype[Any] | None = None  # an object known to equal the layout's
        self._heads, self._tails = rings.heads(), rings.tails()
        slots = range(rings.n_slots)
        self._starts = [rings.rows_at(actor, s) for s in slots]
        self._slot_bytes = rings.n_buffer * self._itemsize
        self._headers = [rings.header(actor, s) for s in slots]
        rows = [rings.rows(actor, s) for s in slots]
        self._rows = rows
        self._columns = [{name: r[name] for name in rings.layout.names} for r in rows]
        self._first_column = rings.layout.names[0]
        self._pack = row_packer(self._record, rings.arena.buf)
        self._memory = memoryview(rings.arena.buf)
        self._fence = Fence()
        self._checked = False
        self._episodes: list[Episode] = []
        self._head = int(self._heads[actor])  # a restarted actor goes on where its predecessor committed last
        self._row = 0  # rows of the message in work; 0: its slot is not claimed
        self._slot = 0
        self._at = self._end = 0  # where its next row goes, and where the last one ends, in bytes
        self._deadline = math.inf

    @classmethod
    def build(
        cls, config: ReplayBufferProxyConfig, sender: RingSource, actor: int, incarnation: int, stop: StopFlag
    ) -> ReplayBufferProxy:
        """Open the ring of one actor. The predecessor, if there was one, must be gone for good.

        Args:
            config: As the channel was bound, see ``ItemSender.proxy_config``.
            sender: A bound sender.
            actor: Index of the ring.
            incarnation: How often this actor was started before.
            stop: Ends waiting for a full ring.

        Raises:
            Unbound: The channel is not bound.
            LayoutMismatch: The ring has no such actor, or slots of another size.
        """
        rings = sender.rings
        if not 0 <= actor < rings.n_actors:
            raise LayoutMismatch(f"item channel: expected an actor in [0, {rings.n_actors}), got {actor}")
        if config.n_buffer != rings.n_buffer:
            raise LayoutMismatch(f"item channel: expected n_buffer {rings.n_buffer} as bound, got {config.n_buffer}")
        return cls(rings, config, actor, incarnation, stop)

    def push(self, items: Items) -> None:
        """Take rows ``[m]``, in columns or as records; they are copied, and may straddle messages.

        Raises:
            ChannelClosed: The run was stopped while the ring was full.
            LayoutMismatch: Columns, shapes or dtypes are not those of the layout (looked at in the first push).
            BadData: A value is not finite (looked at when the message is sent), and the config says ``raise``.
        """
        if not isinstance(items, np.ndarray):
            self._push_mapping(items)
            return
        if items.dtype is not self._own_dtype and not self._is_own(items):
            self._push_columns(items)
            return
        small = items.nbytes <= SMALL_BYTES or not items.flags.c_contiguous
        data = items.tobytes() if small else items.view(np.uint8).data
        if not data:
            return
        if not self._row:
            self._claim()
        at = self._at + len(data)
        if at > self._end:
            data = self._fill_up(data)
            at = self._at + len(data)
        self._memory[self._at : at] = data
        self._at = at
        self._row += len(data) // self._itemsize
        if at == self._end or time.monotonic() >= self._deadline:
            self._send()

    def _is_own(self, items: Array) -> bool:
        """Whether rows can be copied as they are."""
        if not self._checked:
            self._check(items)
        own = bool(items.dtype == self._record and self._itemsize)  # costs more than the copy
        if own:
            self._own_dtype = items.dtype
        return own

    def _fill_up(self, data: bytes | memoryview) -> bytes | memoryview:
        """Send full messages until the rest of the records fits into the one in work; gives the rest."""
        while self._at + len(data) > self._end:
            room = self._end - self._at
            self._memory[self._at : self._end] = data[:room]
            self._row = self._n_buffer
            self._send()
            data = data[room:]
            if not self._row:
                self._claim()
        return data

    def _push_mapping(self, items: Mapping[str, Array]) -> None:
        if not self._checked:
            self._check(items)
        if len(items[self._first_column]) != 1:
            self._push_columns(items)
            return
        if not self._row:
            self._claim()
        if not self._pack(items, self._at):
            self._push_columns(items)
            return
        self._at += self._itemsize
        self._row += 1
        if self._row == self._n_buffer or time.monotonic() >= self._deadline:
            self._send()

    def tick(self) -> None:
        """Send a message that got too old. Call it in steps that bring no items to push."""
        if self._row and time.monotonic() >= self._deadline:
            self._send()

    def report(self, episodes: Sequence[Episode]) -> None:
        """Queue finished episodes for the headers of the next messages, `n_buffer` in each.

        Called before the rows of the same step are pushed, they travel with these.
        """
        self._episodes += episodes

    def flush(self) -> None:
        """Send the rows that are left, and episodes as far as there is room. Never blocks."""
        if self._row:
            self._send()
        while self._episodes and not self._full():
            self._open()
            self._commit()

    def _push_columns(self, items: Items) -> None:
        m, done = n_rows(items), 0
        while done < m:
            if not self._row:
                self._claim()
            a = self._row
            n = min(m - done, self._n_buffer - a)
            for name, column in self._columns[self._slot].items():
                values = items[name]
                column[a : a + n] = values if n == m else values[done : done + n]
            done += n
            self._row += n
            self._at += n * self._itemsize
            if self._row == self._n_buffer:
                self._send()
        self.tick()

    def _check(self, items: Items) -> None:
        """Compare with the layout; afterwards only what costs nothing is checked."""
        where = f"actor {self._actor}"
        layout = self._rings.layout
        if set(column_names(items)) != set(layout.names):
            raise LayoutMismatch(f"{where}: expected items with the columns {layout.names}, got {column_names(items)}")
        m = n_rows(items)
        for f in layout.fields:
            values = items[f.name]
            if values.shape != (m, *f.shape) or values.dtype != f.dtype:
                got = f"{list(values.shape)} {values.dtype}"
                raise LayoutMismatch(f"{where}: expected items with {f.name} {[m, *f.shape]} {f.dtype}, got {got}")
        self._checked = True

    def _full(self) -> bool:
        return self._head - self._tails[self._actor] >= self._n_slots

    def _claim(self) -> None:
        """Wait until the next slot is free, and begin a message in it."""
        if self._full():
            start, nap = time.monotonic(), NAP_S
            self.on_wait(True)
            try:
                while self._full():
                    if self._stop.is_set():
                        raise ChannelClosed(f"actor {self._actor}: the run was stopped while its ring was full")
                    time.sleep(nap)
                    nap = min(2 * nap, LONGEST_NAP_S)
            finally:
                self.wait_s += time.monotonic() - start
                self.on_wait(False)
        self._open()

    def _open(self) -> None:
        self._slot = self._head % self._n_slots
        self._at = self._starts[self._slot]
        self._end = self._at + self._slot_bytes
        self._deadline = time.monotonic() + self._max_age_s

    def _send(self) -> None:
        """Make the message visible, without its bad rows; a full one that had some is filled up again instead."""
        full, m = self._row == self._n_buffer, self._row
        self._row = 0  # if bad rows are an error, none of them is sent by a flush on the way out
        good = self._health.good_rows(self._rows[self._slot][:m], self.env_steps)
        if good is None:
            self._row = m
            self._commit()
            return
        kept = self._rows[self._slot][:m][good]
        self._rows[self._slot][: len(kept)] = kept
        self._row, self._at = len(kept), self._starts[self._slot] + len(kept) * self._itemsize
        if self._row and not full:
            self._commit()

    def _commit(self) -> None:
        """Make the message visible. Cannot block: room for it was there before its first row."""
        header = self._headers[self._slot]
        episodes, self._episodes = self._episodes[: self._n_buffer], self._episodes[self._n_buffer :]
        lowest, highest = self._versions()
        counts = self._incarnation, self.env_steps, lowest, highest, len(episodes), self._health.dropped
        HEADER.pack_into(header, 0, self._row, *counts, self.wait_s)
        for i, e in enumerate(episodes):
            EPISODE.pack_into(header, HEADER.size + i * EPISODE.size, e.ret, e.length, e.env)
        self._fence()  # the message before its counter
        self._head += 1
        self._heads[self._actor] = self._head
        self.rows += self._row
        self._row = 0
        self.on_commit()

    def _versions(self) -> tuple[int, int]:
        column = self._columns[self._slot].get("model_version")
        if column is None or not self._row:
            return self.model_version, self.model_version
        used = column[: self._row]
        version = used.item(0)
        if b"\0" not in (used == version).tobytes():  # mostly: a third of the time of two reductions
            return version, version
        return int(used.min()), int(used.max())
