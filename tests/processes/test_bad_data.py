"""Values that are not finite never reach the replay buffer silently."""

from __future__ import annotations

from typing import Any, Literal

import gymnasium
import numpy as np
import pytest

from outrider.actor_manager import ActorManagerConfig
from outrider.async_trainer import AsyncTrainerConfig, AsyncTrainStat
from outrider.core import StepProcessorConfig
from outrider.envs.gymnasium import GymEnvConfig
from outrider.errors import ActorFailed, BadData
from outrider.evaluation import DefaultEvaluator
from outrider.recording import MemoryRecorder
from outrider.replay.uniform import SimpleReplayBuffer, SimpleReplayBufferConfig
from outrider.sampling import NStepProcessorConfig, SimpleStepProcessorConfig
from outrider.testing import FakeAgentConfig
from outrider.wiring import train_async, train_sync

Where = Literal["obs", "reward"]


def environment(where: Where, value: float, every: int) -> GymEnvConfig:
    class Sick(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.t = getattr(self, "t", 0)
            return np.zeros(3, np.float32), {}

        def step(self, action: Any) -> Any:
            self.t += 1
            bad = self.t % every == 0
            obs = np.array([0, value if bad and where == "obs" else 1, 2], np.float32)
            return obs, value if bad and where == "reward" else 1.0, False, self.t % 50 == 0, {}

    return GymEnvConfig(id=Sick)


class Seen(SimpleReplayBufferConfig):
    def build(self, layout: Any) -> Any:
        class Checking(SimpleReplayBuffer):
            def push(self, items: Any) -> None:
                for name in ("obs", "next_obs", "reward"):
                    assert np.isfinite(items[name]).all(), f"bad {name} in the replay buffer"
                super().push(items)

        return Checking(layout, self.capacity)


def run(
    env: GymEnvConfig, policy: Any, *, mode: str = "async", processor: StepProcessorConfig | None = None
) -> tuple[AsyncTrainStat, MemoryRecorder]:
    recorder = MemoryRecorder()
    train = train_sync if mode == "sync" else train_async
    result = train(
        FakeAgentConfig(),
        [FakeAgentConfig()] * 2,
        env,
        env,
        processor or SimpleStepProcessorConfig(),
        Seen(capacity=1000),
        ActorManagerConfig(bad_data=policy, n_buffer=8),
        AsyncTrainerConfig(max_opts=300, warmup_period=100, samples_per_insert=16.0, eval_interval=0),
        recorder,
        DefaultEvaluator(env),
    )
    return result.stats, recorder


@pytest.mark.parametrize("where", ["obs", "reward"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_bad_rows_are_dropped_and_counted_where_that_is_asked_for(where: Where, value: float) -> None:
    stats, recorder = run(environment(where, value, every=11), "drop")
    assert stats.opt_steps == 300
    per_event = 2 if where == "obs" else 1  # as next_obs of one row and obs of the next
    dropped = recorder.lines[-1]["async/dropped_rows"]
    assert dropped == pytest.approx(stats.env_steps * per_event / 11, rel=0.1)
    assert stats.samples + dropped == pytest.approx(stats.env_steps, abs=32), "no other row was lost"


def test_every_window_over_a_bad_reward_is_dropped() -> None:
    processor = NStepProcessorConfig(n_steps=3, gamma=0.9)
    stats, recorder = run(environment("reward", float("nan"), every=20), "drop", processor=processor)
    assert recorder.lines[-1]["async/dropped_rows"] == pytest.approx(stats.env_steps * 3 / 20, rel=0.15)


@pytest.mark.parametrize("where", ["obs", "reward"])
def test_a_bad_row_ends_the_run_by_default_and_names_actor_column_and_step(where: Where) -> None:
    with pytest.raises(
        ActorFailed, match=r"BadData: actor [01], before env step \d+: expected finite values in '"
    ) as e:
        run(environment(where, float("nan"), every=150), "raise")
    assert where in str(e.value)


def test_the_synchronous_trainer_looks_at_its_rows_too() -> None:
    with pytest.raises(BadData, match="'reward', got inf"):
        run(environment("reward", float("inf"), every=150), "raise", mode="sync")
    stats, recorder = run(environment("reward", float("nan"), every=10), "drop", mode="sync")
    assert stats.opt_steps == 300
    assert recorder.lines[-1]["async/dropped_rows"] > 0
