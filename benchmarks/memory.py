"""Memory of one more actor with an MLP policy, against one more process with numpy and Gymnasium: CartPole-v1.

OMP_NUM_THREADS=1 python benchmarks/memory.py [--rounds 3] [--actors 5]

Proportional set size of all processes of a run: with five actors less that with one, by four. Pages that processes
share count once, so this is what an actor adds. The bare processes make an environment and a numpy generator.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

BARE = """
import sys
import gymnasium, numpy
env, rng = gymnasium.make("CartPole-v1"), numpy.random.default_rng(0)
env.reset(seed=0)
print("ready", flush=True)
sys.stdin.read()
"""
LONGEST_S, SETTLE_S = 120.0, 5.0


def megabytes(processes: Sequence[psutil.Process]) -> float:
    """Proportional set size of all of them."""
    return float(sum(process.memory_full_info().pss for process in processes) / 1e6)


def bare(n: int) -> float:
    """Megabytes of `n` bare processes."""
    children = [
        subprocess.Popen([sys.executable, "-c", BARE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(n)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        return megabytes([psutil.Process(child.pid) for child in children])
    finally:
        for child in children:
            child.communicate()


def run(n: int) -> float:
    """Megabytes of a run with `n` actors, its learner included, when all of them act.

    Raises:
        RuntimeError: It ended by itself, or not all of its actors came.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "outrider", "train", "cartpole-dqn", f"--run_dir={Path(folder) / 'run'}"]
        command += [f"--actors.n_actors={n}", "--trainer.max_opts=null", "--trainer.eval_interval=0"]
        command += ["--recorder.console=off"]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            whole = psutil.Process(child.pid)
            started = time.monotonic()
            while sum(p.name().startswith("outrider: actor") for p in whole.children(recursive=True)) < n:
                if child.poll() is not None or time.monotonic() - started > LONGEST_S:
                    child.send_signal(signal.SIGINT)
                    raise RuntimeError(f"not all actors came: {' '.join(command)}\n{child.communicate()[1]}")
                time.sleep(0.1)
            time.sleep(SETTLE_S)
            return megabytes([whole, *whole.children(recursive=True)])
        finally:
            child.send_signal(signal.SIGINT)
            child.communicate(timeout=LONGEST_S)  # it says on stderr what stopped it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--actors", type=int, default=5)
    arguments = parser.parse_args()
    more = arguments.actors - 1
    one: dict[str, list[float]] = {"bare process": [], "actor": []}
    added: dict[str, list[float]] = {"bare process": [], "actor": []}
    for _ in range(arguments.rounds):
        for name, measure in (("bare process", bare), ("actor", run)):
            first = measure(1)
            one[name].append(first)
            added[name].append((measure(1 + more) - first) / more)
    print(f"\nMemory of one more process, of {arguments.actors}, {arguments.rounds} rounds\n")
    print("| what | MB with one | MB for each one more | against a bare process (median, range) |")
    print("|---|---|---|---|")
    for name, sizes in added.items():
        ratios = sorted(a / b for a, b in zip(sizes, added["bare process"], strict=True))
        middle = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        print(f"| {name} | {statistics.median(one[name]):.1f} | {statistics.median(sizes):.1f} | {middle} |")


if __name__ == "__main__":
    main()
