"""Drawing batches, one thread: uniformly, by priority, from frames that are stored once, and from rows on a disk.

OMP_NUM_THREADS=1 python benchmarks/replay.py [--rounds 15] [--only uniform prioritized frames]
OMP_NUM_THREADS=1 python benchmarks/replay.py [--rounds 15] --only disk [--disk .]

Every function below, but `cold`, gives candidates for `rounds.interleaved`: a name, and work that returns how many
batches it was. The first is the limit that the others are compared with.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces
from rounds import interleaved, table

from outrider.core import EnvSpec
from outrider.envs.gymnasium import GymEnvConfig
from outrider.frame_stream import frame_layout
from outrider.replay import FrameReplayBufferConfig, PrioritizedReplayBufferConfig, SimpleReplayBufferConfig
from outrider.replay.priorities import PriorityConfig
from outrider.replay.storage import zeros
from outrider.replay.sum_tree import BELOW_ONE, SumTree, compiled
from outrider.sampling import transition_layout
from outrider.testing import random_rows

Candidates = dict[str, Callable[[], int]]
BATCHES = 2_000
PRIORITIZED_CAPACITY = 2**20
FRAMES = 20_000
MADV_PAGEOUT = 21  # Linux


def uniform(size: int, capacity: int = 100_000) -> Candidates:
    """`np.take(out=)` of the same columns, and a batch; rows of CartPole's shape."""
    layout = transition_layout(GymEnvConfig(id="CartPole-v1").spec())
    buffer = SimpleReplayBufferConfig(capacity=capacity).build(layout)
    rows = random_rows(layout, capacity)
    buffer.push(rows)
    rng = np.random.default_rng(0)
    out = {f.name: np.empty((size, *f.shape), f.dtype) for f in layout.fields}

    def take() -> int:
        for _ in range(BATCHES):
            ixs = rng.integers(0, capacity, size)
            for name, column in rows.items():
                np.take(column, ixs, axis=0, out=out[name], mode="clip")
        return BATCHES

    return {"np.take of the columns": take, "batch": drawing(buffer, size, BATCHES)}


def prioritized(size: int, capacity: int = PRIORITIZED_CAPACITY) -> Candidates:
    """A binary tree in numba alone, outrider's tree alone, and a batch with its update; rows of CartPole's shape."""
    layout = transition_layout(GymEnvConfig(id="CartPole-v1").spec())
    buffer = PrioritizedReplayBufferConfig(capacity=capacity).build(layout)
    block = np.zeros(2**14, layout.record_dtype())
    rng = np.random.default_rng(0)
    for first in range(0, capacity, len(block)):
        buffer.push(block[: capacity - first])
        numbers = np.arange(first, min(first + len(block), capacity))
        buffer.update_priority(numbers, rng.random(len(numbers)))
    values = rng.random(capacity)
    trees = {"binary tree in numba alone": binary_tree(values)} if compiled() else {}
    tree = SumTree(capacity)
    tree.set_all(values)

    def plain_tree(points: np.ndarray, out: np.ndarray, new: np.ndarray) -> None:
        np.minimum(points, tree.total * BELOW_ONE, out=points)
        tree.find(points, out)
        tree.set(out, new)

    trees["outrider's tree alone"] = (plain_tree, tree.total)
    return {name: tree_alone(*found, size) for name, found in trees.items()} | {
        "batch and update": drawing(buffer, size, BATCHES // 4, rng.random(size))
    }


def tree_alone(work: Callable[..., None], total: float, size: int) -> Callable[[], int]:
    rng, out, parts = np.random.default_rng(0), np.empty(size, np.int64), np.arange(size)

    def run() -> int:
        for _ in range(BATCHES // 4):
            points = (rng.random(size) + parts) * (total / size * BELOW_ONE)
            work(points, out, rng.random(size))
        return BATCHES // 4

    return run


def binary_tree(values: np.ndarray) -> tuple[Callable[..., None], float]:
    """The usual one: walks down a leaf at a time, and adds differences up the way back."""
    import numba

    n = len(values)
    nodes = np.zeros(2 * n)
    nodes[n:] = values
    for i in range(n - 1, 0, -1):
        nodes[i] = nodes[2 * i] + nodes[2 * i + 1]

    @numba.njit  # type: ignore[untyped-decorator]
    def work(nodes: np.ndarray, points: np.ndarray, out: np.ndarray, new: np.ndarray) -> None:
        for i in range(len(points)):
            point, node = points[i], 1
            while node < n:
                node *= 2
                if point >= nodes[node]:
                    point -= nodes[node]
                    node += 1
            out[i] = node - n
        for i in range(len(points)):
            node = out[i] + n
            change = new[i] - nodes[node]
            while node:
                nodes[node] += change
                node //= 2

    return partial(work, nodes), float(nodes[1])


def frames(size: int, n_envs: int = 4, message: int = 128) -> tuple[Candidates, dict[str, float]]:
    """Rows with both stacks, and frames stored once, uniformly and by priority; also bytes per transition of each."""
    spec = EnvSpec("atari", spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(6), frame_stack=4)
    layout = transition_layout(spec)
    stacked = SimpleReplayBufferConfig(capacity=FRAMES).build(layout)
    rows = np.ones(1000, layout.record_dtype())
    for _ in range(FRAMES // len(rows)):
        stacked.push(rows)
    buffers: dict[str, Any] = {"stacked": stacked}
    for name, priorities in (("frames", None), ("frames by priority", PriorityConfig())):
        buffer = FrameReplayBufferConfig(capacity=FRAMES, prioritized=priorities).build(frame_layout(spec))
        for first in range(0, FRAMES, message):
            buffer.push(stream(frame_layout(spec).record_dtype(), first // n_envs, n_envs, message))
        buffers[name] = buffer
    nbytes = {name: buffer.nbytes / FRAMES for name, buffer in buffers.items()}
    td_errors = {"frames by priority": np.random.default_rng(0).random(size)}
    return {name: drawing(buffer, size, 200, td_errors.get(name)) for name, buffer in buffers.items()}, nbytes


def stream(dtype: np.dtype[Any], t: int, n_envs: int, m: int) -> np.ndarray:
    entries = np.ones(m, dtype)
    entries["t"], entries["env"] = t + np.arange(m) // n_envs, np.arange(m) % n_envs
    entries["terminated"] = entries["truncated"] = False
    return entries


def on_disk(size: int, disk: str) -> dict[str, Candidates]:
    """Rows in memory, and the same in a file that is mapped and all in memory: drawing, and pushing messages of 64."""
    spec = EnvSpec("atari", spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(6), frame_stack=4)
    shapes = {"CartPole": (GymEnvConfig(id="CartPole-v1").spec(), 100_000), "Atari": (spec, FRAMES // 2)}
    tables: dict[str, Candidates] = {}
    for shape, (spec, capacity) in shapes.items():
        dtype = transition_layout(spec).record_dtype()
        rows = np.ones(1000, dtype)
        draws, pushes = Candidates(), Candidates()
        for name, place in (("memory", None), ("disk", disk)):
            buffer = SimpleReplayBufferConfig(capacity=capacity, disk=place).build(transition_layout(spec))
            for _ in range(capacity // len(rows)):
                buffer.push(rows)
            draws[name], pushes[name] = drawing(buffer, size, 200), pushing(buffer, rows[:64])
        tables[f"A batch of {size} of {capacity} {shape} transitions"] = draws
        tables[f"A message of 64 {shape} transitions"] = pushes
    return tables


def pushing(buffer: Any, rows: np.ndarray) -> Callable[[], int]:
    def run() -> int:
        for _ in range(100):
            buffer.push(rows)
        return 100

    return run


def cold(size: int, disk: str, rounds: int, nbytes: int = 2**31) -> None:
    """The first batch after all rows have left memory, by the clock: as mapped, and with the kernel's read-ahead."""
    for shape, row_bytes in (("CartPole", 64), ("frames of Atari", 7056)):
        rows = zeros((nbytes // row_bytes,), np.dtype(f"V{row_bytes}"), disk, "benchmark")
        rows.view(np.uint8)[:] = 1
        rng, out = np.random.default_rng(0), np.empty(size, rows.dtype)
        view: Any = rows.base
        mapping = view.base.obj
        mapping.flush()  # what is not on the disk yet does not leave memory
        times: dict[str, list[float]] = {"MADV_RANDOM": [], "MADV_NORMAL": []}
        for _ in range(rounds):
            for name, spent in times.items():
                mapping.madvise(MADV_PAGEOUT)
                mapping.madvise(getattr(mmap, name))
                started = time.perf_counter()
                rows.take(rng.integers(0, len(rows), size), out=out, mode="clip")
                spent.append((time.perf_counter() - started) * 1e6)
        table(f"{size} rows of {shape}, none in memory, by the clock", times, "MADV_NORMAL")


def drawing(buffer: Any, size: int, batches: int, td_errors: np.ndarray | None = None) -> Callable[[], int]:
    def run() -> int:
        for _ in range(batches):
            batch = buffer.batch(size)
            if td_errors is not None:
                buffer.update_priority(batch.ixs, td_errors)
        return batches

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", default=["uniform", "prioritized", "frames"])
    parser.add_argument("--disk", default=".", help="directory for 2 GB")
    options = parser.parse_args()

    def show(title: str, candidates: Candidates) -> None:
        table(title, interleaved(candidates, options.rounds), next(iter(candidates)))
        gc.collect()

    for size in (32, 256):
        if "uniform" in options.only:
            show(f"A batch of {size} of 100,000 rows, uniform", uniform(size))
        if "prioritized" in options.only:
            numba = "with" if compiled() else "without"
            show(f"A batch of {size} of 2**20 rows by priority, {numba} numba, and its update", prioritized(size))
        if "frames" in options.only:
            candidates, nbytes = frames(size)
            show(f"A batch of {size} of {FRAMES} Atari transitions", candidates)
            print("\nBytes per transition:", ", ".join(f"{name} {n:.0f}" for name, n in nbytes.items()))
        if "disk" in options.only:
            for title, candidates in on_disk(size, options.disk).items():
                show(title, candidates)
            cold(size, options.disk, options.rounds)


if __name__ == "__main__":
    main()
