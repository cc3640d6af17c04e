from __future__ import annotations

import os
import subprocess
import sys

import pytest

from outrider.placement import actor_core, learner_cores, pin, usable


@pytest.mark.parametrize(
    ("n_actors", "cores", "actors", "learner"),
    [
        (1, {0, 1}, [1], {0}),
        (2, {0, 1}, [1, 1], {0}),
        (2, {3, 5, 6, 9}, [9, 6], {3, 5}),
        (3, {0, 1, 2, 3}, [3, 2, 1], {0}),
        (5, {0, 1, 2, 3}, [3, 2, 1, 3, 2], {0}),
        (2, {7}, [7, 7], {7}),
    ],
)
def test_actors_and_learner_are_spread_over_the_cores(
    n_actors: int, cores: set[int], actors: list[int], learner: set[int]
) -> None:
    assert [actor_core(actor, cores) for actor in range(n_actors)] == actors
    assert learner_cores(n_actors, cores) == learner


def test_pinning_reaches_every_thread_and_nothing_is_pinned_to_nothing() -> None:
    code = """
import os, threading
from outrider.placement import pin, usable
hold = threading.Event()
thread = threading.Thread(target=hold.wait)
thread.start()
before = usable()
pin(())
assert usable() == before
first = {min(before)}
pin(first)
seen = [os.sched_getaffinity(int(t)) for t in os.listdir("/proc/self/task")]
hold.set()
assert seen == [first, first], seen
pin({10_000})
assert usable() == first
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_usable_cores_are_those_of_this_process() -> None:
    assert usable() == os.sched_getaffinity(0)
    pin(usable())
    assert usable() == os.sched_getaffinity(0)
