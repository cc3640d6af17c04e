"""The item channel and the model channel, against writing and copying the same bytes in one process; one thread.

OMP_NUM_THREADS=1 python benchmarks/channel.py [--rounds 15]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from rounds import interleaved, table

from outrider.channel import ReplayBufferProxy, item_channel
from outrider.envs.gymnasium import GymEnvConfig
from outrider.flags import StopFlag
from outrider.model_sync import model_channel
from outrider.replay.uniform import SimpleReplayBufferConfig
from outrider.sampling import transition_layout
from outrider.testing import random_rows

ROWS = 16_384
LAYOUT = transition_layout(GymEnvConfig(id="CartPole-v1").spec())


def through_the_channel(block: int) -> Callable[[], int]:
    """Push rows in blocks, drain the messages into a replay buffer."""
    sender, receiver = item_channel()
    sender.bind(LAYOUT, n_actors=1, n_buffer=64, n_slots=2 * ROWS // 64, backend="processes")
    proxy = ReplayBufferProxy.build(sender.proxy_config, sender, 0, 0, StopFlag())
    buffer = SimpleReplayBufferConfig(capacity=ROWS).build(LAYOUT)
    columns = random_rows(LAYOUT, block)
    rows = np.empty(block, LAYOUT.record_dtype())
    for name, column in columns.items():
        rows[name] = column

    def run() -> int:
        for _ in range(ROWS // block):
            proxy.push(rows)
        receiver.drain(lambda message: buffer.push(message.items))
        return ROWS

    return run


def in_one_process(block: int) -> Callable[[], int]:
    """Write the same rows into columns a field at a time, and copy them into other columns, 64 at a time."""
    columns = random_rows(LAYOUT, block)
    here = {name: np.empty((64, *c.shape[1:]), c.dtype) for name, c in columns.items()}
    there = {name: np.empty((ROWS, *c.shape[1:]), c.dtype) for name, c in columns.items()}

    def run() -> int:
        at = 0
        for row in range(0, ROWS, block):
            for name, column in columns.items():
                here[name][at : at + block] = column
            at += block
            if at == 64:
                start = row + block - 64
                for name, column in here.items():
                    there[name][start : start + 64] = column
                at = 0
        return ROWS

    return run


def models(n: int) -> dict[str, Callable[[], int]]:
    """Publish and fetch n parameters, and copy them twice in memory."""
    # Not zeros: until they are written, the kernel has one page of them for all.
    info = {"params": np.random.default_rng(0).random(n, np.float32)}
    between, last = np.ones((3, n), np.float32), np.empty(n, np.float32)
    times = max(60, 4_000_000 // n)

    def copies(buffers: int) -> Callable[[], int]:
        def run() -> int:
            for i in range(times):
                between[i % buffers] = info["params"]
                last[:] = between[i % buffers]
            return times

        return run

    def publish_and_fetch(number: int | None) -> tuple[Callable[[], int], Callable[[], bool]]:
        sender, receiver = model_channel()
        sender.bind(info, n_readers=1)
        snapshot = receiver.open(number)

        def run() -> int:
            for i in range(times):
                sender.publish(i, info, 0)
                snapshot.fetch()
            return times

        return run, snapshot.fetch

    numbered, fetch = publish_and_fetch(0)
    unknown, _ = publish_and_fetch(None)

    def check() -> int:
        for _ in range(100_000):
            fetch()
        return 100_000

    return {
        "two copies in memory": copies(1),
        "two copies, by way of two buffers in turn": copies(2),
        "two copies, by way of three buffers in turn": copies(3),
        "publish and fetch": numbered,
        "publish and fetch, where a reader is late or has no number": unknown,
        "look for a newer one": check,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    for block in (1, 16):
        times = interleaved(
            {"written and copied in one process": in_one_process(block), "channel": through_the_channel(block)}, rounds
        )
        table(f"CartPole rows, {block} a push, 64 a message, both sides, per row", times, next(iter(times)))
    for n in (5_000, 1_700_000):
        times = interleaved(models(n), rounds)
        table(f"{n:,} parameters, per publication", times, next(iter(times)))


if __name__ == "__main__":
    main()
