"""Drawing a batch, against `np.take(out=)` of the same columns: rows of CartPole's shape, one thread.

OMP_NUM_THREADS=1 python benchmarks/replay.py [--rounds 15]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from rounds import interleaved, table

from outrider.envs.gymnasium import GymEnvConfig
from outrider.replay.uniform import SimpleReplayBufferConfig
from outrider.sampling import transition_layout
from outrider.testing import random_rows

CAPACITY = 100_000
BATCHES = 2_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    layout = transition_layout(GymEnvConfig(id="CartPole-v1").spec())
    buffer = SimpleReplayBufferConfig(capacity=CAPACITY).build(layout)
    rows = random_rows(layout, CAPACITY)
    buffer.push(rows)
    rng = np.random.default_rng(0)

    def take(size: int) -> Callable[[], int]:
        out = {f.name: np.empty((size, *f.shape), f.dtype) for f in layout.fields}

        def run() -> int:
            for _ in range(BATCHES):
                ixs = rng.integers(0, CAPACITY, size)
                for name, column in rows.items():
                    np.take(column, ixs, axis=0, out=out[name], mode="clip")
            return BATCHES

        return run

    def batch(size: int) -> Callable[[], int]:
        def run() -> int:
            for _ in range(BATCHES):
                buffer.batch(size)
            return BATCHES

        return run

    for size in (32, 256):
        times = interleaved({"np.take of the columns": take(size), "batch": batch(size)}, rounds)
        table(
            f"A batch of {size} from {CAPACITY} rows of {layout.record_dtype().itemsize} bytes",
            times,
            next(iter(times)),
        )


if __name__ == "__main__":
    main()
