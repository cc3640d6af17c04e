"""Batches from replay buffers, uniform and prioritised, with rows of CartPole's shape: CPU time on one thread.

OMP_NUM_THREADS=1 python benchmarks/peers/replay.py [--full] [--rounds N] [--batches N]

Everybody draws a batch of 256 as its user gets it, from 100,000 rows; and draws it by priority, from 1,048,576 rows,
and writes new priorities back.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Mapping

from contest import Contestant, interleaved, options, ratio, table

BATCH = 256


def compare(title: str, contestants: Mapping[str, tuple[str, str]], capacity: int, rounds: int, batches: int) -> None:
    """A table of the CPU time of a batch; the first one is what the others are compared with.

    Args:
        title: Of the table.
        contestants: Library and kind of batch, by the name of the row.
        capacity: Rows in the buffers.
        rounds: How often each is asked.
        batches: In a round.
    """
    asked = {
        name: (
            Contestant("replay_rounds", None if library == "outrider" else library, library),
            {"kind": kind, "capacity": capacity, "batch": BATCH, "batches": batches},
        )
        for name, (library, kind) in contestants.items()
    }
    answers = interleaved(rounds, asked, anew=False)
    times = {name: [answer["us"] for answer in found] for name, found in answers.items()}
    first = next(iter(times))
    table(
        title,
        ("what", "µs", f"times as long as {first}", "versions"),
        [
            (name, f"{statistics.median(spent):.1f}", ratio(spent, times[first]), asked[name][0].versions)
            for name, spent in times.items()
        ],
    )


def main() -> None:
    given = options(__doc__, rounds=(3, 9), batches=(1_000, 5_000))
    uniform = {
        "outrider": ("outrider", "uniform"),
        "outrider, as the agents' tensors": ("outrider", "tensors"),
        "Stable-Baselines3": ("sb3", "uniform"),
        "TorchRL": ("torchrl", "uniform"),
        "Tianshou": ("tianshou", "uniform"),
        "cpprb": ("cpprb", "uniform"),
    }
    compare(f"A uniform batch of {BATCH} from 100,000 rows", uniform, 100_000, given.rounds, given.batches)
    prioritised = {"Tianshou": ("tianshou", "prioritised"), "cpprb": ("cpprb", "prioritised")}
    if importlib.util.find_spec("outrider.replay.prioritized"):
        prioritised = {"outrider": ("outrider", "prioritised"), **prioritised}
    else:
        print("\noutrider.replay.prioritized is not there: no prioritised batches of outrider")
    title = f"A prioritised batch of {BATCH} from 1,048,576 rows, and its priorities written back"
    compare(title, prioritised, 2**20, given.rounds, given.batches)


if __name__ == "__main__":
    main()
