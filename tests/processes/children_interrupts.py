"""An environment that takes its time in one place, so that a signal can come in between."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import time
from typing import Any

from children_faults import actor_id, note

from outrider.testing import CountEnv


class SlowEnv(CountEnv):
    """Counts; notes in ``$FOLDER`` how far it has come.

    Args:
        slow: Where it sleeps: ``describe``, ``build`` (in actors), ``evaluation`` (when it is built there), ``play``
            (a step of an evaluation takes 10 ms, and an episode does not end), ``C`` (such a step waits in C for ever).
    """

    def __init__(self, slow: str = "") -> None:
        super().__init__(10**9 if slow == "play" else 5)
        self.slow, self.folder = slow, os.environ["FOLDER"]
        self.actor = actor_id()
        inline = multiprocessing.parent_process() is None
        self.evaluating = inline or multiprocessing.current_process().name == "outrider: evaluator"
        self.describing = self.actor is None and not self.evaluating
        self.child: subprocess.Popen[bytes] | None = None
        if inline:  # in the learner's process: what it starts is not outrider's to end
            note(self.folder, "building", 1)
            self._sleep_if("evaluation")
            return
        self.child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        name = "describing" if self.describing else "evaluating" if self.evaluating else self.actor
        note(self.folder, f"child-{name}", self.child.pid)
        if self.evaluating:
            note(self.folder, "building", 1)
            self._sleep_if("evaluation")
            return
        if self.actor is not None:
            note(self.folder, f"actor-{self.actor}", os.getpid())
        self._sleep_if("describe" if self.describing else "build")

    def _sleep_if(self, slow: str) -> None:
        if self.slow == slow:
            time.sleep(600.0)

    def step(self, action: Any) -> Any:
        if self.evaluating and self.slow in ("play", "C"):
            note(self.folder, "evaluating", 1)
            if self.slow == "C":
                mutex = ctypes.create_string_buffer(64)
                for _ in range(2):  # the second never returns, signals or not
                    ctypes.CDLL(None).pthread_mutex_lock(mutex)
            time.sleep(0.01)
        elif self.t == 1 and self.actor is not None:
            note(self.folder, f"stepped-{self.actor}", 1)
        return super().step(action)

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait()
