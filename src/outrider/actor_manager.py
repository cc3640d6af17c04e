"""Starts the actors, watches over them, and ends them."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Literal, Self

from setproctitle import setproctitle

from outrider import processes
from outrider.actor import Actor, ActorBoard, ActorStat
from outrider.channel import ItemSender, ReplayBufferProxyConfig
from outrider.config import Config, require
from outrider.core import AgentConfig, EnvConfig, EnvSpec, StepProcessorConfig
from outrider.errors import ActorFailed, Unbound
from outrider.flags import InitGuard, StopFlag
from outrider.health import BadDataPolicy
from outrider.model_sync import ModelReceiver
from outrider.sampling import require_same_discount
from outrider.seeding import Role, derive, env_seeds

log = logging.getLogger(__name__)

TRACEBACK_LIMIT_BYTES = 32_000  # half a pipe's buffer: sending it never blocks a dying actor
WATCH_S = 0.2  # the supervisor wakes at once when an actor ends; this often it looks whether it is still needed


@dataclass(frozen=True, kw_only=True)
class ActorManagerConfig(Config):
    """How many actors there are, and how they send.

    Attributes:
        n_actors: Actors; None: one per agent config given, or usable cores - 1 where none are (at least one).
        n_envs: Environments that each actor steps together.
        n_buffer: Transitions in a message, whatever `n_envs`.
        n_slots: Messages that an actor may be ahead of the learner.
        max_message_age_s: Seconds after which a message is sent though it is not full.
        bad_data: What to do about rows with NaN or infinite values: ``raise``, or ``drop`` and count them.
        backend: ``processes``, or ``threads`` of the learner's process (no restarts, no hidden CUDA, shared GIL).
        stop_timeout_s: Seconds an actor has to end by itself before it is killed.
    """

    n_actors: int | None = None
    n_envs: int = 1
    n_buffer: int = 64
    n_slots: int = 8
    max_message_age_s: float = 1.0
    bad_data: BadDataPolicy = "raise"
    backend: Literal["processes", "threads"] = "processes"
    stop_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if self.n_actors is not None:
            require(self.n_actors >= 1, "n_actors", "an int >= 1, or null", self.n_actors)
        require(self.n_envs >= 1, "n_envs", "an int >= 1", self.n_envs)
        require(self.n_buffer >= 1, "n_buffer", "an int >= 1", self.n_buffer)
        require(self.n_slots >= 2, "n_slots", "an int >= 2", self.n_slots)
        require(self.max_message_age_s > 0, "max_message_age_s", "a number > 0", self.max_message_age_s)
        require(self.stop_timeout_s > 0, "stop_timeout_s", "a number > 0", self.stop_timeout_s)

    def count(self) -> int:
        """Number of actors where no agent configs say it."""
        return self.n_actors or max(1, processes.usable_cores() - 1)


@dataclass(frozen=True)
class ActorOrder:
    """All that an actor needs besides its channel ends; travels by cloudpickle."""

    id: int
    agent_config: AgentConfig
    env_config: EnvConfig
    env_spec: EnvSpec
    step_proc_config: StepProcessorConfig
    proxy_config: ReplayBufferProxyConfig
    n_envs: int
    seed: int
    incarnation: int = 0

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


class ActorManager:
    """Owns the actors.

    **Process**: the learner's; a supervisor thread sleeps until an actor ends.
    **Owns** the actor processes and the board of their statistics.
    **Blocks** in `stop_and_join` only, at most ``stop_timeout_s`` and a second.
    **Closes**: leaving ``with``, or the end of the interpreter, stops and joins.
    """

    def __init__(
        self,
        config: ActorManagerConfig,
        orders: list[ActorOrder],
        item_sender: ItemSender,
        model_receiver: ModelReceiver,
        stop: StopFlag,
    ) -> None:
        self.config = config
        self.stop = stop
        self._orders = orders
        self._item_sender = item_sender
        self._model_receiver = model_receiver
        self._board = ActorBoard(len(orders), shared=config.backend == "processes")
        self._crew: list[_ActorProcess | _ActorThread] = []
        self._supervisor: threading.Thread | None = None
        self._joined = threading.Event()
        self._final: list[ActorStat] | None = None

    @classmethod
    def build(
        cls,
        config: ActorManagerConfig,
        agent_configs: Sequence[AgentConfig],
        env_config: EnvConfig,
        step_proc_config: StepProcessorConfig,
        item_sender: ItemSender,
        model_receiver: ModelReceiver,
        stop: StopFlag,
        *,
        seed: int = 0,
        incarnations: Sequence[int] = (),
    ) -> ActorManager:
        """Describe the actors and bind the item channel: one ring per agent config.

        Args:
            config: How many there are, and how they send.
            agent_configs: One per actor.
            env_config: Their environments.
            step_proc_config: How steps become items.
            item_sender: Is bound here.
            model_receiver: Bound by `AsyncTrainer.build`.
            stop: Stops them.
            seed: Seed of the run.
            incarnations: How many actors of each id there were before, in a run that is resumed: they get new seeds.

        Raises:
            ConfigError: ``n_actors`` differs from the number of agent configs, a space cannot be stored, or the step
                processor's discount is not the agents'.
            EnvFailed: The environment could not be described.
            ResourceError: Not enough memory for the rings.
        """
        n = len(agent_configs)
        require(n >= 1, "agent_configs", "at least one agent config", n)
        require(config.n_actors in (None, n), "actors.n_actors", f"the number of agent configs, {n}", config.n_actors)
        for agent_config in agent_configs:
            require_same_discount(step_proc_config, agent_config)
        env_spec = env_config.spec()
        item_sender.bind(
            step_proc_config.layout(env_spec),
            n_actors=n,
            n_buffer=config.n_buffer,
            n_slots=config.n_slots,
            max_message_age_s=config.max_message_age_s,
            backend=config.backend,
            env_spec=env_spec,
        )
        proxy = replace(item_sender.proxy_config, bad_data=config.bad_data)
        orders = [
            ActorOrder(i, agent, env_config, env_spec, step_proc_config, proxy, config.n_envs, seed, before)
            for (i, agent), before in zip(enumerate(agent_configs), chain(incarnations, repeat(0)), strict=False)
        ]
        return cls(config, orders, item_sender, model_receiver, stop)

    def run(self, guard_init_env: InitGuard) -> None:
        """Start the actors and return at once.

        Raises:
            Unbound: The model channel has no layout yet: `AsyncTrainer.build` is missing.
        """
        if not self._model_receiver.bound:
            raise Unbound("actors.run: the model channel has no layout yet; call AsyncTrainer.build before")
        atexit.register(self.stop_and_join)
        kind = _ActorProcess if self.config.backend == "processes" else _ActorThread
        for order in self._orders:
            ends = (self._item_sender, self._model_receiver, self.stop, guard_init_env, self._board)
            self._crew.append(kind(order, ends))
        self._supervisor = threading.Thread(target=self._watch, name="outrider-supervisor", daemon=True)
        self._supervisor.start()

    def stats(self) -> list[ActorStat]:
        """What every actor has done so far."""
        return self._final if self._final is not None else self._board.stats()

    def stop_and_join(self) -> list[ActorStat]:
        """Stop the actors, wait for them, kill those that do not end, and report. May be called twice."""
        if self._final is not None:
            return self._final
        self.stop.set()
        deadline = time.monotonic() + self.config.stop_timeout_s
        for member in self._crew:
            member.join(max(0.0, deadline - time.monotonic()))
        for member in self._crew:
            if member.alive():
                log.warning("actor %d did not end within %.1f s: killed", member.id, self.config.stop_timeout_s)
                member.kill()
        self._joined.set()
        if self._supervisor is not None:
            self._supervisor.join()
        self._final = self._board.stats()
        for member in self._crew:
            member.close()
        atexit.unregister(self.stop_and_join)
        return self._final

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.stop_and_join()

    def _watch(self) -> None:
        """Sleep until actors end; tell the learner at once if one was not asked to."""
        living: dict[Any, _ActorProcess | _ActorThread] = {member.sentinel: member for member in self._crew}
        while living and not self._joined.is_set():
            for sentinel in connection.wait(list(living), WATCH_S):
                failure = living.pop(sentinel).failure()
                if failure is not None:
                    self._on_failure(failure)

    def _on_failure(self, failure: ActorFailed) -> None:
        """Decide what an actor's end means. Every failure ends the run; a restart would be decided here."""
        if self.stop.is_set():
            log.warning("while stopping: %s", str(failure).splitlines()[0])  # the first failure is the one to read
            log.debug("%s", failure)
        else:
            self._item_sender.fail(failure)
            self.stop.set()


class _ActorProcess:
    """An actor in a process of its own."""

    def __init__(self, order: ActorOrder, ends: tuple[Any, ...]) -> None:
        self.id = order.id
        self._reports, child_end = connection.Pipe(duplex=False)
        payload = processes.dumps(order)
        self.process: BaseProcess = processes.start_process(
            _actor_main, (order.id, payload, *ends, child_end), name=f"outrider: actor {order.id}"
        )
        child_end.close()
        assert self.process.pid is not None
        self.pid = self.process.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:  # it is gone already, and so are those whose end this descriptor tells
            self._pidfd = os.dup(self.process.sentinel)
        self._stop: StopFlag = ends[2]
        self._killed = False

    @property
    def sentinel(self) -> int:
        return self._pidfd

    def failure(self) -> ActorFailed | None:
        """Why it ended; None if it was asked to. Called once it is gone; what it has started goes with it."""
        processes.kill_group(self.pid)
        self.process.join(1.0)
        text = ""
        try:
            if self._reports.poll():
                text = self._reports.recv_bytes().decode(errors="replace")
        except (EOFError, OSError):  # it died without a word, or in the middle of one
            pass
        if self._killed or (not text and self.process.exitcode == 0 and self._stop.is_set()):
            return None
        return ActorFailed(self.id, text, self.process.exitcode)

    def alive(self) -> bool:
        return not connection.wait([self._pidfd], 0)

    def join(self, timeout_s: float) -> None:
        connection.wait([self._pidfd], timeout_s)

    def kill(self) -> None:
        """Kill it and what it started."""
        self._killed = True
        processes.kill_group(self.pid)
        with contextlib.suppress(OSError):  # it is gone; or has not become the leader of a group yet
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.join(1.0)

    def close(self) -> None:
        processes.kill_group(self.pid)
        self.process.join(1.0)
        self._reports.close()
        os.close(self._pidfd)
        self.process.close()


class _ActorThread:
    """An actor in a thread of the learner's process."""

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
        return self._ended

    def failure(self) -> ActorFailed | None:
        return self._failure

    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def kill(self) -> None:
        log.error("actor %d is a thread and cannot be killed", self.id)

    def close(self) -> None:
        if not self.alive():
            self._ended.close()


def _actor_main(
    actor: int,
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
        _prepare_process(actor)
        order: ActorOrder = processes.loads(payload)
        order.build(stop, board).run(item_sender, model_receiver, guard)
    except BaseException:  # noqa: BLE001  the entry of an actor: whatever ends it reaches the learner
        reports.send_bytes(_tail(traceback.format_exc()))
        sys.stderr.flush()
        os._exit(1)  # threads that a failed environment left behind must not hold the process


def _tail(text: str) -> bytes:
    """The text, or its end where it is long. Anything can be in it: messages are made by environments."""
    data = text.encode(errors="backslashreplace")
    return data if len(data) <= TRACEBACK_LIMIT_BYTES else b"[...]\n" + data[-TRACEBACK_LIMIT_BYTES:]


def _prepare_process(actor: int) -> None:
    """One thread, no GPU, a title for ``ps``; a group of its own, which ends as a whole when the learner is gone."""
    processes.lead_group()
    setproctitle(f"outrider: actor {actor}")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
