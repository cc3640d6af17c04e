"""Stations (5) and (6): parameters travel from the learner to the actors, latest only.

The learner publishes into a slab of two slots and two words, the version that is out and the one that was begun; an
actor copies the newest slot whenever the first has changed. Nobody waits for anybody: a reader that is overtaken while
it copies sees it by the second, and copies again.
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
_NAP_S = 1e-3
_LONGEST_NAP_S = 20e-3


def model_channel() -> tuple[ModelSender, ModelReceiver]:
    """Make the two ends of a model channel, unbound: ``AsyncTrainer.build`` binds them once the model is known."""
    binding: Binding[Slab] = Binding("model channel", "AsyncTrainer.build", {"sender", "receiver"})
    return ModelSender(binding), ModelReceiver(binding)


@dataclass(frozen=True)
class Slab:
    """The memory of a model channel; can be handed to a process while it is started.

    A cache line with two words, then :data:`N_SLOTS` slots: a cache line with `n_opts` and `env_steps`,
    then every array, each at the start of a cache line. Version v lies in slot ``v % N_SLOTS``; 0 is none.
    """

    fields: tuple[Field, ...]
    arena: Arena | LocalArena

    def version(self) -> memoryview:
        """The version word: number of publications."""
        return memoryview(self.arena.buf)[:8].cast("Q")

    def begun(self) -> memoryview:
        """The version whose slot the sender began to fill last: the one that is out, or the next."""
        return memoryview(self.arena.buf)[8:16].cast("Q")

    def slot(self, slot: int) -> Array:
        """The bytes of a slot."""
        nbytes = slot_bytes(self.fields)
        return np.ndarray((nbytes,), np.uint8, cast("Any", self.arena.buf), CACHE_LINE + slot * nbytes)

    def close(self) -> None:
        """Free the memory, or leave it to its last view. May be called twice."""
        self.arena.close()


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

    def bind(self, info: ModelInfo, *, backend: Backend = "processes") -> None:
        """Allocate the slab for models of this form; binds the receiver, too. Publishes nothing.

        Args:
            info: A model as it will be published: names, shapes and dtypes count.
            backend: Whether the actors are processes or threads of this one.

        Raises:
            ChannelError: Bound already.
            LayoutMismatch: The reserved name ``env_steps``, or an array that holds no numbers.
            ResourceError: Not enough memory; says needed and free.
        """
        self._binding.require_unbound("sender")
        fields = model_fields(info)
        nbytes = CACHE_LINE + N_SLOTS * slot_bytes(fields)
        what = f"model channel ({N_SLOTS} slots for {len(fields)} arrays)"
        self._binding.bind(Slab(fields, allocate(nbytes, backend, what)))

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
        self._fields, self._word, self._begun, self._fence = slab.fields, slab.version(), slab.begun(), Fence()
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
        version = self._word[0] + 1
        slot = version % N_SLOTS
        self._begun[0] = version
        self._fence()  # a reader of the version that lay here before must not see words of this one before its number
        self._counters[slot][:] = n_opts, env_steps
        for target, value in zip(self._arrays[slot], values, strict=True):
            target[...] = value
        self._fence()  # the model before its version
        self._word[0] = version


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

    def open(self) -> ModelSnapshot:
        """A private snapshot, for one actor; the threads back end opens one for each.

        Raises:
            Unbound: Not bound yet; names the missing call.
        """
        return ModelSnapshot(self._binding.get("receiver"))

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
            zeros before the first fetch, and change only inside :meth:`fetch`.
        model_version: `n_opts` of the copy, -1 before the first fetch.
    """

    info: Mapping[str, Array]
    model_version: int

    def __init__(self, slab: Slab) -> None:
        self._word, self._begun = slab.version(), slab.begun()
        self._slots = [slab.slot(s) for s in range(N_SLOTS)]
        self._fence = Fence()
        self._version = 0
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
        version = self._word[0]
        if version == self._version:
            return False
        while True:
            self._fence()
            self._copy[:] = self._slots[version % N_SLOTS]
            self._fence()
            if self._begun[0] - version < N_SLOTS:
                break
            # What was copied may be torn, and it lies where the policy's parameters are: no way but to go on.
            version = self._word[0]
        self._version = version
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
        while not self.fetch() and self._version == 0:
            left = deadline - time.monotonic()
            if left <= 0 or stop.is_set():
                return False
            time.sleep(min(nap, left))
            nap = min(2 * nap, _LONGEST_NAP_S)
        return True
