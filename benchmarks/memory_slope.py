"""How the memory of every process of a run grows: evaluations, checkpoints, publications and records without a pause.

OMP_NUM_THREADS=1 python benchmarks/memory_slope.py [MINUTES] [--dotted.override=value ...]

Private memory (what no other process shares) and resident memory, every 5 s; the first sixth is left out.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

EVERY_S = 5.0
ARGUMENTS = (
    "--actors.n_actors=2",
    "--trainer.max_opts=null",
    "--trainer.eval_interval=500",
    "--evaluator.n_episodes=2",
    "--trainer.checkpoint.interval=5000",
    "--trainer.flush_record_interval=100",
    "--trainer.record_agent_info_interval=50",
    "--recorder.console=off",
)

Look = tuple[float, float, float]  # seconds since the start, private MB, resident MB


def sizes(process: psutil.Process) -> tuple[float, float] | None:
    """Private and resident memory in MB; None if it has ended."""
    try:
        memory = process.memory_full_info()
    except psutil.Error:
        return None
    return memory.uss / 1e6, memory.rss / 1e6


def name_of(process: psutil.Process, learner: int) -> str | None:
    """Which process of the run this is; None for those that live for moments only."""
    if process.pid == learner:
        return "learner"
    try:
        title = " ".join(" ".join(process.cmdline()).split())
    except psutil.Error:
        return None
    if title.startswith("outrider: "):
        return f"{title.removeprefix('outrider: ')} ({process.pid})"
    return f"fork server ({process.pid})" if "forkserver" in title else None


def watch(run: subprocess.Popen[bytes]) -> dict[str, list[Look]]:
    """Look at all processes of the run until it ends."""
    looks: dict[str, list[Look]] = {}
    started, learner = time.monotonic(), psutil.Process(run.pid)
    while run.poll() is None:
        for process in (learner, *learner.children(recursive=True)):
            name, size = name_of(process, run.pid), sizes(process)
            if name is not None and size is not None:
                looks.setdefault(name, []).append((time.monotonic() - started, *size))
        time.sleep(EVERY_S)
    return looks


def report(looks: dict[str, list[Look]], after_s: float) -> None:
    """One line for each process: slopes by least squares, and the median private memory of each fifth of the time."""
    print("process, looks, private MB/h, resident MB/h, private MB in five parts")
    for name, rows in sorted(looks.items()):
        late = np.array([row for row in rows if row[0] >= after_s])
        if len(late) < 10:
            print(f"{name}, {len(rows)}, lived too briefly", flush=True)
            continue
        hours, private, resident = late[:, 0] / 3600, late[:, 1], late[:, 2]
        slopes = [np.polyfit(hours, values, 1)[0] for values in (private, resident)]
        parts = " ".join(f"{np.median(part):.2f}" for part in np.array_split(private, 5))
        print(f"{name}, {len(late)}, {slopes[0]:+.2f}, {slopes[1]:+.2f}, {parts}", flush=True)


def main(minutes: float, overrides: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        limits = [f"--trainer.max_time_s={60 * minutes}", f"--run_dir={run_dir}"]
        command = [sys.executable, "-m", "outrider", "train", "cartpole-dqn", *ARGUMENTS, *limits, *overrides]
        with subprocess.Popen(command) as run:
            looks = watch(run)
        report(looks, after_s=60 * minutes / 6)
        last = (run_dir / "metrics.jsonl").read_text().splitlines()[-1]
        print(f"exit code {run.returncode}; last record: {last}")
    return run.returncode


if __name__ == "__main__":
    rest = sys.argv[1:]
    minutes = float(rest.pop(0)) if rest and not rest[0].startswith("--") else 30.0
    sys.exit(main(minutes, rest))
