"""The synchronous trainer: actors and learner take turns in one process, bit for bit reproducible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.actor import ActorStat, ActorState
from outrider.checkpoint import Checkpoints
from outrider.core import (
    ActorPolicy,
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
)
from outrider.data import Items, Layout, Record, n_rows
from outrider.evaluation import attended
from outrider.flags import InitGuard
from outrider.learner import AsyncTrainerConfig, AsyncTrainStat, Learner
from outrider.model_sync import ModelSnapshot, model_channel
from outrider.sampling import Sampler
from outrider.seeding import Role, derive, env_seeds
from outrider.statistics import Counters


@dataclass(frozen=True)
class Crew:
    """What the actors that take turns are built from.

    Attributes:
        envs: The environments of each of them.
        agent_configs: Their policies.
        step_proc_config: How steps become items.
        spec: What is known of the environments.
        layout: Layout of the items.
        seed: Seed of the run.
    """

    envs: list[Env]
    agent_configs: Sequence[AgentConfig]
    step_proc_config: StepProcessorConfig
    spec: EnvSpec
    layout: Layout
    seed: int

    def policy(self, actor: int, opt_steps: int) -> ActorPolicy:
        """The policy of an actor from this opt step on: its seed depends on it as that of a restarted actor would."""
        seed = derive(self.seed, Role.ACTOR_POLICY, actor, 0, opt_steps)
        return self.agent_configs[actor].build_actor(self.spec, seed=seed)

    def sampler(self, actor: int, policy: ActorPolicy) -> Sampler:
        """A sampler for an actor's environments."""
        env = self.envs[actor]
        return Sampler(env, policy, self.step_proc_config.build(self.spec, env.n_envs), self.layout)

    def env_seeds(self, actor: int, opt_steps: int) -> list[int]:
        """Seeds of its environments from this opt step on."""
        return env_seeds(self.seed, actor, opt_steps, self.envs[actor].n_envs)


class SamplerSource:
    """Rows that come from stepping the samplers in turn, one vector step at a time.

    At a checkpoint everything starts anew, from seeds that depend on the opt steps: policies, step processors, and
    the episodes of all environments. So what follows depends on nothing that a checkpoint could not hold.
    """

    def __init__(self, crew: Crew, models: list[ModelSnapshot], buffer: ReplayBuffer, counters: Counters) -> None:
        n = len(models)
        self._crew = crew
        self._models = models
        self._buffer = buffer
        self._counters = counters
        self._turn = 0
        self._inserted, self._env_steps, self._episodes = [0] * n, [0] * n, [0] * n
        self._start_anew(0)

    def _start_anew(self, opt_steps: int) -> None:
        actors = range(len(self._models))
        self._opt_steps = opt_steps
        self._policies = [self._crew.policy(i, opt_steps) for i in actors]
        self._samplers = [self._crew.sampler(i, policy) for i, policy in enumerate(self._policies)]
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
        before = sampler.env_steps
        items, episodes = sampler.sample(model.model_version)
        self._push(i, items)
        self._env_steps[i] += sampler.env_steps - before
        self._episodes[i] += len(episodes)
        self._counters.arrived(i, 0, self._env_steps[i], episodes)
        return 1  # a step is progress, whether or not it completed a row

    def _push(self, actor: int, items: Items | None) -> None:
        if items is not None:
            self._buffer.push(items)
            self._inserted[actor] += n_rows(items)

    def _start(self) -> None:
        for i, (policy, model) in enumerate(zip(self._policies, self._models, strict=True)):
            model.fetch()
            policy.sync_model(model.info)
            policy.train()
            self._samplers[i].reset(self._crew.env_seeds(i, self._opt_steps))
        self._started = True

    def cut(self) -> None:
        """Close the open episodes as truncations would, and start anew."""
        if self._started:
            for i, sampler in enumerate(self._samplers):
                self._push(i, sampler.cut())
        self._start_anew(self._counters.opt_steps)

    def state_dict(self) -> dict[str, Any]:
        """Whose turn it is."""
        return {"turn": self._turn}

    def load_state_dict(self, state: dict[str, Any], opt_steps: int) -> None:
        """Start anew as after the checkpoint."""
        self._turn = int(state.get("turn", 0)) % len(self._samplers)
        self._start_anew(opt_steps)

    def actor_stats(self, duration_s: float) -> list[ActorStat]:
        """What each actor has done."""
        return [
            ActorStat(
                actor_id=i,
                samples=self._inserted[i],
                env_steps=self._env_steps[i],
                episodes=self._episodes[i],
                duration_s=duration_s,
                wait_s=0.0,
                state=ActorState.FINISHED,
            )
            for i in range(len(self._samplers))
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

    Each checkpoint closes the open episodes (windows of n steps end as at a truncation) and resets the environments
    with seeds from seed, actor, environment and opt steps. So a run that is resumed from it goes on bit for bit like
    one that has just taken it; but taking it changes the run.
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
            env_config_eval: Only its `spec` is used.
            step_proc_config: How steps become items.
            replay_buffer_config: The replay buffer.
            n_envs: Environments of each actor.
            seed: Seed of the run; environments and policies get the seeds that actor processes would get.
        """
        spec = env_config_train.spec()
        agent = agent_config.build(spec, device=getattr(agent_config, "device", "cpu"), seed=derive(seed, Role.LEARNER))
        layout = step_proc_config.layout(spec)
        buffer = replay_buffer_config.build(layout)
        sender, receiver = model_channel()
        sender.bind(agent.model_info()[1], backend="threads")
        n_actors = len(agent_configs)
        envs = [env_config_train.build(env_seeds(seed, i, 0, n_envs), n_envs) for i in range(n_actors)]
        crew = Crew(envs, agent_configs, step_proc_config, spec, layout, seed)
        for i in range(n_actors):
            receiver.require_equal(crew.policy(i, 0).model_info()[1], f"actor {i}")
        counters = Counters(n_actors)
        source = SamplerSource(crew, [receiver.open() for _ in range(n_actors)], buffer, counters)
        learner = Learner(trainer_config, agent, buffer, source, sender, counters, n_envs, lambda: None)
        return cls(trainer_config, agent, buffer, envs, source, learner)

    def request_stop(self, reason: str = "request") -> None:
        """Have `train` end in order after the present opt step. May be called from a signal handler or a thread."""
        self._stop_reason = reason

    def train(
        self,
        recorder: Recorder,
        evaluator: Evaluator,
        guard_init_env: InitGuard | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> AsyncTrainStat:
        """Train until a stop condition holds. Arguments as :meth:`outrider.async_trainer.AsyncTrainer.train`."""
        self.learner.checkpoints = checkpoints
        try:
            with attended(evaluator, lambda: self._stop_reason is not None, guard_init_env):
                return self.learner.run(recorder, evaluator)
        finally:
            for env in self._envs:
                env.close()

    def actor_stats(self) -> list[ActorStat]:
        """What each actor that takes turns has done."""
        return self._source.actor_stats(self.learner.meter.seconds())
