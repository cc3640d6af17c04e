"""A tree of sums over priorities, in float64: draws a leaf with a probability proportional to its value.

Every inner node is the sum of its children, taken from the first to the last, and is computed anew whenever one of
them changes. So nothing drifts, however many updates there were, and the tree is a function of its leaves alone: one
that is rebuilt from a checkpoint draws as the saved one would have.

Nodes have :data:`FANOUT` children, which are one cache line: a tree of 2**20 leaves has seven levels. All points go
down a level before any goes on to the next, so that they wait for memory together (`benchmarks/replay.py --only
prioritized` compares it with a binary tree).
"""

from __future__ import annotations

import functools
from types import ModuleType

import numpy as np

from outrider.data import Array

FANOUT = 8
BELOW_ONE = 1.0 - 2.0**-52
"""A value times this is less than the value."""


@functools.cache
def compiled() -> ModuleType | None:
    """The module of the compiled kernels, None without numba. Importing it takes about a second once per process."""
    try:
        from outrider.replay import sum_tree_compiled
    except ImportError:
        return None
    return sum_tree_compiled


class SumTree:
    """Values of n leaves and their sums.

    With numba (``pip install outrider[per]``) its two loops are compiled, and are several times faster; without it
    they are numpy calls, one set per level. Both give the same results to the last bit.

    Process: the learner.
    Owns: 9.2 bytes a leaf.
    Blocks: never.
    Closes: nothing.

    Args:
        n_leaves: At least 1. All values are 0 at first.
        kernels: For tests: True: compiled, an error without numba; False: numpy; None: whatever there is.

    Attributes:
        leaves: Values ``[n_leaves]`` float64; set them by :meth:`set`.
    """

    def __init__(self, n_leaves: int, *, kernels: bool | None = None) -> None:
        sizes = [_padded(n_leaves)]
        while sizes[-1] > FANOUT:
            sizes.append(_padded(sizes[-1] // FANOUT))
        # The levels one after another, the leaves first; the last level is one node's children.
        self._begins = np.cumsum([0, *sizes], dtype=np.int64)
        self._nodes = _aligned_zeros(int(self._begins[-1]))
        self._levels = [self._nodes[a:b] for a, b in zip(self._begins[:-1], self._begins[1:], strict=True)]
        self.leaves: Array = self._nodes[:n_leaves]
        self._kernels = None if kernels is False else compiled()
        if kernels and self._kernels is None:
            raise ImportError("compiled sum trees need numba")

    @property
    def nbytes(self) -> int:
        """Bytes of all nodes."""
        return self._nodes.nbytes

    @property
    def total(self) -> float:
        """The sum of all leaves."""
        return float(self._levels[-1].cumsum()[-1])

    def set(self, ixs: Array, values: Array | float) -> None:
        """Give leaves ``[m]`` int64 these finite values, at least 0; of equal indices the last one counts."""
        if not len(ixs):
            return
        self.leaves[ixs] = values
        if self._kernels is not None:
            self._kernels.refresh(self._nodes, self._begins, ixs)
        else:
            self._refresh(ixs)

    def set_all(self, values: Array) -> None:
        """Give all leaves these values ``[n_leaves]``."""
        self.leaves[...] = values
        for below, above in zip(self._levels[:-1], self._levels[1:], strict=True):
            sums = below.reshape(-1, FANOUT).cumsum(1)[:, -1]
            above[: len(sums)] = sums

    def find(self, points: Array, out: Array) -> None:
        """The leaf below each point of the line that the leaves' values make up, end to end.

        Args:
            points: ``[B]`` float64 in [0, :attr:`total`); overwritten.
            out: Indices ``[B]`` int64; none is of a leaf with value 0.
        """
        if self._kernels is not None:
            self._kernels.find(self._nodes, self._begins, points, out)
        else:
            self._find(points, out)

    def _refresh(self, ixs: Array) -> None:
        for below, above in zip(self._levels[:-1], self._levels[1:], strict=True):
            ixs = ixs // FANOUT
            above[ixs] = below.reshape(-1, FANOUT).take(ixs, axis=0).cumsum(1)[:, -1]

    def _find(self, points: Array, out: Array) -> None:
        n = len(points)
        begins = np.arange(n) * FANOUT
        sums = np.zeros((n, FANOUT))  # of the children before each
        out[...] = 0
        for level in reversed(self._levels):
            values = level.reshape(-1, FANOUT).take(out, axis=0)
            np.cumsum(values[:, :-1], axis=1, out=sums[:, 1:])
            child = np.count_nonzero(sums[:, 1:] <= points[:, None], axis=1)
            at = begins + child
            points -= sums.take(at)
            np.minimum(points, values.take(at) * BELOW_ONE, out=points)  # the difference was rounded
            out *= FANOUT
            out += child


def _padded(n: int) -> int:
    return -(-n // FANOUT) * FANOUT


def _aligned_zeros(n: int) -> Array:
    """Doubles ``[n]`` that begin at a cache line."""
    raw = np.zeros(n + 8)
    skipped = -raw.ctypes.data // 8 % 8
    return raw[skipped : skipped + n]
