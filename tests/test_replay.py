from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.recfunctions import repack_fields

from outrider.data import Field, Layout
from outrider.errors import ConfigError, LayoutMismatch
from outrider.replay import SimpleReplayBuffer, SimpleReplayBufferConfig

LAYOUT = Layout(
    "transitions",
    (
        Field("obs.image", (3, 5), np.dtype(np.uint8)),
        Field("obs.pos", (2,), np.dtype(np.float64)),
        Field("act", (), np.dtype(np.int64)),
        Field("reward", (), np.dtype(np.float32)),
        Field("terminated", (), np.dtype(np.bool_)),
    ),
)
FRAMES = Layout("frames", (Field("frame", (84, 84), np.dtype(np.uint8)),))


def rows(ids: np.ndarray, layout: Layout = LAYOUT) -> np.ndarray:
    """Rows of which every cell is a function of the row's id."""
    out = np.zeros(len(ids), layout.record_dtype())
    for k, field in enumerate(layout.fields):
        size = int(np.prod(field.shape, dtype=int))
        cells = ids[:, None] * 31 + np.arange(size) + k
        out[field.name] = cells.reshape(len(ids), *field.shape).astype(field.dtype)
    out["act"] = ids
    return out


def columns(items: np.ndarray) -> dict[str, np.ndarray]:
    return {name: np.ascontiguousarray(items[name]) for name in items.dtype.names or ()}


def build(capacity: int = 100, seed: int = 0) -> SimpleReplayBuffer:
    return SimpleReplayBufferConfig(capacity=capacity, seed=seed).build(LAYOUT)


def ids(buffer: SimpleReplayBuffer) -> list[int]:
    """Of the rows there are, the oldest first."""
    return buffer.state_dict()["rows"]["act"].tolist()


@given(
    capacity=st.integers(1, 40),
    sizes=st.lists(st.integers(0, 100), max_size=12),
    as_columns=st.lists(st.booleans(), min_size=12, max_size=12),
)
@settings(deadline=None)
def test_the_newest_rows_are_kept_whole_and_the_oldest_overwritten(capacity, sizes, as_columns):
    buffer = build(capacity)
    total = 0
    for size, plain in zip(sizes, as_columns, strict=False):
        message = rows(np.arange(total, total + size))
        buffer.push(columns(message) if plain else message)
        total += size
    assert buffer.inserted == total
    assert len(buffer) == min(total, capacity)
    stored = buffer.state_dict()["rows"]
    assert stored["act"].tolist() == list(range(max(0, total - capacity), total))
    expected = rows(stored["act"])
    for name in LAYOUT.names:
        np.testing.assert_array_equal(stored[name], expected[name])
    if total:
        batch = buffer.batch(20)
        assert (batch["act"] % capacity).tolist() == batch.ixs.tolist()


def test_a_batch_holds_the_rows_at_its_indices_in_their_own_dtypes():
    buffer = build()
    buffer.push(rows(np.arange(1000, 1070)))
    batch = buffer.batch(256)
    assert len(batch) == 256
    assert batch.weights is None
    np.testing.assert_array_equal(batch["act"], batch.ixs + 1000)
    expected = rows(batch["act"].copy())
    for field in LAYOUT.fields:
        assert batch[field.name].dtype == field.dtype
        assert batch[field.name].shape == (256, *field.shape)
        np.testing.assert_array_equal(batch[field.name], expected[field.name])
    assert set(batch.obs) == {"image", "pos"}


def test_a_slot_that_was_never_written_is_never_drawn():
    buffer = build(10_000)
    buffer.push(rows(np.arange(1, 11)))
    for _ in range(200):
        batch = buffer.batch(64)
        assert batch["act"].min() >= 1
        assert batch["act"].max() <= 10
        assert batch.ixs.max() <= 9


@pytest.mark.parametrize("inserted", [7, 50, 137])
def test_draws_are_uniform_over_what_is_stored(inserted):
    buffer = build(50, seed=3)
    buffer.push(rows(np.arange(inserted)))
    n, draws = len(buffer), 100_000
    counts = np.zeros(n)
    for _ in range(draws // 1000):
        counts += np.bincount(buffer.batch(1000).ixs, minlength=n)
    chi2 = float(((counts - draws / n) ** 2 / (draws / n)).sum())
    freedom = n - 1
    assert abs(chi2 - freedom) < 4 * np.sqrt(2 * freedom)
    assert counts.sum() == draws == buffer.sampled


def test_draws_follow_from_the_seed():
    a, b, c = build(seed=1), build(seed=1), build(seed=2)
    for buffer in (a, b, c):
        buffer.push(rows(np.arange(60)))
    first = a.batch(32).ixs.tolist()
    assert first == b.batch(32).ixs.tolist()
    assert first != c.batch(32).ixs.tolist()
    assert first != a.batch(32).ixs.tolist()


def test_the_output_of_a_batch_size_is_reused_and_others_are_left_alone():
    buffer = build()
    buffer.push(rows(np.arange(60)))
    small, large = buffer.batch(8), buffer.batch(16)
    kept = large["act"].copy()
    assert buffer.batch(8)["act"].base is small["act"].base
    np.testing.assert_array_equal(large["act"], kept)


def test_pushed_arrays_may_be_reused_by_their_owner():
    buffer = build()
    message = rows(np.arange(10))
    view = rows(np.arange(20))[::2]  # not contiguous
    buffer.push(message)
    buffer.push(view)
    message["act"] = -1
    view["act"] = -1
    assert ids(buffer) == [*range(10), *range(0, 20, 2)]


def test_records_packed_otherwise_are_copied_by_column():
    buffer = build()
    buffer.push(repack_fields(rows(np.arange(10)), align=False))
    batch = buffer.batch(8)
    np.testing.assert_array_equal(batch["obs.pos"], rows(batch["act"].copy())["obs.pos"])


def test_a_restored_buffer_draws_the_same_rows_as_the_saved_one():
    saved = build(50, seed=9)
    saved.push(rows(np.arange(120)))
    saved.batch(32)
    restored = build(50, seed=1)
    restored.load_state_dict(pickle.loads(pickle.dumps(saved.state_dict())))
    assert (restored.inserted, restored.sampled, len(restored)) == (120, 32, 50)
    for buffer in (saved, restored):
        buffer.push(rows(np.arange(120, 127)))
    for _ in range(5):
        a, b = saved.batch(64), restored.batch(64)
        assert a.ixs.tolist() == b.ixs.tolist()
        for name in LAYOUT.names:
            assert a[name].tobytes() == b[name].tobytes()


def test_a_part_full_buffer_is_restored_too():
    saved, restored = build(50), build(50)
    saved.push(rows(np.arange(20)))
    restored.load_state_dict(saved.state_dict())
    restored.push(rows(np.arange(20, 25)))
    assert ids(restored) == list(range(25))


@given(
    saved_capacity=st.integers(1, 30),
    capacities=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    pushes=st.integers(0, 60),
)
@settings(deadline=None, max_examples=50)
def test_of_a_state_of_another_capacity_the_newest_rows_are_kept(saved_capacity, capacities, pushes):
    buffer, expected = build(saved_capacity), list(range(pushes))[-saved_capacity:]
    buffer.push(rows(np.arange(pushes)))
    for capacity in capacities:
        state, buffer = buffer.state_dict(), build(capacity)
        buffer.load_state_dict(state)
        expected = expected[-capacity:]
        assert ids(buffer) == expected
        assert buffer.inserted == pushes
        assert len(buffer) == len(expected)
    buffer.push(rows(np.arange(pushes, pushes + 7)))
    assert ids(buffer) == [*expected, *range(pushes, pushes + 7)][-capacities[-1] :]
    assert set(buffer.batch(200)["act"].tolist()) <= set(ids(buffer))


def test_a_state_of_another_layout_is_refused():
    saved = build(50)
    saved.push(rows(np.arange(3)))
    other = SimpleReplayBuffer(Layout("transitions", LAYOUT.fields[:-1]), 50)
    with pytest.raises(LayoutMismatch, match="'terminated'"):
        other.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("known", [0, 60])
def test_a_buffer_whose_rows_cannot_be_restored_is_empty(known):
    saved = build(50)
    for first in range(0, 200, 40):  # it has been full for long
        saved.push(rows(np.arange(first, first + 40)))
    other = SimpleReplayBuffer(Layout("transitions", LAYOUT.fields[:-1]), 50)
    other.push(rows(np.arange(known), other.layout))
    with pytest.raises(LayoutMismatch):
        other.load_state_dict(saved.state_dict())
    assert (len(other), other.inserted, other.oldest, other.sampled) == (0, 0, 0, 0)
    other.push(rows(np.arange(7), other.layout))
    assert set(other.batch(100)["act"].tolist()) == set(range(7))


def test_rows_that_are_not_there_cannot_be_copied():
    buffer = build(10)
    buffer.push(rows(np.arange(15)))
    assert buffer.copy_rows(7, 12)["act"].tolist() == list(range(7, 12))
    for first, stop in ((4, 8), (8, 16), (9, 8)):
        with pytest.raises(ValueError, match=f"expected some of 5 to 15, got {first} to {stop}"):
            buffer.copy_rows(first, stop)


def test_memory_is_that_of_the_records_in_the_dtype_of_the_space():
    images = Layout("transitions", (Field("obs", (4, 84, 84), np.dtype(np.uint8)),))
    assert SimpleReplayBufferConfig(capacity=1000).build(images).nbytes == 1000 * 4 * 84 * 84


def test_a_frame_stream_is_refused_by_name():
    with pytest.raises(LayoutMismatch, match="SimpleReplayBuffer stores transitions, the step processor makes frames"):
        SimpleReplayBufferConfig().build(FRAMES)


@pytest.mark.parametrize(("values", "key"), [({"capacity": 0}, "capacity"), ({"seed": -1}, "seed")])
def test_impossible_values_are_refused_by_name(values, key):
    with pytest.raises(ConfigError) as caught:
        SimpleReplayBufferConfig(**values)
    assert caught.value.key == key


def test_drawing_from_an_empty_buffer_is_refused():
    with pytest.raises(ValueError, match="it is empty"):
        build().batch(4)


def test_a_push_that_would_convert_drop_or_invent_a_column_is_refused():
    good = columns(rows(np.arange(4)))
    cases = {
        "'extra'": good | {"extra": np.zeros(4)},
        "'reward'.*float64": good | {"reward": np.zeros(4)},
        "'obs.pos'.*\\[4, 3\\]": good | {"obs.pos": np.zeros((4, 3))},
        "'act'.*lack": {name: column for name, column in good.items() if name != "act"},
    }
    for match, items in cases.items():
        buffer = build()
        with pytest.raises(LayoutMismatch, match=match):
            buffer.push(items)
        assert buffer.inserted == 0


def test_priorities_change_nothing():
    buffer, twin = build(), build()
    for b in (buffer, twin):
        b.push(rows(np.arange(60)))
    buffer.update_priority(np.arange(32), np.full(32, 1e9))
    assert buffer.batch(64).ixs.tolist() == twin.batch(64).ixs.tolist()
