"""Training while actors and the evaluator are killed, frozen and made to raise, one every two seconds.

A minute of it, or `OUTRIDER_CHAOS_S` seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest
from runs_with_faults import nothing_left, train, worker_pids

from outrider.actor import ActorState
from outrider.actor_manager import ActorManager
from outrider.async_trainer import ChannelSource
from outrider.envs.gymnasium import GymEnvConfig
from outrider.evaluation import DefaultEvaluator
from outrider.process_scorer import EvaluationConfig
from outrider.recording import NullRecorder
from outrider.testing import FailingEnv

cloudpickle.register_pickle_by_value(sys.modules[__name__])

CHAOS_S = float(os.environ.get("OUTRIDER_CHAOS_S", "60"))
EVERY_S = 2.0
RECOVERY_S = 60.0
N_ACTORS, ROWS, SLOTS = 4, 8, 8
FAULTS = {signal.SIGKILL: "killed", signal.SIGSTOP: "frozen", signal.SIGUSR2: "made to raise"}
MB = 1e6


class TroubledEnv(FailingEnv):
    """Raises when its process, an actor or an evaluator, is sent SIGUSR2."""

    def __init__(self) -> None:
        super().__init__("never")  # type: ignore[arg-type]
        if multiprocessing.current_process().name.startswith(("outrider: actor ", "outrider: evaluator")):
            signal.signal(signal.SIGUSR2, self._raise)

    def _raise(self, *_: Any) -> None:
        raise ValueError("as asked")


class Progress(NullRecorder):
    """Knows how far the run is, and how many evaluations have come."""

    def __init__(self) -> None:
        self.opt_steps, self.scores, self.seen = 0, 0, dict[str, Any]()

    def store(self, record: Any) -> None:
        self.scores += "eval/mean_reward" in record
        self.seen.update(record)

    def flush(self, step: int) -> None:
        self.opt_steps = step


class Trouble(threading.Thread):
    """Makes trouble, looks at this process meanwhile, and stops the run once everything has recovered."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress
        self.rng = random.Random(0)
        self.faults: Counter[tuple[str, str]] = Counter()
        self.looks: list[tuple[float, int, float, int]] = []  # seconds, descriptors, private MB, opt steps
        self.actors: ActorManager | None = None
        self.ended = threading.Event()
        self.recovered = False

    def run(self) -> None:
        while not self._all_at_work(0):
            if self.ended.wait(0.1):
                return
        begin = time.monotonic()
        while (elapsed_s := time.monotonic() - begin) < CHAOS_S and not self.ended.wait(EVERY_S):
            me = psutil.Process()
            self.looks.append((elapsed_s, me.num_fds(), me.memory_full_info().uss / MB, self.progress.opt_steps))
            victims, signum = worker_pids(), self.rng.choice(list(FAULTS))
            if victims:
                name = self.rng.choice(sorted(victims))
                with suppress(ProcessLookupError):  # it has just ended of the fault before
                    os.kill(victims[name], signum)
                    self.faults["evaluator" if name == "evaluator" else "actor", FAULTS[signum]] += 1
        scores, deadline = self.progress.scores, time.monotonic() + RECOVERY_S
        while not self.recovered and time.monotonic() < deadline and not self.ended.wait(0.1):
            self.recovered = self._all_at_work(scores)
        assert self.actors is not None
        self.actors.stop.set()

    def _all_at_work(self, scores: int) -> bool:
        if self.actors is None or self.progress.scores <= scores:
            return False
        at_work = (ActorState.RUNNING, ActorState.WAITING_FOR_ROOM)
        return all(s.state in at_work and s.samples for s in self.actors.stats())


@pytest.mark.slow
@pytest.mark.timeout(CHAOS_S + 180)
def test_training_goes_on_while_its_processes_are_killed_frozen_and_made_to_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress, rings, taken = Progress(), dict[str, int](), Counter[str]()  # a list of messages would look like a leak
    trouble = Trouble(progress)
    start, end, insert = ActorManager.run, ActorManager.stop_and_join, ChannelSource._insert

    def start_and_show(self: ActorManager, guard: Any) -> None:
        start(self, guard)
        trouble.actors = self

    def end_and_count(self: ActorManager) -> Any:
        stats = end(self)
        there = self._item_sender.rings
        rings["sent"], rings["taken"] = sum(there.heads()), sum(there.tails())
        return stats

    def insert_and_count(self: ChannelSource, message: Any) -> None:
        insert(self, message)
        taken.update(messages=1, rows=len(message.items))

    monkeypatch.setattr(ActorManager, "run", start_and_show)
    monkeypatch.setattr(ActorManager, "stop_and_join", end_and_count)
    monkeypatch.setattr(ChannelSource, "_insert", insert_and_count)
    limits = {"step_timeout_s": 1.0, "reset_timeout_s": 1.0, "build_timeout_s": 10.0}
    env = GymEnvConfig(id=TroubledEnv)
    env.spec()  # the fork server stays
    with nothing_left():
        trouble.start()
        try:
            result = train(
                env,
                progress,
                DefaultEvaluator(env, n_episodes=1),
                n_actors=N_ACTORS,
                actors={"n_buffer": ROWS, "n_slots": SLOTS, "restarts": 1000, "restart_window_s": 3.0, **limits},
                max_time_s=CHAOS_S + 120.0,
                eval_interval=20,
                evaluation=EvaluationConfig(timeout_s=1.0, restarts=1000),
            )
        finally:
            trouble.ended.set()
            trouble.join()
            trouble.actors = None
    restarts = sum(s.restarts for s in result.actor_stats)
    seconds, fds, private, opts = np.array(trouble.looks[3:]).T
    slope = np.polyfit(seconds / 3600, private, 1)[0]
    print(f"\n{CHAOS_S:.0f} s:", ", ".join(f"{who} {what} {n}" for (who, what), n in sorted(trouble.faults.items())))
    print(f"  {restarts} restarts of actors, {progress.seen['async/evaluator_failures']} failures of the evaluator")
    print(f"  {result.stats.opt_steps} opt steps, {progress.scores} evaluations")
    left = rings["sent"] - rings["taken"]
    print(f"  messages: {rings['sent']} sent, {taken['messages']} received, {left} left in the rings at the end")
    print(f"  descriptors {fds.min():.0f} to {fds.max():.0f}")
    print(f"  private memory {private[0]:.1f} to {private[-1]:.1f} MB, {slope:+.1f} MB/h")
    assert trouble.recovered
    assert result.stats.stopped_by == "request"
    assert restarts > CHAOS_S / EVERY_S / 4
    assert progress.seen["async/evaluator_failures"] > 0
    assert taken["messages"] == rings["taken"], "each message that was sent was received once"
    assert 0 <= left <= N_ACTORS * SLOTS
    assert taken["rows"] == result.stats.samples
    noted_later = ROWS * (restarts + left)  # messages of those killed before they had noted them
    assert abs(sum(s.samples for s in result.actor_stats) - result.stats.samples) <= noted_later
    assert all(opts[5:] > opts[:-5]), "training went on all the time"
    assert fds.max() - fds.min() <= 4 * (N_ACTORS + 1) + 9, "descriptors of those that are being replaced"
    assert private[-1] - private[0] < 16.0
