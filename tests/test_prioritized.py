from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from outrider.agents.dqn import DqnConfig
from outrider.data import Batch, Field, Layout
from outrider.envs.gymnasium import GymEnvConfig
from outrider.errors import ConfigError, LayoutMismatch
from outrider.replay import PrioritizedReplayBuffer, PrioritizedReplayBufferConfig, SimpleReplayBufferConfig
from outrider.sampling import transition_layout
from outrider.testing import check_replay_buffer_config, random_rows

LAYOUT = Layout(
    "transitions",
    (Field("obs", (2,), np.dtype(np.float32)), Field("act", (), np.dtype(np.int64))),
)


def rows(ids: np.ndarray) -> np.ndarray:
    out = np.zeros(len(ids), LAYOUT.record_dtype())
    out["act"] = ids
    return out


def build(capacity: int = 100, n: int = 0, **values: float) -> PrioritizedReplayBuffer:
    buffer = PrioritizedReplayBufferConfig(capacity=capacity, **values).build(LAYOUT)
    if n:
        buffer.push(rows(np.arange(n)))
    return buffer


def set_all(buffer: PrioritizedReplayBuffer, td_errors: np.ndarray) -> None:
    buffer.update_priority(np.arange(buffer.oldest, buffer.inserted), td_errors)


def frequencies(buffer: PrioritizedReplayBuffer, draws: int = 200_000) -> np.ndarray:
    counts = np.zeros(buffer.inserted)
    for _ in range(draws // 1000):
        counts += np.bincount(buffer.batch(1000)["act"], minlength=buffer.inserted)
    return counts / counts.sum()


def test_the_contract_holds():
    layout = Layout("transitions", (*LAYOUT.fields, Field("reward", (), np.dtype(np.float32))))
    check_replay_buffer_config(PrioritizedReplayBufferConfig(capacity=50), layout)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_rows_are_drawn_in_proportion_to_their_priorities(alpha):
    buffer = build(50, 70, alpha=alpha)
    td_errors = np.random.default_rng(0).normal(size=50)
    set_all(buffer, td_errors)
    expected = np.concatenate([np.zeros(20), (np.abs(td_errors) + 1e-6) ** alpha])
    np.testing.assert_allclose(frequencies(buffer), expected / expected.sum(), atol=2e-3)


def test_each_equal_part_of_the_sum_gives_one_row_of_a_batch():
    buffer = build(64, 64)
    for _ in range(20):
        assert sorted(buffer.batch(64)["act"].tolist()) == list(range(64))


def test_the_weights_make_an_average_over_draws_that_over_all_rows():
    buffer = build(40, 40, alpha=0.7, beta=1.0)
    rng = np.random.default_rng(3)
    set_all(buffer, rng.exponential(size=40))
    values = rng.normal(size=40)
    weighted = total = 0.0
    for _ in range(2000):
        batch = buffer.batch(100)
        # Each batch is normalised by its own highest weight, so the normaliser is taken out again.
        assert batch.weights is not None
        scale = 1.0 / batch.weights.sum()
        weighted += float((batch.weights * values[batch["act"]]).sum() * scale)
        total += 1
    assert weighted / total == pytest.approx(values.mean(), abs=0.05)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_are_those_of_the_paper(beta):
    buffer = build(10, 10, alpha=0.5, beta=beta, beta_final=beta)
    td_errors = np.arange(1.0, 11.0)
    set_all(buffer, td_errors)
    batch = buffer.batch(64)
    probabilities = td_errors**0.5 / (td_errors**0.5).sum()
    expected = (10 * probabilities[batch["act"]]) ** -beta
    assert batch.weights is not None
    assert batch.weights.dtype == np.float32
    np.testing.assert_allclose(batch.weights, expected / expected.max(), rtol=1e-5)


def test_beta_goes_in_a_straight_line_from_the_first_to_the_last_value_with_the_rows_drawn():
    config = PrioritizedReplayBufferConfig(beta=0.4, beta_final=0.8, beta_samples=1000)
    assert [round(config.beta_at(n), 9) for n in (0, 250, 1000, 10**9)] == [0.4, 0.5, 0.8, 0.8]
    assert PrioritizedReplayBufferConfig(beta_samples=0).beta_at(0) == 1.0
    buffer = build(100, 50, beta_samples=640)
    seen = []
    for _ in range(12):
        seen.append(buffer.statistics()["train/importance_beta"])
        buffer.batch(64)
    np.testing.assert_allclose(seen, np.minimum(1.0, 0.4 + 0.6 * np.arange(12) / 10))


def test_new_rows_have_the_highest_priority_there_has_been():
    buffer = build(100, 10, alpha=1.0)
    set_all(buffer, np.r_[7.0, np.full(9, 1.0)])
    set_all(buffer, np.full(10, 1.0))
    buffer.push(rows(np.arange(10, 12)))
    expected = np.r_[np.ones(10), 7.0, 7.0]
    np.testing.assert_allclose(frequencies(buffer), expected / expected.sum(), atol=3e-3)
    assert buffer.statistics()["train/max_priority"] == pytest.approx(7.0)


def test_an_update_of_rows_that_were_overwritten_is_dropped_and_counted():
    buffer = build(8, 8, alpha=1.0)
    batch = buffer.batch(8)
    assert sorted(batch.ixs.tolist()) == list(range(8))
    buffer.push(rows(np.arange(8, 14)))
    buffer.update_priority(batch.ixs, np.full(8, 1e6))
    assert buffer.statistics()["async/stale_priorities"] == 6
    np.testing.assert_allclose(frequencies(buffer)[6:], [0.5] * 2 + [0.0] * 6, atol=3e-3)
    buffer.push(rows(np.arange(14, 22)))
    buffer.update_priority(batch.ixs, np.full(8, 1e-3))
    np.testing.assert_allclose(frequencies(buffer)[14:], 1 / 8, atol=3e-3)
    assert buffer.statistics()["async/stale_priorities"] == 14


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_priority_that_is_not_finite_is_left_out_and_counted(bad):
    buffer = build(4, 4, alpha=1.0)
    set_all(buffer, np.array([1.0, 2.0, 3.0, 4.0]))
    set_all(buffer, np.array([1.0, bad, 3.0, bad]))
    np.testing.assert_allclose(frequencies(buffer), np.array([1, 2, 3, 4]) / 10, atol=3e-3)
    assert buffer.statistics()["async/bad_priorities"] == 2
    assert buffer.statistics()["train/max_priority"] == pytest.approx(4.0)
    assert buffer.statistics()["async/stale_priorities"] == 0


def test_the_sign_of_an_error_does_not_count_and_no_row_is_lost_for_ever():
    buffer = build(5, 5, alpha=1.0)
    set_all(buffer, np.array([-5.0, 5.0, -0.0, 1e-45, 1e300]))
    assert buffer._priorities._tree.leaves.tolist() == [5 + 1e-6, 5 + 1e-6, 1e-6, 1e-6, float(np.finfo("f4").max)]
    set_all(buffer, np.array([0.0, 0.0, 0.0, 0.0, 0.0]))
    np.testing.assert_allclose(frequencies(buffer), 0.2, atol=3e-3)


def test_tensors_are_taken_and_no_errors_at_all_change_nothing():
    buffer = build(2, 2, alpha=1.0)
    buffer.update_priority(np.array([0, 1]), torch.tensor([1.0, 3.0], requires_grad=True))
    buffer.update_priority(np.array([0, 1]), None)
    np.testing.assert_allclose(frequencies(buffer), [0.25, 0.75], atol=3e-3)


def test_of_a_row_drawn_twice_the_last_error_counts():
    buffer = build(3, 3, alpha=1.0)
    buffer.update_priority(np.array([0, 1, 2, 0]), np.array([9.0, 1.0, 1.0, 2.0]))
    np.testing.assert_allclose(frequencies(buffer), [0.5, 0.25, 0.25], atol=3e-3)


def test_a_restored_buffer_draws_and_weighs_the_same_rows_as_the_saved_one():
    saved, rng = build(50, 0, seed=9, beta_samples=500), np.random.default_rng(0)
    for i in range(0, 120, 10):
        saved.push(rows(np.arange(i, i + 10)))
        saved.update_priority(saved.batch(8).ixs, rng.normal(size=8))
    saved.update_priority(saved.batch(8).ixs, np.full(8, np.nan))
    restored = build(50, 0, seed=1, beta_samples=500)
    state = pickle.loads(pickle.dumps(saved.state_without_rows()))
    blocks = [(first, saved.copy_rows(max(first, 70), first + 30)) for first in (60, 90)]
    restored.load_rows(state, [(max(first, 70), block) for first, block in blocks])
    assert restored.statistics() == saved.statistics()
    for i in range(120, 200, 20):
        drawn = []
        for buffer in (saved, restored):
            buffer.push(rows(np.arange(i, i + 20)))
            batch = buffer.batch(32)
            drawn.append((batch["act"].tolist(), batch.ixs.tolist(), batch.weights.tolist()))  # type: ignore[union-attr]
            buffer.update_priority(batch.ixs, np.sin(np.arange(32.0)))
        assert drawn[0] == drawn[1]


@pytest.mark.parametrize("capacity", [20, 50, 90])
def test_of_a_state_of_another_capacity_the_newest_rows_keep_their_priorities(capacity):
    saved = build(50, 70, alpha=1.0)
    set_all(saved, np.arange(1.0, 51.0))
    restored = build(capacity, 0, alpha=1.0)
    restored.load_state_dict(saved.state_dict())
    kept = np.where(np.arange(70) >= max(20, 70 - capacity), np.arange(70) - 19.0, 0.0)
    np.testing.assert_allclose(frequencies(restored), kept / kept.sum(), atol=3e-3)


def test_a_run_may_go_on_with_priorities_where_it_had_none():
    uniform = SimpleReplayBufferConfig(capacity=20).build(LAYOUT)
    uniform.push(rows(np.arange(30)))
    buffer = build(20)
    buffer.load_state_dict(uniform.state_dict())
    np.testing.assert_allclose(frequencies(buffer)[10:], 0.05, atol=3e-3)


def test_a_push_of_more_than_fits_keeps_the_newest():
    buffer = build(7, 20)
    assert len(buffer) == 7
    assert set(buffer.batch(70)["act"].tolist()) == set(range(13, 20))


def test_memory_is_that_of_the_records_and_about_nine_bytes_a_row_of_sums():
    buffer = build(10_000)
    assert buffer.nbytes <= 10_000 * (LAYOUT.record_dtype().itemsize + 9.2)


def test_what_cannot_be_is_refused():
    for values, key in (
        ({"capacity": 0}, "capacity"),
        ({"seed": -1}, "seed"),
        ({"alpha": 1.5}, "alpha"),
        ({"beta": -0.1}, "beta"),
        ({"beta_final": 2.0}, "beta_final"),
        ({"beta_samples": -1}, "beta_samples"),
        ({"epsilon": 0.0}, "epsilon"),
    ):
        with pytest.raises(ConfigError) as caught:
            PrioritizedReplayBufferConfig(**values)
        assert caught.value.key == key
    with pytest.raises(LayoutMismatch, match="PrioritizedReplayBuffer stores transitions"):
        PrioritizedReplayBufferConfig().build(Layout("frames", LAYOUT.fields))
    with pytest.raises(ValueError, match="it is empty"):
        build().batch(4)


def test_an_agent_weights_its_losses_and_gives_each_row_the_size_of_its_error_as_priority():
    spec = GymEnvConfig(id="CartPole-v1").spec()
    layout = transition_layout(spec)
    agents = [DqnConfig(hidden=(8,), batch_size=16, loss="mse", double=False).build(spec) for _ in range(2)]
    buffer = PrioritizedReplayBufferConfig(capacity=64, alpha=1.0, beta=1.0).build(layout)
    made = random_rows(layout, 64, env_spec=spec)
    buffer.push(made)
    buffer.update_priority(np.arange(64), np.arange(1.0, 65.0))
    twin = PrioritizedReplayBufferConfig(capacity=64, alpha=1.0, beta=1.0).build(layout)
    twin.load_state_dict(buffer.state_dict())
    batch = twin.batch(16)
    result = agents[0].update(batch)
    agents[1].opt(buffer)
    assert np.array_equal(agents[0].model_info()[1]["params"], agents[1].model_info()[1]["params"])
    expected = np.arange(1.0, 65.0) + 1e-6
    expected[batch.ixs] = np.abs(np.asarray(result.td_errors, np.float64)) + 1e-6
    np.testing.assert_allclose(buffer._priorities._tree.leaves, expected)
    unweighted = DqnConfig(hidden=(8,), batch_size=16, loss="mse", double=False).build(spec)
    unweighted.update(Batch(batch.rows, batch.ixs))
    assert not np.array_equal(unweighted.model_info()[1]["params"], agents[0].model_info()[1]["params"])


def test_a_buffer_whose_rows_cannot_be_restored_has_no_priorities():
    saved, other = (
        build(50, 120),
        PrioritizedReplayBufferConfig(capacity=50).build(Layout("transitions", LAYOUT.fields[:1])),
    )
    other.push(np.zeros(60, other.row_dtype))
    with pytest.raises(LayoutMismatch):
        other.load_state_dict(saved.state_dict())
    assert (len(other), other.inserted) == (0, 0)
    other.push(np.zeros(3, other.row_dtype))
    assert set(other.batch(200).ixs.tolist()) == {0, 1, 2}
