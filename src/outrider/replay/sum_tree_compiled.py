"""The loops of :mod:`outrider.replay.sum_tree`, compiled by numba when this is imported; only the learner does.

The machine code is kept where Python keeps the bytecode of this module, and if that cannot be written, in numba's
directory in the user's private cache: it is trusted as much as the module is, and made anew when the module changes.
"""

from __future__ import annotations

import numba

from outrider.data import Array

FANOUT = 8  # as in sum_tree, which a compiled function cannot look at
BELOW_ONE = 1.0 - 2.0**-52

_doubles, _ints = numba.float64[::1], numba.int64[::1]


@numba.njit(numba.void(_doubles, _ints, _ints), cache=True)
def refresh(nodes: Array, begins: Array, ixs: Array) -> None:
    """Compute all nodes above these leaves anew.

    Level by level, so that the sums of one level do not wait for each other; a node that the index before led to
    already is left out, which in sorted batches is most of them higher up.
    """
    parents = ixs // FANOUT
    for level in range(1, len(begins) - 1):
        below, above = begins[level - 1], begins[level]
        last = -1
        for i in range(len(parents)):
            parent = parents[i]
            if parent != last:
                last = parent
                total = 0.0
                child = below + parent * FANOUT
                for j in range(FANOUT):
                    total += nodes[child + j]
                nodes[above + parent] = total
            parents[i] = parent // FANOUT


@numba.njit(numba.void(_doubles, _ints, _doubles, _ints), cache=True)
def find(nodes: Array, begins: Array, points: Array, out: Array) -> None:
    """Walk down to the leaf below each point, without a branch that could be guessed wrong."""
    out[:] = 0
    for level in range(len(begins) - 2, -1, -1):
        for i in range(len(points)):
            child, point = begins[level] + out[i] * FANOUT, points[i]
            total, before, j = 0.0, 0.0, 0
            for k in range(FANOUT - 1):
                total += nodes[child + k]
                passed = total <= point
                before = total if passed else before
                j += passed
            points[i] = min(point - before, nodes[child + j] * BELOW_ONE)
            out[i] = out[i] * FANOUT + j
