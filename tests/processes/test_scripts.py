"""What users write in scripts and where they run them does not matter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import outrider

HERE = Path(__file__).parent
SOURCES = str(Path(outrider.__file__).parents[1])


def test_environments_from_anything_that_can_be_called_in_a_script_without_main_guard(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, HERE / "run_of_a_script.py", tmp_path],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**environment, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr
    kinds = ["class", "local class", "closure", "lambda", "partial", "object"]
    assert done.stdout.splitlines() == ["the script runs", *(f"{kind} 20" for kind in kinds)]
    assert {path.name for path in tmp_path.iterdir()} == set(kinds)


IN_A_SMALL_CONTAINER = """
mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"
"""
EIGHT_ACTORS = """
import os
import numpy as np
from gymnasium import spaces
from outrider.actor_manager import ActorManagerConfig
from outrider.envs.gymnasium import GymEnvConfig
from outrider.evaluation import DefaultEvaluator
from outrider.trainer_config import AsyncTrainerConfig
from outrider.recording import NullRecorder
from outrider.replay.uniform import SimpleReplayBufferConfig
from outrider.sampling import SimpleStepProcessorConfig
from outrider.testing import FakeAgentConfig, SpacesEnv
from outrider.wiring import train_async

frames = spaces.Box(0, 255, (4, 84, 84), np.uint8)
env = GymEnvConfig(id=SpacesEnv, kwargs={"observation_space": frames, "action_space": spaces.Discrete(4)})
agents = [FakeAgentConfig(n_weights=1_700_000)] * 8
trainer = AsyncTrainerConfig(
    max_opts=None, max_env_steps=3_000, warmup_period=500, samples_per_insert=1, eval_interval=0
)
parts = (SimpleStepProcessorConfig(), SimpleReplayBufferConfig(capacity=1_000), ActorManagerConfig(), trainer)
result = train_async(agents[0], agents, env, env, *parts, NullRecorder(), DefaultEvaluator(env))
assert result.stats.env_steps >= 3_000
assert not os.listdir("/dev/shm")
print("small enough:", os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize)
"""


def _can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    call = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=64k tmpfs /dev/shm"]
    return subprocess.run(call, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _can_mount(), reason="nothing can be mounted here")
def test_a_container_with_hardly_any_dev_shm_is_large_enough_for_eight_actors_of_frames() -> None:
    """Docker gives 64 MB where this run needs 250; here are 64 kB."""
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", IN_A_SMALL_CONTAINER, "sh", sys.executable, "-c", EIGHT_ACTORS],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, "PYTHONPATH": SOURCES},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "small enough: 65536"
