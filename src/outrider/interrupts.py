"""Ctrl-C, SIGTERM and a terminal that hangs up: the first asks for an orderly end, the second ends at once."""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from outrider.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SAME_S = 0.5
"""Signals this close to the first are the first: ``timeout`` and others send one to a process and to its group."""

PATIENCE_S = 3.0
"""What runs is interrupted if it has not followed the request by then, such as an environment that is being built."""

LEAVE_S = 1.0
"""The process ends this long after the second signal, whatever it is doing."""

_POLL_S = 0.1
_PRESS = signal.SIGURG  # ignored by default, so it harms nothing wherever it arrives
_SHOW_CURSOR = b"\x1b[?25h"


class Interrupts:
    """Handles SIGINT and SIGTERM while it is entered, also where they were inherited as ignored.

    SIGHUP, with which a terminal says that it is gone, is handled alike unless it was inherited as ignored, as under
    ``nohup``.

    The first signal calls `request` if there is one by then, otherwise it raises
    :class:`~outrider.errors.Interrupted` in the main thread. The second raises it in any case, and after
    :data:`LEAVE_S` ends the process, with the exit code of the signal. Processes started by
    :mod:`outrider.processes` end with it. Native code that keeps the interpreter's lock for itself holds up both.

    Handlers can only be installed in the main thread: elsewhere this does nothing.

    Process: the learner's, or the command's.
    Owns: a pipe, and a thread that sleeps until a signal comes and then sees to it that it is followed.
    Blocks: never.
    Closes: leaving ``with`` puts the former handlers back and ends the thread.

    Attributes:
        request: Asks what runs to end in order; given the name of the signal.
        busy: Whether what was asked is still at it, and may be interrupted.
        received: The last signal that came.
    """

    def __init__(self) -> None:
        self.request: Callable[[str], None] | None = None
        self.busy: Callable[[], bool] = lambda: False
        self.received: signal.Signals | None = None
        self._first_at = 0.0
        self._watcher: threading.Thread | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            reading, self._writing = os.pipe()
            os.set_blocking(self._writing, False)
            # The interpreter writes the number of each signal there at once, whatever the main thread is doing.
            self._former_fd = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
            self._watcher = threading.Thread(target=self._watch, args=(reading,), name="outrider-interrupts")
            self._watcher.daemon = True
            self._watcher.start()
            handled = [s for s in SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]
            self._former = {s: signal.signal(s, self._handle) for s in handled}
            self._former[_PRESS] = signal.signal(_PRESS, self._pressed)
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        for s, handler in self._former.items():
            signal.signal(s, signal.SIG_DFL if handler is None else handler)
        if self._watcher is not None:
            signal.set_wakeup_fd(self._former_fd)
            os.close(self._writing)
            self._watcher.join()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        first = self.received is None
        if first:
            self._first_at = time.monotonic()
        elif time.monotonic() - self._first_at < SAME_S:
            return
        self.received = signal.Signals(signum)
        if first and self.request is not None:
            self.request(self.received.name)
        else:
            raise Interrupted(self.received)

    def _pressed(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None and self.busy():  # else it has followed meanwhile, and is saving now
            raise Interrupted(self.received)

    def _watch(self, reading: int) -> None:
        """Press on while the first signal is not followed; end the process after the second."""
        main = threading.main_thread().ident
        assert main is not None
        first_at = second_at = pressed_at = math.inf
        signum = signal.SIGINT
        with open(reading, "rb", buffering=0) as pipe:
            while True:
                came = select.select([pipe], [], [], None if first_at == math.inf else _POLL_S)[0]
                now = time.monotonic()
                if came:
                    numbers = pipe.read(64)
                    if not numbers:  # the end of ``with``
                        return
                    mine = [s for s in SIGNALS if s in numbers]
                    if mine and first_at == math.inf:
                        first_at = pressed_at = now
                    elif mine and now - first_at >= SAME_S:
                        second_at = min(second_at, now)
                    signum = mine[0] if mine else signum
                if now - second_at >= LEAVE_S:
                    _end_at_once(signum)
                if second_at == math.inf and now - pressed_at >= PATIENCE_S:
                    pressed_at = now
                    signal.pthread_kill(main, _PRESS)

    def check(self) -> None:
        """Raise what a signal asked for, now that everything is saved.

        Raises:
            Interrupted: A signal has come.
        """
        if self.received is not None:
            raise Interrupted(self.received)


def _end_at_once(signum: signal.Signals) -> None:
    if os.isatty(1):
        os.write(1, _SHOW_CURSOR)  # a live display hides it
    os.write(2, f"outrider: stopped by {signum.name}, at once\n".encode())
    os._exit(128 + signum)
