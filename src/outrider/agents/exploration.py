"""How agents with discrete actions explore.

What an explorer does depends on the run's global ``env_steps`` and on its own parameters only: an actor that is
restarted, or a run that is resumed, goes on where it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from outrider.config import Config, require
from outrider.data import Array, any_true


@dataclass(frozen=True, kw_only=True)
class EpsilonGreedyConfig(Config):
    """Random actions with probability epsilon, which falls linearly.

    Attributes:
        start: Epsilon at env step 0.
        final: Epsilon from `decay_env_steps` on.
        decay_env_steps: Length of the decay in env steps of the whole run; 0: `final` from the beginning.
    """

    start: float = 1.0
    final: float = 0.05
    decay_env_steps: int = 10_000

    def __post_init__(self) -> None:
        require(0.0 <= self.start <= 1.0, "start", "a probability", self.start)
        require(0.0 <= self.final <= 1.0, "final", "a probability", self.final)
        require(self.decay_env_steps >= 0, "decay_env_steps", "at least 0", self.decay_env_steps)

    def epsilon(self, env_steps: int) -> float:
        """Epsilon at this number of env steps of the run."""
        if env_steps >= self.decay_env_steps:
            return self.final
        return self.start + (self.final - self.start) * env_steps / self.decay_env_steps

    def choose(self, q: Array, env_steps: int, rng: np.random.Generator) -> Array:
        """Actions ``[n]`` int64 for values ``[n, n_actions]``."""
        return epsilon_greedy(q, self.epsilon(env_steps), rng)

    def for_actor(self, actor: int, n_actors: int) -> EpsilonGreedyConfig:
        """The same for every actor."""
        return self


@dataclass(frozen=True, kw_only=True)
class ApexEpsilonConfig(Config):
    """A constant epsilon for each actor: base ** (1 + alpha * i / (n - 1)) (Horgan et al. 2018, section 4.1).

    Attributes:
        base: Epsilon of the first actor, and of a single one.
        alpha: How much greedier the last actor is.
    """

    base: float = 0.4
    alpha: float = 7.0

    def __post_init__(self) -> None:
        require(0.0 <= self.base <= 1.0, "base", "a probability", self.base)
        require(self.alpha >= 0.0, "alpha", "at least 0", self.alpha)

    def choose(self, q: Array, env_steps: int, rng: np.random.Generator) -> Array:
        """Actions ``[n]`` int64 for values ``[n, n_actions]``, with the first actor's epsilon."""
        return epsilon_greedy(q, self.base, rng)

    def for_actor(self, actor: int, n_actors: int) -> EpsilonGreedyConfig:
        """The constant epsilon of actor `actor` of `n_actors`."""
        epsilon = self.base ** (1.0 + self.alpha * actor / max(n_actors - 1, 1))
        return EpsilonGreedyConfig(start=epsilon, final=epsilon, decay_env_steps=0)


@dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(Config):
    """Actions with probability proportional to exp(q / temperature).

    Attributes:
        temperature: In units of value; small: nearly greedy.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        require(self.temperature > 0.0, "temperature", "above 0", self.temperature)

    def choose(self, q: Array, env_steps: int, rng: np.random.Generator) -> Array:
        """Actions ``[n]`` int64 for values ``[n, n_actions]``."""
        # the largest of logits plus Gumbel noise is a draw from their softmax
        chosen: Array = np.argmax(q / self.temperature + rng.gumbel(size=q.shape), axis=1)
        return chosen

    def for_actor(self, actor: int, n_actors: int) -> SoftmaxConfig:
        """The same for every actor."""
        return self


ExplorerConfig: TypeAlias = EpsilonGreedyConfig | ApexEpsilonConfig | SoftmaxConfig


def epsilon_greedy(q: Array, epsilon: float, rng: np.random.Generator) -> Array:
    """The best action of each row, or with probability epsilon any of them."""
    act: Array = q.argmax(1)
    if epsilon > 0.0:
        random = rng.random(len(q)) < epsilon
        if any_true(random):
            act[random] = rng.integers(q.shape[1], size=np.count_nonzero(random))
    return act
