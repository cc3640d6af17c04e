"""One actor as the learner's process sees it: a process of its own, or a thread. Starting, watching, killing it."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from outrider import placement, processes
from outrider.actor import Actor, ActorBoard
from outrider.channel import ItemSender, ReplayBufferProxyConfig
from outrider.core import AgentConfig, EnvConfig, EnvSpec, StepProcessorConfig
from outrider.errors import ActorFailed, BadData, ChannelError, ConfigError
from outrider.flags import InitGuard, StopFlag
from outrider.model_sync import ModelReceiver
from outrider.seeding import Role, derive, env_seeds

log = logging.getLogger(__name__)

TRACEBACK_LIMIT_BYTES = 32_000  # half a pipe's buffer: sending it never blocks a dying actor

_CURABLE, _INCURABLE = b" ", b"!"  # the first byte of what a dying actor says

INCURABLE = (BadData, ChannelError, ConfigError)
"""Errors that a new actor would run into as well, or that the user asked to be told of."""


@dataclass(frozen=True)
class ActorOrder:
    """All that an actor needs besides its channel ends; travels by cloudpickle.

    ``log_file`` takes stack dumps, of hangs and of crashes in native code; None: stderr does. ``core`` is the one its
    process is kept on; None: any.
    """

    id: int
    agent_config: AgentConfig
    env_config: EnvConfig
    env_spec: EnvSpec
    step_proc_config: StepProcessorConfig
    proxy_config: ReplayBufferProxyConfig
    n_envs: int
    seed: int
    incarnation: int = 0
    log_file: Path | None = None
    core: int | None = None

    def build(self, stop: StopFlag, board: ActorBoard) -> Actor:
        """Build the actor that this describes."""
        return Actor.build(
            self.id,
            self.agent_config,
            self.env_config,
            self.step_proc_config,
            self.proxy_config,
            stop,
            env_seeds(self.seed, self.id, self.incarnation, self.n_envs),
            board,
            n_envs=self.n_envs,
            policy_seed=derive(self.seed, Role.ACTOR_POLICY, self.id, 0, self.incarnation),
            incarnation=self.incarnation,
            env_spec=self.env_spec,
        )


class Member(Protocol):
    """One incarnation of an actor."""

    id: int

    @property
    def sentinel(self) -> int | Connection:
        """Ready, for :func:`multiprocessing.connection.wait`, once it is gone."""
        ...

    def failure(self) -> ActorFailed | None:
        """Why it ended; None if it was asked to. Called once it is gone; what it has started goes with it."""
        ...

    @property
    def curable(self) -> bool:
        """Whether another one may do better. Asked after `failure`."""
        ...

    def alive(self) -> bool:
        """Whether it is not gone yet."""
        ...

    def join(self, timeout_s: float) -> None:
        """Wait until it is gone, that long at most."""
        ...

    def dump(self) -> None:
        """Have it write its stack."""
        ...

    def kill(self, why: ActorFailed | None = None) -> None:
        """Kill it and what it started; `why` is then its failure."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class ActorProcess:
    """An actor in a process of its own."""

    def __init__(self, order: ActorOrder, ends: tuple[Any, ...]) -> None:
        self.id = order.id
        self.curable = True
        self._reports, child_end = connection.Pipe(duplex=False)
        payload = processes.dumps(order)
        try:
            self.process: BaseProcess = processes.start_process(
                _actor_main, (payload, *ends, child_end), name=f"outrider: actor {order.id}"
            )
        except BaseException:
            self._reports.close()
            raise
        finally:
            child_end.close()
        assert self.process.pid is not None
        self.pid = self.process.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:  # it is gone already, and so are those whose end this descriptor tells
            self._pidfd = os.dup(self.process.sentinel)
        self._stop: StopFlag = ends[2]
        self._killed = False
        self._why: ActorFailed | None = None

    @property
    def sentinel(self) -> int:
        """See :class:`Member`."""
        return self._pidfd

    def failure(self) -> ActorFailed | None:
        """See :class:`Member`."""
        processes.kill_group(self.pid)
        self.process.join(1.0)
        report = b""
        try:
            if self._reports.poll():
                report = self._reports.recv_bytes()
        except (EOFError, OSError):  # it died without a word, or in the middle of one
            pass
        if self._killed or (not report and self.process.exitcode == 0 and self._stop.is_set()):
            return self._why
        self.curable = not report.startswith(_INCURABLE)
        return ActorFailed(self.id, report[1:].decode(errors="replace"), self.process.exitcode)

    def alive(self) -> bool:
        """See :class:`Member`."""
        return not connection.wait([self._pidfd], 0)

    def join(self, timeout_s: float) -> None:
        """See :class:`Member`."""
        connection.wait([self._pidfd], timeout_s)

    def dump(self) -> None:
        """See :class:`Member`."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGUSR1)

    def kill(self, why: ActorFailed | None = None) -> None:
        """See :class:`Member`."""
        self._killed, self._why = True, why
        processes.kill_group(self.pid)
        with contextlib.suppress(OSError):  # it is gone; or has not become the leader of a group yet
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.join(1.0)

    def close(self) -> None:
        """See :class:`Member`."""
        processes.kill_group(self.pid)
        self.process.join(1.0)
        self._reports.close()
        os.close(self._pidfd)
        self.process.close()


class ActorThread:
    """An actor in a thread of the learner's process. Nothing can be done about one that hangs."""

    curable = False

    def __init__(self, order: ActorOrder, ends: tuple[Any, ...]) -> None:
        self.id = order.id
        self._failure: ActorFailed | None = None
        self._ended, self._end = connection.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._main, args=(order, *ends), name=f"outrider-actor-{order.id}")
        self._thread.daemon = True  # a stuck environment must not keep the interpreter from ending
        self._thread.start()

    def _main(
        self,
        order: ActorOrder,
        item_sender: ItemSender,
        model_receiver: ModelReceiver,
        stop: StopFlag,
        guard: InitGuard,
        board: ActorBoard,
    ) -> None:
        try:
            order.build(stop, board).run(item_sender, model_receiver, guard)
            if not stop.is_set():
                self._failure = ActorFailed(order.id)
        except BaseException:  # noqa: BLE001  the entry of an actor: whatever ends it reaches the learner
            self._failure = ActorFailed(order.id, traceback.format_exc())
        finally:
            self._end.close()

    @property
    def sentinel(self) -> Connection:
        """See :class:`Member`."""
        return self._ended

    def failure(self) -> ActorFailed | None:
        """See :class:`Member`."""
        return self._failure

    def alive(self) -> bool:
        """See :class:`Member`."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """See :class:`Member`."""
        self._thread.join(timeout_s)

    def dump(self) -> None:
        """See :class:`Member`."""
        faulthandler.dump_traceback(all_threads=True)

    def kill(self, why: ActorFailed | None = None) -> None:
        """See :class:`Member`."""
        log.error("actor %d is a thread and cannot be killed", self.id)

    def close(self) -> None:
        """See :class:`Member`."""
        if not self.alive():
            self._ended.close()


def _actor_main(
    payload: bytes,
    item_sender: ItemSender,
    model_receiver: ModelReceiver,
    stop: StopFlag,
    guard: InitGuard,
    board: ActorBoard,
    reports: Connection,
) -> None:
    """Entry of an actor's process."""
    try:
        _prepare_process()
        order: ActorOrder = processes.loads(payload)
        _dump_stacks_to(order.log_file)
        placement.pin(() if order.core is None else (order.core,))
        order.build(stop, board).run(item_sender, model_receiver, guard)
    except BaseException as error:  # noqa: BLE001  the entry of an actor: whatever ends it reaches the learner
        kind = _INCURABLE if isinstance(error, INCURABLE) else _CURABLE
        reports.send_bytes(kind + _tail(traceback.format_exc()))
        sys.stderr.flush()
        os._exit(1)  # threads that a failed environment left behind must not hold the process


def _tail(text: str) -> bytes:
    """The text, or its end where it is long. Anything can be in it: messages are made by environments."""
    data = text.encode(errors="backslashreplace")
    return data if len(data) <= TRACEBACK_LIMIT_BYTES else b"[...]\n" + data[-TRACEBACK_LIMIT_BYTES:]


def _prepare_process() -> None:
    """One thread, no GPU; a group of its own, which ends as a whole when the learner is gone."""
    processes.lead_group()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _dump_stacks_to(None)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _dump_stacks_to(path: Path | None) -> None:
    """Where the stacks of all threads go at a crash in native code, and at SIGUSR1."""
    file = sys.stderr.fileno()
    if path is not None:
        with contextlib.suppress(OSError):  # stderr will do
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
