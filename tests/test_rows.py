"""The quick ways of packing rows and of looking for bad ones do what the plain ones do."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from outrider.core import EnvSpec
from outrider.data import Array, Field, Layout, Step
from outrider.errors import LayoutMismatch
from outrider.health import RowHealth
from outrider.sampling import SimpleStepProcessor, transition_layout
from outrider.single_step import SingleStepProcessor

OBS_SPACES = {
    "floats": spaces.Box(-1, 1, (3,), np.float32),
    "doubles": spaces.Box(-1, 1, (3,), np.float64),
    "bytes": spaces.Box(0, 255, (2, 2), np.uint8),
    "a number": spaces.Discrete(5),
    "bits": spaces.MultiBinary(3),
    "negative ints": spaces.Box(-5, 5, (1,), np.int16),
}
HALFWAY = 2.0**128 - 2.0**103  # from here on float32 is infinite


@pytest.mark.parametrize("made", ["as the space says", ">f8", np.float64, np.uint8, np.bool_])
@pytest.mark.parametrize("obs_space", OBS_SPACES.values(), ids=OBS_SPACES)
@pytest.mark.parametrize("act_space", [spaces.Discrete(5, start=-2), spaces.Box(-1, 1, (), np.float64)])
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in cast")
def test_a_row_packed_at_once_is_the_one_filled_column_by_column(obs_space: Any, act_space: Any, made: Any) -> None:
    layout = transition_layout(EnvSpec("any", obs_space, act_space))
    column = next(f for f in layout.fields if f.name == "obs")
    dtype = column.dtype if made == "as the space says" else np.dtype(made)
    rewards = [0.1, np.nan, np.inf, 1e39, -1e39, -1e-50, HALFWAY, -HALFWAY, np.nextafter(HALFWAY, 0), 3.4028235e38]

    def obs(number: int) -> Array:
        return np.asfortranarray(np.full((1, *column.shape), number)).astype(dtype)

    one, many = SingleStepProcessor(layout), SimpleStepProcessor(layout, 1)
    for processor in (one, many):
        processor.reset(obs(0))
    act = next(f for f in layout.fields if f.name == "act").dtype
    for i, (reward, end) in enumerate(itertools.product(rewards, ["", "terminated", "truncated", "reset", "both"])):
        last = obs(i % 5)
        terminated, truncated = (np.array([end in (kind, "both")]) for kind in ("terminated", "truncated"))
        init = obs(4) if end in ("truncated", "both") else last  # the others are reset by a step of their own
        valid = np.array([end != "reset"])
        step = Step(
            np.array([i % 3]).astype(act), last, init, np.array([reward]), terminated, truncated, valid, None, i
        )
        a, b = one.process(step), many.process(step)
        assert (a is None) == (b is None) == (end == "reset")
        if a is not None and b is not None:
            assert all(np.asarray(a[name]).tobytes() == np.asarray(b[name]).tobytes() for name in layout.names)


INTS_AND_FLOATS = ("?", "u1", "i1", "<i2", "<i4", "<i8", "<f4", "<f4", "<f2", "<f8", ">f4")


@given(
    columns=st.lists(st.tuples(st.sampled_from(INTS_AND_FLOATS), st.sampled_from([(), (3,), (2, 2)])), min_size=1),
    data=st.data(),
)
def test_no_neighbour_hides_a_value_that_is_not_finite_nor_looks_like_one(columns: Any, data: Any) -> None:
    layout = Layout(
        "transitions", tuple(Field(f"c{i}", shape, np.dtype(dtype)) for i, (dtype, shape) in enumerate(columns))
    )
    record = layout.record_dtype()
    fill = data.draw(st.sampled_from([0x00, 0x01, 0x7F, 0x80, 0xFF]))  # 0xFF: all ints -1, and NaN as a float32
    rows = np.full(4 * record.itemsize, fill, np.uint8).view(record)
    floats = [f for f in layout.fields if f.dtype.kind == "f"]
    for f in layout.fields:
        if f in floats or f.dtype.kind == "b":
            rows[f.name] = 1
    health = RowHealth(layout, "drop", 0)
    assert health.good_rows(rows, 0) is None
    for f in floats:
        for at in range(rows[f.name][0].size):
            spoilt, row = rows.copy(), at % 4
            spoilt[f.name].reshape(4, -1)[row, at] = [np.nan, np.inf, -np.inf][at % 3]
            good = health.good_rows(spoilt, 0)
            assert good is not None
            assert good.tolist() == [i != row for i in range(4)]


def test_an_action_of_another_kind_is_refused_by_name() -> None:
    layout = transition_layout(EnvSpec("any", spaces.Box(-1, 1, (3,)), spaces.Discrete(5)))
    processor, obs = SingleStepProcessor(layout), np.zeros((1, 3), np.float32)
    processor.reset(obs)
    no, step = np.zeros(1, bool), np.array([0.5])
    with pytest.raises(LayoutMismatch, match=r"^act: expected one of dtype int64, got 0\.5"):
        processor.process(Step(step, obs, obs, np.zeros(1), no, no, ~no))
