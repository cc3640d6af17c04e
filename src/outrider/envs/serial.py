"""n environments stepped one after the other in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from outrider.data import Array, Obs, Step
from outrider.errors import ConfigError
from outrider.spaces import act_dtype, action_start, copy_obs, empty_obs, obs_fields


class SerialEnv:
    """Steps single environments one after the other; an ended one is reset at once, so every row is valid.

    Observations are copied into arrays of the dtype of the space, and each environment gets an action of its own:
    environments that reuse or change their arrays do no harm. Exceptions of an environment pass unchanged.

    **Process:** the caller's. **Owns:** the environments and the arrays of each Step. **Blocks:** as long as the
    environments take. **Closes:** the environments.

    Args:
        envs: At least one environment, all with the same spaces.
        seeds: One seed per environment, used by the first ``reset(None)``.
    """

    def __init__(self, envs: Sequence[gymnasium.Env[Any, Any]], seeds: Sequence[int]) -> None:
        self._envs = tuple(envs)
        self.n_envs = len(self._envs)
        self.observation_space = self._envs[0].observation_space
        self.action_space = self._envs[0].action_space
        self._fields = obs_fields(self.observation_space)
        self._require_equal_spaces()
        self._seeds: Sequence[int] | None = seeds
        self._act_dtype = act_dtype(self.action_space)
        self._discrete = isinstance(self.action_space, spaces.Discrete)
        self._start = action_start(self.action_space)
        # Rows are then numbers as they should be, which nobody can change.
        self._as_it_is = self._discrete and not self._start and self._act_dtype == np.int64
        n = self.n_envs
        self._obs, self._init_obs = empty_obs(self.observation_space, n), empty_obs(self.observation_space, n)
        self._reward = np.zeros(n, np.float64)
        self._terminated, self._truncated = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        self._valid = np.ones(n, np.bool_)
        self._valid.flags.writeable = False

    def reset(self, seed: Sequence[int] | None = None) -> Obs:
        """Start an episode in every environment; see :meth:`outrider.core.Env.reset`."""
        seeds = self._seeds if seed is None else seed
        self._seeds = None
        for i, env in enumerate(self._envs):
            if seeds is None:
                first, _ = env.reset()
            else:
                env.action_space.seed(int(seeds[i]))
                first, _ = env.reset(seed=int(seeds[i]))
            _require_fits(first, self._obs, "obs")
            _put(self._obs, i, first)
        return self._obs

    def step(self, act: Array) -> Step:
        """Apply actions ``[n_envs, ...]``, discrete ones counted from 0; see :meth:`outrider.core.Env.step`."""
        obs, reward, terminated, truncated = self._obs, self._reward, self._terminated, self._truncated
        own = act if self._as_it_is else self._own_actions(act)
        ended: list[int] = []
        for i, env in enumerate(self._envs):
            last, reward[i], dead, cut, _ = env.step(own[i])
            if isinstance(obs, dict):
                _put(obs, i, last)
            else:
                obs[i] = last
            terminated[i], truncated[i] = dead, cut
            if dead or cut:
                ended.append(i)
        init_obs = self._reset_ended(ended) if ended else obs
        return Step(act, obs, init_obs, reward, terminated, truncated, self._valid)

    def close(self) -> None:
        """Close every environment. May be called twice."""
        envs, self._envs = self._envs, ()
        for env in envs:
            env.close()

    def _reset_ended(self, ended: Sequence[int]) -> Obs:
        copy_obs(self._obs, self._init_obs)
        for i in ended:
            _put(self._init_obs, i, self._envs[i].reset()[0])
        return self._init_obs

    def _own_actions(self, act: Array) -> Array | list[Array]:
        """What each environment gets: its own, in the dtype and the numbers of its action space."""
        own = np.array(act, self._act_dtype) + self._start
        return [own[i, ...] for i in range(self.n_envs)] if own.ndim == 1 and not self._discrete else own

    def _require_equal_spaces(self) -> None:
        for env in self._envs[1:]:
            if obs_fields(env.observation_space) != self._fields or env.action_space != self.action_space:
                raise ConfigError(
                    "env.id",
                    f"environments with equal spaces ({self.observation_space}, {self.action_space})",
                    f"{env.observation_space}, {env.action_space}",
                )


def _put(dst: Obs, i: int, obs: Any) -> None:
    """Copy the observation of one environment into row i."""
    if isinstance(dst, dict):
        for key, part in dst.items():
            _put(part, i, obs[key])
    else:
        dst[i] = obs


def _require_fits(obs: Any, dst: Obs, name: str) -> None:
    """Refuse an observation that numpy would have stretched to the shape of the space."""
    if isinstance(dst, dict):
        for key, part in dst.items():
            _require_fits(obs[key], part, f"{name}.{key}")
    elif np.shape(obs) != dst.shape[1:]:
        raise ValueError(f"{name}: expected shape {dst.shape[1:]} of the observation space, got {np.shape(obs)}")
