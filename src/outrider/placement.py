"""Which cores actors and learner run on, if the user wants that said rather than left to the system."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from typing import Literal

Affinity = Literal["none", "spread"]
"""``spread``: each actor on a core of its own, the learner on those that are left."""


def actor_core(actor: int, cores: Collection[int]) -> int:
    """The core of an actor: from the last one down, again from there where cores are short; the first is spared.

    Args:
        actor: Index of the actor.
        cores: The usable ones, at least one.
    """
    taken = sorted(cores, reverse=True)
    taken = taken[:-1] or taken
    return taken[actor % len(taken)]


def learner_cores(n_actors: int, cores: Collection[int]) -> set[int]:
    """The cores that actors leave to the learner; the first at least."""
    taken = {actor_core(actor, cores) for actor in range(n_actors)}
    return set(cores) - taken or {min(cores)}


def usable() -> set[int]:
    """The cores that this process may run on; empty where the system does not tell."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def pin(cores: Collection[int]) -> None:
    """Keep this process, with all threads that it has and will have, on these cores. Empty: leave it as it is.

    A core that was taken away meanwhile is no reason to fail: then everything stays as it was.
    """
    if not cores:
        return
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(OSError):  # also of a thread that has just ended
            os.sched_setaffinity(thread, cores)
