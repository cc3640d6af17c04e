from __future__ import annotations

import time

from outrider.data import Episode
from outrider.statistics import Counters, Meter


def test_env_steps_of_all_actors_add_up_over_their_incarnations() -> None:
    counters = Counters(2)
    counters.arrived(0, 0, 10, ())
    counters.arrived(1, 0, 7, ())
    counters.arrived(0, 0, 25, ())
    assert counters.env_steps == 32
    counters.arrived(0, 1, 5, ())  # restarted: its own count begins again
    assert counters.env_steps == 37
    counters.arrived(0, 1, 6, ())
    assert counters.env_steps == 38


def test_episode_statistics_are_the_mean_of_the_last_hundred() -> None:
    counters = Counters(1)
    meter = Meter(counters)
    counters.arrived(0, 0, 1, [Episode(ret=1000.0, length=1, env=0)])
    counters.arrived(0, 0, 300, [Episode(ret=float(i), length=2 * i, env=0) for i in range(100)])
    record = meter.read(0, 0)
    assert record["rollout/ep_rew_mean"] == 49.5
    assert record["rollout/ep_len_mean"] == 99.0
    assert record["async/episodes"] == 101


def test_staleness_is_counted_in_opt_steps_and_starts_anew_at_each_reading() -> None:
    counters = Counters(1)
    meter = Meter(counters)
    counters.opt_steps = 100
    counters.aged(80, 90)
    counters.aged(40, 60)
    record = meter.read(0, 0)
    assert record["async/staleness_mean"] == (15 + 50) / 2
    assert record["async/staleness_max"] == 60
    assert "async/staleness_mean" not in meter.read(0, 0)


def test_waiting_counts_as_a_fraction_of_the_time_between_readings() -> None:
    meter = Meter(Counters(1))
    with meter.waiting():
        time.sleep(0.05)
    record = meter.read(0, 0)
    wait = record["async/learner_wait"]
    assert isinstance(wait, float)
    assert 0.1 < wait <= 1.0
    time.sleep(0.03)
    assert meter.read(0, 0)["async/learner_wait"] == 0.0


def test_a_pause_is_no_time_at_all() -> None:
    meter = Meter(Counters(1))
    with meter.paused():
        time.sleep(0.2)
    assert meter.seconds() < 0.2
    assert meter.seconds_since_read() < 0.2


def test_no_rates_are_told_over_an_instant() -> None:
    meter = Meter(Counters(1))
    time.sleep(0.03)
    assert "time/fps" in meter.read(100, 100)
    again = meter.read(100, 100)
    assert "time/fps" not in again
    assert again["async/inserted"] == 100


def test_an_actors_wait_is_its_share_since_the_last_reading() -> None:
    counters = Counters(2)
    meter = Meter(counters)
    counters.arrived(1, 0, 10, (), wait_s=1e9)
    time.sleep(0.03)
    assert meter.read(0, 0)["actor/1/wait"] == 1.0
    time.sleep(0.03)
    record = meter.read(0, 0)
    assert record["actor/1/wait"] == 0.0
    assert record["actor/1/env_steps"] == 10
