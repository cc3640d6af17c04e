"""Nothing that a test started may be left behind, and what children run can be imported by them."""

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

# No test measures speed, on a busy machine either: no deadlines, also where a test has no settings of its own.
settings.register_profile("outrider", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("outrider")

# Children get the parent's sys.path: functions they run live in modules beside their tests, found by plain name.
sys.path.append(str(Path(__file__).parent / "processes"))


def _children() -> set[str]:
    """Child processes, without the two helpers that Python keeps until it ends."""
    multiprocessing.active_children()  # reaps those that ended
    helpers = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    return {
        f"process {p.pid} {p.name()}"
        for p in psutil.Process().children(recursive=True)
        if p.pid not in helpers and p.status() != psutil.STATUS_ZOMBIE
    }


def _held() -> set[str]:
    # pytest-timeout runs a thread beside every test, this fixture's end included.
    threads = {f"thread {t.name}" for t in threading.enumerate() if not t.name.startswith("pytest_timeout")}
    files = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    return _children() | threads | files


def _used_by_others() -> set[str]:
    """Shared-memory files of other programs on this machine, which are alive and not ours to judge.

    Told by their inodes: a semaphore is mapped under another name than it has.
    """
    ours = {os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))}
    mapped: set[int] = set()
    for pid in psutil.pids():
        if pid not in ours:
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
                mapped |= {int(line.split()[4]) for line in lines if " /dev/shm/" in line}
    return {file.path for file in os.scandir("/dev/shm") if file.inode() in mapped}


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    before = _held()
    yield
    deadline = time.monotonic() + 5
    while (left := _held() - before) and (left := left - _used_by_others()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"left behind by the tests: {sorted(left)}"
