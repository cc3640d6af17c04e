"""Starts the actors, watches over them, and ends them."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from outrider import machine, placement
from outrider.actor import ActorBoard, ActorStat, ActorState
from outrider.channel import ItemSender
from outrider.config import Config, require
from outrider.core import AgentConfig, EnvConfig, StepProcessorConfig
from outrider.crew import ActorOrder, ActorProcess, ActorThread, Member
from outrider.errors import Unbound
from outrider.flags import InitGuard, StopFlag
from outrider.health import BadDataPolicy
from outrider.model_sync import ModelReceiver
from outrider.sampling import require_same_discount
from outrider.supervisor import Limits, Supervisor


@dataclass(frozen=True, kw_only=True)
class ActorManagerConfig(Config):
    """How many actors there are, and how they send.

    Attributes:
        n_actors: Actors; None: one per agent config given, or where none are as many as leave a core to the learner,
            at least one.
        n_envs: Environments that each actor steps together.
        n_buffer: Transitions in a message, whatever `n_envs`.
        n_slots: Messages that an actor may be ahead of the learner.
        max_message_age_s: Seconds after which a message is sent though it is not full.
        bad_data: What to do about rows with NaN or infinite values: ``raise``, or ``drop`` and count them.
        backend: ``processes``, or ``threads`` of the learner's process (no restarts, no hidden CUDA, shared GIL).
        affinity: ``none``: the system places actors and learner; ``spread``: each actor process is kept on a core of
            its own, as far as there are, and the learner on those left.
        stop_timeout_s: Seconds an actor has to end by itself before it is killed.
        restarts: How often an actor that failed is started anew, with new seeds, within `restart_window_s`; one
            failure more ends the run. 0: the first failure does. Threads are never restarted.
        restart_window_s: Seconds over which restarts count.
        build_timeout_s: Seconds after which an actor that still builds its policy or its environments is killed and
            started anew; 0: never.
        reset_timeout_s: The same for the first reset of the environments.
        step_timeout_s: The same for a step, with what the policy takes. With the automatic reset at the end of an
            episode a step may take as long as `reset_timeout_s`, if that is longer.
    """

    n_actors: int | None = None
    n_envs: int = 1
    n_buffer: int = 64
    n_slots: int = 8
    max_message_age_s: float = 1.0
    bad_data: BadDataPolicy = "raise"
    backend: Literal["processes", "threads"] = "processes"
    affinity: placement.Affinity = "none"
    stop_timeout_s: float = 5.0
    restarts: int = 5
    restart_window_s: float = 600.0
    build_timeout_s: float = 120.0
    reset_timeout_s: float = 60.0
    step_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.n_actors is not None:
            require(self.n_actors >= 1, "n_actors", "an int >= 1, or null", self.n_actors)
        require(self.n_envs >= 1, "n_envs", "an int >= 1", self.n_envs)
        require(self.n_buffer >= 1, "n_buffer", "an int >= 1", self.n_buffer)
        require(self.n_slots >= 2, "n_slots", "an int >= 2", self.n_slots)
        require(self.max_message_age_s > 0, "max_message_age_s", "a number > 0", self.max_message_age_s)
        require(self.stop_timeout_s > 0, "stop_timeout_s", "a number > 0", self.stop_timeout_s)
        require(self.restarts >= 0, "restarts", "an int >= 0", self.restarts)
        require(self.restart_window_s > 0, "restart_window_s", "a number > 0", self.restart_window_s)
        for name in ("build_timeout_s", "reset_timeout_s", "step_timeout_s"):
            require(getattr(self, name) >= 0, name, "a number > 0, or 0 for off", getattr(self, name))

    def count(self) -> int:
        """Number of actors where no agent configs say it."""
        return self.n_actors or max(1, machine.usable_cores() - 1)

    def limits(self) -> Limits:
        """How long an actor may be in a state without a sign of life."""
        step_s = self.step_timeout_s and max(self.step_timeout_s, self.reset_timeout_s)
        if self.backend == "threads":  # which cannot be killed
            return {}
        return {
            ActorState.STARTING: ("building its policy", "build_timeout_s", self.build_timeout_s),
            ActorState.BUILDING: ("building its environments", "build_timeout_s", self.build_timeout_s),
            ActorState.RESETTING: ("the first reset", "reset_timeout_s", self.reset_timeout_s),
            ActorState.RUNNING: ("a step", "step_timeout_s", step_s),
            ActorState.WAITING_FOR_GUARD: ("waiting for the guard", "step_timeout_s", step_s),
            ActorState.WAITING_FOR_MODEL: ("waiting for a model", "step_timeout_s", step_s),
            ActorState.WAITING_FOR_ROOM: ("waiting for room", "step_timeout_s", step_s),
        }


class ActorManager:
    """Owns the actors.

    **Process**: the learner's; a supervisor thread sleeps until an actor ends, and restarts it.
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
        item_sender.introduce(self._board)
        self._cores: set[int] = set()  # of the learner, before it made room
        self._supervisor: Supervisor | None = None
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
        logs: Path | None = None,
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
            logs: Directory for the tracebacks and stack dumps of actors that failed or hung; None: they are logged
                at debug level, and written to stderr.

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
        cores = placement.usable() if config.affinity == "spread" and config.backend == "processes" else set()
        proxy = replace(item_sender.proxy_config, bad_data=config.bad_data)
        orders = [
            ActorOrder(
                i,
                agent,
                env_config,
                env_spec,
                step_proc_config,
                proxy,
                config.n_envs,
                seed,
                before,
                None if logs is None else logs / f"actor-{i}.log",
                placement.actor_core(i, cores) if cores else None,
            )
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
        kind = ActorProcess if self.config.backend == "processes" else ActorThread
        ends = self._item_sender, self._model_receiver, self.stop, guard_init_env, self._board

        def hire(order: ActorOrder) -> Member:
            return kind(order, ends)

        self._supervisor = Supervisor(
            self._orders,
            hire,
            self._board,
            self._item_sender,
            self.stop,
            restarts=self.config.restarts,
            window_s=self.config.restart_window_s,
            limits=self.config.limits(),
        )
        self._supervisor.start()
        if any(order.core is not None for order in self._orders):
            self._cores = placement.usable()
            placement.pin(placement.learner_cores(len(self._orders), self._cores))

    def stats(self) -> list[ActorStat]:
        """What every actor has done so far."""
        return self._final if self._final is not None else self._board.stats()

    def stop_and_join(self) -> list[ActorStat]:
        """Stop the actors, wait for them, kill those that do not end, and report. May be called twice."""
        if self._final is not None:
            return self._final
        self.stop.set()
        if self._supervisor is not None:
            self._supervisor.stop_and_join(self.config.stop_timeout_s)
        placement.pin(self._cores)
        self._final = self._board.stats()
        atexit.unregister(self.stop_and_join)
        return self._final

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.stop_and_join()
