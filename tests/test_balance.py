from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.balance import Balance

ratios = st.one_of(st.none(), st.floats(0.1, 64.0))


@given(
    spi=ratios,
    warmup=st.integers(1, 1000),
    slack=st.integers(1, 500),
    inserted=st.integers(0, 10**6),
    sampled=st.integers(0, 10**7),
)
def test_either_an_opt_step_or_an_insertion_is_always_allowed(
    spi: float | None, warmup: int, slack: int, inserted: int, sampled: int
) -> None:
    balance = Balance(spi, warmup, slack)
    assert balance.may_opt(inserted, sampled) or balance.rows_allowed(inserted, sampled, 4096) > 0


@given(
    spi=ratios,
    warmup=st.integers(1, 600),
    message=st.integers(1, 64),
    batch=st.integers(1, 512),
    updates=st.integers(1, 4),
    actors=st.integers(1, 8),
    slots=st.integers(2, 8),
)
@settings(deadline=None, max_examples=200)
def test_actors_and_learner_never_stop_making_progress(
    spi: float | None, warmup: int, message: int, batch: int, updates: int, actors: int, slots: int
) -> None:
    """Bounded rings, whole messages, any ratio: 200 opt steps are reached, and the ratio holds on the way."""
    balance = Balance(spi, warmup, slack=message)
    rings = [0] * actors
    inserted = sampled = opts = idle = 0
    while opts < 200:
        for i in range(actors):  # each actor may fill one more slot, unless its ring is full
            rings[i] = min(slots, rings[i] + 1)
        before = inserted, opts
        allowed, drained = balance.rows_allowed(inserted, sampled, 4096), 0
        for i in range(actors):
            while rings[i] and drained < allowed:
                rings[i] -= 1
                drained += message
        inserted += drained
        if balance.may_opt(inserted, sampled):
            opts += 1
            sampled += batch * updates
        idle = idle + 1 if before == (inserted, opts) else 0
        assert idle < 2, "neither a row was inserted nor an opt step made"
        if spi is not None and inserted >= warmup:
            # Whole numbers are added to whole ones only: a sum with a fraction is rounded to the bound itself.
            assert sampled - batch * updates < spi * (inserted - warmup)
            assert inserted - warmup - 2 * message < sampled / spi


@given(spi=st.floats(0.1, 64.0), inserted=st.integers(0, 10**5))
def test_no_opt_step_before_the_warm_up_is_over(spi: float, inserted: int) -> None:
    assert not Balance(spi, warmup=inserted + 1, slack=64).may_opt(inserted, 0)
    assert not Balance(None, warmup=inserted + 1, slack=64).may_opt(inserted, 0)


def test_without_a_ratio_both_sides_run_free() -> None:
    balance = Balance(None, warmup=10, slack=1)
    assert balance.may_opt(10, 10**9)
    assert balance.rows_allowed(10**9, 0, 4096) == 4096


def test_the_achieved_ratio_counts_from_the_end_of_the_warm_up() -> None:
    balance = Balance(8.0, warmup=100, slack=1)
    assert balance.achieved(100, 0) == 0.0
    assert balance.achieved(200, 800) == 8.0
