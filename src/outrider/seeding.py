"""All random numbers of a run come from one seed: ``SeedSequence(seed, spawn_key=(role, actor, env, incarnation))``."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np


class Role(IntEnum):
    """Who draws; the first word of every spawn key. Numbers never change: runs depend on them."""

    ACTOR_ENV = 0
    ACTOR_POLICY = 1
    LEARNER = 2
    REPLAY = 3
    EVALUATOR = 4
    EVALUATOR_POLICY = 5


def derive(seed: int, role: Role, actor: int = 0, env: int = 0, incarnation: int = 0) -> int:
    """A seed in [0, 2**31) for one drawer; equal arguments give equal seeds."""
    sequence = np.random.SeedSequence(seed, spawn_key=(int(role), actor, env, incarnation))
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(33))


def env_seeds(seed: int, actor: int, incarnation: int, n_envs: int, role: Role = Role.ACTOR_ENV) -> list[int]:
    """One seed for each environment of an actor; no two environments of a run share one."""
    return [derive(seed, role, actor, env, incarnation) for env in range(n_envs)]


def spread(seed: int | Sequence[int], n: int) -> list[int]:
    """One seed per environment: the given ones, or n derived from a single int.

    Raises:
        ValueError: A sequence of another length than n.
    """
    if isinstance(seed, int | np.integer):
        return [derive(int(seed), Role.ACTOR_ENV, 0, env) for env in range(n)]
    if len(seed) != n:
        raise ValueError(f"seed: expected {n} seeds, one per environment, got {len(seed)}")
    return [int(s) for s in seed]
