"""A policy that a run has learned, for use outside of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from outrider.core import Agent, AgentConfig, EnvSpec
from outrider.data import Array, Obs
from outrider.spaces import action_start


def build_saved(agent_config: AgentConfig, env_spec: EnvSpec, path: Path) -> Agent:
    """Build an agent for acting with the parameters saved in `path`."""
    agent = agent_config.build(env_spec, device="cpu", seed=0)
    agent.load_params(path)
    agent.eval()
    return agent


class LoadedPolicy:
    """Acts on observations as the environment gives them, and returns actions as the environment takes them.

    Args:
        agent: The agent, in evaluation mode.
        env_spec: Its environment.
    """

    def __init__(self, agent: Agent, env_spec: EnvSpec) -> None:
        self.agent = agent
        self.env_spec = env_spec
        self._start = action_start(env_spec.action_space)

    def sample(self, obs: Any) -> Array:
        """Action for one observation of the space, or actions ``[n, ...]`` for a batch ``[n, ...]``.

        Args:
            obs: Array, number or (for Dict spaces) nested dict.

        Raises:
            ValueError: Neither one observation of the space nor a batch of them.
        """
        arrays, batched = _as_batch(obs, self.env_spec.observation_space, "obs")
        act = self.agent.sample(arrays) + self._start
        act = act.astype(self.env_spec.action_space.dtype, copy=False)
        return act if batched else act[0]


def _as_batch(obs: Any, space: spaces.Space[Any], name: str) -> tuple[Obs, bool]:
    """Observations with a batch axis, and whether they had one before."""
    if isinstance(space, spaces.Dict):
        parts = {key: _as_batch(obs[key], sub, f"{name}.{key}") for key, sub in space.spaces.items()}
        batched = {part[1] for part in parts.values()}
        if len(batched) != 1:
            raise ValueError(f"{name}: expected all parts with a batch axis, or none, got a mixture")
        return {key: part[0] for key, part in parts.items()}, batched.pop()
    shape = tuple(space.shape or ())
    array = np.asarray(obs, space.dtype)
    if array.shape == shape:
        return array[None], False
    if array.shape[1:] == shape and array.ndim == len(shape) + 1:
        return array, True
    raise ValueError(f"{name}: expected {list(shape)} or [n, {', '.join(map(str, shape))}], got {list(array.shape)}")
