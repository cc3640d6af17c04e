"""Every supported space is trained on by real actor processes; every other is refused by name before a run begins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

import outrider
from outrider.actor_manager import ActorManagerConfig
from outrider.agents.dqn import DqnConfig
from outrider.agents.sac import SacConfig
from outrider.async_trainer import AsyncTrainerConfig
from outrider.core import AgentConfig, EnvSpec
from outrider.data import Layout
from outrider.envs.gymnasium import GymEnvConfig
from outrider.errors import ConfigError
from outrider.evaluation import DefaultEvaluator
from outrider.recording import NullRecorder
from outrider.replay.uniform import SimpleReplayBuffer, SimpleReplayBufferConfig
from outrider.sampling import NStepProcessorConfig
from outrider.testing import SpacesEnv
from outrider.wiring import train_async

OBSERVATIONS: dict[str, tuple[spaces.Space[Any], dict[str, str]]] = {
    "box": (spaces.Box(-1, 1, (3,), np.float32), {"obs": "3 float32"}),
    "box of no dimensions": (spaces.Box(-1, 1, (), np.float64), {"obs": " float64"}),
    "small integers": (spaces.Box(0, 255, (2, 2), np.uint8), {"obs": "2,2 uint8"}),
    "discrete": (spaces.Discrete(5, start=-2), {"obs": " int64"}),
    "multi-discrete": (spaces.MultiDiscrete([3, 4], start=[1, -1]), {"obs": "2 int64"}),
    "multi-binary": (spaces.MultiBinary(4), {"obs": "4 int8"}),
    "nested dict": (
        spaces.Dict(
            {
                "pos": spaces.Dict({"xy": spaces.Box(-1, 1, (2,), np.float16), "way": spaces.Discrete(3)}),
                "lamps": spaces.MultiBinary([2, 2]),
            }
        ),
        {"obs.pos.xy": "2 float16", "obs.pos.way": " int64", "obs.lamps": "2,2 int8"},
    ),
    "image": (spaces.Box(0, 255, (2, 36, 40), np.uint8), {"obs": "2,36,40 uint8"}),
}
ACTIONS: dict[str, spaces.Box] = {
    "one": spaces.Box(-2, 6, (1,), np.float32),
    "of no dimensions": spaces.Box(0, 1, (), np.float32),
    "matrix, each with its bounds": spaces.Box(np.array([[0.0, -5.0]]), np.array([[0.5, 7.0]]), dtype=np.float64),
}


def env_config(observations: spaces.Space[Any], actions: spaces.Space[Any]) -> GymEnvConfig:
    return GymEnvConfig(id=SpacesEnv, kwargs={"observation_space": observations, "action_space": actions})


@dataclass(frozen=True, kw_only=True)
class KeptConfig(SimpleReplayBufferConfig):
    """Shows the buffer that it built."""

    kept: list[SimpleReplayBuffer]

    def build(self, layout: Layout) -> SimpleReplayBuffer:
        self.kept.append(super().build(layout))
        return self.kept[-1]


def train(agent: AgentConfig, env: GymEnvConfig) -> SimpleReplayBuffer:
    """A few opt steps; the environment itself refuses actions outside of its space, in actors and evaluation."""
    kept: list[SimpleReplayBuffer] = []
    stats = train_async(
        agent,
        [agent],
        env,
        env.eval(),
        NStepProcessorConfig(n_steps=2, gamma=0.99),
        KeptConfig(capacity=500, kept=kept),
        ActorManagerConfig(n_envs=2, n_buffer=8),
        AsyncTrainerConfig(max_opts=10, warmup_period=64, eval_interval=5, samples_per_insert=4.0, sync_interval=1),
        NullRecorder(),
        DefaultEvaluator(env.eval(), n_episodes=2),
    ).stats
    assert stats.opt_steps == 10
    assert stats.best_score == 3.5, "7 steps of 0.5: evaluations acted in the same spaces"
    return kept[0]


@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_dqn_trains_on_every_kind_of_observation_in_its_own_dtype(kind: str) -> None:
    space, columns = OBSERVATIONS[kind]
    agent = DqnConfig(hidden=(8,), batch_size=16)
    layout = train(agent, env_config(space, spaces.Discrete(3, start=-1))).layout
    stored = {f.name: f"{','.join(map(str, f.shape))} {f.dtype}" for f in layout.fields}
    assert {name: stored[name] for name in columns} == columns
    assert {name.replace("obs", "next_obs", 1): stored[f"next_{name}"] for name in columns} == {
        f"next_{name}": form for name, form in columns.items()
    }


@pytest.mark.parametrize("kind", [kind for kind in OBSERVATIONS if kind != "image"])
def test_sac_trains_on_every_kind_of_observation(kind: str) -> None:
    train(SacConfig(hidden=(8,), batch_size=16), env_config(OBSERVATIONS[kind][0], ACTIONS["one"]))


@pytest.mark.parametrize("kind", ACTIONS)
def test_sac_trains_on_every_shape_of_action(kind: str) -> None:
    space = ACTIONS[kind]
    act = train(SacConfig(hidden=(8,), batch_size=16), env_config(spaces.Box(-1, 1, (2,)), space)).batch(100)["act"]
    assert (act.dtype, act.shape) == (space.dtype, (100, *space.shape))


class OnlyBytes(nn.Module):
    """Refuses images that were converted on their way."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.uint8, x.dtype
        values: Tensor = self.inner(x)
        return values


@dataclass(frozen=True, kw_only=True)
class OnlyBytesConfig(DqnConfig):
    """DQN with that network."""

    def network_module(self, env_spec: EnvSpec) -> nn.Module:
        return OnlyBytes(super().network_module(env_spec))


def test_images_are_bytes_until_they_are_inside_the_network() -> None:
    train(OnlyBytesConfig(hidden=(8,), batch_size=16), env_config(OBSERVATIONS["image"][0], spaces.Discrete(2)))


BOX, TWO = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)
IMAGE = OBSERVATIONS["image"][0]


@pytest.mark.parametrize(
    ("agent", "observations", "actions", "key"),
    [
        ("dqn", BOX, BOX, "agent"),
        ("dqn", BOX, spaces.MultiDiscrete([2, 2]), "agent"),
        ("dqn", BOX, spaces.MultiBinary(2), "agent"),
        ("sac", BOX, TWO, "agent"),
        ("sac", BOX, spaces.MultiDiscrete([2, 2]), "agent"),
        ("sac", BOX, spaces.Box(0, 3, (2,), np.int64), "agent"),
        ("sac", BOX, spaces.Box(-np.inf, np.inf, (2,), np.float32), "env.action_space"),
        ("sac", IMAGE, BOX, "env.observation_space"),
        ("dqn", spaces.Dict(image=IMAGE, pos=BOX), TWO, "env.observation_space.image"),
        ("dqn", spaces.Tuple([BOX]), TWO, "env.observation_space"),
        ("dqn", spaces.Dict(pos=spaces.Tuple([BOX])), TWO, "env.observation_space.pos"),
        ("dqn", spaces.Sequence(BOX), TWO, "env.observation_space"),
        ("dqn", spaces.Text(3), TWO, "env.observation_space"),
        ("dqn", spaces.Graph(BOX, None), TWO, "env.observation_space"),
        ("dqn", BOX, spaces.Dict(a=TWO), "env.action_space"),
    ],
)
def test_what_cannot_be_stored_or_learned_is_refused_by_name(
    agent: str, observations: spaces.Space[Any], actions: spaces.Space[Any], key: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        outrider.train(env_config(observations, actions), agent, run_dir=tmp_path / "run")
    assert caught.value.key == key
    assert not (tmp_path / "run").exists()
