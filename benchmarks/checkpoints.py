"""Checkpoints of a 1 GB replay buffer: how long the learner stands still, and what is on the disk.

Run: ``python benchmarks/checkpoints.py [FOLDER]`` (needs 3 GB of memory and 4 GB of disk).
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from outrider.checkpoint import CheckpointConfig, Checkpoints
from outrider.checkpoint_files import Moment, newest_checkpoint
from outrider.data import Field, Layout
from outrider.replay.uniform import SimpleReplayBuffer

GB = 2**30
IMAGE = Field("obs", (4, 84, 84), np.dtype(np.uint8))
LAYOUT = Layout("transitions", (IMAGE, Field("next_obs", IMAGE.shape, IMAGE.dtype)))
ROWS = GB // LAYOUT.record_dtype().itemsize
MESSAGE = 64
MB_PER_S = 40  # of new rows: about 700 Atari transitions a second, stored as whole stacks


def fill(buffer: SimpleReplayBuffer, checkpoints: Checkpoints, share: float, mb_per_s: float | None) -> float:
    """Insert this share of a buffer as a learner would; returns the longest time between two messages in ms."""
    block = np.random.default_rng(0).integers(0, 255, MESSAGE * buffer.row_dtype.itemsize, np.uint8)
    rows, longest = block.view(buffer.row_dtype), 0.0
    for _ in range(int(share * ROWS / MESSAGE)):
        buffer.push(rows)
        started = time.perf_counter()
        checkpoints.due(0)
        longest = max(longest, time.perf_counter() - started)
        if mb_per_s is not None:
            time.sleep(rows.nbytes / 1e6 / mb_per_s)
    return longest * 1e3


def on_disk(folder: Path) -> float:
    """Size in GB."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / GB


def main() -> None:
    """Print the table."""
    buffer = SimpleReplayBuffer(LAYOUT, ROWS)
    print("| checkpoint | new, GB | at, MB/s | longest stop meanwhile, ms | pause, ms | written after, s | disk, GB |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as name:
        folder = Path(name)
        with Checkpoints(folder, CheckpointConfig(keep=5)) as checkpoints:
            checkpoints.start(buffer)
            plan = [(1.0, None), *[(0.2, MB_PER_S)] * 4, (0.2, None)]
            for n, (share, rate) in enumerate(plan, 1):
                stop = fill(buffer, checkpoints, share, rate)
                started = time.perf_counter()
                checkpoints.take(Moment(n, 0, 0.0, None, "interval"), {"replay": buffer.state_without_rows()})
                pause = (time.perf_counter() - started) * 1e3
                assert checkpoints._writing is not None
                checkpoints._writing.result()
                written = time.perf_counter() - started
                speed = "at once" if rate is None else str(rate)
                figures = f"{stop:.0f} | {pause:.0f} | {written:.1f} | {on_disk(folder):.2f}"
                print(f"| {n} | {share:.1f} | {speed} | {figures} |", flush=True)
        started = time.perf_counter()
        found, _ = newest_checkpoint(folder)
        checked = time.perf_counter() - started
        assert found is not None
        buffer.load_rows(found.state["replay"], found.blocks())
        print(f"\nchecked in {checked:.1f} s, restored in {time.perf_counter() - started - checked:.1f} s")


if __name__ == "__main__":
    main()
