"""Batches as tensors: what is made once follows the rows, what cannot is made anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from outrider.agents.batches import Batches
from outrider.agents.dqn import DqnConfig
from outrider.agents.networks import encoder
from outrider.core import EnvSpec
from outrider.data import Array, Batch, nest
from outrider.sampling import transition_layout
from outrider.testing import random_rows

GAMMA = 0.9
OBS_SPACES = {
    "floats": spaces.Box(-1, 1, (4,)),
    "doubles": spaces.Box(-1, 1, (3,), np.float64),
    "a matrix": spaces.Box(-1, 1, (2, 3)),
    "bits": spaces.MultiBinary(5),
    "a number": spaces.Discrete(5, start=2),
    "a dict": spaces.Dict({"pos": spaces.Box(-1, 1, (3,)), "mode": spaces.Discrete(3)}),
    "an image": spaces.Box(0, 255, (4, 36, 36), np.uint8),
}
CPU = torch.device("cpu")


def as_index(act: Array) -> Array:
    return act.astype(np.int64, copy=False)


def records(spec: EnvSpec, dtype: np.dtype[Any], n: int, seed: int) -> Array:
    rows = np.zeros(n, dtype)
    for name, column in random_rows(transition_layout(spec), n, seed, spec).items():
        rows[name] = column
    return rows


@pytest.mark.parametrize("kind", ["aligned", "packed", "by column"])
@pytest.mark.parametrize("obs_space", OBS_SPACES.values(), ids=OBS_SPACES)
@pytest.mark.parametrize("n_actions", [2, 300])
def test_tensors_follow_an_array_that_gets_other_rows(obs_space: Any, n_actions: int, kind: str) -> None:
    spec = EnvSpec("any", obs_space, spaces.Discrete(n_actions))
    encode = encoder(obs_space, "auto")
    batches = Batches(spec, encode, as_index, GAMMA, CPU)
    aligned = transition_layout(spec).record_dtype()
    dtype = np.dtype([(f, aligned.fields[f][0]) for f in aligned.names]) if kind == "packed" else aligned  # type: ignore
    reused = {n: np.zeros(n, dtype) for n in (8, 5)}
    for seed in range(6):
        n = 8 if seed % 3 else 5
        fresh = records(spec, dtype, n, seed)
        reused[n][...] = fresh
        rows: Any = {f: reused[n][f] for f in dtype.names or ()} if kind == "by column" else reused[n]
        weights = np.random.default_rng(seed).random(n) if seed % 2 else None
        columns = batches(Batch(rows, np.arange(n), weights))
        expected = (
            encode(nest(fresh, "obs")),
            fresh["act"].astype(np.int64),
            fresh["reward"],
            encode(nest(fresh, "next_obs")),
            fresh["n_steps"],
            fresh["terminated"],
        )
        for tensor, array in zip(columns, expected, strict=False):
            np.testing.assert_array_equal(tensor.numpy(), array)  # type: ignore[union-attr]
        assert (columns.weights is None) == (weights is None)
        discount = batches.transitions(columns).discount
        assert discount.dtype == torch.float32
        np.testing.assert_allclose(discount, GAMMA ** fresh["n_steps"] * ~fresh["terminated"], rtol=1e-6)


def test_an_example_is_as_a_batch_of_a_row_buffer() -> None:
    spec = EnvSpec("any", spaces.Box(-1, 1, (4,)), spaces.Discrete(2))
    batches = DqnConfig(batch_size=8).build(spec)._batches
    layout = transition_layout(spec)
    made = batches(Batch(records(spec, layout.record_dtype(), 8, 0), np.arange(8), np.ones(8, np.float32)))
    for given, example in zip(made, batches.example(8), strict=True):
        assert given is not None
        assert (given.shape, given.dtype, given.stride()) == (example.shape, example.dtype, example.stride())
