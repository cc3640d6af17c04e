"""Short ways to train with what fails on purpose, and to see what is left."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil
from children_faults import FaultAgentConfig

import outrider
from outrider.actor_manager import ActorManagerConfig
from outrider.async_trainer import AsyncTrainerConfig
from outrider.envs.gymnasium import GymEnvConfig
from outrider.recording import MemoryRecorder, NullRecorder
from outrider.replay.uniform import SimpleReplayBufferConfig
from outrider.sampling import SimpleStepProcessorConfig
from outrider.wiring import TrainResult, train_async

HERE = Path(__file__).parent


def noted(folder: Path, pattern: str, n: int = 1, timeout_s: float = 35.0) -> list[float]:
    """Wait for n such notes, and read them."""
    deadline = time.monotonic() + timeout_s
    while len(files := [f for f in folder.glob(pattern) if f.suffix != ".tmp"]) < n:
        assert time.monotonic() < deadline, f"{len(files)} of {n} {pattern} after {timeout_s} s"
        time.sleep(0.02)
    return [float(file.read_text()) for file in files]


def alive(pid: float) -> bool:
    """Whether a process is there, and is no zombie that only waits for its parent."""
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: Sequence[float], timeout_s: float = 5.0) -> bool:
    """Wait until none of them is there."""
    deadline = time.monotonic() + timeout_s
    while any(map(alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def worker_pids() -> dict[str, int]:
    """Processes of this process's actors and evaluator, by name: `actor 0`, `evaluator`."""
    pids = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie, too
            title = " ".join("".join(process.cmdline()).split())
            if title.startswith("outrider: "):
                pids[title.removeprefix("outrider: ")] = process.pid
    return pids


class NoEvaluator:
    """Never asked."""

    def evaluate(self, agent: Any) -> tuple[float, dict[str, Any]]:
        raise AssertionError("expected no evaluation")

    def close(self) -> None:
        pass


def train(
    env: GymEnvConfig,
    recorder: Any = None,
    evaluator: Any = None,
    *,
    agent: Any = None,
    n_actors: int = 2,
    step_processor: Any = None,
    replay: Any = None,
    actors: dict[str, Any] | None = None,
    logs: Path | None = None,
    **trainer: Any,
) -> TrainResult:
    """Train a fake agent; until something fails, or for 30 s."""
    config = {"max_opts": None, "max_time_s": 30.0, "warmup_period": 64, "samples_per_insert": None} | trainer
    config = {"eval_interval": 0, "flush_record_interval": 10} | config
    agent = agent or FaultAgentConfig(opt_s=0.002)
    return train_async(
        agent,
        [agent] * n_actors,
        env,
        env.eval(),
        step_processor or SimpleStepProcessorConfig(),
        replay or SimpleReplayBufferConfig(capacity=1000),
        ActorManagerConfig(**({"n_buffer": 8} | (actors or {}))),
        AsyncTrainerConfig(**config),
        recorder or NullRecorder(),
        evaluator or NoEvaluator(),
        logs=logs,
    )


class TimedRecorder(MemoryRecorder):
    """Knows when the last model was saved."""

    saved_at = 0.0

    def save_model(self, name: str, agent: Any) -> None:
        super().save_model(name, agent)
        self.saved_at = time.monotonic()


def _held() -> list[str]:
    gc.collect()
    multiprocessing.active_children()  # reaps those that ended
    helpers = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    fds = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            fds.append(f"descriptor {fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:  # the one that lists them
            continue
    threads = [f"thread {t.name}" for t in threading.enumerate() if not t.name.startswith("pytest_timeout")]
    files = [f"/dev/shm/{name}" for name in os.listdir("/dev/shm")]
    children = [f"process {p.pid}" for p in psutil.Process().children(recursive=True) if p.pid not in helpers]
    return fds + threads + files + children


@contextmanager
def nothing_left() -> Iterator[None]:
    """No process, thread, descriptor or shared-memory file is there after the block that was not there before."""
    before = _held()
    yield
    deadline = time.monotonic() + 2.0
    while (left := set(_held()) - set(before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, sorted(left)


class Pythons:
    """Starts interpreters with what these tests use on their path; kills those that are left when it is closed."""

    def __init__(self) -> None:
        self.runs: list[subprocess.Popen[str]] = []

    def start(
        self, *arguments: str, prefix: Sequence[str] = (), env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start one.

        Args:
            arguments: Of the interpreter.
            prefix: A command that runs the one that follows it.
            env: Environment variables besides those there are.
            options: For :class:`subprocess.Popen`.
        """
        root = str(Path(outrider.__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, str(HERE)]), "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        command = [*prefix, sys.executable, *arguments]
        self.runs.append(subprocess.Popen(command, text=True, env={**environment, **(env or {})}, **pipes))
        return self.runs[-1]

    def close(self) -> None:
        for run in self.runs:
            run.kill()
            run.wait()
            for pipe in (run.stdin, run.stdout, run.stderr):
                if pipe is not None:
                    pipe.close()
