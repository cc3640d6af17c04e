"""Which Gymnasium spaces are supported, and the columns they become."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from outrider.data import Array, Field, Obs
from outrider.errors import UnsupportedSpace

SUPPORTED = "a Box, Discrete, MultiDiscrete, MultiBinary or (for observations) Dict space"


def obs_fields(space: spaces.Space[Any], name: str = "obs", key: str = "env.observation_space") -> tuple[Field, ...]:
    """Columns of an observation space: one, or one per leaf of a Dict, in the order of the space.

    Args:
        space: Space of a single environment.
        name: Name of the column, or the prefix of the columns.
        key: Dotted key for the error.

    Raises:
        UnsupportedSpace: Names the space that cannot be stored.
    """
    if isinstance(space, spaces.Dict):
        fields: list[Field] = []
        for part, sub in space.spaces.items():
            if not isinstance(part, str) or "." in part or not part:
                raise UnsupportedSpace(key, "Dict keys that are non-empty strings without a dot", repr(part))
            fields += obs_fields(sub, f"{name}.{part}", f"{key}.{part}")
        if not fields:
            raise UnsupportedSpace(key, "a Dict space with at least one entry", space)
        return tuple(fields)
    return (_leaf_field(space, name, key),)


def act_field(space: spaces.Space[Any], name: str = "act", key: str = "env.action_space") -> Field:
    """Column of an action space. Discrete actions are stored from 0, whatever the space's ``start``.

    Raises:
        UnsupportedSpace: Names the space that cannot be stored.
    """
    return _leaf_field(space, name, key)


def _leaf_field(space: spaces.Space[Any], name: str, key: str) -> Field:
    if isinstance(space, spaces.Discrete):
        return Field(name, (), np.dtype(np.int64))
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        if space.dtype is None or space.dtype.kind not in "biuf":
            raise UnsupportedSpace(key, "a bool, integer or float dtype", space)
        if 0 in space.shape:
            raise UnsupportedSpace(key, "a shape without 0", space)
        return Field(name, tuple(space.shape), np.dtype(space.dtype))
    raise UnsupportedSpace(key, SUPPORTED, space)


def action_start(space: spaces.Space[Any]) -> Array | int:
    """What the environment boundary adds to a stored action: ``start`` of Discrete and MultiDiscrete, else 0."""
    if isinstance(space, spaces.Discrete):
        return int(space.start)
    if isinstance(space, spaces.MultiDiscrete):
        return np.asarray(space.start)
    return 0


def act_dtype(space: spaces.Space[Any]) -> np.dtype[Any]:
    """Dtype in which the environment takes its actions; for Discrete it may differ from the stored int64."""
    act_field(space)
    return np.dtype(space.dtype)


def empty_obs(space: spaces.Space[Any], n: int) -> Obs:
    """Uninitialised observations of n environments: an array ``[n, ...]``, or a nested dict of them."""
    if isinstance(space, spaces.Dict):
        return {key: empty_obs(sub, n) for key, sub in space.spaces.items()}
    f = _leaf_field(space, "obs", "env.observation_space")
    return np.empty((n, *f.shape), f.dtype)


def copy_obs(src: Obs, dst: Obs) -> None:
    """Copy observations into arrays of the same structure."""
    if isinstance(dst, dict):
        assert isinstance(src, dict)
        for key, part in dst.items():
            copy_obs(src[key], part)
    else:
        dst[...] = src
