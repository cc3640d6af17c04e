"""Actors are killed for real, at random moments and at each point where it could matter."""

import os
import random
import signal
import time
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess

import pytest
from children_transport import LAYOUT, POINTS, faults, send_rows_and_die

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

    def take(self, message: PushedItemMessage) -> None:
        self.faults += faults(message.items, self.taken)
        self.faults += message.incarnation != self.incarnation
        self.taken += len(message.items)

    def start(self, point: str | None, n: int) -> ForkServerProcess:
        self.incarnation += 1
        args = (self.sender, self.stop, 0, self.incarnation, self.taken, point, n, self.block)
        process = get_context("forkserver").Process(target=send_rows_and_die, args=args)
        process.start()
        return process

    def drain_until_dead(self, process: ForkServerProcess) -> None:
        """The old actor is gone for good, and its ring empty, before the next one may have it."""
        deadline = time.monotonic() + 30
        while process.is_alive() and time.monotonic() < deadline:
            self.receiver.drain(self.take)
            time.sleep(1e-4)
        assert process.exitcode == -signal.SIGKILL
        process.close()
        self.receiver.drain(self.take)


def kill_at_points(run: Run, point: str, kills: int) -> None:
    for n in range(1, kills + 1):
        run.drain_until_dead(run.start(point, n))


def kill_at_random(run: Run, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(kills):
        process = run.start(None, 0)
        before = run.taken
        deadline = time.monotonic() + 30
        while run.taken == before and time.monotonic() < deadline:
            run.receiver.drain(run.take)
        end = time.monotonic() + rng.random() * 0.01
        while time.monotonic() < end:
            run.receiver.drain(run.take, max_rows=rng.choice((1, None)))
        if rng.random() < 0.2:
            os.kill(process.pid or 0, signal.SIGSTOP)
            run.receiver.drain(run.take)
        os.kill(process.pid or 0, signal.SIGKILL)
        run.drain_until_dead(process)


@pytest.mark.parametrize("point", [p for p in POINTS if p != "too early"])
@pytest.mark.parametrize("n_buffer", [1, 4])
def test_a_kill_at_this_point_leaves_nothing_torn_lost_or_doubled(point: str, n_buffer: int) -> None:
    run = Run(n_buffer=n_buffer)
    kill_at_points(run, point, kills=5)
    assert run.faults == 0
    committed = {
        "in a row block": [(n - 1) // n_buffer for n in range(1, 6)],  # rows written in full, the last not counted
        "after the head": [1, 2, 3, 4, 5],
    }.get(point, [0, 1, 2, 3, 4])
    assert run.taken == n_buffer * sum(committed)


def test_the_check_has_power() -> None:
    """Negative control: an actor that advances the head before its last row is written is found out each time."""
    run = Run(n_buffer=4)
    kill_at_points(run, "too early", kills=3)
    assert run.faults >= 3


@pytest.mark.parametrize(("n_buffer", "block"), [(16, 1), (5, 3)])
def test_kills_at_random_leave_nothing_torn_lost_or_doubled(n_buffer: int, block: int) -> None:
    run = Run(n_buffer=n_buffer, block=block)
    kill_at_random(run, kills=12, seed=n_buffer)
    assert run.faults == 0
    assert run.taken > 12


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("n_buffer", "block", "age_s"), [(64, 1, 100.0), (16, 5, 1e-3), (1, 1, 100.0), (4, 11, 1e-4)])
def test_a_thousand_kills_leave_nothing_torn_lost_or_doubled(n_buffer: int, block: int, age_s: float) -> None:
    run = Run(n_buffer=n_buffer, block=block, age_s=age_s)
    kill_at_random(run, kills=1000, seed=block)
    assert run.faults == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("point", [p for p in POINTS if p != "too early"])
def test_hundreds_of_kills_at_this_point_leave_nothing_torn_lost_or_doubled(point: str) -> None:
    for n_buffer, n_slots in ((1, 1), (4, 3), (16, 2)):
        run = Run(n_buffer=n_buffer, n_slots=n_slots)
        kill_at_points(run, point, kills=70)
        assert run.faults == 0
