"""From the command to the first opt step, against the import of torch: CartPole-v1, eight actors, warm-up 1,000.

OMP_NUM_THREADS=1 python benchmarks/start.py [--rounds 5] [--actors 8]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LONGEST_S = 120.0


def import_of_torch() -> float:
    """Seconds of a process that imports torch and ends."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - started


def start(n_actors: int) -> tuple[float, float]:
    """Seconds to the line that the first opt step writes, and to the end of the command.

    Raises:
        RuntimeError: It ended without an opt step, or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "outrider", "train", "cartpole-dqn", f"--run_dir={run_dir}"]
        command += [f"--actors.n_actors={n_actors}", "--trainer.warmup_period=1000", "--trainer.max_opts=1"]
        command += ["--trainer.flush_record_interval=1", "--trainer.eval_interval=0", "--recorder.console=off"]
        metrics = run_dir / "metrics.jsonl"
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while not _has_opt_step(metrics):
                if process.poll() not in (None, 0) or time.perf_counter() - started > LONGEST_S:
                    raise RuntimeError(f"no opt step: {' '.join(command)}")
                time.sleep(0.002)
            first = time.perf_counter() - started
            process.wait(LONGEST_S)
        finally:
            process.kill()
        return first, time.perf_counter() - started


def _has_opt_step(metrics: Path) -> bool:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return any(json.loads(line)["opt_steps"] >= 1 for line in lines if line.endswith("}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--actors", type=int, default=8)
    arguments = parser.parse_args()
    start(arguments.actors), import_of_torch()  # the files are in memory then
    times = [(import_of_torch(), *start(arguments.actors)) for _ in range(arguments.rounds)]
    print(f"\nFrom the command to the first opt step, {arguments.actors} actors, {arguments.rounds} rounds\n")
    print("| what | seconds | in imports of torch (median, range) |")
    print("|---|---|---|")
    for name, spent in zip(
        ("import of torch", "first opt step", "whole command"), zip(*times, strict=True), strict=True
    ):
        ratios = sorted(a / b[0] for a, b in zip(spent, times, strict=True))
        middle = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        print(f"| {name} | {statistics.median(spent):.2f} | {middle} |")
    bound = statistics.median(2 * import_s + 2 for import_s, *_ in times)
    print(f"\nTwice the import and two seconds: {bound:.2f} s")


if __name__ == "__main__":
    main()
