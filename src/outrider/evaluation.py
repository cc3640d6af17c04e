"""Scores an agent by whole episodes in environments of its own."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.config import Config, require
from outrider.core import Env, EnvConfig, Evaluator, Policy
from outrider.data import Episode, Record
from outrider.flags import InitGuard
from outrider.seeding import Role, env_seeds

MAX_ENVS = 8
"""Environments that play side by side when their number is not given."""

ENDLESS_S = 60.0
ENDLESS = (
    "evaluation: no episode has ended for %g s (%d of %d have); the longest has %d steps so far. "
    "If nothing else ends episodes, env.max_episode_steps does."
)

log = logging.getLogger(__name__)

_GUARD_WAIT_S = 0.1  # between two questions whether to stop


@dataclass(frozen=True, kw_only=True)
class DefaultEvaluatorConfig(Config):
    """Builds a :class:`DefaultEvaluator`.

    Attributes:
        n_episodes: Whole episodes per evaluation, at least 1.
        n_envs: Environments that play them side by side; None: as many as episodes, at most 8.
        seed: Seed of the environments, the same at every evaluation; at least 0.
    """

    n_episodes: int = 10
    n_envs: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.n_episodes >= 1, "n_episodes", "at least 1", self.n_episodes)
        require(
            self.n_envs is None or 1 <= self.n_envs <= self.n_episodes,
            "n_envs",
            f"1 to n_episodes ({self.n_episodes})",
            self.n_envs,
        )
        require(self.seed >= 0, "seed", "a seed of at least 0", self.seed)

    def build(self, env_config: EnvConfig) -> DefaultEvaluator:
        """Build an evaluator for these environments (given as they are evaluated: ``env_config.eval()``)."""
        return DefaultEvaluator(env_config, self.seed, self.n_episodes, self.n_envs)


class DefaultEvaluator:
    """Plays whole episodes and reports their mean return.

    Each environment plays a fixed number of episodes, so short ones are not counted more often than long ones,
    and starts from the same seeds at every evaluation: equal policies get equal scores.

    Process: the caller's (the learner, or an evaluator process).
    Owns: its environments, built at the first evaluation.
    Blocks: in `evaluate`, until all episodes have ended or `stop` says so.
    Closes: its environments, in `close`.

    Args:
        env_config: Environments to play in, as they are evaluated.
        seed: Seed of the environments.
        n_episodes: Whole episodes per evaluation, at least 1.
        n_envs: Environments side by side; None: as many as episodes, at most 8.

    Attributes:
        stop: Asked once per step, None or a callable without arguments: True ends the evaluation early, with the
            score NaN (better than no other score) and an empty record. Being asked is also a sign of life.
        on_episode: Called with each episode when it has ended, or None.
        guard: Held while the environments are built, None or the guard that the actors build theirs under.
        episodes: The episodes of the last evaluation, in the order in which they ended.

    Raises:
        ConfigError: A number is out of its range.
    """

    def __init__(self, env_config: EnvConfig, seed: int = 0, n_episodes: int = 1, n_envs: int | None = None) -> None:
        checked = DefaultEvaluatorConfig(n_episodes=n_episodes, n_envs=n_envs, seed=seed)
        self.env_config = env_config
        self.n_episodes = checked.n_episodes
        self.n_envs = checked.n_envs or min(n_episodes, MAX_ENVS)
        self.stop: Callable[[], bool] | None = None
        self.on_episode: Callable[[Episode], object] | None = None
        self.guard: InitGuard | None = None
        self.episodes: list[Episode] = []
        self._seeds = env_seeds(seed, 0, 0, self.n_envs, Role.EVALUATOR)
        self._env: Env | None = None

    def evaluate(self, agent: Policy) -> tuple[float, Record]:
        """Mean undiscounted return of unclipped rewards, and ``eval/*`` metrics.

        Leaves the agent in training mode, whatever happens.
        """
        self.episodes = []
        if self._env is None and self._take_guard():
            try:
                self._env = self.env_config.build(self._seeds, self.n_envs)
            finally:
                if self.guard is not None:
                    self.guard.release()
        if self._env is not None:
            agent.eval()
            try:
                self.episodes = self._play(self._env, agent)
            finally:
                agent.train()
        if len(self.episodes) < self.n_episodes:
            return float("nan"), {}
        returns = np.array([episode.ret for episode in self.episodes])
        score = float(returns.mean())
        return score, {
            "eval/mean_reward": score,
            "eval/std_reward": float(returns.std()),
            "eval/min_reward": float(returns.min()),
            "eval/max_reward": float(returns.max()),
            "eval/mean_ep_length": float(np.mean([episode.length for episode in self.episodes])),
            "eval/n_episodes": self.n_episodes,
        }

    def _take_guard(self) -> bool:
        """Wait until nobody builds an environment; False if it was stopped meanwhile."""
        while self.guard is not None and not self.guard.acquire(_GUARD_WAIT_S):
            if self.stop is not None and self.stop():
                return False
        return True

    def _play(self, env: Env, agent: Policy) -> list[Episode]:
        """The episodes of one evaluation; fewer than asked for if it was stopped."""
        episodes: list[Episode] = []
        left = np.full(self.n_envs, self.n_episodes // self.n_envs)
        left[: self.n_episodes % self.n_envs] += 1
        returns, lengths = np.zeros(self.n_envs), np.zeros(self.n_envs, np.int64)
        obs = env.reset(self._seeds)
        quiet_until = time.monotonic() + ENDLESS_S
        while left.any():
            if self.stop is not None and self.stop():
                break
            if time.monotonic() > quiet_until:
                quiet_until = math.inf  # said once
                log.warning(ENDLESS, ENDLESS_S, len(episodes), self.n_episodes, lengths.max())
            step = env.step(agent.sample(obs))
            reward = step.reward if step.raw_reward is None else step.raw_reward
            returns += np.where(step.valid, reward, 0.0)
            lengths += step.valid
            for i in np.flatnonzero((step.terminated | step.truncated) & step.valid):
                if left[i]:
                    episodes.append(Episode(float(returns[i]), int(lengths[i]), int(i)))
                    left[i] -= 1
                    if self.on_episode is not None:
                        self.on_episode(episodes[-1])
                    quiet_until = time.monotonic() + ENDLESS_S
                returns[i], lengths[i] = 0.0, 0
            obs = step.init_obs
        return episodes

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_env": None}  # a copy in another process builds its own

    def close(self) -> None:
        """Close the environments; a later evaluation builds new ones."""
        if self._env is not None:
            self._env.close()
            self._env = None


@contextmanager
def attended(evaluator: Evaluator, stop: Callable[[], bool], guard: InitGuard | None) -> Iterator[None]:
    """Give an evaluator the attributes ``stop`` and ``guard``, if it has them, until the block is left.

    Args:
        evaluator: Any evaluator.
        stop: Whether an evaluation is to end early.
        guard: What to hold while its environments are built.
    """
    given = {"stop": stop, "guard": guard}
    former = {name: getattr(evaluator, name) for name in given if hasattr(evaluator, name)}
    for name in former:
        setattr(evaluator, name, given[name])
    try:
        yield
    finally:
        for name, value in former.items():
            setattr(evaluator, name, value)
