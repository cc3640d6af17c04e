from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from outrider.data import leaves
from outrider.errors import UnsupportedSpace
from outrider.spaces import act_dtype, act_field, action_start, copy_obs, empty_obs, obs_fields

NESTED = spaces.Dict(
    z=spaces.Box(0, 255, (2, 3), np.uint8), a=spaces.Dict(y=spaces.Discrete(3), b=spaces.MultiBinary([2, 2]))
)


def test_a_dict_becomes_columns_in_the_order_of_the_space():
    assert [str(f) for f in obs_fields(NESTED)] == [f"obs.{line}" for line in leaf_lines(NESTED)]
    assert {str(f) for f in obs_fields(NESTED)} == {
        "obs.z [2, 3] uint8",
        "obs.a.y [] int64",
        "obs.a.b [2, 2] int8",
    }


def leaf_lines(space: spaces.Dict, prefix: str = "") -> list[str]:
    lines = []
    for key, sub in space.spaces.items():
        if isinstance(sub, spaces.Dict):
            lines += leaf_lines(sub, f"{prefix}{key}.")
        else:
            lines.append(f"{prefix}{key} {list(sub.shape or ())} {np.dtype(sub.dtype)}")
    return lines


@pytest.mark.parametrize(
    ("space", "line"),
    [
        (spaces.Box(-1, 1, (3,)), "act [3] float32"),
        (spaces.Box(-1, 1, (), np.float64), "act [] float64"),
        (spaces.Discrete(3, start=-1), "act [] int64"),
        (spaces.Discrete(3, dtype=np.int32), "act [] int64"),
        (spaces.MultiDiscrete([2, 3]), "act [2] int64"),
        (spaces.MultiDiscrete([[2, 3]], dtype=np.int16), "act [1, 2] int16"),
        (spaces.MultiBinary([2, 2]), "act [2, 2] int8"),
    ],
    ids=str,
)
def test_an_action_space_becomes_a_column(space: spaces.Space[Any], line: str):
    assert str(act_field(space)) == line


@pytest.mark.parametrize(
    "space",
    [
        spaces.Tuple([spaces.Discrete(2)]),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Text(4),
        spaces.Graph(spaces.Box(0, 1, (1,)), None),
        spaces.OneOf([spaces.Discrete(2)]),
        spaces.Dict(),
        spaces.Dict({"": spaces.Discrete(2)}),
        spaces.Box(-1, 1, (0,)),
    ],
    ids=lambda space: type(space).__name__,
)
def test_other_spaces_are_refused_by_name(space: spaces.Space[Any]):
    with pytest.raises(UnsupportedSpace, match=r"^env\.observation_space"):
        obs_fields(space)
    with pytest.raises(UnsupportedSpace, match=r"^env\.action_space"):
        act_field(space)


def test_actions_begin_where_the_space_says():
    assert action_start(spaces.Discrete(3, start=-1)) == -1
    assert np.array_equal(action_start(spaces.MultiDiscrete([2, 2], start=[4, 5])), [4, 5])
    assert action_start(spaces.Box(3, 4, (2,))) == 0
    assert action_start(spaces.MultiBinary(3)) == 0


def test_an_environment_takes_actions_in_the_dtype_of_its_space():
    assert act_dtype(spaces.Discrete(3, dtype=np.int32)) == np.int32
    assert act_dtype(spaces.Box(0, 1, (2,), np.float64)) == np.float64
    with pytest.raises(UnsupportedSpace):
        act_dtype(spaces.Text(3))


def test_observations_are_copied_part_by_part():
    src, dst = empty_obs(NESTED, 4), empty_obs(NESTED, 4)
    for i, (_, part) in enumerate(leaves(src, "obs")):
        part[...] = i + 1
    for _, part in leaves(dst, "obs"):
        part[...] = 0
    copy_obs(src, dst)
    for (name, part), f in zip(leaves(dst, "obs"), obs_fields(NESTED), strict=True):
        assert (name, part.shape, part.dtype) == (f.name, (4, *f.shape), f.dtype)
    for i, ((_, a), (_, b)) in enumerate(zip(leaves(src, "obs"), leaves(dst, "obs"), strict=True)):
        a[...] = 0
        assert (b == i + 1).all()
