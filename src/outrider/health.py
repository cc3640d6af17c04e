"""Rows with values that are not finite: found before they reach the replay buffer, never silently trained on."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from outrider.data import Array, Items, Layout, n_rows
from outrider.errors import BadData

BadDataPolicy: TypeAlias = Literal["raise", "drop"]
"""What to do about rows with NaN or infinite values: end the run with an error, or leave them out and count them."""


LONG_ROW_BYTES = 512  # of longer ones, such as images, the columns are looked at
EXPONENT = 0x7F800000  # the bits of a float32 that are all set in NaN and infinite values only


class RowHealth:
    """Looks at whole columns of rows: observations, actions and rewards that are floats.

    Args:
        layout: Columns of the rows.
        policy: What to do about bad rows.
        actor: Whose rows they are, for the error.

    Attributes:
        dropped: Rows left out so far.
    """

    def __init__(self, layout: Layout, policy: BadDataPolicy, actor: int) -> None:
        self._names = [f.name for f in layout.fields if f.dtype.kind in "fc"]
        self._exponents = _exponents(layout)
        self._policy = policy
        self._actor = actor
        self.dropped = 0

    def good_rows(self, rows: Items, env_steps: int) -> Array | None:
        """Which rows ``[m]`` bool to keep; None, at little cost, if all are good.

        Args:
            rows: The rows.
            env_steps: Env steps of the actor so far, for the error.

        Raises:
            BadData: There are bad ones, and the policy is ``raise``.
        """
        if self._exponents is not None and isinstance(rows, np.ndarray) and rows.flags.c_contiguous:
            words = rows.view(np.uint32).reshape(len(rows), -1) & self._exponents
            if np.maximum.reduce(words, axis=None, initial=0) < EXPONENT:
                return None
        good = np.ones(n_rows(rows), np.bool_)
        for name in self._names:
            finite = np.isfinite(rows[name])
            if finite.all():
                continue
            whole = finite.reshape(len(finite), -1).all(1)
            if self._policy == "raise":
                first = rows[name][int(np.argmin(whole))]
                raise BadData(self._actor, name, env_steps, str(first))
            good &= whole
        bad = len(good) - int(np.count_nonzero(good))
        self.dropped += bad
        return good if bad else None


def _exponents(layout: Layout) -> Array | None:
    """For every word of four bytes of a row, the bits of the exponent if it is a float32, and else none.

    One pass over whole rows takes a fifth of the time of one column after the other. None: there are other floats,
    which take that, or a row has no whole number of words.
    """
    record = layout.record_dtype()
    floats = [f for f in layout.fields if f.dtype.kind in "fc"]
    if record.itemsize % 4 or any(f.dtype != np.float32 for f in floats) or record.itemsize > LONG_ROW_BYTES:
        return None
    row = np.zeros(1, record)
    words = row.view(np.uint32)
    for f in floats:
        row[f.name].view(np.uint32)[...] = EXPONENT
    return words
