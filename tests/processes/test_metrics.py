"""The table of metrics is what runs really record: nothing of it is missing, and nothing else is recorded."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from outrider.actor_manager import ActorManagerConfig
from outrider.agents.dqn import DqnConfig
from outrider.agents.sac import SacConfig
from outrider.async_trainer import AsyncTrainerConfig
from outrider.checkpoint import CheckpointConfig, Checkpoints
from outrider.core import AgentConfig
from outrider.envs.gymnasium import GymEnvConfig
from outrider.evaluation import DefaultEvaluator
from outrider.recording import METRICS, MemoryRecorder
from outrider.recording.metrics import AXES
from outrider.replay.prioritized import PrioritizedReplayBufferConfig
from outrider.sampling import SimpleStepProcessorConfig
from outrider.wiring import train_async

COMPILED = {"train/compiled", "train/compiled_time_ratio"}
"""Recorded where updates are compiled, which takes half a minute: tests/test_compile.py looks at that."""


def names_recorded(agent: AgentConfig, env: GymEnvConfig, folder: Path) -> set[str]:
    recorder = MemoryRecorder()
    with Checkpoints(folder, CheckpointConfig()) as checkpoints:
        train_async(
            agent,
            [agent] * 2,
            env,
            env.eval(),
            SimpleStepProcessorConfig(),
            PrioritizedReplayBufferConfig(capacity=2_000),
            ActorManagerConfig(n_buffer=8),
            AsyncTrainerConfig(
                max_opts=200,
                warmup_period=500,
                samples_per_insert=8.0,
                eval_interval=50,
                record_compute_cost_interval=50,
                record_agent_info_interval=50,
            ),
            recorder,
            DefaultEvaluator(env.eval()),
            checkpoints=checkpoints,
        )
    return set().union(*recorder.lines) - set(AXES)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    dqn = DqnConfig(hidden=(8,), batch_size=32)
    sac = SacConfig(hidden=(8,), batch_size=32, random_steps=0)
    return names_recorded(dqn, GymEnvConfig(id="CartPole-v1"), tmp_path_factory.mktemp("dqn")) | names_recorded(
        sac, GymEnvConfig(id="Pendulum-v1", max_episode_steps=20), tmp_path_factory.mktemp("sac")
    )


def test_every_metric_of_the_table_is_recorded(recorded: set[str]) -> None:
    missing = {m.name for m in METRICS if not any(fnmatchcase(name, m.name) for name in recorded)}
    assert missing == COMPILED


def test_every_recorded_metric_is_in_the_table(recorded: set[str]) -> None:
    unknown = {name for name in recorded if not any(fnmatchcase(name, m.name) for m in METRICS)}
    assert unknown == set()
