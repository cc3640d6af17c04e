"""The asynchronous trainer: the learner's loop fed by the item channel."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import torch

from outrider import machine, placement
from outrider.channel import ItemReceiver, PushedItemMessage
from outrider.checkpoint import Checkpoints
from outrider.core import (
    Agent,
    AgentConfig,
    EnvConfig,
    Evaluator,
    Recorder,
    ReplayBuffer,
    ReplayBufferConfig,
    TakesStreams,
)
from outrider.data import Record
from outrider.errors import Unbound
from outrider.flags import InitGuard, StopFlag
from outrider.learner import Learner, build_buffer
from outrider.model_sync import ModelSender
from outrider.process_scorer import PolicySource, scorer_for
from outrider.scoring import Scorer
from outrider.seeding import Role, derive
from outrider.statistics import Counters
from outrider.trainer_config import AsyncTrainerConfig, AsyncTrainStat
from outrider.watchdog import Watchdog

__all__ = ["AsyncTrainStat", "AsyncTrainer", "AsyncTrainerConfig"]

WAIT_S = 0.05  # a wait for data is that long at most, then the stop conditions are looked at
DEFAULT_THREADS = torch.get_num_threads()


class ChannelSource:
    """Rows that actors sent: station (2) seen from the learner."""

    def __init__(self, receiver: ItemReceiver, buffer: ReplayBuffer, counters: Counters) -> None:
        self._receiver = receiver
        self._buffer = buffer
        self._by_actor = buffer if isinstance(buffer, TakesStreams) else None
        self._counters = counters
        self.opt_steps = 0  # set by the publisher: what staleness is measured against

    def collect(self, max_rows: int) -> int:
        """Drain whole messages until about `max_rows` rows were inserted.

        Raises:
            ActorFailed: An actor ended before it was asked to.
        """
        return self._receiver.drain(self._insert, max_rows)

    def _insert(self, message: PushedItemMessage) -> None:
        if self._by_actor is None:
            self._buffer.push(message.items)
        else:
            self._by_actor.push_from(message.items, message.actor)
        counters = self._counters
        counters.arrived(
            message.actor,
            message.incarnation,
            message.env_steps,
            message.episodes,
            wait_s=message.wait_s,
            dropped=message.dropped,
        )
        counters.aged(*message.model_versions)

    def wait(self) -> None:
        """Nap until a message is there, `WAIT_S` at most."""
        self._receiver.wait(WAIT_S)

    def cut(self) -> None:
        """Open episodes stay where they are, in the actors."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: what actors are in the middle of cannot be saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any], opt_steps: int) -> None:
        """Nothing: the actors of a resumed run are new ones."""

    def statistics(self) -> Record:
        """Ring fill, and what the actors are doing."""
        crew = self._receiver.crew
        return {"async/ring_fill": self._receiver.fill()} | ({} if crew is None else crew.statistics())


class AsyncTrainer:
    """Trains an agent on what actors send.

    **Process**: the caller's; call `train` from its main thread.
    **Owns** the agent and the replay buffer.
    **Blocks** in `train` until a stop condition holds.
    **Closes**: leaving `train` for any reason sets the stop flag of the actors.

    A checkpoint does not disturb the actors. A run that is resumed has new ones: what was open in the old ones,
    episodes and windows of n steps, is discarded.
    """

    def __init__(
        self,
        config: AsyncTrainerConfig,
        agent: Agent,
        buffer: ReplayBuffer,
        item_receiver: ItemReceiver,
        model_sender: ModelSender,
        stop: StopFlag,
        policy_source: PolicySource | None = None,
        logs: Path | None = None,
    ) -> None:
        self.config = config
        self.agent = agent
        self.buffer = buffer
        self.stop = stop
        self._item_receiver = item_receiver
        self._policy_source = policy_source
        self._logs = logs
        self._stop_reason: str | None = None
        counters = Counters(item_receiver.n_actors)
        self.learner = Learner(
            config,
            agent,
            buffer,
            ChannelSource(item_receiver, buffer, counters),
            model_sender,
            counters,
            slack=item_receiver.message_rows,
            should_stop=self._should_stop,
        )
        self._evaluation_steps = 0
        self._cores = machine.usable_cores()  # now: actors that are spread leave this process fewer

    @classmethod
    def build(
        cls,
        async_trainer_config: AsyncTrainerConfig,
        agent_config: AgentConfig,
        env_config_eval: EnvConfig,
        replay_buffer_config: ReplayBufferConfig,
        item_receiver: ItemReceiver,
        model_sender: ModelSender,
        stop: StopFlag,
        *,
        seed: int = 0,
        logs: Path | None = None,
    ) -> AsyncTrainer:
        """Build agent and replay buffer, and bind the model channel.

        Args:
            async_trainer_config: When what is done.
            agent_config: The agent to train.
            env_config_eval: Only its `spec` is used; no environment is built.
            replay_buffer_config: The replay buffer.
            item_receiver: Bound by `ActorManager.build`.
            model_sender: Is bound here.
            stop: Stops the actors; set when `train` is left.
            seed: Seed of the run.
            logs: Directory for what an evaluator's process that fails leaves; None: on stderr.

        Raises:
            Unbound: The item channel has no layout yet: `ActorManager.build` is missing.
            ConfigError: The environments of actors and evaluation differ, or the numbers do not go together.
            LayoutMismatch: The buffer cannot store the items.
            UnsupportedSpace: The agent cannot handle the environment's spaces.
            ResourceError: Not enough memory.
        """
        if not item_receiver.bound:
            raise Unbound("AsyncTrainer.build: the item channel has no layout yet; call ActorManager.build before")
        env_spec = env_config_eval.spec()
        streams = item_receiver.n_actors  # at least
        async_trainer_config.require_possible(replay_buffer_config, agent_config, streams, env_spec.frame_stack)
        if item_receiver.env_spec is not None:
            item_receiver.env_spec.require_same_spaces(env_spec)
        agent = agent_config.build(
            env_spec, device=getattr(agent_config, "device", "cpu"), seed=derive(seed, Role.LEARNER)
        )
        buffer = build_buffer(replay_buffer_config, item_receiver.layout)
        model_sender.bind(agent.model_info()[1], backend=item_receiver.backend, n_readers=item_receiver.n_actors)
        source = PolicySource(agent_config, env_spec, seed)
        return cls(async_trainer_config, agent, buffer, item_receiver, model_sender, stop, source, logs)

    def request_stop(self, reason: str = "request") -> None:
        """Have `train` end in order after the present opt step. May be called from a signal handler or a thread."""
        self._stop_reason = reason

    def train(
        self,
        recorder: Recorder,
        evaluator: Evaluator,
        guard_init_env: InitGuard | None = None,
        *,
        checkpoints: Checkpoints | None = None,
    ) -> AsyncTrainStat:
        """Train until a stop condition holds.

        Args:
            recorder: Takes metrics and models.
            evaluator: Scores the agent every ``eval_interval`` opt steps; a copy of it does, in a process of its
                own, if ``evaluation.process`` is set and it can be pickled.
            guard_init_env: Held while the evaluator builds its environment, if it has an attribute ``guard``.
            checkpoints: Saves the run so that it can be resumed; not closed here. None: it is not saved.

        Raises:
            ActorFailed: An actor ended before it was asked to, and was not restarted; carries its traceback.
            Stalled: Nothing moved for ``stall_timeout_s``.
            EvaluatorFailed: Only a score could have ended the run, and there are no more evaluations.
        """
        choose_threads(self._item_receiver.n_actors, self._cores)
        self.learner.checkpoints = checkpoints
        try:
            with self._scorer(evaluator, guard_init_env) as scorer:
                watchdog = Watchdog(
                    self.learner,
                    self._item_receiver,
                    self.stop,
                    self.config.stall_timeout_s,
                    lambda: self._evaluation_steps + getattr(scorer, "steps", 0),
                )
                with watchdog:
                    return self.learner.run(recorder, scorer, self._stopping)
        finally:
            self.stop.set()

    def _scorer(self, evaluator: Evaluator, guard: InitGuard | None) -> AbstractContextManager[Scorer]:
        return scorer_for(
            self.config.evaluation,
            self.agent,
            self._policy_source if self.config.eval_interval else None,
            evaluator,
            guard,
            self._stopping,
            log_file=None if self._logs is None else self._logs / "evaluator.log",
            indispensable=self.config.ends_by_score_only,
        )

    def _stopping(self) -> bool:
        self._evaluation_steps += 1  # a sign of life
        return self._stop_reason is not None or self.stop.is_set()

    def _should_stop(self) -> str | None:
        if self._stop_reason is None and self.stop.is_set():  # by an actor that failed, or by the user
            self._item_receiver.drain(_take_nothing, max_rows=0)  # raises the failure
            return "request"
        return self._stop_reason


def _take_nothing(message: PushedItemMessage) -> None:
    """Leave a message where it is."""


def choose_threads(n_actors: int, cores: int) -> None:
    """Give torch the cores that actors leave, at least one, unless the user chose a number of threads.

    A learner whose threads spin beside busy actors loses most of its speed (docs/performance.md). Torch does not tell
    who chose: a number that it would not have chosen by itself, or that changed since, is the user's.
    """
    torch.set_num_threads(learner_threads(n_actors, cores))


def learner_threads(n_actors: int, cores: int) -> int:
    """Threads that the learner will compute with beside so many actors: see :func:`choose_threads`."""
    threads = torch.get_num_threads()
    return threads if user_chose_threads(cores) else min(threads, max(1, cores - n_actors))


def user_chose_threads(cores: int) -> bool:
    """Whether torch's number of threads is the user's: see :func:`choose_threads`."""
    threads = torch.get_num_threads()
    its_own = {cores, len(placement.usable()), psutil.cpu_count(logical=False)}
    unchosen = threads == DEFAULT_THREADS and threads in its_own
    return not unchosen or bool({"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys())
