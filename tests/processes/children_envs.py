"""Environments that tests name by import path."""

from __future__ import annotations

from typing import Any

import gymnasium


class TupleEnv(gymnasium.Env[Any, Any]):
    """Its observations cannot be stored."""

    observation_space = gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(2)])
    action_space = gymnasium.spaces.Discrete(2)


class UnboundedEnv(gymnasium.Env[Any, Any]):
    """Its actions have no bounds that a squashed policy could fill."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    action_space = gymnasium.spaces.Box(-float("inf"), float("inf"), (2,))
