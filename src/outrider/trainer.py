"""The synchronous trainer: actors and learner take turns in one process, bit for bit reproducible."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

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
from outrider.data import Record, n_rows
from outrider.evaluation import attended
from outrider.flags import InitGuard
from outrider.learner import AsyncTrainerConfig, AsyncTrainStat, Learner
from outrider.model_sync import ModelSnapshot, model_channel
from outrider.sampling import Sampler
from outrider.seeding import Role, derive, env_seeds
from outrider.statistics import Counters


class SamplerSource:
    """Rows that come from stepping the samplers in turn, one vector step at a time."""

    def __init__(
        self,
        policies: list[ActorPolicy],
        samplers: list[Sampler],
        models: list[ModelSnapshot],
        buffer: ReplayBuffer,
        counters: Counters,
    ) -> None:
        self._policies = policies
        self._samplers = samplers
        self._models = models
        self._buffer = buffer
        self._counters = counters
        self._turn = 0
        self._inserted = [0] * len(samplers)
        self._started = False

    def collect(self, max_rows: int) -> int:
        """One vector step of the sampler whose turn it is; 1, whatever it brought."""
        if not self._started:
            self._start()
        i = self._turn
        self._turn = (i + 1) % len(self._samplers)
        sampler, model = self._samplers[i], self._models[i]
        if model.fetch():
            self._policies[i].sync_model(model.info)
        items, episodes = sampler.sample(model.model_version)
        if items is not None:
            self._buffer.push(items)
            self._inserted[i] += n_rows(items)
        self._counters.arrived(i, 0, sampler.env_steps, episodes)
        return 1  # a step is progress, whether or not it completed a row

    def _start(self) -> None:
        for policy, sampler, model in zip(self._policies, self._samplers, self._models, strict=True):
            model.fetch()
            policy.sync_model(model.info)
            policy.train()
            sampler.reset()
        self._started = True

    def actor_stats(self, duration_s: float) -> list[ActorStat]:
        """What each sampler has done."""
        return [
            ActorStat(
                actor_id=i,
                samples=self._inserted[i],
                env_steps=sampler.env_steps,
                episodes=sampler.episodes,
                duration_s=duration_s,
                wait_s=0.0,
                state=ActorState.FINISHED,
            )
            for i, sampler in enumerate(self._samplers)
        ]

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
        envs: list[Env],
        source: SamplerSource,
        learner: Learner,
    ) -> None:
        self.config = config
        self.agent = agent
        self.buffer = buffer
        self.learner = learner
        self._envs = envs
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
            seed: Seed of the run; environments and policies get the seeds that actor processes would get.

        Raises:
            ConfigError: The environments of actors and evaluation differ, or the numbers do not go together.
            LayoutMismatch: The buffer cannot store the items.
            UnsupportedSpace: A space cannot be stored, or the agent cannot handle it.
            ResourceError: Not enough memory.
        """
        trainer_config.require_possible(replay_buffer_config, agent_config)
        spec = env_config_train.spec()
        spec.require_same_spaces(env_config_eval.spec())
        agent = agent_config.build(spec, device=getattr(agent_config, "device", "cpu"), seed=derive(seed, Role.LEARNER))
        layout = step_proc_config.layout(spec)
        buffer = replay_buffer_config.build(layout)
        sender, receiver = model_channel()
        sender.bind(agent.model_info()[1], backend="threads")
        envs, policies, samplers, models = [], [], [], []
        with ExitStack() as opened:
            for i, config in enumerate(agent_configs):
                policy = config.build_actor(spec, seed=derive(seed, Role.ACTOR_POLICY, i))
                receiver.require_equal(policy.model_info()[1], f"actor {i}")
                policies.append(policy)
                envs.append(env_config_train.build(env_seeds(seed, i, 0, n_envs), n_envs))
                opened.callback(envs[-1].close)
                samplers.append(Sampler(envs[-1], policy, step_proc_config.build(spec, n_envs), layout))
                models.append(receiver.open())
            opened.pop_all()
        counters = Counters(len(samplers))
        source = SamplerSource(policies, samplers, models, buffer, counters)
        learner = Learner(trainer_config, agent, buffer, source, sender, counters, n_envs, lambda: None)
        return cls(trainer_config, agent, buffer, envs, source, learner)

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
            for env in self._envs:
                env.close()

    def actor_stats(self) -> list[ActorStat]:
        """What each actor that takes turns has done."""
        return self._source.actor_stats(self.learner.meter.seconds())
