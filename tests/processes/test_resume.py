"""Runs that are interrupted, killed or run out of disk, and go on: by the command, for real."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from runs_with_faults import gone

from outrider.checkpoint import CheckpointConfig, Checkpoints
from outrider.checkpoint_files import Moment, newest_checkpoint, opt_steps_of_checkpoints, read_checkpoint
from outrider.data import Field, Layout
from outrider.durable import whole_directory
from outrider.recording import read_metrics
from outrider.replay.uniform import SimpleReplayBuffer

GOAL = 20_000
OPTIONS = (
    f"--trainer.max_opts={GOAL}",
    "--trainer.warmup_period=300",
    "--trainer.samples_per_insert=64",
    "--trainer.eval_interval=0",
    "--trainer.flush_record_interval=20",
    "--actors.n_actors=2",
    "--agent.hidden=[16]",
    "--agent.batch_size=16",
    "--recorder.console=off",
)
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: str | Path, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        call = [*prefix, sys.executable, "-m", "outrider", *map(str, arguments)]
        running.append(subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return running[-1]

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finished(process: subprocess.Popen[str], code: int = 0) -> str:
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    return err


def wait_until(what: Callable[[], bool], process: subprocess.Popen[str], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def metrics(run_dir: Path) -> list[dict[str, float | int | str]]:
    return read_metrics(run_dir) if (run_dir / "metrics.jsonl").exists() else []


def require_one_axis(run_dir: Path) -> None:
    lines = metrics(run_dir)
    for axis in ("opt_steps", "env_steps", "time_s", "async/inserted", "async/sampled"):
        values = [line[axis] for line in lines if axis in line]
        assert values == sorted(values), axis  # type: ignore[type-var]


def test_a_run_stopped_by_ctrl_c_goes_on(start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run = start("train", "cartpole-dqn", *OPTIONS, f"--run_dir={run_dir}")
    wait_until(lambda: len(metrics(run_dir)) > 5, run)
    run.send_signal(signal.SIGINT)
    finished(run, 130)
    checkpoint, damages = newest_checkpoint(run_dir / "checkpoints")
    assert checkpoint is not None
    assert damages == []
    assert checkpoint.moment.reason == "SIGINT"
    reached = checkpoint.moment.opt_steps
    assert reached == metrics(run_dir)[-1]["opt_steps"]
    said = finished(start("resume", run_dir, f"--trainer.max_opts={reached + 50}"))
    assert f"changed: trainer.max_opts: {GOAL} -> {reached + 50}" in said
    assert f"goes on from {run_dir}/checkpoints/{reached}: {reached} opt steps" in said
    lines = metrics(run_dir)
    require_one_axis(run_dir)
    assert lines[-1]["opt_steps"] == reached + 50
    burst = 50 * 16 / 64 + 2 * 8 * 64 * 2
    assert int(lines[-1]["async/inserted"]) - checkpoint.state["replay"]["inserted"] <= burst, "no second warm-up"
    assert lines[-1]["async/sampled"] == checkpoint.state["replay"]["sampled"] + 50 * 16
    assert (run_dir / "command.txt").read_text().count("\n") == 2


def test_a_run_stopped_before_it_began_begins(start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run = start("train", "cartpole-dqn", *OPTIONS, f"--run_dir={run_dir}")
    wait_until(lambda: (run_dir / "config.yaml").exists(), run)
    run.send_signal(signal.SIGINT)
    finished(run, 130)
    finished(start("resume", run_dir, "--trainer.max_opts=10"))
    assert metrics(run_dir)[-1]["opt_steps"] == 10
    require_one_axis(run_dir)


def test_a_run_stopped_in_its_warm_up_goes_on_with_it(start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    warm_up = ("--trainer.warmup_period=900_000", "--replay.capacity=900_000")
    often = "--trainer.checkpoint.interval_min=0.01"
    run = start("train", "cartpole-dqn", *OPTIONS, *warm_up, often, f"--run_dir={run_dir}")
    wait_until(lambda: bool(opt_steps_of_checkpoints(run_dir / "checkpoints")), run)
    run.send_signal(signal.SIGTERM)
    finished(run, 143)
    checkpoint, _ = newest_checkpoint(run_dir / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.moment.opt_steps == 0
    inserted = checkpoint.state["replay"]["inserted"]
    finished(start("resume", run_dir, "--trainer.max_opts=10", "--trainer.warmup_period=300"))
    require_one_axis(run_dir)
    assert int(metrics(run_dir)[-1]["async/inserted"]) >= inserted


def test_a_learner_that_raises_leaves_an_emergency_checkpoint(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    agent = ("--agent=children_faults:FaultAgentConfig", "--agent.fail_at=70", "--step_processor=simple")
    run = start("train", "cartpole-dqn", *OPTIONS[:5], f"--run_dir={run_dir}", *agent)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1, err
    checkpoint, _ = newest_checkpoint(run_dir / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.moment.reason == "ZeroDivisionError"
    assert checkpoint.moment.opt_steps == 69


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_reaches_its_goal(kills: int, start: Start, tmp_path: Path) -> None:
    run_dir, rng = tmp_path / "run", random.Random(kills)
    checkpoints = ("--trainer.checkpoint.interval=25", "--trainer.checkpoint.keep=2")
    arguments: tuple[str | Path, ...] = ("train", "cartpole-dqn", *OPTIONS, *checkpoints, f"--run_dir={run_dir}")
    reached = []
    for _ in range(kills):
        run = start(*arguments)
        before = len(metrics(run_dir))
        wait_until(lambda: (run_dir / "config.yaml").exists(), run)
        if rng.random() < 0.8:  # else wherever it is after a moment, in its start too
            wait_until(lambda before=before: len(metrics(run_dir)) > before, run)  # type: ignore[misc]
        time.sleep(rng.uniform(0.0, 1.5))
        family = [run.pid, *(child.pid for child in psutil.Process(run.pid).children(recursive=True))]
        os.kill(run.pid, signal.SIGKILL)
        run.communicate()
        assert gone(family), "nothing of it is left"
        for n in opt_steps_of_checkpoints(run_dir / "checkpoints"):
            read_checkpoint(whole_directory(run_dir / "checkpoints" / str(n)))
        require_one_axis(run_dir)
        newest, damages = newest_checkpoint(run_dir / "checkpoints")
        assert damages == []
        reached.append(newest.moment.opt_steps if newest else 0)
        arguments = ("resume", run_dir)
    assert reached == sorted(reached), "what has been written is never lost"
    assert reached[-1] > reached[0]
    goal = reached[-1] + 100
    said = finished(start("resume", run_dir, f"--trainer.max_opts={goal}"))
    assert "damaged" not in said
    require_one_axis(run_dir)
    assert metrics(run_dir)[-1]["opt_steps"] == goal
    there = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert len(there) <= 2 + 1, f"nothing half written is left: {there}"


def can_mount() -> bool:
    if os.geteuid() != 0 or not shutil.which("unshare"):
        return False
    probe = "mount -t tmpfs -o size=1m none /mnt"
    return subprocess.run(["unshare", "-m", "sh", "-c", probe], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="mounting a small disk needs root and unshare")
def test_a_full_disk_does_not_end_the_training(start: Start, tmp_path: Path) -> None:
    """The whole run happens on a disk of 2 MB: in a mount namespace of its own, which goes with it."""
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    script = f'mount -t tmpfs -o size=2m none {disk} && "$@"; code=$?; cp -r {disk} {copy}; exit $code'
    run = start(
        "train",
        "cartpole-dqn",
        *OPTIONS,
        "--trainer.max_opts=1500",
        "--trainer.samples_per_insert=1",
        "--replay.capacity=100_000",
        "--trainer.checkpoint.interval=50",
        "--recorder.tensorboard=false",
        f"--run_dir={disk / 'run'}",
        prefix=("unshare", "-m", "sh", "-c", script, "sh"),
    )
    said = finished(run)
    assert said.count("could not be written, training goes on") == 1, said
    run_dir = copy / "run"
    newest, damages = newest_checkpoint(run_dir / "checkpoints")
    assert newest is not None
    assert damages == []
    assert 0 < newest.moment.opt_steps < 1500
    for n in opt_steps_of_checkpoints(run_dir / "checkpoints"):
        read_checkpoint(run_dir / "checkpoints" / str(n))
    finished(start("resume", run_dir, f"--trainer.max_opts={newest.moment.opt_steps + 20}"))


@pytest.mark.slow
def test_five_checkpoints_of_a_large_buffer_take_little_more_than_one(tmp_path: Path) -> None:
    """One GB of image transitions, a tenth of them new at each checkpoint. Figures: benchmarks/checkpoints.py."""
    image = Field("obs", (4, 84, 84), np.dtype(np.uint8))
    layout = Layout("transitions", (image, Field("next_obs", image.shape, image.dtype)))
    rows = 2**30 // layout.record_dtype().itemsize
    buffer = SimpleReplayBuffer(layout, rows)
    block = np.zeros(rows // 100, layout.record_dtype())

    def on_disk() -> int:
        return sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())

    with Checkpoints(tmp_path, CheckpointConfig(keep=5)) as checkpoints:
        checkpoints.start(buffer)
        for n in range(1, 6):
            for i in range(100 if n == 1 else 10):
                block["obs"][...] = (n * 100 + i) % 251
                buffer.push(block)
                checkpoints.due(n)
            checkpoints.take(Moment(n, 0, 0.0, None, "interval"), {"replay": buffer.state_without_rows()})
    assert opt_steps_of_checkpoints(tmp_path) == [5, 4, 3, 2, 1]
    assert on_disk() < 1.5 * buffer.nbytes
    newest, _ = newest_checkpoint(tmp_path)
    assert newest is not None
    restored = SimpleReplayBuffer(layout, rows)
    restored.load_rows(newest.state["replay"], newest.blocks())
    last = rows - 1
    assert (
        restored.copy_rows(restored.inserted - last, restored.inserted).tobytes()
        == buffer.copy_rows(buffer.inserted - last, buffer.inserted).tobytes()
    )
