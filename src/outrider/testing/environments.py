"""Toy environments whose observations and rewards tell where they came from.

They can be named in a config: ``GymEnvConfig(id="outrider.testing:TagEnv", kwargs={"lengths": (3, 5)})``.
"""

from __future__ import annotations

import copy
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from outrider.data import Array

StepOf = tuple[Any, float, bool, bool, dict[str, Any]]
ModeName = Literal["NextStep", "SameStep", "Disabled"]


class CountEnv(gymnasium.Env[Array, Any]):
    """Observation ``[t]``, reward 1; truncated after `length` steps."""

    terminates = False

    def __init__(self, length: int = 5) -> None:
        self.length = length
        self.observation_space = spaces.Box(0.0, np.inf, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Start an episode at t = 0."""
        super().reset(seed=seed)
        self.t = 0
        return np.array([0.0], np.float32), {}

    def step(self, action: Any) -> StepOf:
        """Count on."""
        reward = self.reward()
        self.t += 1
        end = self.t >= self.length
        return np.array([self.t], np.float32), reward, end and self.terminates, end and not self.terminates, {}

    def reward(self) -> float:
        """Reward of the step from t to t + 1."""
        return 1.0


class TermEnv(CountEnv):
    """Like :class:`CountEnv`, but terminated after `length` steps."""

    terminates = True


class Pow2Env(CountEnv):
    """Like :class:`CountEnv` with reward 2**t, so that every sum of rewards tells which steps are in it.

    Args:
        length: Steps of an episode; at most 24 keep the rewards' sums exact in float32.
        terminates: The end is a termination.
    """

    def __init__(self, length: int = 5, terminates: bool = False) -> None:
        super().__init__(length)
        self.terminates = terminates

    def reward(self) -> float:
        """2**t."""
        return 2.0**self.t


class TagEnv(gymnasium.Env[Any, Any]):
    """Observation ``[stream, episode, t, global_step]`` int64, which proves where a row comes from.

    ``stream`` is the seed of the first reset: with the seeds that a run derives for its actors it names the actor,
    its incarnation and the environment. ``global_step`` counts the env steps of this environment. The reward is
    ``4 * global_step + action``, in float32 exact for four million steps.

    Args:
        lengths: Steps of the first, second, ... episode; then from the beginning.
        terminates: The ends are terminations: of all episodes, of none, or of every second one (None).
        reuse: Return the same array every time, changed in place.
        dtype: Of the observation.
    """

    def __init__(
        self, lengths: tuple[int, ...] = (5,), terminates: bool | None = None, reuse: bool = False, dtype: str = "int64"
    ) -> None:
        self.lengths, self.terminates, self.reuse = tuple(lengths), terminates, reuse
        limit = 2**62 if np.dtype(dtype).kind == "i" else np.inf
        self.observation_space = spaces.Box(-1, limit, (4,), np.dtype(dtype).type)
        self.action_space = spaces.Discrete(4)
        self.stream, self.episode, self.t, self.global_step = -1, -1, 0, 0
        self._array = np.zeros(4, dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Start the next episode."""
        super().reset(seed=seed)
        if seed is not None:
            self.stream = seed
        self.episode += 1
        self.t = 0
        return self._obs(), {}

    def step(self, action: Any) -> StepOf:
        """Count on."""
        reward = 4.0 * self.global_step + float(action)
        self.t += 1
        self.global_step += 1
        end = self.t >= self.lengths[self.episode % len(self.lengths)]
        terminates = self.episode % 2 == 0 if self.terminates is None else self.terminates
        return self._obs(), reward, end and terminates, end and not terminates, {}

    def _obs(self) -> Array:
        if not self.reuse:
            self._array = np.zeros_like(self._array)
        self._array[:] = self.stream, self.episode, self.t, self.global_step
        return self._array


class SpacesEnv(gymnasium.Env[Any, Any]):
    """Random observations of any space; refuses actions that are not in its action space, in its dtype and shape.

    Args:
        observation_space: Observations are drawn from it.
        action_space: Actions have to lie in it.
        length: Steps until the episode is truncated.
    """

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], length: int = 7) -> None:
        self.observation_space, self.action_space = copy.deepcopy((observation_space, action_space))
        self.length = length
        self.t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> StepOf:
        """Check the action."""
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        expected = np.asarray(self.action_space.sample())
        assert np.asarray(action).dtype == expected.dtype, f"{action!r} has not dtype {expected.dtype}"
        assert np.shape(action) == expected.shape, f"{action!r} has not shape {expected.shape}"
        self.t += 1
        return self.observation_space.sample(), 0.5, False, self.t >= self.length, {}


class FailingEnv(CountEnv):
    """Fails in a chosen way at a chosen place.

    Args:
        where: The call that fails.
        how: ``raise`` a ValueError("as asked"), ``exit`` (SystemExit), ``segfault``, ``kill`` (SIGKILL), or ``hang``.
        at: The call that fails, counted from 0, of `reset` or `step`.
        length: Steps of an episode.
    """

    def __init__(
        self,
        where: Literal["init", "reset", "step", "close"] = "step",
        how: Literal["raise", "exit", "segfault", "kill", "hang"] = "raise",
        at: int = 0,
        length: int = 5,
    ) -> None:
        super().__init__(length)
        self.where, self.how, self.at = where, how, at
        self._fail_in("init")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Start an episode, or fail."""
        self._fail_in("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> StepOf:
        """Count on, or fail."""
        self._fail_in("step")
        return super().step(action)

    def close(self) -> None:
        """Close, or fail."""
        self._fail_in("close")

    def _fail_in(self, where: str) -> None:
        if where != self.where:
            return
        if where in ("reset", "step") and self.at > 0:
            self.at -= 1
            return
        if self.how == "raise":
            raise ValueError("as asked")
        if self.how == "exit":
            sys.exit(0)
        if self.how == "segfault":
            ctypes.string_at(0)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600.0)


def vector_count_env(
    num_envs: int, mode: ModeName = "NextStep", length: int = 5, terminates: bool = False
) -> VectorEnv[Any, Any, Any]:
    """A Gymnasium vector environment of :class:`CountEnv` or :class:`TermEnv`, in any autoreset mode."""
    kind = TermEnv if terminates else CountEnv
    return _vector(lambda: kind(length), num_envs, mode)


def vector_tag_env(num_envs: int, mode: ModeName = "NextStep", **kwargs: Any) -> VectorEnv[Any, Any, Any]:
    """A Gymnasium vector environment of :class:`TagEnv`, in any autoreset mode."""
    return _vector(lambda: TagEnv(**kwargs), num_envs, mode)


def _vector(make: Callable[[], gymnasium.Env[Any, Any]], num_envs: int, mode: ModeName) -> VectorEnv[Any, Any, Any]:
    return SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode(mode))
