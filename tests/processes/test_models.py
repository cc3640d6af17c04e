"""No actor ever acts with a mixed model, and the version it reports is the one it used."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from outrider.actor_manager import ActorManagerConfig
from outrider.async_trainer import AsyncTrainerConfig
from outrider.core import EnvSpec
from outrider.data import Array, ModelInfo, Obs
from outrider.envs.gymnasium import GymEnvConfig
from outrider.evaluation import DefaultEvaluator
from outrider.recording import NullRecorder
from outrider.replay.uniform import SimpleReplayBuffer
from outrider.sampling import SimpleStepProcessorConfig
from outrider.wiring import train_async


def make_classes(n_weights: int, period_s: float) -> tuple[Any, Any]:
    """Classes defined in here travel to the actors by value."""

    class Anything(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        action_space = gymnasium.spaces.Box(-1, 2**40, (3,), np.int64)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return np.zeros(1, np.float32), {}

        def step(self, action: Any) -> Any:
            return np.zeros(1, np.float32), 0.0, False, False, {}

    class Equal:
        """At version k all its weights are k; its actions tell the least and the greatest weight, and env steps."""

        def __init__(self) -> None:
            self.k = 0
            self.weights = np.zeros(n_weights)
            self.env_steps = 0
            self.next_opt = 0.0

        def sample(self, obs: Obs) -> Array:
            return np.array([[self.weights.min(), self.weights.max(), self.env_steps]], np.int64)

        def sync_model(self, info: ModelInfo) -> None:
            self.weights = info["w"]  # kept, not copied: it must hold still between two calls
            self.env_steps = int(info["env_steps"])

        def model_info(self) -> tuple[int, ModelInfo]:
            return self.k, {"w": self.weights}

        def opt(self, buffer: Any) -> None:
            self.k += 1
            self.weights[:] = self.k
            time.sleep(max(0.0, self.next_opt - time.monotonic()))
            self.next_opt = time.monotonic() + period_s

        def opt_with_record(self, buffer: Any) -> dict[str, Any]:
            self.opt(buffer)
            return {}

        def train(self) -> None: ...
        def eval(self) -> None: ...
        def save_params(self, path: Path) -> None: ...
        def load_params(self, path: Path) -> None: ...

    @dataclass(frozen=True)
    class EqualConfig:
        def build(self, env_spec: EnvSpec, *, device: str = "cpu", seed: int = 0) -> Equal:
            return Equal()

        def build_actor(self, env_spec: EnvSpec, *, seed: int = 0) -> Equal:
            return Equal()

    return Anything, EqualConfig


@dataclass(frozen=True)
class ColumnsConfig:
    """Keeps actions and versions of all rows, besides what the uniform buffer does."""

    seen: list[Array]

    def build(self, layout: Any) -> Any:
        seen = self.seen

        class Columns(SimpleReplayBuffer):
            def push(self, items: Any) -> None:
                seen.append(np.column_stack([items["act"], items["model_version"]]))
                super().push(items)

        return Columns(layout, 1000)


def actions(n_steps: int, n_weights: int, period_s: float, n_actors: int = 2) -> Array:
    env_class, agent_class = make_classes(n_weights, period_s)
    env = GymEnvConfig(id=env_class)
    seen: list[Array] = []
    agents: Sequence[Any] = [agent_class()] * n_actors
    train_async(
        agents[0],
        agents,
        env,
        env,
        SimpleStepProcessorConfig(),
        ColumnsConfig(seen),
        ActorManagerConfig(n_buffer=16),
        AsyncTrainerConfig(
            max_opts=None,
            max_env_steps=n_steps,
            eval_interval=0,
            sync_interval=1,
            warmup_period=1,
            samples_per_insert=None,
        ),
        NullRecorder(),
        DefaultEvaluator(env),
    )
    return np.concatenate(seen)


def check(seen: Array, least_versions: int) -> None:
    low, high, env_steps, version = seen.T
    np.testing.assert_array_equal(low, high, err_msg="a mixed model was used")
    np.testing.assert_array_equal(low, version, err_msg="the version reported is not the one used")
    assert len(np.unique(version)) >= least_versions, "too few publications reached the actors for this to mean much"
    assert env_steps.max() > 0, "the env steps of the run travel with the model"


def test_no_actor_acts_with_a_mixed_model() -> None:
    check(actions(20_000, n_weights=20_000, period_s=0.001), least_versions=100)


@pytest.mark.slow
@pytest.mark.parametrize("n_weights", [100, 20_000, 200_000])
def test_no_actor_acts_with_a_mixed_model_in_a_hundred_thousand_actions(n_weights: int) -> None:
    seen = actions(100_000, n_weights=n_weights, period_s=0.001)
    print(f"{n_weights} weights: {len(seen)} actions with {len(np.unique(seen[:, 3]))} versions")
    check(seen, least_versions=100)


def test_no_actor_ever_acts_with_the_parameters_it_was_built_with() -> None:
    """The learner's first parameters are 0, those of a policy just built -1; publication is late."""
    env_class, agent_class = make_classes(100, 0.001)

    class LateConfig(agent_class):  # type: ignore[misc]
        def build(self, env_spec: EnvSpec, *, device: str = "cpu", seed: int = 0) -> Any:
            agent = super().build(env_spec)
            first_info, calls = agent.model_info, iter(range(10**9))

            def late() -> tuple[int, ModelInfo]:
                if next(calls) == 1:  # the first publication; before, only the layout was asked for
                    time.sleep(1.0)
                return first_info()  # type: ignore[no-any-return]

            agent.model_info = late
            return agent

        def build_actor(self, env_spec: EnvSpec, *, seed: int = 0) -> Any:
            policy = super().build_actor(env_spec)
            policy.weights -= 1
            return policy

    env = GymEnvConfig(id=env_class)
    seen: list[Array] = []
    trainer = AsyncTrainerConfig(
        max_opts=None, max_env_steps=2_000, eval_interval=0, warmup_period=500, samples_per_insert=None
    )
    parts = (SimpleStepProcessorConfig(), ColumnsConfig(seen), ActorManagerConfig(n_buffer=16), trainer)
    train_async(LateConfig(), [LateConfig()] * 3, env, env, *parts, NullRecorder(), DefaultEvaluator(env))
    rows = np.concatenate(seen)
    assert rows[:, :2].min() == 0, "an actor did not wait for the learner's parameters"
    assert (rows[:, 3] == 0).any()
