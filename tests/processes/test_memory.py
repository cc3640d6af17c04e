"""A learner slower than its actors: rings fill, actors wait, and nobody's memory grows."""

from __future__ import annotations

import os
import time
from typing import Any

import psutil
import pytest
from children_faults import FaultAgentConfig, fault_env
from runs_with_faults import train

from outrider.recording import NullRecorder

MB = 1e6


class MemoryWatch(NullRecorder):
    """Notes the resident size of this process and of its actors at every flush.

    Args:
        after_s: Seconds from which on they count: by then every page has been written once.
    """

    def __init__(self, after_s: float) -> None:
        self.begin = time.monotonic() + after_s
        self.sizes: dict[str, list[float]] = {}
        self.fills: list[float] = []

    def store(self, record: Any) -> None:
        if time.monotonic() < self.begin:
            return
        if "async/ring_fill" in record:
            self.fills.append(record["async/ring_fill"])
        me = psutil.Process()
        actors = [p for p in me.children(recursive=True) if p.name().startswith("outrider: actor")]
        for p in (me, *actors):
            name = "learner" if p.pid == me.pid else p.name()
            self.sizes.setdefault(name, []).append(p.memory_info().rss / MB)


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(10.0, marks=[pytest.mark.slow, pytest.mark.timeout(50)]),
        pytest.param(120.0, marks=[pytest.mark.slow, pytest.mark.timeout(200)]),
    ],
)
def test_memory_stays_flat_while_full_rings_hold_the_actors(seconds: float) -> None:
    watch = MemoryWatch(after_s=3.0)
    result = train(
        fault_env(where="never"),
        watch,
        agent=FaultAgentConfig(opt_s=0.01),
        samples_per_insert=1.0,
        max_time_s=3.0 + seconds,
        actors={"n_buffer": 64, "n_slots": 8},
    )
    print(f"\n{seconds:.0f} s on {os.cpu_count()} cores, {result.stats.samples_per_s:.0f} samples/s")
    for name, sizes in sorted(watch.sizes.items()):
        print(f"  {name}: {min(sizes):.1f} to {max(sizes):.1f} MB in {len(sizes)} looks")
    assert set(watch.sizes) == {"learner", "outrider: actor 0", "outrider: actor 1"}
    assert sum(watch.fills) / len(watch.fills) > 0.8, "the rings were full"
    assert all(stat.wait_s > 0.5 * stat.duration_s for stat in result.actor_stats), "the actors waited"
    for name, sizes in watch.sizes.items():
        middle = (min(sizes) + max(sizes)) / 2
        assert max(sizes) <= 1.05 * middle, name
