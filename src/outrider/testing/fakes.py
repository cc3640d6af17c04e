"""Stand-ins for the parts of a run."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from outrider.config import Config
from outrider.core import EnvSpec, ReplayBuffer
from outrider.data import Array, Batch, Items, Layout, ModelInfo, Obs, Record, column_names, n_rows
from outrider.spaces import act_field, action_start


class FakePolicy:
    """Acts at random, discrete actions counted from 0; in eval mode always alike. Knows what it was told.

    Attributes:
        modes: The modes (``train``, ``eval``) in which it was asked for actions.
        training: Whether :meth:`train` or :meth:`eval` was called last.
        model: A copy of the last model it was given.
    """

    def __init__(self, action_space: spaces.Space[Any], seed: int = 0) -> None:
        self._space, self._start = copy.deepcopy(action_space), action_start(action_space)
        self._dtype = act_field(action_space).dtype
        self._space.seed(seed)
        self.training = True
        self.modes: set[str] = set()
        self.model: dict[str, Array] = {}

    def sample(self, obs: Obs) -> Array:
        """Random actions ``[n_envs, ...]``; in eval mode the ones nearest to 0."""
        self.modes.add("train" if self.training else "eval")
        actions = np.stack([np.asarray(self._space.sample()) for _ in range(_n_envs(obs))])
        if not self.training:
            space = self._space
            actions[...] = np.clip(0, space.low, space.high) if isinstance(space, spaces.Box) else self._start
        return (actions - self._start).astype(self._dtype)

    def train(self) -> None:
        """Remember it."""
        self.training = True

    def eval(self) -> None:
        """Remember it."""
        self.training = False

    def model_info(self) -> tuple[int, ModelInfo]:
        """No opt steps, and the last model it was given."""
        return 0, self.model

    def sync_model(self, info: ModelInfo) -> None:
        """Keep a copy."""
        self.model = {name: np.array(value) for name, value in info.items()}


class FakeAgent(FakePolicy):
    """Learns nothing: after k opt steps all its weights are k.

    Attributes:
        n_opts: Opt steps so far.
        weights: ``[n_weights]`` float32.
    """

    def __init__(self, action_space: spaces.Space[Any], n_weights: int, batch_size: int, seed: int = 0) -> None:
        super().__init__(action_space, seed)
        self.n_opts, self.batch_size = 0, batch_size
        self.weights = np.zeros(n_weights, np.float32)

    def model_info(self) -> tuple[int, ModelInfo]:
        """The weights."""
        return self.n_opts, {"weights": self.weights}

    def sync_model(self, info: ModelInfo) -> None:
        """Take the weights over."""
        super().sync_model(info)
        self.weights[:] = info["weights"]

    def opt(self, buffer: ReplayBuffer) -> None:
        """Draw a batch and count."""
        batch = buffer.batch(self.batch_size)
        buffer.update_priority(batch.ixs, np.zeros(len(batch), np.float32))
        self.n_opts += 1
        self.weights[:] = self.n_opts

    def opt_with_record(self, buffer: ReplayBuffer) -> Record:
        """Draw a batch, count, and say so."""
        self.opt(buffer)
        return {"train/loss": 1.0 / self.n_opts}

    def save_params(self, path: Path) -> None:
        """Write ``weights.npy``."""
        np.save(path / "weights.npy", self.weights)

    def load_params(self, path: Path) -> None:
        """Read ``weights.npy``."""
        self.weights[:] = np.load(path / "weights.npy")

    def state_dict(self) -> dict[str, Any]:
        """Weights and counter."""
        return {"n_opts": self.n_opts, "weights": self.weights.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore weights and counter."""
        self.n_opts = state["n_opts"]
        self.weights[:] = state["weights"]


@dataclass(frozen=True, kw_only=True)
class FakeAgentConfig(Config):
    """Builds :class:`FakeAgent`.

    Attributes:
        n_weights: Length of its only parameter.
        batch_size: Rows it draws in an opt step.
    """

    n_weights: int = 1000
    batch_size: int = 32

    def build(self, env_spec: EnvSpec, *, device: str = "cpu", seed: int = 0) -> FakeAgent:
        """Build the agent."""
        return FakeAgent(env_spec.action_space, self.n_weights, self.batch_size, seed)

    def build_actor(self, env_spec: EnvSpec, *, seed: int = 0) -> FakeAgent:
        """Build the same for an actor."""
        return self.build(env_spec, seed=seed)

    def for_actor(self, actor: int, n_actors: int) -> FakeAgentConfig:
        """All alike."""
        return self


class ListBuffer:
    """An experience buffer that keeps a copy of every push.

    Attributes:
        pushes: What was pushed, as arrays by column name.
    """

    def __init__(self) -> None:
        self.pushes: list[dict[str, Array]] = []

    def push(self, items: Items) -> None:
        """Keep a copy."""
        self.pushes.append({name: np.array(items[name]) for name in column_names(items)})

    def __len__(self) -> int:
        return sum(n_rows(push) for push in self.pushes)

    def columns(self) -> dict[str, Array]:
        """All rows so far, by column name; empty if there were none."""
        names = column_names(self.pushes[0]) if self.pushes else ()
        return {name: np.concatenate([push[name] for push in self.pushes]) for name in names}


class RowsBuffer(ListBuffer):
    """A replay buffer that keeps everything, drawing uniformly; slow.

    Attributes:
        inserted: Rows taken so far.
        sampled: Rows drawn so far.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._rng = np.random.default_rng(seed)
        self.inserted = self.sampled = 0

    def push(self, items: Items) -> None:
        """Keep a copy."""
        super().push(items)
        self.inserted += n_rows(items)

    def accepts(self, layout: Layout) -> bool:
        """Anything."""
        return True

    def batch(self, size: int) -> Batch:
        """Draw rows with replacement."""
        ixs = self._rng.integers(0, len(self), size)
        self.sampled += size
        return Batch({name: column[ixs] for name, column in self.columns().items()}, ixs)

    def update_priority(self, ixs: Array, td_errors: Any) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """All rows and counters."""
        return {"rows": self.columns(), "sampled": self.sampled, "rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""
        self.pushes = [dict(state["rows"])] if state["rows"] else []
        self.inserted = len(self)
        self.sampled = state["sampled"]
        self._rng.bit_generator.state = state["rng"]


def random_rows(layout: Layout, m: int, seed: int = 0, env_spec: EnvSpec | None = None) -> dict[str, Array]:
    """Random rows ``[m]`` of a layout.

    Args:
        layout: Its columns.
        m: Number of rows.
        seed: Equal seeds give equal rows.
        env_spec: Actions and observations are drawn from its spaces, else they are small numbers.
    """
    rng = np.random.default_rng(seed)
    drawn: dict[str, Array] = {}
    if env_spec is not None:
        drawn["act"] = FakePolicy(env_spec.action_space, seed).sample(np.zeros(m))
        obs_space = copy.deepcopy(env_spec.observation_space)
        drawn |= _drawn_obs(obs_space, "obs", m, 2 * seed)
        drawn |= _drawn_obs(obs_space, "next_obs", m, 2 * seed + 1)
    rows = {}
    for f in layout.fields:
        values = drawn.get(f.name)
        if values is None:
            values = np.ones(m) if f.name == "n_steps" else rng.integers(0, 2, (m, *f.shape))
        rows[f.name] = values.astype(f.dtype)
    return rows


def _drawn_obs(space: spaces.Space[Any], name: str, m: int, seed: int) -> Mapping[str, Array]:
    if isinstance(space, spaces.Dict):
        parts = [_drawn_obs(sub, f"{name}.{key}", m, seed) for key, sub in space.spaces.items()]
        return {column: values for part in parts for column, values in part.items()}
    space.seed(seed)
    return {name: np.stack([np.asarray(space.sample()) for _ in range(m)])}


def _n_envs(obs: Obs) -> int:
    return _n_envs(next(iter(obs.values()))) if isinstance(obs, dict) else len(obs)
