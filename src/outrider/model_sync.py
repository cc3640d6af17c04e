"""Stations (5) and (6): parameters travel from the learner to the actors, latest only.

The learner publishes into a slab of two slots and two words, the version that is out and the one that was begun; an
actor copies the newest slot whenever the first has changed. Nobody waits for anybody: a reader that is overtaken while
it copies sees it by the second, and copies again. A version that every reader has a copy of is written over where it
lies: where the actors keep up one slot is enough, and less memory goes through the caches (``docs/decisions``, 0010).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from outrider.binding import Binding
from outrider.data import ENV_STEPS, Array, Field, ModelInfo
from outrider.errors import LayoutMismatch
from outrider.flags import StopFlag
from outrider.shared_memory import CACHE_LINE, Arena, Backend, Fence, LocalArena, aligned, allocate

N_SLOTS = 2
_OUT, _BEGUN = 0, 1
_HAVE = CACHE_LINE // 8
_NOBODY, _NOTHING = 0, 1
_NAP_S = 1e-3
_LONGEST_NAP_S = 20e-3


def model_channel() -> tuple[ModelSender, ModelReceiver]:
    """Make the two ends of a model channel, unbound: ``AsyncTrainer.build`` binds them once the model is known."""
    binding: Binding[Slab] = Binding("model channel", "AsyncTrainer.build", {"sender", "receiver"})
    return ModelSender(binding), ModelReceiver(binding)


@dataclass(frozen=True)
class Slab:
    """The memory of a model channel; can be handed to a process while it is started.

    Words of 64 bits, then :data:`N_SLOTS` slots: a cache line with `n_opts` and `env_steps`, then every array, each at
    the start of a cache line. Version v in slot s is the number ``2 * v + s``; 0 is none.
    """

    fields: tuple[Field, ...]
    n_readers: int
    arena: Arena | LocalArena

    @classmethod
    def allocate(cls, fields: tuple[Field, ...], n_readers: int, backend: Backend) -> Slab:
        """Reserve the memory.

        Raises:
            ResourceError: Not enough is free; says needed and free.
        """
        nbytes = _words_bytes(n_readers) + N_SLOTS * slot_bytes(fields)
        what = f"model channel ({N_SLOTS} slots for {len(fields)} arrays)"
        return cls(fields, n_readers, allocate(nbytes, backend, what))

    def words(self) -> memoryview:
        """A cache line of the sender's: the version that is out, and the one it began last, which is that or the next.

        Then a word of each reader's: the version it has a copy of. The last is shared by readers without a number, and
        says that there are some.
        """
        return memoryview(self.arena.buf)[: _words_bytes(self.n_readers)].cast("Q")

    def slot(self, slot: int) -> Array:
        """The bytes of a slot."""
        nbytes = slot_bytes(self.fields)
        at = _words_bytes(self.n_readers) + slot * nbytes
        return np.ndarray((nbytes,), np.uint8, cast("Any", self.arena.buf), at)

    def close(self) -> None:
        """Free the memory, or leave it to its last view. May be called twice."""
        self.arena.close()


def _words_bytes(n_readers: int) -> int:
    return CACHE_LINE + aligned(8 * (n_readers + 1))


def slot_bytes(fields: tuple[Field, ...]) -> int:
    """Size of a slot, of the same form in the slab and in a private snapshot."""
    return CACHE_LINE + sum(aligned(_nbytes(f)) for f in fields)


def slot_counters(slot: Array) -> Array:
    """`n_opts` and `env_steps` of a slot, a view ``[2]`` int64."""
    return slot[:16].view(np.int64)


def slot_arrays(fields: tuple[Field, ...], slot: Array) -> dict[str, Array]:
    """The arrays of a slot, views by name."""
    arrays, at = {}, CACHE_LINE
    for f in fields:
        arrays[f.name] = slot[at : at + _nbytes(f)].view(f.dtype).reshape(f.shape)
        at += aligned(_nbytes(f))
    return arrays


def _nbytes(f: Field) -> int:
    return int(np.prod(f.shape, dtype=np.int64)) * f.dtype.itemsize


def model_fields(info: ModelInfo) -> tuple[Field, ...]:
    """Names, shapes and dtypes of a model, in its order. Plain numbers count as arrays of shape ().

    Raises:
        LayoutMismatch: The reserved name is used, or an array holds no numbers.
    """
    if ENV_STEPS in info:
        raise LayoutMismatch(f"model: the name {ENV_STEPS!r} is reserved for what the sender adds")
    fields = []
    for name, value in info.items():
        array = np.asarray(value)
        if array.dtype.kind not in "biufc":
            raise LayoutMismatch(f"model: expected {name!r} to be an array of numbers, got dtype {array.dtype}")
        fields.append(Field(name, array.shape, array.dtype))
    return tuple(fields)


def require_equal_fields(fields: tuple[Field, ...], info: ModelInfo, who: str) -> None:
    """Compare a model with the layout of the channel; their order does not matter.

    Raises:
        LayoutMismatch: Names the first array that differs, and both sides.
    """
    ours, theirs = {f.name: f for f in fields}, {f.name: f for f in model_fields(info)}
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            raise LayoutMismatch(
                f"model array {name!r}: the channel was bound with {ours.get(name, 'no such array')}, "
                f"{who} has {theirs.get(name, 'no such array')}"
            )


class ModelSender:
    """The learner's end.

    Process: learner; one thread publishes.
    Owns: the slab, together with the receiver.
    Blocks: never.
    Closes: its hold on the slab.
    """

    def __init__(self, binding: Binding[Slab]) -> None:
        self._binding = binding
        self._writer: _Writer | None = None
        self._published: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("the sender of a model channel belongs to the learner's process")

    @property
    def bound(self) -> bool:
        """Whether the model's layout is known."""
        return self._binding.bound

    @property
    def published(self) -> int | None:
        """`n_opts` of the last publication, None before the first."""
        return self._published

    def bind(self, info: ModelInfo, *, backend: Backend = "processes", n_readers: int = 0) -> None:
        """Allocate the slab for models of this form; binds the receiver, too. Publishes nothing.

        Args:
            info: A model as it will be published: names, shapes and dtypes count.
            backend: Whether the actors are processes or threads of this one.
            n_readers: How many of them will open it under a number of their own. If all do, publishing is faster.

        Raises:
            ChannelError: Bound already.
            LayoutMismatch: The reserved name ``env_steps``, or an array that holds no numbers.
            ResourceError: Not enough memory; says needed and free.
        """
        self._binding.require_unbound("sender")
        self._binding.bind(Slab.allocate(model_fields(info), n_readers, backend))

    def publish(self, n_opts: int, info: ModelInfo, env_steps: int) -> None:
        """Make a model the latest. The arrays are copied.

        Args:
            n_opts: Opt steps behind it, its version for statistics; may be the same again.
            info: The model, of the form it was bound with.
            env_steps: Env steps of the run so far, for exploration schedules.

        Raises:
            LayoutMismatch: Names, shapes or dtypes changed; nothing was published.
            Unbound: Not bound yet.
        """
        if self._writer is None:
            self._writer = _Writer(self._binding.get("sender"))
        self._writer.write(n_opts, info, env_steps)
        self._published = n_opts

    def close(self) -> None:
        """Let go. May be called twice."""
        self._writer = None
        self._binding.close("sender")


class _Writer:
    def __init__(self, slab: Slab) -> None:
        self._fields, self._words, self._fence = slab.fields, slab.words(), Fence()
        self._have = self._words[_HAVE:]
        slots = [slab.slot(s) for s in range(N_SLOTS)]
        self._counters = [slot_counters(slot) for slot in slots]
        self._arrays = [list(slot_arrays(slab.fields, slot).values()) for slot in slots]

    def write(self, n_opts: int, info: ModelInfo, env_steps: int) -> None:
        if len(info) != len(self._fields):
            require_equal_fields(self._fields, info, "the published model")
        values = [np.asarray(info.get(f.name)) for f in self._fields]
        for f, value in zip(self._fields, values, strict=True):
            if value.dtype != f.dtype or value.shape != f.shape:
                require_equal_fields(self._fields, info, "the published model")
        slot = self._free_slot()
        version = (self._words[_OUT] | 1) + 1 + slot
        self._words[_BEGUN] = version
        self._fence()  # a reader of the version that lay here before must not see words of this one before its number
        self._counters[slot][:] = n_opts, env_steps
        for target, value in zip(self._arrays[slot], values, strict=True):
            target[...] = value
        self._fence()  # the model before its version
        self._words[_OUT] = version

    def _free_slot(self) -> int:
        out, begun = self._words[_OUT], self._words[_BEGUN]
        if begun != out:  # the last publication was interrupted, maybe in the middle of what is out
            return begun & 1
        self._fence()  # whoever is not seen now has not looked yet, and will see the latest at least
        # A reader does not touch what it has a copy of: if all have the latest, its slot is free.
        return out & 1 if {_NOBODY, out}.issuperset(self._have) else ~out & 1


class ModelReceiver:
    """The actors' end; can be handed to a process, once bound, while that is started.

    Process: learner, and a copy in every actor.
    Owns: the slab, together with the sender.
    Blocks: never; :meth:`ModelSnapshot.wait_first` does.
    Closes: its hold on the slab.
    """

    def __init__(self, binding: Binding[Slab]) -> None:
        self._binding = binding

    def __reduce__(self) -> tuple[Any, ...]:
        return _bound_receiver, (self._binding.get("receiver"),)

    @property
    def bound(self) -> bool:
        """Whether the model's layout is known."""
        return self._binding.bound

    @property
    def fields(self) -> tuple[Field, ...]:
        """Names, shapes and dtypes of the arrays."""
        return self._binding.get("receiver").fields

    def open(self, reader: int | None = None) -> ModelSnapshot:
        """A private snapshot, for one actor; the threads back end opens one for each.

        Args:
            reader: Its number, which nobody else uses at the same time; whoever takes the place of one that was
                killed takes its number, too. None, or one that the channel was not bound for: any reader.

        Raises:
            Unbound: Not bound yet; names the missing call.
        """
        return ModelSnapshot(self._binding.get("receiver"), reader)

    def require_equal(self, info: ModelInfo, who: str) -> None:
        """Compare the model of an actor's policy with the learner's, at start.

        Args:
            info: What ``policy.model_info()[1]`` gave.
            who: Whose it is, for the error.

        Raises:
            LayoutMismatch: Names the first array that differs, and both sides.
        """
        require_equal_fields(self.fields, info, who)

    def close(self) -> None:
        """Let go. May be called twice."""
        self._binding.close("receiver")


def _bound_receiver(slab: Slab) -> ModelReceiver:
    binding: Binding[Slab] = Binding("model channel", "AsyncTrainer.build", {"receiver"})
    binding.bind(slab)
    return ModelReceiver(binding)


class ModelSnapshot:
    """An actor's private copy of the latest model it fetched.

    Process: actor; one thread uses it.
    Owns: the copy.
    Blocks: in :meth:`wait_first`, with a time-out.
    Closes: nothing.

    Attributes:
        info: The arrays by name, and ``env_steps`` (int64, shape ()): views of the copy that keep their addresses,
            of no meaning before the first fetch, and change only inside :meth:`fetch`.
        model_version: `n_opts` of the copy, -1 before the first fetch.
    """

    info: Mapping[str, Array]
    model_version: int

    def __init__(self, slab: Slab, reader: int | None) -> None:
        self._words = slab.words()
        self._slots = [slab.slot(s) for s in range(N_SLOTS)]
        self._fence = Fence()
        self._version = _NOTHING
        at = _HAVE + slab.n_readers
        if reader is not None and 0 <= reader < slab.n_readers:
            at = _HAVE + reader
        self._mine = self._words[at : at + 1]
        self._mine[0] = _NOTHING
        self._fence()  # said before the first look
        if at == _HAVE + slab.n_readers:  # shared: nobody may say there what it has
            self._mine = memoryview(bytearray(8)).cast("Q")
        nbytes = slot_bytes(slab.fields)
        room = np.zeros(nbytes + CACHE_LINE, np.uint8)
        skip = -room.ctypes.data % CACHE_LINE
        self._copy = room[skip : skip + nbytes]
        self._counters = slot_counters(self._copy)
        self.info = {**slot_arrays(slab.fields, self._copy), ENV_STEPS: self._counters[1:].reshape(())}
        self.model_version = -1

    def fetch(self) -> bool:
        """Copy the latest model if there is a newer one; costs 0.1 µs if there is none.

        Blocks:
            Not for anybody, but copies again when the one after the next is begun during the copy: only where
            copying takes longer than the pauses between publications.

        Returns:
            Whether there was a newer one.
        """
        version = self._words[_OUT]
        if version == self._version or version == 0:
            return False
        while True:
            self._fence()
            self._copy[:] = self._slots[version & 1]
            self._fence()
            begun = self._words[_BEGUN]
            if begun in (version, (version ^ 1) + 2):  # it, or the next one in the other slot
                break
            # What was copied may be torn, and it lies where the policy's parameters are: no way but to go on, except
            # for a reader that the sender did not know of yet, and that has no parameters yet.
            if self._version == _NOTHING and begun == version + 2:
                return False
            version = self._words[_OUT]
        self._version = version
        self._mine[0] = version
        self.model_version = int(self._counters[0])
        return True

    def wait_first(self, stop: StopFlag, timeout_s: float) -> bool:
        """Sleep until the first publication, whatever its version, and fetch it.

        Blocks:
            In naps of at most 20 ms, for at most `timeout_s`, and until `stop` is set.

        Returns:
            Whether there is a model.
        """
        deadline, nap = time.monotonic() + timeout_s, _NAP_S
        while not self.fetch() and self._version == _NOTHING:
            left = deadline - time.monotonic()
            if left <= 0 or stop.is_set():
                return False
            time.sleep(min(nap, left))
            nap = min(2 * nap, _LONGEST_NAP_S)
        return True
