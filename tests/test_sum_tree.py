from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.replay.sum_tree import FANOUT, SumTree, compiled

KERNELS = [
    False,
    pytest.param(True, marks=pytest.mark.skipif(compiled() is None, reason="needs numba")),
]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("n", [1, 2, FANOUT, FANOUT + 1, 1000])
def test_a_point_finds_the_leaf_it_lies_on(kernels, n):
    tree = SumTree(n, kernels=kernels)
    values = np.random.default_rng(n).integers(0, 3, n).astype(float)
    values[n // 2] = 1.0
    tree.set(np.arange(n), values)
    assert tree.total == values.sum()
    points = np.arange(0, values.sum(), 0.25)
    out = np.empty(len(points), np.int64)
    expected = np.searchsorted(np.cumsum(values), points, side="right")
    tree.find(points, out)
    assert out.tolist() == expected.tolist()


@pytest.mark.parametrize("kernels", KERNELS)
def test_leaves_are_drawn_in_proportion_to_their_values(kernels):
    tree, rng = SumTree(300, kernels=kernels), np.random.default_rng(0)
    values = rng.random(300) ** 4 + 0.01
    tree.set(np.arange(300), values)
    points = rng.random(400_000) * tree.total
    out = np.empty(len(points), np.int64)
    tree.find(points, out)
    expected = values / values.sum() * len(out)
    chi2 = float(((np.bincount(out, minlength=300) - expected) ** 2 / expected).sum())
    assert abs(chi2 - 299) < 4 * np.sqrt(2 * 299)


@pytest.mark.parametrize("kernels", KERNELS)
def test_sums_do_not_drift_over_many_updates_of_very_different_values(kernels):
    tree, rng = SumTree(5000, kernels=kernels), np.random.default_rng(0)
    for _ in range(2000):
        tree.set(rng.integers(0, 5000, 500), 10.0 ** rng.uniform(-9, 9, 500))
    assert abs(tree.total / tree.leaves.sum() - 1) < 1e-12
    tree.set(np.arange(5000), 0.0)
    assert tree.total == 0.0


@given(
    n=st.integers(1, 700),
    updates=st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 1e6)), max_size=60),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_a_tree_is_a_function_of_its_leaves_alone(n, updates, seed):
    tree, rebuilt = SumTree(n), SumTree(n, kernels=False)
    for at, value in updates:
        tree.set(np.array([at % n]), value)
    rebuilt.set_all(tree.leaves)
    assert tree.total == rebuilt.total
    if tree.total:
        points = np.random.default_rng(seed).random(50) * tree.total * (1 - 2**-52)
        found = [np.empty(50, np.int64) for _ in range(2)]
        tree.find(points.copy(), found[0])
        rebuilt.find(points, found[1])
        assert found[0].tolist() == found[1].tolist()
        assert (tree.leaves[found[0]] > 0).all()


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_leaf_without_value_is_never_found_however_the_sums_are_rounded(kernels):
    tree = SumTree(4096, kernels=kernels)
    rng = np.random.default_rng(1)
    some = rng.permutation(4096)[:1500]
    tree.set(some, 10.0 ** rng.uniform(-15, 15, len(some)))
    points = np.concatenate([rng.random(20_000) * tree.total, [0.0, tree.total * (1 - 2**-52)]])
    points = np.concatenate([points, np.nextafter(np.cumsum(tree.leaves)[:-1], 0)])
    points = points[(points >= 0) & (points < tree.total)]
    out = np.empty(len(points), np.int64)
    tree.find(points, out)
    assert (tree.leaves[out] > 0).all()


@pytest.mark.parametrize("kernels", KERNELS)
def test_of_equal_indices_the_last_value_counts(kernels):
    tree = SumTree(20, kernels=kernels)
    tree.set(np.array([3, 7, 3, 7, 3]), np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert (tree.leaves[3], tree.leaves[7], tree.total) == (5.0, 4.0, 9.0)


@pytest.mark.skipif(compiled() is None, reason="needs numba")
@pytest.mark.parametrize("n", [1, 9, 513, 4000])
def test_compiled_and_plain_trees_are_equal_to_the_last_bit(n):
    trees, rng = [SumTree(n, kernels=kernels) for kernels in (False, True)], np.random.default_rng(n)
    for _ in range(50):
        ixs, values, points = rng.integers(0, n, 40), rng.random(40) ** 8, rng.random(40)
        found = [np.empty(40, np.int64) for _ in trees]
        for tree, out in zip(trees, found, strict=True):
            tree.set(ixs, values)
            tree.find(points * tree.total * (1 - 2**-52), out)
        assert trees[0].total == trees[1].total
        assert found[0].tolist() == found[1].tolist()
