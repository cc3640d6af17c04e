import os
import pickle
import signal
import threading
import time
from multiprocessing import get_context

import pytest
from children_transport import enter_together, hold_for_ever, set_and_wait

from outrider.errors import ChannelClosed
from outrider.flags import InitGuard, StopFlag


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_stop_flag_is_seen_in_both_directions_between_processes(method: str) -> None:
    flag, answer = StopFlag(), StopFlag()
    process = get_context(method).Process(target=set_and_wait, args=(flag, answer))
    process.start()
    assert not answer.is_set()
    flag.set()
    assert answer.wait(20)
    process.join(20)
    assert process.exitcode == 0


def test_a_stop_flag_wakes_a_thread_that_waits() -> None:
    flag = StopFlag()
    seen = []
    thread = threading.Thread(target=lambda: seen.append(flag.wait(20)))
    thread.start()
    flag.set()
    flag.set()
    thread.join(20)
    assert seen == [True]


def test_waiting_for_a_flag_that_nobody_sets_ends_in_time() -> None:
    flag = StopFlag()
    start = time.monotonic()
    assert not flag.wait(0.05)
    assert time.monotonic() - start >= 0.05
    assert not flag.wait(0)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_one_process_at_a_time_is_inside_the_guard(method: str) -> None:
    guard, stop, inside, torn = InitGuard(), StopFlag(), StopFlag(), StopFlag()
    processes = [
        get_context(method).Process(target=enter_together, args=(guard, stop, inside, torn, 20)) for _ in range(2)
    ]
    for p in processes:
        p.start()
    enter_together(guard, stop, inside, torn, 20)
    for p in processes:
        p.join(30)
        assert p.exitcode == 0
    assert not torn.is_set()


def test_one_thread_at_a_time_is_inside_the_guard() -> None:
    guard, stop, inside, torn = InitGuard(), StopFlag(), StopFlag(), StopFlag()
    threads = [threading.Thread(target=enter_together, args=(guard, stop, inside, torn, 20)) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert not torn.is_set()


def test_the_guard_of_a_killed_holder_is_free() -> None:
    guard, held = InitGuard(), StopFlag()
    process = get_context("forkserver").Process(target=hold_for_ever, args=(guard, held))
    process.start()
    assert held.wait(20)
    assert not guard.acquire(timeout_s=0.05)
    with pytest.raises(TimeoutError, match=r"still being built after 0\.05 s"), guard.hold(timeout_s=0.05):
        pytest.fail("entered")
    os.kill(process.pid or 0, signal.SIGKILL)
    assert guard.acquire(timeout_s=20)
    guard.release()
    process.join(20)


def test_a_stop_ends_waiting_for_the_guard() -> None:
    guard, stop = InitGuard(), StopFlag()
    stop.set()
    with guard.hold(stop=stop):  # it is free: no reason to refuse
        thread_saw = []
        thread = threading.Thread(target=lambda: thread_saw.append(guard.acquire(timeout_s=20, stop=stop)))
        thread.start()
        thread.join(20)
        assert thread_saw == [False]
        with pytest.raises(ChannelClosed, match="stopped while waiting"), guard.hold(stop=stop):
            pytest.fail("entered")


def test_the_guard_is_given_back_when_the_build_fails() -> None:
    guard = InitGuard()
    with pytest.raises(ZeroDivisionError), guard:
        raise ZeroDivisionError
    with guard:
        assert not guard.acquire(timeout_s=0)


def test_flag_and_guard_travel_only_to_a_process_that_is_being_started() -> None:
    for shared in (StopFlag(), InitGuard()):
        with pytest.raises(RuntimeError, match="inheritance"):
            pickle.dumps(shared)
