"""One process that evaluates policies, until it is told to end or fails: its entry, and how the learner sees it."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import struct
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from outrider import processes, workers
from outrider.core import AgentConfig, EnvSpec, Evaluator
from outrider.data import Record
from outrider.errors import EvaluatorFailed
from outrider.evaluation import attended
from outrider.flags import InitGuard
from outrider.model_sync import ModelReceiver
from outrider.shared_memory import Arena
from outrider.workers import Worker

NAME = "outrider: evaluator"

_SCORE, _TRACEBACK = b"+", b"-"  # the first byte of what it sends
_LENGTH = struct.Struct("<q")
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class EvaluatorOrder:
    """All that an evaluator's process needs besides its channel ends; travels by cloudpickle.

    ``log_file`` takes stack dumps, of hangs and of crashes in native code; None: stderr does.
    """

    agent_config: AgentConfig
    env_spec: EnvSpec
    evaluator: Evaluator
    seed: int
    log_file: Path | None = None


class Pulse:
    """A sign of life from an evaluation, and a request to end it, in shared memory."""

    _BEATS, _STOP = range(2)

    def __init__(self, arena: Arena | None = None) -> None:
        self._arena = arena or Arena(16)
        self._words = memoryview(self._arena.buf).cast("B").cast("q")

    def __reduce__(self) -> tuple[Any, ...]:
        return Pulse, (self._arena,)

    @property
    def beats(self) -> int:
        """How often :meth:`beat` was called."""
        return self._words[self._BEATS]

    def beat(self) -> bool:
        """Called by the evaluator once per step: still alive. Returns whether to end the evaluation."""
        self._words[self._BEATS] += 1
        return self._words[self._STOP] != 0

    def stop(self) -> None:
        """Ask the evaluation that runs to end early."""
        self._words[self._STOP] = 1


class EvaluatorProcess(Worker):
    """Evaluates the latest model of a channel whenever it is told to.

    **Process**: the learner's; the evaluation runs in a process of its own.
    **Owns** that process, and pipes to and from it.
    **Blocks**: never, but in `close`, for `patience_s` and a second.
    **Closes**: in `close`, with everything that the process has started.

    Args:
        payload: A pickled :class:`EvaluatorOrder`.
        model: Where the model to evaluate is.
        guard: Held while its environments are built.
    """

    def __init__(self, payload: bytes, model: ModelReceiver, guard: InitGuard | None) -> None:
        self.pulse = Pulse()
        self._received = bytearray()
        child_orders, self._orders = connection.Pipe(duplex=False)
        self._results, child_results = connection.Pipe(duplex=False)
        with contextlib.ExitStack() as opened:
            opened.callback(self._orders.close)
            opened.callback(self._results.close)
            with child_orders, child_results:
                ends = (payload, model, self.pulse, guard, child_orders, child_results)
                super().__init__(_evaluator_main, ends, NAME)
            opened.pop_all()
        os.set_blocking(self._results.fileno(), False)
        self._ready = select.poll()
        self._ready.register(self._results.fileno(), select.POLLIN)
        self._ready.register(self.sentinel, select.POLLIN)

    def begin(self) -> None:
        """Evaluate the model that is in the channel now; the result of an earlier one has been polled."""
        with contextlib.suppress(BrokenPipeError):  # it is gone, as `poll` is about to say
            self._orders.send_bytes(b"evaluate")

    def poll(self) -> tuple[float, Record] | EvaluatorFailed | None:
        """The score and record of an evaluation, why the process ended, or None; costs about a microsecond."""
        if not self._ready.poll(0):
            return None
        gone = not self.alive()  # looked at before reading: what it sent before its end is then all there
        whole = self._read()
        if whole is not None and whole.startswith(_SCORE):
            score, record = processes.loads(whole[1:])
            return score, record
        if whole is None and not gone:
            return None
        text = "" if whole is None else whole[1:].decode(errors="replace")
        self.join(1.0)
        self.kill_group()  # threads that a failed environment left behind hold it
        return EvaluatorFailed(text, self.reap())

    def _read(self) -> bytes | None:
        """Take what has arrived; a message once it is whole. It may have been stopped in the middle of one."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._results.fileno(), _CHUNK_BYTES):
                self._received += data
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        whole = bytes(self._received[_LENGTH.size : _LENGTH.size + length])
        if len(whole) < length:
            return None
        del self._received[: _LENGTH.size + length]
        return whole

    def end(self, patience_s: float) -> None:
        """Have it close its environments and end; kill it if it does not within that time."""
        self.pulse.stop()
        self._orders.close()
        self.join(patience_s)
        self.close()

    def close(self) -> None:
        """Kill it, and let go of it."""
        self.kill_group()
        self._orders.close()
        self._results.close()
        super().close()


def _evaluator_main(
    payload: bytes,
    model: ModelReceiver,
    pulse: Pulse,
    guard: InitGuard | None,
    orders: Connection,
    results: Connection,
) -> None:
    """Entry of an evaluator's process."""
    try:
        workers.prepare()
        order: EvaluatorOrder = processes.loads(payload)
        workers.dump_stacks_to(order.log_file)
        _serve(order, model, pulse, guard, orders, results)
    except BaseException:  # noqa: BLE001  the entry of an evaluator: whatever ends it reaches the learner
        _send(results, _TRACEBACK + workers.tail(traceback.format_exc()))
        sys.stderr.flush()
        os._exit(1)  # threads that a failed environment left behind must not hold the process


def _serve(
    order: EvaluatorOrder,
    model: ModelReceiver,
    pulse: Pulse,
    guard: InitGuard | None,
    orders: Connection,
    results: Connection,
) -> None:
    policy = order.agent_config.build_actor(order.env_spec, seed=order.seed)
    model.require_equal(policy.model_info()[1], "the evaluator")
    snapshot, evaluator = model.open(), order.evaluator
    with attended(evaluator, pulse.beat, guard):
        while True:
            try:
                orders.recv_bytes()
            except EOFError:  # the learner needs no more
                break
            snapshot.fetch()
            policy.sync_model(snapshot.info)
            score, record = evaluator.evaluate(policy)
            _send(results, _SCORE + processes.dumps((float(score), _named(record))))  # what is neither fails here
    evaluator.close()


def _named(record: Mapping[Any, Any]) -> Record:
    """A copy of what an evaluator calls its record."""
    values = dict(record)
    for name in values:
        if not isinstance(name, str):
            raise TypeError(f"evaluate: expected a record with names that are strings, got {name!r}")
    return values


def _send(results: Connection, message: bytes) -> None:
    rest = memoryview(_LENGTH.pack(len(message)) + message)
    while rest:
        rest = rest[os.write(results.fileno(), rest) :]


PICKLING_ERRORS = (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError, OSError)
"""What pickling raises where something cannot travel to another process."""
