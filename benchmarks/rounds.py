"""What the benchmarks share: interleaved rounds, medians, one table."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable


def interleaved(candidates: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Microseconds of CPU time per unit of work, for each candidate in each round.

    The candidates take turns, so that a change in the machine's speed meets all of them alike.

    Args:
        candidates: Functions that do some work and return how many units it was.
        rounds: Rounds that count; one more comes first, to warm up.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for i in range(rounds + 1):
        for name, work in candidates.items():
            gc.collect()
            started = time.process_time()
            units = work()
            spent = time.process_time() - started
            if i:
                times[name].append(spent / units * 1e6)
    return times


def table(title: str, times: dict[str, list[float]], limit: str) -> None:
    """Print medians, and each candidate's rate as a part of the limit's, round by round."""
    print(f"\n{title}\n")
    print(f"| what | µs | rate against '{limit}' (median, range) |")
    print("|---|---|---|")
    for name, spent in times.items():
        ratios = sorted(a / b for a, b in zip(times[limit], spent, strict=True))
        middle = statistics.median(ratios)
        print(f"| {name} | {statistics.median(spent):.2f} | {middle:.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) |")
