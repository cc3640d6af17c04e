"""Actors are killed for real, at random moments and at each point where it could matter."""

import os
import random
import signal
import time
from multiprocessing import get_context
from typing import Self

import pytest
from children_transport import LAYOUT, POINTS, faults, nursery

from outrider.channel import PushedItemMessage, item_channel
from outrider.flags import StopFlag


class Run:
    """One ring, whose actor is killed and replaced again and again; counts the rows that are not the next ones."""

    def __init__(self, *, n_buffer: int, n_slots: int = 3, block: int = 1, age_s: float = 100.0) -> None:
        self.sender, self.receiver = item_channel()
        self.sender.bind(LAYOUT, n_actors=1, n_buffer=n_buffer, n_slots=n_slots, max_message_age_s=age_s)
        self.stop = StopFlag()
        self.block = block
        self.incarnation = self.taken = self.faults = 0

    def __enter__(self) -> Self:
        context = get_context("forkserver")
        self.orders, theirs = context.Pipe()
        self.nursery = context.Process(target=nursery, args=(self.sender, self.stop, theirs))
        self.nursery.start()
        theirs.close()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop.set()
        self.orders.send(None)
        self.nursery.join(20)
        self.orders.close()
        self.sender.close()
        self.receiver.close()

    def take(self, message: PushedItemMessage) -> None:
        self.faults += faults(message.items, self.taken)
        self.faults += message.incarnation != self.incarnation
        self.taken += len(message.items)

    def start(self, point: str | None, n: int) -> int:
        """Start the next actor; returns its pid."""
        self.incarnation += 1
        self.orders.send((0, self.incarnation, self.taken, point, n, self.block))
        assert self.orders.poll(30)
        return int(self.orders.recv())

    def drain_until_dead(self) -> None:
        """The old actor is gone for good, and its ring empty, before the next one may have it."""
        deadline = time.monotonic() + 30
        while not self.orders.poll(1e-4):
            assert time.monotonic() < deadline
            self.receiver.drain(self.take)
        assert os.WTERMSIG(self.orders.recv()) == signal.SIGKILL
        self.receiver.drain(self.take)


def kill_at_points(run: Run, point: str, kills: int) -> None:
    for n in range(1, kills + 1):
        run.start(point, n)
        run.drain_until_dead()


def kill_at_random(run: Run, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(kills):
        pid = run.start(None, 0)
        end = time.monotonic() + rng.random() * 0.01
        while time.monotonic() < end:
            run.receiver.drain(run.take, max_rows=rng.choice((1, None)))
        if rng.random() < 0.2:
            os.kill(pid, signal.SIGSTOP)
            run.receiver.drain(run.take)
        os.kill(pid, signal.SIGKILL)
        run.drain_until_dead()


KILLS = 12


@pytest.mark.parametrize("point", [p for p in POINTS if p != "too early"])
@pytest.mark.parametrize("n_buffer", [1, 4])
def test_a_kill_at_this_point_leaves_nothing_torn_lost_or_doubled(point: str, n_buffer: int) -> None:
    with Run(n_buffer=n_buffer) as run:
        kill_at_points(run, point, KILLS)
    assert run.faults == 0
    passes = range(1, KILLS + 1)
    committed = {
        "in a row block": [(n - 1) // n_buffer for n in passes],  # the n-th row is written, but not counted
        "after the head": passes,
    }.get(point, [n - 1 for n in passes])
    assert run.taken == n_buffer * sum(committed)


def test_the_check_has_power() -> None:
    """Negative control: an actor that advances the head before its last row is written is found out each time."""
    with Run(n_buffer=4) as run:
        kill_at_points(run, "too early", kills=10)
    assert run.faults >= 10


@pytest.mark.parametrize(
    ("n_buffer", "n_slots", "block", "age_s"), [(16, 3, 1, 100.0), (5, 2, 3, 1e-3), (1, 1, 1, 100.0)]
)
def test_kills_at_random_leave_nothing_torn_lost_or_doubled(
    n_buffer: int, n_slots: int, block: int, age_s: float
) -> None:
    with Run(n_buffer=n_buffer, n_slots=n_slots, block=block, age_s=age_s) as run:
        kill_at_random(run, kills=60, seed=n_buffer)
    assert run.faults == 0
    assert run.taken > 60


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("n_buffer", "n_slots", "block", "age_s"), [(64, 8, 1, 100.0), (16, 3, 5, 1e-3), (1, 1, 1, 100.0), (4, 2, 11, 1e-4)]
)
def test_thousands_of_kills_leave_nothing_torn_lost_or_doubled(
    n_buffer: int, n_slots: int, block: int, age_s: float
) -> None:
    with Run(n_buffer=n_buffer, n_slots=n_slots, block=block, age_s=age_s) as run:
        kill_at_random(run, kills=2000, seed=block)
    assert run.faults == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("point", [p for p in POINTS if p != "too early"])
def test_hundreds_of_kills_at_this_point_leave_nothing_torn_lost_or_doubled(point: str) -> None:
    for n_buffer, n_slots in ((1, 1), (4, 3), (16, 2)):
        with Run(n_buffer=n_buffer, n_slots=n_slots) as run:
            kill_at_points(run, point, kills=100)
        assert run.faults == 0
