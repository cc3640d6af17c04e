"""Processes that run code of others, which may crash, hang or leave children behind: watched, and killed as a whole."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from outrider import processes

TRACEBACK_LIMIT_BYTES = 32_000  # half a pipe's buffer: sending it never blocks a dying process


class Worker:
    """A process that :func:`prepare` has made the leader of a group, as the process that started it sees it.

    **Process**: the one that started it.
    **Owns** a descriptor that tells its end, also if somebody else has reaped it.
    **Blocks** for a second at most, in `kill` and `close`; in `join` as long as it is told.
    **Closes**: `close` kills what is left of the group and lets go of it.

    Args:
        target: Its entry; has to call :func:`prepare`.
        args: As for :func:`outrider.processes.start_process`.
        name: Its name.
    """

    def __init__(self, target: Callable[..., object], args: tuple[Any, ...], name: str) -> None:
        self.process: BaseProcess = processes.start_process(target, args, name=name)
        assert self.process.pid is not None
        self.pid = self.process.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:  # it is gone already, and so are those whose end this descriptor tells
            self._pidfd = os.dup(self.process.sentinel)

    @property
    def sentinel(self) -> int:
        """Ready, for :func:`multiprocessing.connection.wait`, once it is gone."""
        return self._pidfd

    def alive(self) -> bool:
        """Whether it is not gone yet."""
        return not connection.wait([self._pidfd], 0)

    def join(self, timeout_s: float) -> None:
        """Wait until it is gone, that long at most."""
        connection.wait([self._pidfd], timeout_s)

    def reap(self) -> int | None:
        """Kill what it has started and left behind, now that it is gone.

        Returns:
            Its exit code, None if nobody knows.
        """
        processes.kill_group(self.pid)
        self.process.join(1.0)
        return self.process.exitcode

    def dump(self) -> None:
        """Have it write the stacks of its threads."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGUSR1)

    def kill_group(self) -> None:
        """Kill it and what it has started."""
        processes.kill_group(self.pid)
        with contextlib.suppress(OSError):  # it is gone; or has not become the leader of a group yet
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.join(1.0)

    def close(self) -> None:
        """Let go of it, once it is gone."""
        self.reap()
        os.close(self._pidfd)
        self.process.close()


def prepare() -> None:
    """First thing in a worker: one thread, no GPU, and a group of its own, which ends with whoever started it."""
    processes.lead_group()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    dump_stacks_to(None)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def dump_stacks_to(path: Path | None) -> None:
    """Where the stacks of all threads go at a crash in native code, and at SIGUSR1; None: to stderr."""
    file = sys.stderr.fileno()
    if path is not None:
        with contextlib.suppress(OSError):  # stderr will do
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def tail(text: str) -> bytes:
    """The text, or its end where it is long. Anything can be in it: messages are made by environments."""
    data = text.encode(errors="backslashreplace")
    return data if len(data) <= TRACEBACK_LIMIT_BYTES else b"[...]\n" + data[-TRACEBACK_LIMIT_BYTES:]
