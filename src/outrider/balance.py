"""The limiter: how many rows may be drawn for each row inserted, and who has to wait for whom.

It lives in the learner alone. With ``spi`` = samples per insert::

    an opt step is allowed while   sampled < spi * (inserted - warmup)
    inserting   is allowed while   inserted - warmup < sampled / spi + slack

If the first does not hold, ``inserted - warmup <= sampled / spi``, so the second does (slack > 0): one of the two
always holds and neither side can wait for the other for ever. Rings that are not drained fill and hold the actors.
"""

from __future__ import annotations

import math


class Balance:
    """Decides from the counters alone; holds no state but its three numbers.

    Args:
        samples_per_insert: Rows drawn per row inserted after the warm-up; None: both sides run free.
        warmup: Rows inserted before the first opt step.
        slack: Rows that may be inserted ahead of the ratio, at least one message.
    """

    def __init__(self, samples_per_insert: float | None, warmup: int, slack: int) -> None:
        self.samples_per_insert = samples_per_insert
        self.warmup = warmup
        self.slack = max(1, slack)

    def may_opt(self, inserted: int, sampled: int) -> bool:
        """Whether an opt step is allowed."""
        if inserted < self.warmup:
            return False
        spi = self.samples_per_insert
        return spi is None or sampled < spi * (inserted - self.warmup)

    def rows_allowed(self, inserted: int, sampled: int, at_most: int) -> int:
        """Rows that may be inserted now: 0 to `at_most`. A message is taken whole once a single row is allowed."""
        spi = self.samples_per_insert
        if spi is None:
            return at_most
        ahead = inserted - self.warmup
        return max(0, min(at_most, math.ceil(sampled / spi + self.slack - ahead)))

    def achieved(self, inserted: int, sampled: int) -> float:
        """Rows drawn per row inserted after the warm-up; 0 before its end."""
        after = inserted - self.warmup
        return sampled / after if after > 0 else 0.0
