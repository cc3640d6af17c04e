"""One actor as the learner's process sees it: a process of its own, or a thread. Starting, watching, killing it."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from outrider import placement, processes, workers
from outrider.actor import Actor, ActorBoard
from outrider.channel import ItemSender, ReplayBufferProxyConfig
from outrider.core import AgentConfig, EnvConfig, EnvSpec, StepProcessorConfig
from outrider.errors import ActorFailed, BadData, ChannelError, ConfigError
from outrider.flags import InitGuard, StopFlag
from outrider.model_sync import ModelReceiver
from outrider.seeding import Role, derive, env_seeds
from outrider.workers import Worker

log = logging.getLogger(__name__)

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


class ActorProcess(Worker):
    """An actor in a process of its own."""

    def __init__(self, order: ActorOrder, ends: tuple[Any, ...]) -> None:
        self.id = order.id
        self.curable = True
        self._reports, child_end = connection.Pipe(duplex=False)
        payload = processes.dumps(order)
        try:
            super().__init__(_actor_main, (payload, *ends, child_end), f"outrider: actor {order.id}")
        except BaseException:
            self._reports.close()
            raise
        finally:
            child_end.close()
        self._stop: StopFlag = ends[2]
        self._killed = False
        self._why: ActorFailed | None = None

    def failure(self) -> ActorFailed | None:
        """See :class:`Member`."""
        exitcode = self.reap()
        report = b""
        try:
            if self._reports.poll():
                report = self._reports.recv_bytes()
        except (EOFError, OSError):  # it died without a word, or in the middle of one
            pass
        if self._killed or (not report and exitcode == 0 and self._stop.is_set()):
            return self._why
        self.curable = not report.startswith(_INCURABLE)
        return ActorFailed(self.id, report[1:].decode(errors="replace"), exitcode)

    def kill(self, why: ActorFailed | None = None) -> None:
        """See :class:`Member`."""
        self._killed, self._why = True, why
        self.kill_group()

    def close(self) -> None:
        """See :class:`Member`."""
        self._reports.close()
        super().close()


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
        workers.prepare()
        order: ActorOrder = processes.loads(payload)
        workers.dump_stacks_to(order.log_file)
        placement.pin(() if order.core is None else (order.core,))
        order.build(stop, board).run(item_sender, model_receiver, guard)
    except BaseException as error:  # noqa: BLE001  the entry of an actor: whatever ends it reaches the learner
        kind = _INCURABLE if isinstance(error, INCURABLE) else _CURABLE
        reports.send_bytes(kind + workers.tail(traceback.format_exc()))
        sys.stderr.flush()
        os._exit(1)  # threads that a failed environment left behind must not hold the process
