"""A policy that a run has learned, for use outside of training: one to ask for actions, or its score."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from outrider.core import Agent, AgentConfig, EnvSpec
from outrider.data import Array, Episode, Obs, Record
from outrider.evaluation import DefaultEvaluator
from outrider.run_config import RunConfig
from outrider.run_dir import RunDir
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


def evaluate_run(
    run_dir: Path | str,
    model: str = "best",
    episodes: int = 10,
    seed: int = 0,
    on_episode: Callable[[Episode], object] | None = None,
) -> tuple[float, Record]:
    """Play whole episodes with a model that a run has kept.

    Args:
        run_dir: The run directory; it may be in use.
        model: ``best``, ``last`` or a number of opt steps.
        episodes: Number of episodes.
        seed: Seed of the environments.
        on_episode: Called with each episode when it has ended, or None.

    Returns:
        Mean return, and ``eval/*`` metrics.

    Raises:
        RunDirError: It is no run directory, or has no such model.
    """
    config, path = _open_run(run_dir, model)
    env = config.env.eval()
    agent = build_saved(config.agent, env.spec(), path)
    with closing(DefaultEvaluator(env, seed=seed, n_episodes=episodes)) as evaluator:
        evaluator.on_episode = on_episode
        return evaluator.evaluate(agent)


def load_policy(run_dir: Path | str, model: str = "best") -> LoadedPolicy:
    """A policy that a run has learned, for one observation or a batch.

    Args:
        run_dir: The run directory; it may be in use.
        model: ``best`` (which is the last one where the run was never evaluated), ``last`` or a number of opt steps.

    Raises:
        RunDirError: It is no run directory, or has no such model.
    """
    if model == "best":
        model = RunDir.open(run_dir, lock=False).default_model()
    config, path = _open_run(run_dir, model)
    spec = config.env.eval().spec()
    return LoadedPolicy(build_saved(config.agent, spec, path), spec)


def _open_run(run_dir: Path | str, model: str) -> tuple[RunConfig, Path]:
    run = RunDir.open(run_dir, lock=False)
    return RunConfig.load(run.path / "config.yaml"), run.model_path(model)


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
