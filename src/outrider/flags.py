"""What all processes of a run share besides the channels: the flag that stops it, and the guard of the builds."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import context, reduction
from types import TracebackType
from typing import Any

from outrider.errors import ChannelClosed
from outrider.shared_memory import Arena, nameless_file

_NAP_S = 1e-3
_LONGEST_NAP_S = 20e-3


class StopFlag:
    """A flag that is raised once and seen by all processes and threads of a run.

    It can be handed to a process while that is started, and be set from a signal handler.

    Owns:
        A page of shared memory, freed with its last holder.
    """

    __slots__ = ("__weakref__", "_arena", "_word")

    def __init__(self) -> None:
        self._adopt(Arena(8))

    def _adopt(self, arena: Arena) -> None:
        self._arena = arena
        self._word = memoryview(arena.buf).cast("Q")

    def __reduce__(self) -> tuple[Any, ...]:
        return _stop_flag, (self._arena,)

    def set(self) -> None:
        """Ask everybody to stop. May be called any number of times, by anybody."""
        self._word[0] = 1

    def is_set(self) -> bool:
        """Whether the run is to stop; costs less than 0.1 µs."""
        return self._word[0] != 0

    def wait(self, timeout_s: float) -> bool:
        """Sleep until it is set, or for `timeout_s`.

        Blocks:
            In naps of at most 20 ms.

        Returns:
            Whether it is set.
        """
        deadline, nap = time.monotonic() + timeout_s, _NAP_S
        while not self.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(nap, left))
            nap = min(2 * nap, _LONGEST_NAP_S)
        return True


def _stop_flag(arena: Arena) -> StopFlag:
    flag = StopFlag.__new__(StopFlag)
    flag._adopt(arena)
    return flag


class InitGuard:
    """Lets one environment be constructed at a time, over all processes and threads of a run.

    The kernel frees it when its holder dies, however that happens: a simulator that crashes in its constructor
    holds up nobody. It is not reentrant, and makes no promise about the order in which waiters get it.

    A process has one of it: record locks belong to processes, and closing *any* descriptor of the file frees them.

    Owns:
        One descriptor, closed with the last reference.
    """

    def __init__(self) -> None:
        self._adopt(nameless_file(0))

    def _adopt(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        weakref.finalize(self, os.close, fd)
        self._fd = fd
        self._thread_lock = threading.Lock()  # record locks do not hold threads of one process apart

    def __reduce__(self) -> tuple[Any, ...]:
        context.assert_spawning(self)
        return _init_guard, (reduction.DupFd(self._fd),)

    def acquire(self, timeout_s: float | None = None, stop: StopFlag | None = None) -> bool:
        """Take it.

        Args:
            timeout_s: How long to wait at most; None: as long as it takes. A dead holder never holds it.
            stop: Give up when this is set.

        Blocks:
            In naps of at most 20 ms while somebody else has it.

        Returns:
            Whether it was taken; False after the time-out or the stop.
        """
        deadline, nap = time.monotonic() + (timeout_s if timeout_s is not None else float("inf")), _NAP_S
        while not self._try():
            left = deadline - time.monotonic()
            if left <= 0 or (stop is not None and stop.is_set()):
                return False
            time.sleep(min(nap, left))
            nap = min(2 * nap, _LONGEST_NAP_S)
        return True

    def _try(self) -> bool:
        if not self._thread_lock.acquire(blocking=False):
            return False
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._thread_lock.release()
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True

    def release(self) -> None:
        """Give it back."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN)
        self._thread_lock.release()

    @contextmanager
    def hold(self, timeout_s: float | None = None, stop: StopFlag | None = None) -> Iterator[None]:
        """Hold it for the block; arguments as in :meth:`acquire`.

        Raises:
            ChannelClosed: The run was stopped before it was free.
            TimeoutError: It was not free in time.
        """
        if not self.acquire(timeout_s, stop):
            if stop is not None and stop.is_set():
                raise ChannelClosed("init guard: the run was stopped while waiting to build an environment")
            raise TimeoutError(f"init guard: another environment was still being built after {timeout_s} s")
        try:
            yield
        finally:
            self.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def _init_guard(duplicate: Any) -> InitGuard:
    guard = InitGuard.__new__(InitGuard)
    guard._adopt(duplicate.detach())
    return guard
