"""Values that are known by hand are learnt through the whole pipeline: ends of episodes are what they should be."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from outrider.actor_manager import ActorManagerConfig
from outrider.agents.dqn import DqnConfig
from outrider.agents.sac import SacConfig
from outrider.async_trainer import AsyncTrainerConfig
from outrider.envs.gymnasium import GymEnvConfig
from outrider.evaluation import DefaultEvaluator
from outrider.recording import MemoryRecorder
from outrider.replay.uniform import SimpleReplayBufferConfig
from outrider.sampling import NStepProcessorConfig, SimpleStepProcessorConfig
from outrider.wiring import train_async, train_sync

GAMMA = 0.9
TOLERANCE = 0.25  # batches differ
LENGTH = 10
ENDLESS = 1 / (1 - GAMMA)  # 10: a time limit changes nothing
# All states look alike, so the value learnt is Q = mean reward + mean discount * Q over the rows of an episode.
ENDING = {1: 1 / (1 - GAMMA * (LENGTH - 1) / LENGTH)}  # 5.26: the last row of ten has no successor
ENDING[3] = (8 * 2.71 + 1.9 + 1.0) / 10 / (1 - 0.7 * GAMMA**3)  # 5.02: rows of 3 steps, the last three have none


def make_env(terminates: bool, continuous: bool) -> Any:
    class Constant(gymnasium.Env[Any, Any]):
        """Observation [1], reward 1, and an end after ten steps."""

        observation_space = spaces.Box(0.0, 2.0, (1,), np.float32)
        action_space: Any = spaces.Box(-1.0, 1.0, (1,), np.float32) if continuous else spaces.Discrete(2)
        t = 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.t = 0
            return np.ones(1, np.float32), {}

        def step(self, action: Any) -> Any:
            self.t += 1
            end = self.t == LENGTH
            return np.ones(1, np.float32), 1.0, end and terminates, end and not terminates, {}

    return Constant


def env_config(mode: str, terminates: bool, continuous: bool) -> GymEnvConfig:
    kind = make_env(terminates, continuous)
    if mode == "serial":
        return GymEnvConfig(id=kind)

    def vector(num_envs: int) -> SyncVectorEnv:
        return SyncVectorEnv([kind] * num_envs, autoreset_mode=AutoresetMode(mode))

    return GymEnvConfig(id=vector)


def learnt(agent: Any, mode: str, n_steps: int, terminates: bool, *, how: str = "processes") -> float:
    env = env_config(mode, terminates, isinstance(agent, SacConfig))
    processor = SimpleStepProcessorConfig() if n_steps == 1 else NStepProcessorConfig(n_steps=n_steps, gamma=GAMMA)
    trainer = AsyncTrainerConfig(
        max_opts=1_500, warmup_period=500, samples_per_insert=64, eval_interval=0, record_agent_info_interval=50
    )
    recorder = MemoryRecorder()
    parts = (agent, [agent] * 2, env, env, processor, SimpleReplayBufferConfig(capacity=5_000))
    backend: Any = "processes" if how == "sync" else how
    actors = ActorManagerConfig(n_envs=3, n_buffer=7, backend=backend)
    train = train_sync if how == "sync" else train_async
    train(*parts, actors, trainer, recorder, DefaultEvaluator(env))
    values = [line["train/q_mean"] for line in recorder.lines if "train/q_mean" in line]
    return float(values[-1])


DQN = DqnConfig(hidden=(16,), gamma=GAMMA, lr=1e-2, tau=0.1, target_update_interval=1, batch_size=256, loss="mse")
SAC = SacConfig(
    hidden=(16,), gamma=GAMMA, critic_lr=5e-3, actor_lr=1e-4, tau=0.1, batch_size=256, alpha=0.0, random_steps=0
)


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("mode", ["serial", "NextStep", "SameStep", "Disabled"])
def test_a_time_limit_cuts_no_value(mode: str, n_steps: int) -> None:
    assert learnt(DQN, mode, n_steps, terminates=False) == pytest.approx(ENDLESS, abs=TOLERANCE)


@pytest.mark.parametrize(("mode", "n_steps"), [("serial", 1), ("serial", 3), ("NextStep", 1), ("NextStep", 3)])
def test_there_is_no_value_behind_a_termination(mode: str, n_steps: int) -> None:
    assert learnt(DQN, mode, n_steps, terminates=True) == pytest.approx(ENDING[n_steps], abs=TOLERANCE)


@pytest.mark.parametrize(("terminates", "value"), [(False, ENDLESS), (True, ENDING[1])])
def test_sac_learns_the_same_values(terminates: bool, value: float) -> None:
    assert learnt(SAC, "NextStep", 1, terminates) == pytest.approx(value, abs=TOLERANCE)


@pytest.mark.parametrize("how", ["threads", "sync"])
def test_threads_and_turns_learn_the_same_values(how: str) -> None:
    assert learnt(DQN, "NextStep", 3, terminates=False, how=how) == pytest.approx(ENDLESS, abs=TOLERANCE)
    assert learnt(DQN, "NextStep", 3, terminates=True, how=how) == pytest.approx(ENDING[3], abs=TOLERANCE)
