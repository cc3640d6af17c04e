"""Ctrl-C and SIGTERM: the first asks for an orderly end, the second ends at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from outrider.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Handles SIGINT and SIGTERM while it is entered, also where they were inherited as ignored.

    The first signal calls `request` if there is one by then, otherwise it raises
    :class:`~outrider.errors.Interrupted` in the main thread, as every further one does. Handlers can only be
    installed in the main thread: elsewhere this does nothing.

    **Closes**: leaving ``with`` puts the former handlers back.
    """

    def __init__(self) -> None:
        self.request: Callable[[str], None] | None = None
        self.received: signal.Signals | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._former = {s: signal.signal(s, self._handle) for s in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        for s, handler in self._former.items():
            signal.signal(s, signal.SIG_DFL if handler is None else handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        first = self.received is None
        self.received = signal.Signals(signum)
        if first and self.request is not None:
            self.request(self.received.name)
        else:
            raise Interrupted(self.received)

    def check(self) -> None:
        """Raise what a signal asked for, now that everything is saved.

        Raises:
            Interrupted: A signal has come.
        """
        if self.received is not None:
            raise Interrupted(self.received)
