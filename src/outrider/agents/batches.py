"""Batches of a replay buffer as tensors.

Where a buffer gives the same array again and again, with other rows in it, the tensors that alias it are made once:
for small networks, making them would be half of the time between two updates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.agents.networks import Encoder
from outrider.core import EnvSpec
from outrider.data import Array, Batch, Items
from outrider.sampling import transition_layout


class Columns(NamedTuple):
    """A batch as tensors on the device, as it was stored.

    Attributes:
        obs: Encoded observations ``[B, ...]``.
        act: Actions ``[B]`` int64 or ``[B, act_dim]`` float32 in [-1, 1].
        reward: ``[B]`` float32, the discounted sum of n steps.
        next_obs: Encoded observations n steps later.
        n_steps: ``[B]`` int32.
        terminated: ``[B]`` bool.
        weights: Importance weights ``[B]`` float32, None for uniform sampling.
    """

    obs: Tensor
    act: Tensor
    reward: Tensor
    next_obs: Tensor
    n_steps: Tensor
    terminated: Tensor
    weights: Tensor | None


class Transitions(NamedTuple):
    """What losses are made of: :class:`Columns` with the discount of the bootstrapped value.

    Attributes:
        obs: Encoded observations ``[B, ...]``.
        act: Actions ``[B]`` int64 or ``[B, act_dim]`` float32 in [-1, 1].
        reward: ``[B]`` float32, the discounted sum of n steps.
        next_obs: Encoded observations n steps later.
        discount: ``[B]`` float32: gamma ** n_steps, and 0 where the episode terminated. Truncation masks nothing.
        weights: Importance weights ``[B]`` float32, None for uniform sampling.
    """

    obs: Tensor
    act: Tensor
    reward: Tensor
    next_obs: Tensor
    discount: Tensor
    weights: Tensor | None


class Batches:
    """Turns batches into :class:`Columns`; images go as they are.

    **Process**: the learner. **Owns**: tensors that alias the last array of rows. **Blocks**: never.
    **Closes**: nothing.

    Args:
        env_spec: What the rows are about.
        encode: Encoder of observations.
        encode_act: Turns stored actions ``[B, ...]`` into what the loss takes; may alias them.
        gamma: Discount of one step.
        device: Where the tensors go.
    """

    def __init__(
        self,
        env_spec: EnvSpec,
        encode: Encoder,
        encode_act: Callable[[Array], Array],
        gamma: float,
        device: torch.device,
    ) -> None:
        self._env_spec = env_spec
        self._gamma = gamma
        self._device = device
        self._on_cpu = device.type == "cpu"
        self._columns: tuple[Callable[[Batch], Array], ...] = (
            lambda batch: encode(batch.obs),
            lambda batch: encode_act(batch["act"]),
            lambda batch: np.asarray(batch["reward"], np.float32),
            lambda batch: encode(batch.next_obs),
            lambda batch: np.asarray(batch["n_steps"], np.int32),
            lambda batch: np.asarray(batch["terminated"], np.bool_),
        )
        self._images = encode.dtype != np.float32
        self._rows: Items | None = None
        self._aliases: list[Tensor | None] = [None] * len(self._columns)

    def __call__(self, batch: Batch) -> Columns:
        """The batch as tensors, which may alias it and hold as long as it does."""
        if batch.rows is not self._rows:
            self._rows, self._aliases = batch.rows, [None] * len(self._columns)
        made = [self._made(i, batch) if alias is None else alias for i, alias in enumerate(self._aliases)]
        weights = None if batch.weights is None else self._tensor(np.asarray(batch.weights, np.float32))
        obs, act, reward, next_obs, n_steps, terminated = made
        return Columns(obs, act, reward, next_obs, n_steps, terminated, weights)

    def _made(self, i: int, batch: Batch) -> Tensor:
        array = self._columns[i](batch)
        if any(stride % array.itemsize for stride in array.strides):  # a column of packed records
            array = array.copy()
        tensor = self._tensor(array)
        if self._on_cpu and isinstance(batch.rows, np.ndarray) and np.may_share_memory(array, batch.rows):
            self._aliases[i] = tensor
        return tensor

    def _tensor(self, array: Array) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._on_cpu else tensor.to(self._device)

    def transitions(self, columns: Columns) -> Transitions:
        """The batch as losses take it; a function of tensors alone."""
        obs, act, reward, next_obs, n_steps, terminated, weights = columns
        discount = torch.pow(self._gamma, n_steps).masked_fill_(terminated, 0.0)
        return Transitions(obs, act, reward, next_obs, discount, weights)

    def example(self, size: int) -> tuple[Tensor, ...]:
        """A batch whose tensors have the shapes, dtypes and strides that batches of a row buffer have, with weights.

        Images are taken to come from a frame buffer, which gives them in one piece.
        """
        rows = np.zeros(size, transition_layout(self._env_spec).record_dtype())
        rows["reward"] = rows["n_steps"] = 1
        made = self(Batch(rows, np.arange(size), np.ones(size, np.float32)))
        self._rows = None
        return tuple([t.contiguous() if self._images else t for t in made if t is not None])
