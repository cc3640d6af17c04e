"""Runs that the machine is too small for, started as users start them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from runs_with_faults import train

from outrider.envs.gymnasium import GymEnvConfig
from outrider.recording import NullRecorder
from outrider.testing import CountEnv

SOURCES = str(Path(__file__).resolve().parents[2] / "src")
SHORT = ("--trainer.max_opts=20", "--trainer.warmup_period=64", "--trainer.eval_interval=0", "--recorder.console=off")


def outrider(
    folder: Path, *arguments: str, before: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "outrider", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        cwd=folder,
        env=environment,
        preexec_fn=before,
        check=False,
    )


def few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (90, 90))


def refused(done: subprocess.CompletedProcess[str], folder: Path, message: str) -> None:
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"outrider: error: {message}")
    assert done.stderr.count("\n") == 1
    assert list(folder.iterdir()) == []


def test_too_few_descriptors_for_the_actors_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = outrider(tmp_path, "train", "cartpole-dqn", "--actors.n_actors=40", before=few_descriptors)
    refused(done, tmp_path, "descriptors: needs at least 177, ")
    assert "free (4 per actor, evaluator); raise `ulimit -n`, or lower actors.n_actors" in done.stderr


def test_a_replay_buffer_that_memory_cannot_hold_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = outrider(tmp_path, "train", "cartpole-dqn", "--replay.capacity=1_000_000_000_000")
    refused(done, tmp_path, "memory: needs at least 64000.")
    assert "free (replay 64,000.0 GB, 2 actors " in done.stderr


def test_a_run_that_just_has_the_descriptors_it_is_said_to_need_works(tmp_path: Path) -> None:
    done = outrider(
        tmp_path, "train", "cartpole-dqn", "--actors.n_actors=12", "--run_dir=run", *SHORT, before=few_descriptors
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("affinity", ["spread", pytest.param("none", marks=pytest.mark.slow)])
def test_needs_are_printed_before_training_and_before_a_resume(affinity: str, tmp_path: Path) -> None:
    train = ("train", "cartpole-dqn", "--run_dir=run", f"--actors.affinity={affinity}", *SHORT)
    resume = ("resume", "run", "--trainer.max_opts=30")
    for arguments in (train, resume):
        done = outrider(tmp_path, *arguments)
        assert done.returncode == 0, done.stderr
        table = done.stdout.splitlines()[:5]
        assert [line.split()[:2] for line in table] == [
            [name, "needs"] for name in ("memory", "disk", "descriptors", "processes", "cores")
        ]
        assert done.stdout.splitlines()[5].startswith("Stats of")


class AffinityEnv(CountEnv):
    """Notes the cores of its process."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        (Path(folder) / f"{cores} of {os.getpid()}").touch()


class LearnerCores(NullRecorder):
    """Notes those of the learner."""

    def __init__(self) -> None:
        self.cores: list[int] = []

    def flush(self, step: int) -> None:
        self.cores = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize("affinity", ["none", "spread"])
def test_spread_actors_and_the_learner_have_cores_of_their_own_and_the_process_gets_its_own_back(
    affinity: str, tmp_path: Path
) -> None:
    before = sorted(os.sched_getaffinity(0))
    learner = LearnerCores()
    env = GymEnvConfig(id=AffinityEnv, kwargs={"folder": str(tmp_path)})
    env.spec()  # described in a process that is no actor
    for file in tmp_path.iterdir():
        file.unlink()
    train(env, learner, n_actors=1, actors={"affinity": affinity}, max_opts=20)
    (actor,) = tmp_path.iterdir()
    everywhere = affinity == "none"
    assert actor.name.split()[0] == ",".join(map(str, before if everywhere else before[-1:]))
    assert learner.cores == (before if everywhere else before[:-1] or before)
    assert sorted(os.sched_getaffinity(0)) == before
