"""The synchronous trainer: actors and learner take turns in one process, bit for bit reproducible."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from outrider.actor import ActorStat, ActorState
from outrider.core import (
    ActorPolicy,
    Agent,
    AgentConfig,
    Env,
    EnvConfig,
    Evaluator,
    Recorder,
    ReplayBuffer,
    ReplayBufferConfig,
    StepProcessorConfig,
)
from outrider.data import Episode, Record, column_names, n_rows
from outrider.evaluation import attended
from outrider.flags import InitGuard
from outrider.health import BadDataPolicy, RowHealth
from outrider.learner import AsyncTrainerConfig, AsyncTrainStat, Learner, build_buffer
from outrider.model_sync import ModelSnapshot, model_channel
from outrider.sampling import Sampler, require_same_discount
from outrider.seeding import Role, derive, env_seeds
from outrider.statistics import Counters


@dataclass
class Player:
    """An actor that takes turns with the others."""

    policy: ActorPolicy
    env: Env
    sampler: Sampler
    model: ModelSnapshot
    health: RowHealth
    inserted: int = 0

    def start(self) -> None:
        """Take the first parameters, and begin an episode in every environment."""
        self.model.fetch()
        self.policy.sync_model(self.model.info)
        self.policy.train()
        self.sampler.reset()

    def step(self, buffer: ReplayBuffer) -> Sequence[Episode]:
        """One vector step with the newest parameters, its rows inserted."""
        if self.model.fetch():
            self.policy.sync_model(self.model.info)
        items, episodes = self.sampler.sample(self.model.model_version)
        if items is not None:
            good = self.health.good_rows(items, self.sampler.env_steps)
            if good is not None:
                items = {name: items[name][good] for name in column_names(items)}
            buffer.push(items)
            self.inserted += n_rows(items)
        return episodes


class SamplerSource:
    """Rows that come from stepping the players in turn, one vector step at a time."""

    def __init__(self, players: list[Player], buffer: ReplayBuffer, counters: Counters) -> None:
        self._players = players
        self._buffer = buffer
        self._counters = counters
        self._turn = 0
        self._started = False

    def collect(self, max_rows: int) -> int:
        """One vector step of the player whose turn it is; 1, whatever it brought."""
        if not self._started:
            for player in self._players:
                player.start()
            self._started = True
        i = self._turn
        self._turn = (i + 1) % len(self._players)
        player = self._players[i]
        episodes = player.step(self._buffer)
        self._counters.arrived(i, 0, player.sampler.env_steps, episodes, dropped=player.health.dropped)
        return 1  # a step is progress, whether or not it completed a row

    def actor_stats(self, duration_s: float) -> list[ActorStat]:
        """What each player has done."""
        return [
            ActorStat(
                actor_id=i,
                samples=player.inserted,
                env_steps=player.sampler.env_steps,
                episodes=player.sampler.episodes,
                duration_s=duration_s,
                wait_s=0.0,
                state=ActorState.FINISHED,
            )
            for i, player in enumerate(self._players)
        ]

    def close(self) -> None:
        """Close the environments."""
        for player in self._players:
            player.env.close()

    def wait(self) -> None:
        """Never waits: a step can always be taken."""

    def statistics(self) -> Record:
        """Nothing of its own."""
        return {}


class Trainer:
    """Trains an agent with the same stations as the asynchronous trainer, but without processes or an item channel.

    **Process**: the caller's.
    **Owns** agent, replay buffer and environments.
    **Blocks** in `train` until a stop condition holds.
    **Closes** its environments when `train` is left.

    The balance of the configuration holds exactly; without one (``samples_per_insert`` None) each opt step follows
    one vector step of one actor. Equal seeds give bit-identical parameters on one machine and thread count.
    """

    def __init__(
        self,
        config: AsyncTrainerConfig,
        agent: Agent,
        buffer: ReplayBuffer,
        source: SamplerSource,
        learner: Learner,
    ) -> None:
        self.config = config
        self.agent = agent
        self.buffer = buffer
        self.learner = learner
        self._source = source
        self._stop_reason: str | None = None
        learner.should_stop = lambda: self._stop_reason

    @classmethod
    def build(
        cls,
        trainer_config: AsyncTrainerConfig,
        agent_config: AgentConfig,
        agent_configs: Sequence[AgentConfig],
        env_config_train: EnvConfig,
        env_config_eval: EnvConfig,
        step_proc_config: StepProcessorConfig,
        replay_buffer_config: ReplayBufferConfig,
        *,
        n_envs: int = 1,
        bad_data: BadDataPolicy = "raise",
        seed: int = 0,
    ) -> Trainer:
        """Build everything.

        Args:
            trainer_config: When what is done.
            agent_config: The agent to train.
            agent_configs: One per actor that takes turns.
            env_config_train: The actors' environments.
            env_config_eval: Only its `spec` is used, which must have the actors' spaces.
            step_proc_config: How steps become items.
            replay_buffer_config: The replay buffer.
            n_envs: Environments of each actor.
            bad_data: What to do about rows with NaN or infinite values: ``raise``, or ``drop`` and count them.
            seed: Seed of the run; environments and policies get the seeds that actor processes would get.

        Raises:
            ConfigError: The environments of actors and evaluation differ, or the numbers do not go together.
            LayoutMismatch: The buffer cannot store the items.
            UnsupportedSpace: A space cannot be stored, or the agent cannot handle it.
            ResourceError: Not enough memory.
        """
        trainer_config.require_possible(replay_buffer_config, agent_config)
        require_same_discount(step_proc_config, agent_config)
        spec = env_config_train.spec()
        spec.require_same_spaces(env_config_eval.spec())
        agent = agent_config.build(spec, device=getattr(agent_config, "device", "cpu"), seed=derive(seed, Role.LEARNER))
        layout = step_proc_config.layout(spec)
        buffer = build_buffer(replay_buffer_config, layout)
        sender, receiver = model_channel()
        sender.bind(agent.model_info()[1], backend="threads")
        players: list[Player] = []
        with ExitStack() as built:  # what was built is closed again if the rest cannot be
            for i, config in enumerate(agent_configs):
                policy = config.build_actor(spec, seed=derive(seed, Role.ACTOR_POLICY, i))
                receiver.require_equal(policy.model_info()[1], f"actor {i}")
                env = env_config_train.build(env_seeds(seed, i, 0, n_envs), n_envs)
                built.callback(env.close)
                sampler = Sampler(env, policy, step_proc_config.build(spec, n_envs), layout)
                players.append(Player(policy, env, sampler, receiver.open(), RowHealth(layout, bad_data, i)))
            built.pop_all()
        counters = Counters(len(players))
        source = SamplerSource(players, buffer, counters)
        learner = Learner(trainer_config, agent, buffer, source, sender, counters, n_envs, lambda: None)
        return cls(trainer_config, agent, buffer, source, learner)

    def request_stop(self, reason: str = "request") -> None:
        """Have `train` end in order after the present opt step. May be called from a signal handler or a thread."""
        self._stop_reason = reason

    def train(
        self, recorder: Recorder, evaluator: Evaluator, guard_init_env: InitGuard | None = None
    ) -> AsyncTrainStat:
        """Train until a stop condition holds."""
        try:
            with attended(evaluator, lambda: self._stop_reason is not None, guard_init_env):
                return self.learner.run(recorder, evaluator)
        finally:
            self._source.close()

    def actor_stats(self) -> list[ActorStat]:
        """What each actor that takes turns has done."""
        return self._source.actor_stats(self.learner.meter.seconds())
