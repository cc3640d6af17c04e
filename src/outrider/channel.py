"""Station (2): items travel from the actors to the learner through shared-memory rings.

An actor pushes rows into its :class:`ReplayBufferProxy`, which fills slots of `n_buffer` rows; a full slot is a
message, made visible by advancing one counter. The learner's :class:`ItemReceiver` hands the messages, as views
of the slots, to the replay buffer. Nothing is pickled, no lock and no semaphore is shared: a full ring holds its
actor, and neither side can be hurt by the death of the other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.binding import Binding
from outrider.config import require
from outrider.core import EnvSpec
from outrider.data import Array, Episode, Layout, Record
from outrider.flags import StopFlag
from outrider.replay_buffer_proxy import LONGEST_NAP_S, NAP_S, ReplayBufferProxy, ReplayBufferProxyConfig
from outrider.rings import EPISODE, HEADER, Rings
from outrider.shared_memory import Backend, Fence

__all__ = [
    "Crew",
    "ItemReceiver",
    "ItemSender",
    "PushedItemMessage",
    "ReplayBufferProxy",
    "ReplayBufferProxyConfig",
    "item_channel",
]


class Crew(Protocol):
    """Those who send, as the receiving side may know them."""

    def statistics(self) -> Record:
        """How many are alive, and what each is doing."""
        ...

    def signs(self) -> tuple[int, ...]:
        """Numbers that change when one of them makes a step, or gets ready for its first."""
        ...

    def describe(self) -> list[str]:
        """A line on each, for errors."""
        ...


class _ItemBinding(Binding[Rings]):
    crew: Crew | None = None


def item_channel() -> tuple[ItemSender, ItemReceiver]:
    """Make the two ends of an item channel, unbound: ``ActorManager.build`` binds them once the layout is known."""
    binding = _ItemBinding("item channel", "ActorManager.build", {"sender", "receiver"})
    return ItemSender(binding), ItemReceiver(binding)


class ItemSender:
    """The actors' end; can be handed to a process, once bound, while that is started.

    Process: learner, and a copy in every actor.
    Owns: the rings, together with the receiver.
    Blocks: never; the :class:`ReplayBufferProxy` does.
    Closes: its hold on the rings. They are freed when the receiver and every actor have let go, too.
    """

    def __init__(self, binding: _ItemBinding) -> None:
        self._binding = binding

    def __reduce__(self) -> tuple[Any, ...]:
        return _bound_sender, (self.rings,)

    def bind(
        self,
        layout: Layout,
        *,
        n_actors: int,
        n_buffer: int = 64,
        n_slots: int = 8,
        max_message_age_s: float = 1.0,
        backend: Backend = "processes",
        env_spec: EnvSpec | None = None,
    ) -> None:
        """Allocate one ring per actor; binds the receiver, too.

        Args:
            layout: Columns of the items.
            n_actors: Number of rings, >= 1.
            n_buffer: Rows of a message, >= 1.
            n_slots: Messages that a ring holds, >= 1.
            max_message_age_s: A message is sent incomplete when its first row is older than that; > 0.
            backend: Whether the actors are processes or threads of this one.
            env_spec: The actors' environment, for the trainer to compare its own with.

        Raises:
            ChannelError: Bound already.
            ConfigError: A number out of its range.
            ResourceError: Not enough memory; says needed and free.
        """
        self._binding.require_unbound("sender")
        for key, value in (("n_actors", n_actors), ("n_buffer", n_buffer), ("n_slots", n_slots)):
            require(value >= 1, f"actors.{key}", "at least 1", value)
        require(max_message_age_s > 0, "actors.max_message_age_s", "a time above 0", max_message_age_s)
        self._binding.bind(Rings.allocate(layout, n_actors, n_buffer, n_slots, max_message_age_s, backend, env_spec))

    @property
    def bound(self) -> bool:
        """Whether the layout is known."""
        return self._binding.bound

    @property
    def rings(self) -> Rings:
        """The memory of the channel."""
        return self._binding.get("sender")

    @property
    def layout(self) -> Layout:
        """Columns of the items."""
        return self.rings.layout

    @property
    def n_actors(self) -> int:
        """Number of rings."""
        return self.rings.n_actors

    @property
    def proxy_config(self) -> ReplayBufferProxyConfig:
        """The config of the proxies that fit this channel."""
        return ReplayBufferProxyConfig(n_buffer=self.rings.n_buffer, max_message_age_s=self.rings.max_message_age_s)

    def introduce(self, crew: Crew) -> None:
        """Let the receiving side know who sends."""
        self._binding.crew = crew

    def fail(self, error: BaseException) -> None:
        """Let the receiver raise this at its next drain or wait; the first failure is kept. From any thread."""
        self._binding.fail(error)

    def close(self) -> None:
        """Let go. May be called twice."""
        self._binding.close("sender")


def _bound_sender(rings: Rings) -> ItemSender:
    binding = _ItemBinding("item channel", "ActorManager.build", {"sender"})
    binding.bind(rings)
    return ItemSender(binding)


@dataclass(slots=True)
class PushedItemMessage:
    """What one actor sent at once.

    Attributes:
        actor: Index of the actor.
        incarnation: How often it had been restarted.
        items: Records ``[n]``, n <= `n_buffer`, read-only, valid only during the call that gets the message. n is
            0 in a message that brings only episodes, at the end of a run.
        env_steps: Env steps of this incarnation when the message was sent.
        wait_s: Seconds this incarnation had waited for room in its ring by then.
        dropped: Rows this incarnation had left out by then because a value was not finite.
        model_versions: Lowest and highest version of the models that chose the actions.
        episodes: Episodes that ended.
    """

    actor: int
    incarnation: int
    items: Array
    env_steps: int
    wait_s: float
    dropped: int
    model_versions: tuple[int, int]
    episodes: list[Episode]


class ItemReceiver:
    """The learner's end.

    Process: learner; one thread drains and waits. :meth:`fail` and the fills are for any thread.
    Owns: the tails of all rings.
    Blocks: in :meth:`wait`, with a time-out.
    Closes: its hold on the rings.
    """

    def __init__(self, binding: _ItemBinding) -> None:
        self._binding = binding
        self._taker: _Taker | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("the receiver of an item channel belongs to the learner's process")

    @property
    def bound(self) -> bool:
        """Whether the layout is known."""
        return self._binding.bound

    @property
    def layout(self) -> Layout:
        """Columns of the items."""
        return self._binding.get("receiver").layout

    @property
    def n_actors(self) -> int:
        """Number of rings."""
        return self._binding.get("receiver").n_actors

    @property
    def message_rows(self) -> int:
        """Rows of a full message."""
        return self._binding.get("receiver").n_buffer

    @property
    def backend(self) -> Backend:
        """Whether the actors are processes or threads of this one."""
        return self._binding.get("receiver").backend

    @property
    def env_spec(self) -> EnvSpec | None:
        """The actors' environment, if the sender was told."""
        return self._binding.get("receiver").env_spec

    @property
    def crew(self) -> Crew | None:
        """Those who send, if they were introduced."""
        return self._binding.crew

    def fail(self, error: BaseException) -> None:
        """Let every later :meth:`drain` and :meth:`wait` raise this; the first failure is kept."""
        self._binding.fail(error)

    def drain(self, push: Callable[[PushedItemMessage], None], max_rows: int | None = None) -> int:
        """Take whole messages, one actor after the other, until none is left or `max_rows` are reached.

        A message counts as taken when `push` returned; the next drain begins with the next actor.

        Args:
            push: Takes one message.
            max_rows: Stop at the message that reaches this many rows; None: take all.

        Returns:
            Number of rows taken.

        Raises:
            ActorFailed, or whatever :meth:`fail` was given.
        """
        self._raise_failure()
        return self._open().drain(push, math.inf if max_rows is None else max_rows)

    def pending(self) -> bool:
        """Whether there is a message; costs 0.1 µs, whatever the number of actors."""
        return self._open().pending()

    def wait(self, timeout_s: float, stop: StopFlag | None = None) -> bool:
        """Sleep until there is a message.

        Blocks:
            In naps of at most 2 ms, for at most `timeout_s`, and until `stop` is set.

        Returns:
            Whether there is a message.

        Raises:
            ActorFailed, or whatever :meth:`fail` was given; at once.
        """
        taker, deadline, nap = self._open(), time.monotonic() + timeout_s, NAP_S
        while True:
            self._raise_failure()
            if taker.pending():
                return True
            left = deadline - time.monotonic()
            if left <= 0 or (stop is not None and stop.is_set()):
                return False
            time.sleep(min(nap, left))
            nap = min(2 * nap, LONGEST_NAP_S)

    def fills(self) -> list[float]:
        """How full each actor's ring is, in [0, 1]."""
        rings = self._binding.get("receiver")
        return [(h - t) / rings.n_slots for h, t in zip(rings.heads().tolist(), rings.tails().tolist(), strict=True)]

    def fill(self) -> float:
        """How full the rings are on average, in [0, 1]."""
        fills = self.fills()
        return sum(fills) / len(fills)

    def close(self) -> None:
        """Let go. May be called twice."""
        self._taker = None
        self._binding.close("receiver")

    def _raise_failure(self) -> None:
        if self._binding.failure is not None:
            raise self._binding.failure

    def _open(self) -> _Taker:
        if self._taker is None:
            self._taker = _Taker(self._binding.get("receiver"))
        return self._taker


class _Taker:
    """The receiver's view of bound rings."""

    def __init__(self, rings: Rings) -> None:
        self._n_actors, self._n_slots = rings.n_actors, rings.n_slots
        self._heads, self._tails = rings.heads(), rings.tails()
        self._taken: list[int] = self._tails.tolist()
        slots = range(rings.n_slots)
        self._headers = [[rings.header(i, s) for s in slots] for i in range(rings.n_actors)]
        self._rows = [[rings.rows(i, s) for s in slots] for i in range(rings.n_actors)]
        for rows in self._rows:
            for slot in rows:
                slot.flags.writeable = False
        self._fence = Fence()
        self._next = 0

    def pending(self) -> bool:
        return self._heads.tolist() != self._taken

    def drain(self, push: Callable[[PushedItemMessage], None], max_rows: float) -> int:
        heads, taken, rows = self._heads.tolist(), self._taken, 0
        if heads == taken:
            return 0
        self._fence()  # the counters before the messages
        while rows < max_rows and heads != taken:
            i = self._next
            if taken[i] != heads[i]:
                message = self._message(i, taken[i] % self._n_slots)
                push(message)
                rows += len(message.items)
                self._fence()  # the message was read before its slot is free
                taken[i] += 1
                self._tails[i] = taken[i]
            self._next = (i + 1) % self._n_actors
        return rows

    def _message(self, actor: int, slot: int) -> PushedItemMessage:
        header = self._headers[actor][slot]
        n, incarnation, env_steps, lowest, highest, n_episodes, dropped, wait_s = HEADER.unpack_from(header)
        end = HEADER.size + n_episodes * EPISODE.size
        episodes = [Episode(*e) for e in EPISODE.iter_unpack(header[HEADER.size : end])] if n_episodes else []
        return PushedItemMessage(
            actor, incarnation, self._rows[actor][slot][:n], env_steps, wait_s, dropped, (lowest, highest), episodes
        )
