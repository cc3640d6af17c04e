"""Ends a run in which nothing moves any more, wherever it is stuck."""

from __future__ import annotations

import faulthandler
import logging
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from outrider.channel import ItemReceiver
from outrider.errors import Stalled
from outrider.flags import StopFlag
from outrider.learner import Learner, Stage

log = logging.getLogger(__name__)

LOOK_S = 1.0
COMPUTING = 0.1
"""Part of a core that this process uses at least while it computes, though others use the machine, too: a compilation
that takes its time is no hang. One that sleeps or waits uses a hundredth."""

_PRESS = signal.SIGURG  # ignored by default, so it harms nothing wherever it arrives
_STDERR = 2


class Watchdog:
    """Watches the learner's loop while it is entered.

    Signs of life are env steps of any actor, actors that get ready for the first time, opt steps, evaluation steps,
    checkpoints and the wait for the last evaluation (which have time-outs of their own), and a learner that computes.
    Without any for `timeout_s` the item channel fails with :class:`~outrider.errors.Stalled`, the stacks of all
    threads are written to stderr, and if the main thread does not come to look at the channel, the error is raised in
    it wherever it is. Native code that keeps the interpreter's lock for itself holds that up.

    Process: the learner's.
    Owns: a thread, and while it is entered in the main thread the handler of SIGURG.
    Blocks: never.
    Closes: leaving ``with`` ends the thread, and puts the former handler back.

    Args:
        learner: Whose loop it is.
        receiver: What fails when nothing moves.
        stop: Is set then.
        timeout_s: Seconds without a sign of life; 0: nothing is watched.
        evaluation_steps: How many steps of evaluations there have been.
    """

    def __init__(
        self,
        learner: Learner,
        receiver: ItemReceiver,
        stop: StopFlag,
        timeout_s: float,
        evaluation_steps: Callable[[], int],
    ) -> None:
        self._learner, self._receiver, self._stop, self._timeout_s = learner, receiver, stop, timeout_s
        self._evaluation_steps = evaluation_steps
        self._error: Stalled | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="outrider-watchdog", daemon=True)
        self._former: Any = None
        self._in_main = False

    def __enter__(self) -> Self:
        if self._timeout_s:
            self._in_main = threading.current_thread() is threading.main_thread()
            if self._in_main:
                self._former = signal.signal(_PRESS, self._pressed)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        if self._timeout_s:
            self._thread.join()
        if self._in_main:
            signal.signal(_PRESS, signal.SIG_DFL if self._former is None else self._former)

    def _pressed(self, signum: int, frame: FrameType | None) -> None:
        if self._error is not None and self._learner.looping:  # else it has followed meanwhile, and is saving now
            raise self._error
        if callable(self._former):
            self._former(signum, frame)

    def _watch(self) -> None:
        seen: tuple[object, ...] = ()
        still_s, looked_at, computed_s = 0.0, time.monotonic(), time.process_time()
        look_s = min(LOOK_S, self._timeout_s / 4)
        while still_s < self._timeout_s:
            if self._ended.wait(look_s):
                return
            now, used_s, signs = time.monotonic(), time.process_time(), self._signs()
            elapsed_s = now - looked_at
            computing = used_s - computed_s >= COMPUTING * elapsed_s and self._learner.stage is not Stage.WAITING
            timed = self._learner.stage in (Stage.CHECKPOINT, Stage.LAST_SCORES)
            alive = signs != seen or computing or timed or not self._learner.looping
            # If this process was stopped for a while, all that it has started may have been, too.
            still_s = 0.0 if alive else still_s + min(elapsed_s, 2 * look_s)
            seen, looked_at, computed_s = signs, now, used_s
        self._bark()

    def _signs(self) -> tuple[object, ...]:
        counters, crew = self._learner.counters, self._receiver.crew
        steps = counters.opt_steps, counters.env_steps, self._evaluation_steps()
        return *steps, () if crew is None else crew.signs()

    def _bark(self) -> None:
        crew = self._receiver.crew
        fills = self._receiver.fills()
        actors = () if crew is None else tuple(crew.describe())
        lines = tuple(f"{who}, its ring {fill:.0%} full" for who, fill in zip(actors, fills, strict=False))
        self._error = Stalled(self._timeout_s, self._learner.stage.value, lines)
        log.error("%s", self._error)
        faulthandler.dump_traceback(_STDERR, all_threads=True)
        self._receiver.fail(self._error)
        self._stop.set()
        main = threading.main_thread().ident
        while self._in_main and main is not None and not self._ended.wait(LOOK_S):
            signal.pthread_kill(main, _PRESS)
