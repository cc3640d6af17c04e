"""Any Gymnasium vector environment, in all of its autoreset modes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from outrider.data import Array, Obs, Step, any_true
from outrider.errors import EnvFailed
from outrider.spaces import act_dtype, action_start, copy_obs, empty_obs


class VectorEnvAdapter:
    """A Gymnasium vector environment as an :class:`outrider.core.Env`.

    ============  =====================================================================================
    mode          what becomes of it
    ============  =====================================================================================
    NEXT_STEP     the step after an end only resets: its row is not valid
    SAME_STEP     ``Step.obs`` has the final observation (``final_obs`` in the info), ``init_obs`` the first
    DISABLED      ended environments are reset at once, by ``reset(options={"reset_mask": ...})``
    ============  =====================================================================================

    Gymnasium's own vector environments keep only a reference to a final observation while they reset, so in
    SAME_STEP an environment that reuses its array would lose it: a ``SyncVectorEnv`` is therefore switched to
    DISABLED. With an ``AsyncVectorEnv`` of such environments use another mode.

    **Process:** the caller's. **Owns:** the vector environment. **Blocks:** as long as it takes. **Closes:** it.

    Args:
        env: The vector environment; its metadata names its autoreset mode.
        seeds: One seed per environment, used by the first ``reset(None)``. A ``SyncVectorEnv`` or an
            ``AsyncVectorEnv`` takes them all, any other vector environment only the first: it seeds from one int.
        array_seeds: The vector environment takes an array of seeds.

    Raises:
        EnvFailed: It does not say how it resets.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], seeds: Sequence[int], *, array_seeds: bool = False) -> None:
        self._env = env
        self.n_envs = env.num_envs
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        self._where = f"vector environment {env}"
        if "autoreset_mode" not in env.metadata:
            raise EnvFailed(self._where, "expected its autoreset mode in metadata['autoreset_mode'], got none")
        self._mode = AutoresetMode(env.metadata["autoreset_mode"])
        if type(env) is SyncVectorEnv and self._mode is AutoresetMode.SAME_STEP:
            self._mode = env.autoreset_mode = AutoresetMode.DISABLED
        self._seeds: Sequence[int] | None = seeds
        self._array_seeds = array_seeds
        self._act_dtype = act_dtype(self.action_space)
        self._start = action_start(self.action_space)
        self._shifts = bool(np.any(self._start))
        self._obs, self._init_obs = (empty_obs(self.observation_space, self.n_envs) for _ in range(2))
        self._all_valid = np.ones(self.n_envs, np.bool_)
        self._all_valid.flags.writeable = False
        self._none_ended = np.zeros(self.n_envs, np.bool_)
        self._none_ended.flags.writeable = False
        self._ended = self._none_ended  # by the last step; what NEXT_STEP resets in the next
        self._info: dict[str, Any] = {}  # of the last reset or step
        self._closed = False

    def reset(self, seed: Sequence[int] | None = None) -> Obs:
        """Start an episode in every environment; see :meth:`outrider.core.Env.reset`."""
        seeds = self._seeds if seed is None else seed
        self._seeds = None
        self._ended = self._none_ended
        if seeds is not None:
            self._env.action_space.seed(int(seeds[0]))
        obs, self._info = self._env.reset(seed=None if seeds is None else self._accepted(seeds))
        return self._typed(obs)

    def step(self, act: Array) -> Step:
        """Apply actions ``[n_envs, ...]``, discrete ones counted from 0; see :meth:`outrider.core.Env.step`."""
        own = np.array(act, self._act_dtype)  # a copy: the environment may change what it gets
        if self._shifts:
            own = own + self._start
        raw_obs, raw_reward, dead, cut, info = self._env.step(own)
        obs, reward = self._typed(raw_obs), np.asarray(raw_reward, np.float64)
        terminated, truncated = np.asarray(dead, np.bool_), np.asarray(cut, np.bool_)
        valid, init_obs = self._all_valid, obs
        if self._ended is not self._none_ended and self._mode is AutoresetMode.NEXT_STEP:
            valid = ~self._ended
            reward = np.where(valid, reward, 0.0)
            terminated, truncated = terminated & valid, truncated & valid
        if not (any_true(terminated) or any_true(truncated)):
            self._ended = self._none_ended
        else:
            self._ended = terminated | truncated
            if self._mode is AutoresetMode.SAME_STEP:
                obs = self._with_final(obs, info)
            elif self._mode is AutoresetMode.DISABLED:
                obs, init_obs = self._reset_ended(obs)
        self._info = info
        return Step(act, obs, init_obs, reward, terminated, truncated, valid)

    def close(self) -> None:
        """Close the vector environment. May be called twice."""
        if not self._closed:
            self._closed = True
            self._env.close()

    def _typed(self, obs: Any) -> Obs:
        """Its arrays in the dtype of the space; no copy where they have it: they hold until its next step."""
        return _cast(obs, self._obs)

    def _accepted(self, seeds: Sequence[int]) -> Any:
        if self._array_seeds:
            return np.asarray(seeds)
        if isinstance(self._env.unwrapped, SyncVectorEnv | AsyncVectorEnv):
            return [int(seed) for seed in seeds]
        return int(seeds[0])

    def _with_final(self, init_obs: Obs, info: dict[str, Any]) -> Obs:
        """SAME_STEP: what came is the next episode's first observation; the last one lies in the info."""
        if "final_obs" not in info:
            raise EnvFailed(self._where, f"expected 'final_obs' in the info of an ended episode, got {sorted(info)}")
        copy_obs(init_obs, self._obs)
        for i in np.flatnonzero(self._was_reset(info)).tolist():
            _put_final(self._obs, i, info["final_obs"])
        return self._obs

    def _was_reset(self, info: dict[str, Any]) -> Array:
        """Which of the environments that ended have a final observation in the info."""
        return self._ended

    def _reset_ended(self, last: Obs) -> tuple[Obs, Obs]:
        """DISABLED: reset those that ended; copies first, since the environment may reuse its arrays."""
        copy_obs(last, self._obs)
        copy_obs(last, self._init_obs)
        first = self._typed(self._env.reset(options={"reset_mask": self._ended.copy()})[0])
        if not _same_rows(first, self._obs, ~self._ended):
            raise EnvFailed(self._where, "expected reset_mask to leave the other environments alone, they changed")
        _copy_rows(first, self._init_obs, self._ended)
        return self._obs, self._init_obs


def _cast(obs: Any, like: Obs) -> Obs:
    if isinstance(like, dict):
        return {key: _cast(obs[key], part) for key, part in like.items()}
    return np.asarray(obs, like.dtype)


def _put_final(dst: Obs, i: int, final: Any) -> None:
    """Copy the final observation of environment i from an array (or a list, or an object array) or a dict of arrays."""
    if not isinstance(dst, dict):
        dst[i] = final[i]
    elif isinstance(final, dict):
        for key, part in dst.items():
            _put_final(part, i, final[key])
    else:
        _put_row(dst, i, final[i])


def _put_row(dst: Obs, i: int, row: Any) -> None:
    if isinstance(dst, dict):
        for key, part in dst.items():
            _put_row(part, i, row[key])
    else:
        dst[i] = row


def _copy_rows(src: Obs, dst: Obs, rows: Array) -> None:
    if isinstance(dst, dict):
        assert isinstance(src, dict)
        for key, part in dst.items():
            _copy_rows(src[key], part, rows)
    else:
        assert not isinstance(src, dict)
        dst[rows] = src[rows]


def _same_rows(a: Obs, b: Obs, rows: Array) -> bool:
    if isinstance(a, dict):
        assert isinstance(b, dict)
        return all(_same_rows(part, b[key], rows) for key, part in a.items())
    assert not isinstance(b, dict)
    return a[rows].tobytes() == b[rows].tobytes()  # bytes: NaN equals itself
