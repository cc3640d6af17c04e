"""The contracts: what an own environment, agent, step processor, buffer, evaluator or recorder has to offer.

Each is documented by the loop that calls it. A class need not inherit from its contract if it has all of its
methods; inheriting brings those that have a default. :mod:`outrider.testing` has a check for each of them.

An actor runs::

    policy = agent_config.build_actor(env_spec, seed=...)
    env = env_config.build(seeds, n_envs)                 # under the guard: one at a time
    policy.sync_model(info)                               # the first publication, whatever its version
    obs = env.reset(); processor.reset(obs)
    while not stop:
        policy.sync_model(info)                           # only when there is a newer one
        act = policy.sample(obs)
        step = env.step(act)
        items = processor.process(step)
        proxy.push(items)                                 # to the learner, a message at a time
        obs = step.init_obs

and the learner::

    agent = agent_config.build(env_spec, device=..., seed=...)
    buffer = replay_buffer_config.build(layout)           # refuses a layout it cannot store
    while opt_steps < max_opts:
        buffer.push(message.items)                        # whole messages, as far as the limiter allows
        agent.opt(buffer)                                 # buffer.batch, agent.update, buffer.update_priority
        snapshot = copy(agent.model_info())               # every eval_interval; scored in a process, see below
        sender.publish(*agent.model_info(), env_steps)    # every sync_interval
        recorder.store(record); recorder.flush(opt_steps)
        checkpoints.take(moment, state)                   # when one is due, and at the end

and the evaluator, whose scores come back to the learner::

    policy = agent_config.build_actor(env_spec, seed=...)
    for snapshot in snapshots:
        policy.sync_model(snapshot)
        score, record = evaluator.evaluate(policy)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from gymnasium import spaces

from outrider.data import Array, Batch, Items, Layout, ModelInfo, Obs, Record, Step, UpdateResult
from outrider.errors import ConfigError


@dataclass(frozen=True)
class EnvSpec:
    """What is known of an environment without building it again.

    Attributes:
        id: Name for messages, such as ``CartPole-v1``.
        observation_space: Space of a single environment.
        action_space: Space of a single environment, with its original ``start``. Stored actions, and those
            that policies return, count from 0.
        max_episode_steps: Time limit in env steps, None if unknown.
        reward_threshold: Score at which the environment counts as solved, None if it has none.
        frame_stack: Number of frames stacked along the first axis of the observation, 0 if it is no stack.
    """

    id: str
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    max_episode_steps: int | None = None
    reward_threshold: float | None = None
    frame_stack: int = 0

    def require_same_spaces(self, evaluation: EnvSpec) -> None:
        """Refuse an environment for evaluation with other spaces than this one, which the actors have.

        Raises:
            ConfigError: Names the space that differs, and both sides.
        """
        for name in ("observation_space", "action_space"):
            ours, theirs = getattr(self, name), getattr(evaluation, name)
            if ours != theirs:
                raise ConfigError(f"env_config_eval.{name}", f"the actors' {ours}", theirs)


@runtime_checkable
class Env(Protocol):
    """n environments stepped together. Whoever builds it closes it."""

    n_envs: int

    def reset(self, seed: Sequence[int] | None = None) -> Obs:
        """Start an episode in every environment.

        Args:
            seed: One seed per environment. None: the seeds given at build, and at later calls go on.

        Returns:
            Observations ``[n_envs, ...]``, a nested dict of arrays for Dict spaces, in the dtype of the space.
        """
        ...

    def step(self, act: Array) -> Step:
        """Apply actions ``[n_envs, ...]``, counted from 0 where they are discrete. An ended environment starts anew."""
        ...

    def close(self) -> None:
        """Free what the environments hold. May be called twice."""
        ...


@runtime_checkable
class EnvConfig(Protocol):
    """Builds environments; travels to the actors by cloudpickle."""

    def build(self, seed: int | Sequence[int], n_envs: int) -> Env:
        """Build n environments; `seed` is one int per environment, or one that they are derived from."""
        ...

    def eval(self) -> EnvConfig:
        """The same environment as it is evaluated: unclipped rewards, whole games."""
        ...

    def spec(self) -> EnvSpec:
        """Describe the environment; it is built once for that, in a short-lived process of its own.

        Raises:
            ConfigError: Unknown id, or a space that cannot be stored.
            EnvFailed: It raised or crashed; carries the traceback.
        """
        ...


@runtime_checkable
class Policy(Protocol):
    """Chooses actions for n environments at once."""

    def sample(self, obs: Obs) -> Array:
        """Actions ``[n_envs, ...]`` in the dtype and units of the action space, discrete ones from 0.

        The result is the caller's until the next call.
        """
        ...

    def train(self) -> None:
        """Explore from now on."""
        ...

    def eval(self) -> None:
        """Act for evaluation from now on."""
        ...


@runtime_checkable
class SyncModel(Protocol):
    """Parameters that travel from the learner's agent to the actors' policies."""

    def model_info(self) -> tuple[int, ModelInfo]:
        """Number of opt steps so far, and everything acting needs, by name.

        Names, dtypes and shapes never change. The arrays may alias the live parameters: the sender copies them.
        """
        ...

    def sync_model(self, info: ModelInfo) -> None:
        """Act with these parameters from now on; called between steps. An agent's ``save_params`` writes them then.

        The arrays are the receiver's snapshot: they keep their addresses from call to call and do not change
        in between, so they may be kept instead of copied. ``info["env_steps"]`` is the run's env steps at
        publication, for exploration schedules.
        """
        ...


class ExperienceBuffer(Protocol):
    """Takes items: a replay buffer in the learner, a :class:`~outrider.channel.ReplayBufferProxy` in an actor."""

    def push(self, items: Items) -> None:
        """Take rows ``[m]``. They are copied: the caller may reuse its arrays."""
        ...


class ReplayBuffer(ExperienceBuffer, Protocol):
    """Stores items and draws batches. Belongs to the learner.

    It may offer more: :class:`RowStore`, :class:`Measured`, :class:`TakesStreams`.

    Attributes:
        inserted: Rows taken so far (all, not only those still there).
        sampled: Rows drawn so far.
    """

    inserted: int
    sampled: int

    def __len__(self) -> int:
        """Rows that can be drawn now."""
        ...

    def accepts(self, layout: Layout) -> bool:
        """Whether it can store rows of this layout; asked once, when it was built."""
        ...

    def batch(self, size: int) -> Batch:
        """Draw `size` rows with replacement. The arrays are reused by the next call."""
        ...

    def update_priority(self, ixs: Array, td_errors: Any) -> None:
        """Set priorities from TD errors ``[B]``; does nothing where sampling is uniform."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        ...


@runtime_checkable
class Measured(Protocol):
    """A replay buffer that has metrics of its own."""

    def statistics(self) -> Record:
        """Metrics, asked for with those of the run."""
        ...


@runtime_checkable
class TakesStreams(Protocol):
    """A replay buffer that has to know which actor made the items: asked in the place of ``push``."""

    def push_from(self, items: Items, actor: int) -> None:
        """Take rows ``[m]`` that this actor, counted from 0, made after those that it made before."""
        ...


@runtime_checkable
class RowStore(Protocol):
    """What a replay buffer may offer besides, so that checkpoints store each of its rows once.

    Rows are counted from 0 in the order of their insertion. Without these methods, every checkpoint holds the whole
    of :meth:`ReplayBuffer.state_dict`.

    Attributes:
        inserted: Rows taken so far.
    """

    inserted: int

    @property
    def oldest(self) -> int:
        """The oldest row that is still there, `inserted` if there is none."""
        ...

    @property
    def row_dtype(self) -> np.dtype[Any]:
        """The structured dtype of a row."""
        ...

    def copy_rows(self, first: int, stop: int) -> Array:
        """A copy of the rows ``[first, stop)``, which are all still there."""
        ...

    def state_without_rows(self) -> dict[str, Any]:
        """Everything else that a resumed run needs: counters, priorities, random state."""
        ...

    def load_rows(self, state: dict[str, Any], blocks: Iterable[tuple[int, Array]]) -> None:
        """Restore a buffer, also one of another capacity: then the newest rows that fit.

        Args:
            state: What :meth:`state_without_rows` gave.
            blocks: First row and rows of consecutive blocks ``[m]``, the last one up to `inserted`.
        """
        ...


@runtime_checkable
class ReplayBufferConfig(Protocol):
    """Builds the replay buffer in the learner.

    With a method ``nbytes(layout) -> int`` a run is refused at its start if memory cannot hold that much; without one
    ``capacity`` rows are expected, if it has that field.
    """

    def build(self, layout: Layout) -> ReplayBuffer:
        """Build it for this kind of item.

        Raises:
            LayoutMismatch: It cannot store this layout; says which it can.
        """
        ...


@runtime_checkable
class Agent(Policy, SyncModel, Protocol):
    """The learner's agent. It samples batches itself, so any number of updates may make up an opt step."""

    def opt(self, buffer: ReplayBuffer) -> None:
        """One opt step: sample, update, write priorities back."""
        ...

    def opt_with_record(self, buffer: ReplayBuffer) -> Record:
        """The same, with metrics; called every ``record_agent_info_interval`` opt steps."""
        ...

    def save_params(self, path: Path) -> None:
        """Write what acting needs into the existing directory `path`."""
        ...

    def load_params(self, path: Path) -> None:
        """Read what :meth:`save_params` wrote."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs: parameters, targets, optimisers, counters, random states."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        ...


@runtime_checkable
class Preparable(Protocol):
    """What an agent may offer besides, where something has to be ready before training, or runs beside it."""

    def prepare(self, stopping: Callable[[], bool]) -> None:
        """Called once, when the parameters are in place and no opt step was made.

        Args:
            stopping: To be asked several times a second while it takes long; then it returns as soon as it may.

        Raises:
            ConfigError: It cannot train as it is asked to.
        """
        ...

    def close(self) -> None:
        """No opt step will follow; also called where :meth:`prepare` failed."""
        ...


class BatchLearner(Protocol):
    """What the built-in agents offer besides: they can be tested with a batch made by hand."""

    def update(self, batch: Batch, *, with_record: bool = False) -> UpdateResult:
        """One gradient update on this batch."""
        ...


class ActorPolicy(Policy, SyncModel, Protocol):
    """What runs in an actor: acting and taking parameters, nothing else."""


@runtime_checkable
class AgentConfig(Protocol):
    """Builds the agent of the learner, and the policies of the actors and the evaluator.

    With a method ``require_usable()`` it can refuse, at the start of a run, what this machine lacks.
    """

    def build(self, env_spec: EnvSpec, *, device: str = "cpu", seed: int = 0) -> Agent:
        """Build the learner's agent.

        Raises:
            UnsupportedSpace: It cannot handle this observation or action space.
        """
        ...

    def build_actor(self, env_spec: EnvSpec, *, seed: int = 0) -> ActorPolicy:
        """Build a policy for an actor: on the CPU, without optimiser. Default: a whole agent."""
        return self.build(env_spec, device="cpu", seed=seed)

    def for_actor(self, actor: int, n_actors: int) -> AgentConfig:
        """The config of one actor of n; they may differ in exploration. Default: all alike."""
        return self


class StepProcessor(Protocol):
    """Turns steps into items; belongs to one actor. Holds copies of what it needs, never references.

    A method is optional: ``cut(obs) -> Items | None`` ends every open episode at the observations that its last step
    led to, as a truncation would, and gives the items that this completes. The synchronous trainer asks for it at
    checkpoints; without it, what is incomplete is dropped.
    """

    def reset(self, init_obs: Obs) -> None:
        """Begin with these first observations ``[n_envs, ...]``."""
        ...

    def process(self, step: Step) -> Items | None:
        """Items that are complete after this step, None if there are none; valid until the next call."""
        ...


@runtime_checkable
class StepProcessorConfig(Protocol):
    """Builds step processors, and knows their layout before any is built."""

    def layout(self, env_spec: EnvSpec) -> Layout:
        """The layout of the items.

        Raises:
            UnsupportedSpace: The environment's spaces cannot be stored.
        """
        ...

    def build(self, env_spec: EnvSpec, n_envs: int) -> StepProcessor:
        """Build one for n environments."""
        ...


class Evaluator(Protocol):
    """Scores an agent. Holds configs; builds its environment at the first call, and closes it in `close`.

    The asynchronous trainer sends a copy of it to a process of its own, once; where that is not possible or not wanted,
    it scores the learner's agent in place.

    Two attributes are optional; a trainer sets them where they are. ``stop``: a callable that is true once the
    evaluation is to end early, with the score NaN; to ask it at each step is a sign of life. ``guard``: held while the
    environment is built.
    """

    def evaluate(self, agent: Policy) -> tuple[float, Record]:
        """Score (higher is better) and metrics. Leaves the agent in training mode."""
        ...

    def close(self) -> None:
        """Free the environment."""
        ...


class Recorder(Protocol):
    """Keeps metrics and models. Never raises in a trainer: it reports a failure once and goes on."""

    def store(self, record: Record) -> None:
        """Take metrics; they are aggregated until the next flush."""
        ...

    def flush(self, step: int) -> None:
        """Write what was stored, at `step` opt steps. ``env_steps`` and ``time_s`` come in the records."""
        ...

    def save_model(self, name: str, agent: Agent) -> None:
        """Keep the agent's parameters under this name (``best``, ``last`` or a number)."""
        ...

    def load_model(self, name: str, agent: Agent) -> None:
        """Give the agent the parameters kept under this name."""
        ...

    def close(self) -> None:
        """Write everything and free what is held. May be called twice."""
        ...
