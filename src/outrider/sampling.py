"""(1) Step processors, which turn steps into items, and the Sampler, which makes the steps.

One assembler for every actor and for the synchronous trainer: :meth:`Sampler.sample`.

**Process:** each actor, or the learner's in synchronous mode. **Owns:** the arrays of the items; the current
observation. **Blocks:** where the environment, the policy or the buffer does. **Closes:** nothing: who built the
environment closes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.config import Config, require
from outrider.core import Env, EnvSpec, Policy, StepProcessor
from outrider.data import Array, Episode, Field, Items, Layout, Obs, Step, any_true, leaves
from outrider.errors import LayoutMismatch
from outrider.item_rows import Rows, valid_rows
from outrider.single_step import SingleStepProcessor
from outrider.spaces import act_field, obs_fields


def transition_layout(env_spec: EnvSpec) -> Layout:
    """Layout of transition rows.

    ==================  ======================================================================================
    column              meaning
    ==================  ======================================================================================
    ``obs`` (``obs.*``)  the state it starts in
    ``act``             the action taken there, discrete ones counted from 0
    ``reward``          float32; for n steps their discounted sum, computed in float64
    ``next_obs``        the true successor, ``n_steps`` later, never an observation of a reset
    ``terminated``      bool: there is nothing after ``next_obs``
    ``truncated``       bool: the episode was cut at ``next_obs``; its value still counts
    ``n_steps``         int32: steps really taken, k; whoever bootstraps discounts by ``gamma**k``
    ``model_version``   int64: version of the model that chose ``act``
    ==================  ======================================================================================

    Raises:
        UnsupportedSpace: A space that cannot be stored.
    """
    obs_space = env_spec.observation_space
    return Layout(
        "transitions",
        (
            *obs_fields(obs_space, "obs"),
            act_field(env_spec.action_space),
            Field("reward", (), np.dtype(np.float32)),
            *obs_fields(obs_space, "next_obs"),
            Field("terminated", (), np.dtype(np.bool_)),
            Field("truncated", (), np.dtype(np.bool_)),
            Field("n_steps", (), np.dtype(np.int32)),
            Field("model_version", (), np.dtype(np.int64)),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class SimpleStepProcessorConfig(Config):
    """One transition per env step."""

    def layout(self, env_spec: EnvSpec) -> Layout:
        """See :func:`transition_layout`."""
        return transition_layout(env_spec)

    def build(self, env_spec: EnvSpec, n_envs: int) -> SimpleStepProcessor | SingleStepProcessor:
        """Build one for n environments."""
        layout = self.layout(env_spec)
        if n_envs == 1 and SingleStepProcessor.suits(layout):
            return SingleStepProcessor(layout)
        return SimpleStepProcessor(layout, n_envs)


class SimpleStepProcessor:
    """Each valid step of each environment becomes a row."""

    def __init__(self, layout: Layout, n_envs: int) -> None:
        # The first observation of the next rows is written when these rows are complete: hence two blocks.
        self._blocks = [Rows.zeros(layout, n_envs) for _ in range(2)]
        for block in self._blocks:
            block.columns["n_steps"][...] = 1

    def reset(self, init_obs: Obs) -> None:
        """Begin with these first observations ``[n_envs, ...]``."""
        self._blocks[0].put_obs("obs", init_obs)

    def process(self, step: Step) -> Items | None:
        """The rows ``[m]`` of this step, m <= n_envs; they hold until the next call."""
        block, following = self._blocks
        block.put_obs("next_obs", step.obs)
        block.act[...] = step.act
        block.reward[...] = step.reward
        block.terminated[...] = step.terminated
        block.truncated[...] = step.truncated
        block.put_version(step.model_version)
        following.put_obs("obs", step.init_obs)
        self._blocks = [following, block]
        return valid_rows(block.rows, step.valid)


@dataclass(frozen=True, kw_only=True)
class NStepProcessorConfig(Config):
    """Transitions over up to n steps; shorter ones at the end of an episode, so that every state starts one.

    Attributes:
        n_steps: n, at least 1.
        gamma: Discount of the rewards within a transition, which must be the agent's, since that discounts the
            bootstrap by gamma**k. None: a run config fills in the agent's.

    Raises:
        ConfigError: A value is out of range.
    """

    n_steps: int = 3
    gamma: float | None = None

    def __post_init__(self) -> None:
        require(self.n_steps >= 1, "n_steps", "at least 1", self.n_steps)
        require(self.gamma is None or 0.0 <= self.gamma <= 1.0, "gamma", "a number in [0, 1]", self.gamma)

    def layout(self, env_spec: EnvSpec) -> Layout:
        """See :func:`transition_layout`.

        Raises:
            ConfigError: Nobody has said what gamma is.
        """
        require(self.gamma is not None, "step_processor.gamma", "the agent's gamma", self.gamma)
        return transition_layout(env_spec)

    def build(self, env_spec: EnvSpec, n_envs: int) -> NStepProcessor:
        """Build one for n environments."""
        layout = self.layout(env_spec)
        assert self.gamma is not None
        return NStepProcessor(layout, n_envs, self.n_steps, self.gamma)


def require_same_discount(config: Any, agent_config: Any, section: str = "step_processor") -> None:
    """Refuse rewards that are summed with another discount than the agent bootstraps with.

    Args:
        config: Of what sums rewards: the step processor, or a replay buffer that makes transitions. Only a field
            ``gamma`` counts.
        agent_config: Likewise.
        section: Where the config stands, for the error.

    Raises:
        ConfigError: Both have one, and they differ.
    """
    summed, bootstrapped = (getattr(part, "gamma", None) for part in (config, agent_config))
    if summed is not None and bootstrapped is not None:
        require(summed == bootstrapped, f"{section}.gamma", f"agent.gamma ({bootstrapped})", summed)


class NStepProcessor:
    """A sliding window over each environment's last n steps, which never reaches beyond the end of an episode.

    The row that starts at s_t after k steps holds ``sum_{i<k} gamma**i r_{t+i}`` (float64 until it is stored) and
    s_{t+k}: k = n, or less where the episode terminated or was truncated (Sutton & Barto, 2nd ed., eq. 7.1 without
    the bootstrap).

    Step t is written to slot ``t % (n + 1)``, for all environments alike. An environment's open starts are those in
    the last ``pending`` slots: a reset that takes a step of its own finds none open. While all windows are full, the
    slot of step t - n + 1 is the block of rows that is handed out, without a copy; else the rows are gathered.
    """

    def __init__(self, layout: Layout, n_envs: int, n_steps: int, gamma: float) -> None:
        slots = n_steps + 1  # one more, since the next start is written while a block is handed out
        self._n, self._n_envs, self._slots = n_steps, n_envs, slots
        self._starts = [Rows.zeros(layout, n_envs) for _ in range(slots)]
        for block in self._starts:
            block.columns["n_steps"][...] = n_steps
        self._gathered = Rows.zeros(layout, n_envs * n_steps)
        self._sums = np.zeros((slots, n_envs), np.float64)
        ages = (np.arange(slots)[:, None] - np.arange(slots)) % slots  # of slot s (column) when t is in the row's slot
        self._discounts = (float(gamma) ** ages)[:, :, None]
        self._pending = [0] * n_envs
        self._all_but_full = n_steps == 1  # every environment has n - 1 open starts
        self._t = 0

    def reset(self, init_obs: Obs) -> None:
        """Begin with these first observations ``[n_envs, ...]``; open windows are dropped."""
        self._pending = [0] * self._n_envs
        self._all_but_full = self._n == 1
        self._starts[self._t].put_obs("obs", init_obs)

    def process(self, step: Step) -> Items | None:
        """Rows ``[m]`` that this step completed, those of an environment in order of time; None if there are none."""
        t = self._t
        start = self._starts[t]
        start.act[...] = step.act
        start.put_version(step.model_version)
        self._sums[t] = 0.0
        self._sums += self._discounts[t] * step.reward
        ended = True in step.terminated.tolist() or True in step.truncated.tolist()
        if self._all_but_full and not ended and False not in step.valid.tolist():
            items: Items | None = self._hand_out(step)
        else:
            items = self._gather(step)
        self._t = (t + 1) % self._slots
        self._starts[self._t].put_obs("obs", step.init_obs)
        return items

    def _hand_out(self, step: Step) -> Array:
        """All windows are full, no episode ended: the block of n - 1 steps ago is complete."""
        slot = (self._t + 2) % self._slots
        block = self._starts[slot]
        block.put_obs("next_obs", step.obs)
        block.reward[...] = self._sums[slot]
        block.terminated[...] = False
        block.truncated[...] = False
        return block.rows

    def _gather(self, step: Step) -> Array | None:
        n, valid = self._n, step.valid.tolist()
        flags = zip(step.terminated.tolist(), step.truncated.tolist(), valid, strict=True)
        ended = [i for i, (dead, cut, counts) in enumerate(flags) if counts and (dead or cut)]
        pending = [p + 1 if counts else 0 for p, counts in zip(self._pending, valid, strict=True)]
        full = [i for i, p in enumerate(pending) if p == n]
        m = self._write(step, full, n, 0)
        for k in range(n - 1 if ended else 0, 0, -1):
            m = self._write(step, [i for i in ended if pending[i] >= k], k, m)
        for i in full:
            pending[i] = n - 1
        for i in ended:
            pending[i] = 0
        self._pending = pending
        self._all_but_full = min(pending) == n - 1
        return self._gathered.rows[:m] if m else None

    def cut(self, obs: Obs) -> Items | None:
        """Rows ``[m]`` of all open windows, ended at these observations as by a truncation; call `reset` next."""
        n = self._n_envs
        self._t = (self._t - 1) % self._slots  # the windows ended with the last step
        nothing, everything = np.zeros(n, np.bool_), np.ones(n, np.bool_)
        step = Step(nothing, obs, obs, np.zeros(n), nothing, everything, everything)
        m = 0
        for k in range(self._n - 1, 0, -1):
            m = self._write(step, [i for i, p in enumerate(self._pending) if p >= k], k, m)
        self._pending = [0] * n
        return self._gathered.rows[:m] if m else None

    def _write(self, step: Step, rows: list[int], k: int, at: int) -> int:
        """Write the rows of k steps that end with this one, from row `at` on; returns the row after them."""
        if not rows:
            return at
        slot = (self._t - k + 1) % self._slots
        start, out, to = self._starts[slot], self._gathered, slice(at, at + len(rows))
        for name in start.obs_names:
            out.columns[name][to] = start.columns[name][rows]
        for name, part in leaves(step.obs, "next_obs"):
            out.columns[name][to] = part[rows]
        out.act[to] = start.act[rows]
        out.reward[to] = self._sums[slot, rows]
        out.terminated[to] = step.terminated[rows]
        out.truncated[to] = step.truncated[rows]
        out.columns["n_steps"][to] = k
        out.columns["model_version"][to] = start.columns["model_version"][rows]
        return at + len(rows)


_NO_EPISODES: tuple[Episode, ...] = ()


class Sampler:
    """Steps the environments with the policy, and gives what the step processor makes of it.

    Args:
        env: Stepped, but not closed.
        policy: Chooses the actions.
        processor: Makes the items.
        layout: Layout of the items; the first action is compared with its column ``act``. None: no comparison.

    Attributes:
        env_steps: Valid single-environment steps so far.
        episodes: Finished episodes so far.
    """

    def __init__(self, env: Env, policy: Policy, processor: StepProcessor, layout: Layout | None = None) -> None:
        self._env, self._policy, self._processor = env, policy, processor
        self._unchecked = layout
        self._obs: Obs | None = None
        self._alone = env.n_envs == 1
        self._return, self._length = 0.0, 0  # of one environment: faster than arrays
        self._returns = np.zeros(env.n_envs)
        self._started = np.zeros(env.n_envs, np.int64)  # the step before the first of the episode
        self._steps = 0
        self.env_steps = 0
        self.episodes = 0

    def cut(self) -> Items | None:
        """End all open episodes as a truncation would; the next :meth:`sample` starts new ones.

        Returns:
            Items that this completes, as far as the step processor has a method ``cut``.
        """
        obs, self._obs = self._obs, None
        cut = getattr(self._processor, "cut", None)
        return None if obs is None or cut is None else cut(obs)

    def reset(self, seed: Sequence[int] | None = None) -> None:
        """Start an episode in every environment, with these seeds if there are any; open ones are forgotten."""
        self._return, self._length = 0.0, 0
        self._returns[...] = 0.0
        self._started[...] = self._steps
        self._obs = self._env.reset(seed)
        self._processor.reset(self._obs)

    def sample(self, model_version: int) -> tuple[Items | None, Sequence[Episode]]:
        """Make one step in every environment.

        Args:
            model_version: Version of the model that the policy acts with.

        Returns:
            Items that are complete now, valid until the next call, None if there are none; and the episodes that
            ended with this step.

        Raises:
            LayoutMismatch: The policy's first action has another shape or dtype than the layout says.
        """
        if self._obs is None:
            self.reset()
            assert self._obs is not None
        act = self._policy.sample(self._obs)
        if self._unchecked is not None:
            _require_act(act, self._unchecked, self._env.n_envs)
            self._unchecked = None
        step = self._env.step(act)
        step.model_version = model_version
        items = self._processor.process(step)
        self._obs = step.init_obs
        if not self._alone:
            return items, self._count(step)
        reward = step.reward if step.raw_reward is None else step.raw_reward
        if step.valid.item():
            self.env_steps += 1
            self._length += 1
            self._return += reward.item()
        ended = step.terminated.item() or step.truncated.item()
        return items, self._end() if ended else _NO_EPISODES

    def _end(self) -> Sequence[Episode]:
        episode = Episode(self._return, self._length, 0)
        self._return, self._length = 0.0, 0
        self.episodes += 1
        return [episode]

    def _count(self, step: Step) -> Sequence[Episode]:
        reward = step.reward if step.raw_reward is None else step.raw_reward
        self._steps += 1
        self.env_steps += len(reward)
        only_reset = step.valid.tobytes().count(0)
        if only_reset:
            self.env_steps -= only_reset
            self._started += ~step.valid
            reward = np.where(step.valid, reward, 0.0)
        self._returns += reward
        if not (any_true(step.terminated) or any_true(step.truncated)):
            return _NO_EPISODES
        ended = np.flatnonzero(step.terminated | step.truncated)
        lengths = self._steps - self._started[ended]
        returns = self._returns[ended]
        self._returns[ended] = 0.0
        self._started[ended] = self._steps
        self.episodes += len(ended)
        return [Episode(*e) for e in zip(returns.tolist(), lengths.tolist(), ended.tolist(), strict=True)]


def _require_act(act: Any, layout: Layout, n_envs: int) -> None:
    field = next(f for f in layout.fields if f.name == "act")
    expected = f"{[n_envs, *field.shape]} {field.dtype}"
    if not isinstance(act, np.ndarray):
        raise LayoutMismatch(f"actions: expected an array {expected} from the policy, got {type(act).__name__}")
    if act.shape != (n_envs, *field.shape) or act.dtype != field.dtype:
        raise LayoutMismatch(f"actions: expected {expected} from the policy, got {list(act.shape)} {act.dtype}")
