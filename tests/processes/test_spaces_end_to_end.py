"""Actions and observations of every space, from the policy through real actor processes into the replay buffer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from outrider.actor_manager import ActorManagerConfig
from outrider.agents.dqn import DqnConfig
from outrider.agents.sac import SacConfig
from outrider.async_trainer import AsyncTrainerConfig
from outrider.core import AgentConfig
from outrider.data import Array, Layout
from outrider.envs.gymnasium import GymEnvConfig
from outrider.errors import UnsupportedSpace
from outrider.evaluation import DefaultEvaluator
from outrider.recording import NullRecorder
from outrider.replay.uniform import SimpleReplayBuffer, SimpleReplayBufferConfig
from outrider.sampling import SimpleStepProcessorConfig
from outrider.testing import FakeAgentConfig, SpacesEnv
from outrider.wiring import train_async


@dataclass(frozen=True)
class WatchedConfig:
    """A replay buffer that the test can look into."""

    built: list[SimpleReplayBuffer] = field(default_factory=list)

    def build(self, layout: Layout) -> SimpleReplayBuffer:
        self.built.append(SimpleReplayBufferConfig(capacity=10_000).build(layout))
        return self.built[-1]


def rows(env: GymEnvConfig, agent: AgentConfig, n_rows: int = 3_000, n_envs: int = 2) -> dict[str, Array]:
    """Train with two actors and two evaluations; all rows by column."""
    replay = WatchedConfig()
    train_async(
        agent,
        [agent] * 2,
        env,
        env.eval(),
        SimpleStepProcessorConfig(),
        replay,
        ActorManagerConfig(n_envs=n_envs, n_buffer=16),
        AsyncTrainerConfig(
            max_opts=None, max_env_steps=n_rows, warmup_period=300, samples_per_insert=2, eval_interval=20
        ),
        NullRecorder(),
        DefaultEvaluator(env.eval(), n_episodes=2),
    )
    (buffer,) = replay.built
    assert buffer.sampled > 0
    columns: dict[str, Array] = buffer.state_dict()["rows"]
    return columns


VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)


@pytest.mark.parametrize("space", [spaces.Discrete(3, start=-1), spaces.Discrete(2, start=10)])
def test_discrete_actions_are_stored_from_zero_and_played_from_the_start_of_the_space(space: spaces.Discrete) -> None:
    env = GymEnvConfig(id=SpacesEnv, kwargs={"observation_space": VECTOR, "action_space": space})
    act = rows(env, DqnConfig(hidden=(8,), batch_size=32))["act"]
    assert act.dtype == np.int64
    assert set(act.tolist()) == set(range(int(space.n)))


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([12, 385, 217]),
        spaces.MultiDiscrete(np.array([[3, 2], [4, 5]])),
        spaces.MultiDiscrete([3, 4], start=[-1, 7]),
        spaces.MultiBinary(4),
        spaces.MultiBinary((2, 3)),
        spaces.Box(-2.0, 3.0, (), np.float32),
        spaces.Box(0, 7, (2, 2), np.int16),
    ],
    ids=str,
)
def test_actions_of_any_shape_reach_environment_and_buffer_whole(space: Any) -> None:
    env = GymEnvConfig(id=SpacesEnv, kwargs={"observation_space": VECTOR, "action_space": space})
    act = rows(env, FakeAgentConfig(), 1_000)["act"]
    assert act.dtype == (np.int64 if isinstance(space, spaces.MultiDiscrete) else space.dtype)
    assert act.shape[1:] == space.shape
    start = space.start if isinstance(space, spaces.MultiDiscrete) else 0
    own = (act + start).astype(space.dtype)
    assert all(space.contains(own[i, ...]) for i in range(len(own)))
    assert len(np.unique(own.reshape(len(own), -1), axis=0)) > 10


@pytest.mark.parametrize("space", [spaces.MultiDiscrete([2, 2]), spaces.MultiBinary(4), VECTOR], ids=str)
def test_an_action_space_that_the_agent_lacks_is_refused_before_a_process_starts(
    space: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = GymEnvConfig(id=SpacesEnv, kwargs={"observation_space": VECTOR, "action_space": space})
    monkeypatch.setattr("outrider.actor_manager.ActorManager.run", pytest.fail)
    with pytest.raises(UnsupportedSpace, match="agent: expected a Discrete action space for DQN"):
        rows(env, DqnConfig())


def make_bounded(low: Any, high: Any, dtype: Any) -> Any:
    class Bounded(gymnasium.Env[Any, Any]):
        """Its observation tells the action it was given last, and it takes none from outside of its bounds."""

        action_space = spaces.Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)
        observation_space = spaces.Box(-np.inf, np.inf, (len(low),), np.float64)
        t = 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.t = 0
            return np.zeros(len(low)), {}

        def step(self, action: Any) -> Any:
            assert self.action_space.contains(action), action
            self.t += 1
            obs = action.astype(np.float64)
            action[...] = 99.0  # an environment may do that
            return obs, 0.0, False, self.t == 20, {}

    return Bounded


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("random_steps", [0, 10**9], ids=["policy", "warm-up"])
def test_sac_acts_and_stores_in_the_units_of_each_dimension(random_steps: int, dtype: Any) -> None:
    low, high = np.array([0.0, -0.785, -7.0, 10.0]), np.array([5.0, 0.785, -6.5, 1000.0])
    env = GymEnvConfig(id=make_bounded(low, high, dtype))
    stored = rows(env, SacConfig(hidden=(16,), batch_size=32, random_steps=random_steps))
    act = stored["act"]
    assert act.dtype == dtype
    np.testing.assert_array_equal(stored["next_obs"], act.astype(np.float64), err_msg="stored is what was done")
    assert (act >= low.astype(dtype)).all()
    assert (act <= high.astype(dtype)).all()
    share = (act - low) / (high - low)
    assert (share.min(0) < 0.15).all(), "each dimension uses its own range, down to its bounds"
    assert (share.max(0) > 0.85).all()
    if random_steps:
        np.testing.assert_allclose(share.mean(0), 0.5, atol=0.05)


@pytest.mark.parametrize(
    ("obs_space", "stored"),
    [
        (spaces.Box(0, 255, (4, 84, 84), np.uint8), np.uint8),
        (spaces.Box(-1.0, 1.0, (3,), np.float64), np.float64),
        (spaces.Box(-1.0, 1.0, (3,), np.float16), np.float16),
        (spaces.Discrete(5, start=2), np.int64),
    ],
    ids=str,
)
def test_observations_keep_their_dtype_into_the_buffer(obs_space: Any, stored: Any) -> None:
    env = GymEnvConfig(id=SpacesEnv, kwargs={"observation_space": obs_space, "action_space": spaces.Discrete(2)})
    columns = rows(env, FakeAgentConfig(batch_size=8), 400)
    assert columns["obs"].dtype == columns["next_obs"].dtype == stored
    assert columns["obs"].shape[1:] == obs_space.shape
    assert all(obs_space.contains(columns["obs"][i, ...]) for i in range(50))


def make_view_env() -> Any:
    class Views(gymnasium.Env[Any, Any]):
        """Gives out views of its own state, which the next step changes."""

        action_space = spaces.Discrete(2)
        observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (2, 3), np.uint8),
                "pos": spaces.Dict({"x": spaces.Box(-np.inf, np.inf, (2,))}),
            }
        )

        def __init__(self) -> None:
            self.state = np.zeros(2, np.float32)
            self.image = np.zeros((4, 6), np.uint8)
            self.parts = {"image": self.image[::2, ::2], "pos": {"x": self.state[::-1]}}

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.state[:] = 0
            self.image[:] = 0
            return self.parts, {}

        def step(self, action: Any) -> Any:
            self.state += 1
            self.image += 1
            return self.parts, 1.0, False, bool(self.state[0] == 9), {}

    return Views


@pytest.mark.parametrize("n_envs", [1, 3])
def test_views_of_a_state_that_goes_on_are_copied_in_time(n_envs: int) -> None:
    stored = rows(GymEnvConfig(id=make_view_env()), FakeAgentConfig(), 1_000, n_envs)
    t = stored["obs.pos.x"][:, 0]
    np.testing.assert_array_equal(stored["next_obs.pos.x"], stored["obs.pos.x"] + 1)
    np.testing.assert_array_equal(stored["next_obs.image"], stored["obs.image"] + 1)
    np.testing.assert_array_equal(stored["obs.image"], np.broadcast_to(t[:, None, None], (len(t), 2, 3)))
    np.testing.assert_array_equal(stored["truncated"], t == 8)
    assert set(t.tolist()) == set(range(9))
