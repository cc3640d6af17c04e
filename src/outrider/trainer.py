"""The synchronous trainer: actors and learner take turns in one process, bit for bit reproducible."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from outrider.actor import ActorStat, ActorState
from outrider.checkpoint import Checkpoints
from outrider.core import (
    Agent,
    AgentConfig,
    Env,
    EnvConfig,
    EnvSpec,
    Evaluator,
    Recorder,
    ReplayBuffer,
    ReplayBufferConfig,
    StepProcessorConfig,
    TakesStreams,
)
from outrider.data import Episode, Items, Record, column_names, n_rows
from outrider.evaluation import attended
from outrider.flags import InitGuard
from outrider.health import BadDataPolicy, RowHealth
from outrider.learner import Learner, build_buffer
from outrider.model_sync import ModelSnapshot, model_channel
from outrider.sampling import Sampler, require_same_discount
from outrider.scoring import InlineScorer
from outrider.seeding import Role, derive, env_seeds
from outrider.statistics import Counters
from outrider.trainer_config import AsyncTrainerConfig, AsyncTrainStat


@dataclass
class Player:
    """An actor that takes turns with the others.

    Attributes:
        id: Its index.
        agent_config: Its policy's config.
        step_proc_config: How steps become items.
        env_spec: What is known of its environments.
        env: Its environments.
        model: The newest parameters.
        health: Looks at its rows.
        seed: Seed of the run.
    """

    id: int
    agent_config: AgentConfig
    step_proc_config: StepProcessorConfig
    env_spec: EnvSpec
    env: Env
    model: ModelSnapshot
    health: RowHealth
    seed: int
    inserted: int = 0
    env_steps: int = 0
    episodes: int = 0

    def start(self, opt_steps: int) -> None:
        """Build policy and step processor anew, and begin an episode in every environment.

        Seeds depend on the opt steps, and nothing on what was before: a run that was resumed can do the same.
        """
        self.policy = self.agent_config.build_actor(
            self.env_spec, seed=derive(self.seed, Role.ACTOR_POLICY, self.id, 0, opt_steps)
        )
        self.model.fetch()
        self.policy.sync_model(self.model.info)
        self.policy.train()
        processor = self.step_proc_config.build(self.env_spec, self.env.n_envs)
        self.sampler = Sampler(self.env, self.policy, processor, self.step_proc_config.layout(self.env_spec))
        self.sampler.reset(env_seeds(self.seed, self.id, opt_steps, self.env.n_envs))

    def step(self, buffer: ReplayBuffer) -> Sequence[Episode]:
        """One vector step with the newest parameters, its rows inserted."""
        if self.model.fetch():
            self.policy.sync_model(self.model.info)
        before = self.sampler.env_steps
        items, episodes = self.sampler.sample(self.model.model_version)
        self.env_steps += self.sampler.env_steps - before
        self.episodes += len(episodes)
        self._push(buffer, items)
        return episodes

    def cut(self, buffer: ReplayBuffer) -> None:
        """Close the open episodes as truncations would."""
        self._push(buffer, self.sampler.cut())

    def _push(self, buffer: ReplayBuffer, items: Items | None) -> None:
        if items is not None:
            good = self.health.good_rows(items, self.env_steps)
            if good is not None:
                items = {name: items[name][good] for name in column_names(items)}
            if isinstance(buffer, TakesStreams):
                buffer.push_from(items, self.id)
            else:
                buffer.push(items)
            self.inserted += n_rows(items)


class SamplerSource:
    """Rows that come from stepping the players in turn, one vector step at a time."""

    def __init__(self, players: list[Player], buffer: ReplayBuffer, counters: Counters) -> None:
        self._players = players
        self._buffer = buffer
        self._counters = counters
        self._turn = 0
        self._start_at = 0  # opt steps of the last checkpoint
        self._started = False

    def collect(self, max_rows: int) -> int:
        """One vector step of the player whose turn it is; 1, whatever it brought."""
        if not self._started:
            for player in self._players:
                player.start(self._start_at)
            self._started = True
        i = self._turn
        self._turn = (i + 1) % len(self._players)
        player = self._players[i]
        episodes = player.step(self._buffer)
        self._counters.arrived(i, 0, player.env_steps, episodes, dropped=player.health.dropped)
        return 1  # a step is progress, whether or not it completed a row

    def cut(self) -> None:
        """Close all open episodes; with the next step every player starts anew."""
        if self._started:
            for player in self._players:
                player.cut(self._buffer)
        self._started = False
        self._start_at = self._counters.opt_steps

    def state_dict(self) -> dict[str, Any]:
        """Whose turn it is."""
        return {"turn": self._turn}

    def load_state_dict(self, state: dict[str, Any], opt_steps: int) -> None:
        """Start as after the checkpoint."""
        self._turn = int(state.get("turn", 0)) % len(self._players)
        self._start_at = opt_steps

    def actor_stats(self, duration_s: float) -> list[ActorStat]:
        """What each player has done."""
        total = max(1, sum(player.inserted for player in self._players))
        return [
            ActorStat(
                actor_id=i,
                samples=player.inserted,
                env_steps=player.env_steps,
                episodes=player.episodes,
                duration_s=duration_s,
                wait_s=0.0,
                state=ActorState.FINISHED,
                share=player.inserted / total,
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

    Each checkpoint closes the open episodes (windows of n steps end as at a truncation), and every actor starts anew
    with seeds from seed, actor, environment and opt steps. So a run that is resumed from it goes on bit for bit like
    one that has just taken it; but taking it changes the run.
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
        require_same_discount(step_proc_config, agent_config)
        spec = env_config_train.spec()
        streams = len(agent_configs) * n_envs
        trainer_config.require_possible(replay_buffer_config, agent_config, streams, spec.frame_stack)
        spec.require_same_spaces(env_config_eval.spec())
        agent_config = _without_chance(agent_config)
        agent = agent_config.build(spec, device=getattr(agent_config, "device", "cpu"), seed=derive(seed, Role.LEARNER))
        layout = step_proc_config.layout(spec)
        buffer = build_buffer(replay_buffer_config, layout)
        sender, receiver = model_channel()
        sender.bind(agent.model_info()[1], backend="threads")
        players: list[Player] = []
        with ExitStack() as built:  # what was built is closed again if the rest cannot be
            for i, config in enumerate(agent_configs):
                receiver.require_equal(config.build_actor(spec).model_info()[1], f"actor {i}")
                env = env_config_train.build(env_seeds(seed, i, 0, n_envs), n_envs)
                built.callback(env.close)
                health = RowHealth(layout, bad_data, i)
                players.append(Player(i, config, step_proc_config, spec, env, receiver.open(), health, seed))
            built.pop_all()
        counters = Counters(len(players))
        source = SamplerSource(players, buffer, counters)
        learner = Learner(trainer_config, agent, buffer, source, sender, counters, n_envs, lambda: None)
        return cls(trainer_config, agent, buffer, source, learner)

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
        """Train until a stop condition holds. Arguments as :meth:`outrider.async_trainer.AsyncTrainer.train`."""
        self.learner.checkpoints = checkpoints
        try:
            with attended(evaluator, self._stopping, guard_init_env):
                return self.learner.run(recorder, InlineScorer(evaluator, self.agent), self._stopping)
        finally:
            self._source.close()

    def _stopping(self) -> bool:
        return self._stop_reason is not None

    def actor_stats(self) -> list[ActorStat]:
        """What each actor that takes turns has done."""
        return self._source.actor_stats(self.learner.meter.seconds())


def _without_chance(agent_config: AgentConfig) -> AgentConfig:
    """The config without what depends on time: which driver makes the updates."""
    if getattr(agent_config, "compile", None) != "auto":
        return agent_config
    return replace(agent_config, compile="off")  # type: ignore[type-var]
