"""The learner's memory stays as it is once everything was touched."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from outrider.actor_manager import ActorManagerConfig
from outrider.agents.dqn import DqnConfig
from outrider.async_trainer import AsyncTrainerConfig
from outrider.envs.gymnasium import GymEnvConfig
from outrider.evaluation import DefaultEvaluator
from outrider.recording import TensorboardRecorder
from outrider.replay.uniform import SimpleReplayBufferConfig
from outrider.sampling import SimpleStepProcessorConfig
from outrider.wiring import train_async

SECONDS = 75


@pytest.mark.slow
def test_publications_records_and_evaluations_leave_nothing_in_memory(tmp_path: Path) -> None:
    """Tens of thousands of publications; what each of them left behind would be seen."""
    resident: list[tuple[float, float]] = []
    ended = threading.Event()

    def watch() -> None:
        started, process = time.monotonic(), psutil.Process()
        while not ended.wait(1.0):
            resident.append(((time.monotonic() - started) / 60, process.memory_info().rss / 2**20))

    agent, env = DqnConfig(hidden=(16,), batch_size=32), GymEnvConfig(id="CartPole-v1", max_episode_steps=30)
    trainer = AsyncTrainerConfig(
        max_opts=None,
        max_time_s=SECONDS,
        warmup_period=1_000,
        samples_per_insert=8,
        sync_interval=1,
        eval_interval=500,
        save_interval=5_000,
        record_agent_info_interval=10,
        flush_record_interval=50,
    )
    recorder = TensorboardRecorder(tmp_path)
    parts = (SimpleStepProcessorConfig(), SimpleReplayBufferConfig(capacity=5_000), ActorManagerConfig(n_envs=4))
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        train_async(agent, [agent] * 2, env, env, *parts, trainer, recorder, DefaultEvaluator(env, n_episodes=2))
    finally:
        ended.set()
        watcher.join()
        recorder.close()
    minutes, megabytes = np.array(resident[len(resident) // 3 : -1]).T
    slope = np.polyfit(minutes, megabytes, 1)[0]
    print(f"resident size of the learner: {slope:.2f} MB a minute, from {megabytes[0]:.0f} to {megabytes[-1]:.0f} MB")
    assert slope < 1.0
