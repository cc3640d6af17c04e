"""Stations (3) to (5): the learner's loop, the same for the asynchronous and the synchronous trainer.

One iteration, in this order: a score that has arrived, insert as far as the balance allows, opt step, evaluation,
``best``, numbered save, publication, cost statistics, store, flush, checkpoint, stop test.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Protocol, cast

from outrider.announcing import announce
from outrider.balance import Balance
from outrider.checkpoint import Checkpoints
from outrider.checkpoint_files import Checkpoint, Moment
from outrider.core import Agent, Measured, Preparable, Recorder, ReplayBuffer, ReplayBufferConfig
from outrider.data import Layout, Record
from outrider.errors import LayoutMismatch
from outrider.model_sync import ModelSender
from outrider.run_state import Resumable, capture, restore
from outrider.scoring import Scored, Scorer
from outrider.statistics import Counters, Meter
from outrider.trainer_config import AsyncTrainerConfig, AsyncTrainStat

ROWS_PER_INSERT = 4096  # rows taken between two opt steps at most, so that a flood of data never holds the learner
STORE_INTERVAL_S = 0.5  # statistics reach the recorder at least this often, so that a live display lives
LAST_SCORES_NAP_S = 0.01  # between two looks for the last scores
PUBLISH_ENV_STEPS_INTERVAL_S = 0.25  # while nothing is learnt, exploration schedules still see env steps this often


LIMITS = ("max_opts", "max_env_steps", "max_time_s")
"""Why a run ends that waits for its last evaluations: it has done what it was to do."""


class Stage(Enum):
    """What the learner is doing."""

    INSERTING = "inserting rows"
    WAITING = "waiting for the actors"
    OPT = "an opt step"
    EVALUATION = "an evaluation"
    RECORDING = "recording"
    CHECKPOINT = "a checkpoint"
    LAST_SCORES = "waiting for the last evaluation"


class Source(Resumable, Protocol):
    """Where rows come from: the item channel, or samplers stepped in turn."""

    def collect(self, max_rows: int) -> int:
        """Insert what is there, about `max_rows` at most (whole messages), and count it; 0 if there was nothing."""
        ...

    def wait(self) -> None:
        """Sleep a moment, or until there is something."""
        ...

    def cut(self) -> None:
        """A checkpoint follows: insert what must not be lost with the open episodes, and start new ones after it."""
        ...

    def statistics(self) -> Record:
        """What the source knows of itself, such as how full its rings are."""
        ...


class Learner:
    """The loop.

    **Process**: the caller's thread.
    **Owns** nothing: agent, buffer, source and sender are given.
    **Blocks** while the balance or the warm-up forbids an opt step and nothing arrives.
    **Closes** nothing; a final publication, flush and save always happen.
    """

    def __init__(
        self,
        config: AsyncTrainerConfig,
        agent: Agent,
        buffer: ReplayBuffer,
        source: Source,
        sender: ModelSender,
        counters: Counters,
        slack: int,
        should_stop: Callable[[], str | None],
    ) -> None:
        self.config = config
        self.agent = agent
        self.buffer = buffer
        self.source = source
        self.sender = sender
        self.counters = counters
        self.balance = Balance(config.samples_per_insert, config.warmup_period, slack)
        self.should_stop = should_stop
        self.meter = Meter(counters)
        self.best_score: float | None = None
        self.stopped_by = "error"  # until the loop ends in order
        self._last_score: float | None = None
        self._published = (-1, -1)  # opt steps and env steps at the last publication
        self._published_at = 0.0
        self.stage = Stage.INSERTING
        self.began = False  # whether the loop was ever entered
        self.looping = False  # between the first look at the stop conditions and the final save
        self.checkpoints: Checkpoints | None = None
        self._seconds_before = 0.0

    @property
    def opt_steps(self) -> int:
        """Opt steps so far."""
        return self.counters.opt_steps

    def run(self, recorder: Recorder, scorer: Scorer, stopping: Callable[[], bool] = lambda: False) -> AsyncTrainStat:
        """Train until a stop condition holds. Flushes, saves and publishes also when it is left by an exception.

        Args:
            recorder: Takes metrics and models.
            scorer: Scores the agent.
            stopping: Whether the run is to end; asked while the agent prepares itself, as by a compilation.
        """
        with _prepared(self.agent, stopping):
            return self._run(recorder, scorer)

    def _run(self, recorder: Recorder, scorer: Scorer) -> AsyncTrainStat:
        self.recorder, self.scorer = recorder, scorer
        self.meter = Meter(self.counters, self.buffer.inserted, self._seconds_before)
        if self.checkpoints is not None:
            self.checkpoints.start(self.buffer, exact=self.config.mode == "sync")
        self._publish()
        try:
            self.began = self.looping = True
            self.stopped_by = self._loop()
        finally:
            self.looping = False
            error = sys.exception()
            try:
                self._finish(self.stopped_by if error is None else type(error).__name__)
            finally:
                if error is not None:
                    raise error  # nothing that fails on the way out may hide why we go
        return self.stat()

    def _loop(self) -> str:
        config, buffer = self.config, self.buffer
        while True:
            self._take_score()
            reason = self._stop_reason()
            if reason is not None:
                if reason in LIMITS:
                    self._take_last_scores()
                return reason
            self.stage = Stage.INSERTING
            allowed = self.balance.rows_allowed(buffer.inserted, buffer.sampled, ROWS_PER_INSERT)
            if not allowed and len(buffer) < config.warmup_period:
                allowed = 1  # of a frame stream, not every row inserted can be drawn
            arrived = self.source.collect(allowed) if allowed else 0
            if len(buffer) < config.warmup_period or not self.balance.may_opt(buffer.inserted, buffer.sampled):
                if not arrived:
                    self._wait()
                self.stage = Stage.RECORDING
                self._store_if_due()
                self._checkpoint_if_due()
                continue
            record = self._opt()
            self._evaluate_and_save(record)
            if self.opt_steps % config.sync_interval == 0:
                self._publish()
            self._record(record)
            self._checkpoint_if_due()

    def _opt(self) -> Record:
        """One opt step, with a record or with its cost where one is due."""
        self.stage = Stage.OPT
        config, n = self.config, self.opt_steps + 1
        started = time.perf_counter() if _due(n, config.record_compute_cost_interval) else None
        recorded = config.record_agent_info_interval
        if _due(n, recorded) or (recorded and n == config.max_opts):  # a short run ends with a loss, too
            record = self.agent.opt_with_record(self.buffer)
        else:
            self.agent.opt(self.buffer)
            record = {}
        if started is not None:
            record["time/opt_time_ms"] = (time.perf_counter() - started) * 1e3
        self.counters.opt_steps = n
        return record

    def _evaluate_and_save(self, record: Record) -> None:
        config = self.config
        if _due(self.opt_steps, config.eval_interval):
            self.stage = Stage.EVALUATION
            scored = self.scorer.evaluate(self._axes())
            if scored is not None:
                record.update(self._judge(scored))
        if _due(self.opt_steps, config.save_interval):
            self.recorder.save_model(str(self.opt_steps), self.agent)

    def _judge(self, scored: Scored) -> Record:
        """Keep what was evaluated if it is the best so far."""
        record, score = scored.record, scored.score
        if math.isfinite(score):  # NaN: the evaluation was stopped; infinity would be the best for ever
            self._last_score = score
            if self.best_score is None or score > self.best_score:
                self.best_score = score
                self.recorder.save_model("best", scored.agent())
            record = {**record, "eval/best_mean_reward": self.best_score}
        return record

    def _take_score(self) -> None:
        """Record a score that has arrived, at the moment that was evaluated."""
        scored = self.scorer.arrived()
        if scored is None:
            return
        record = self._judge(scored)
        if record:
            if self.stage is not Stage.LAST_SCORES:
                self._flush()  # what was stored so far belongs to later steps
            self.recorder.store(record | scored.axes)  # nobody's record moves the axes
            self.recorder.flush(int(cast(int, scored.axes["opt_steps"])))

    def _take_last_scores(self) -> None:
        """Wait, within limits, for the evaluations that are still open. That is no time of training."""
        if not self.scorer.open():
            return
        self._flush()  # rates are of training
        self.stage = Stage.LAST_SCORES
        deadline = time.monotonic() + self.scorer.patience_s
        with self.meter.paused():
            while self.scorer.open() and time.monotonic() < deadline and self.should_stop() is None:
                time.sleep(LAST_SCORES_NAP_S)
                self._take_score()
        for opt_steps in self.scorer.open():
            announce(f"the evaluation at {opt_steps} opt steps had not ended when the run did: dropped")

    def _record(self, record: Record) -> None:
        self.stage = Stage.RECORDING
        if record:
            self.recorder.store(record | self._axes())
        self._store_if_due()
        if _due(self.opt_steps, self.config.flush_record_interval) or "eval/mean_reward" in record:
            self._flush()

    def _store_if_due(self) -> None:
        if self.meter.seconds_since_read() >= STORE_INTERVAL_S:
            self.recorder.store(self._statistics())

    def _flush(self) -> None:
        self.recorder.store(self._statistics())
        self.recorder.flush(self.opt_steps)

    def _wait(self) -> None:
        opt_steps, env_steps = self._published
        stale = env_steps != self.counters.env_steps and self._age() >= PUBLISH_ENV_STEPS_INTERVAL_S
        if opt_steps != self.opt_steps or stale:
            self._publish()
        self.stage = Stage.WAITING
        with self.meter.waiting():
            self.source.wait()

    def _age(self) -> float:
        return time.monotonic() - self._published_at

    def _publish(self) -> None:
        env_steps = self.counters.env_steps
        n_opts, info = self.agent.model_info()
        self.sender.publish(n_opts, info, env_steps)
        self._published = (self.opt_steps, env_steps)
        self._published_at = time.monotonic()

    def _stop_reason(self) -> str | None:
        config = self.config
        if config.max_opts is not None and self.opt_steps >= config.max_opts:
            return "max_opts"
        if config.target_score is not None and self._last_score is not None and self._last_score >= config.target_score:
            return "target_score"
        if config.max_env_steps is not None and self.counters.env_steps >= config.max_env_steps:
            return "max_env_steps"
        if config.max_time_s is not None and self.meter.seconds() >= config.max_time_s:
            return "max_time_s"
        return self.should_stop()

    def _axes(self) -> Record:
        return {
            "opt_steps": self.opt_steps,
            "env_steps": self.counters.env_steps,
            "time_s": self.meter.seconds(),
        }

    def _statistics(self) -> Record:
        buffer = self.buffer
        return (
            self._axes()
            | self.meter.read(buffer.inserted, buffer.sampled)
            | self.source.statistics()
            | (buffer.statistics() if isinstance(buffer, Measured) else {})
            | self.scorer.statistics()
            | {"async/samples_per_insert": self.balance.achieved(buffer.inserted, buffer.sampled)}
        )

    def _checkpoint_if_due(self) -> None:
        if self.checkpoints is not None and self.checkpoints.due(self.opt_steps):
            self.stage = Stage.CHECKPOINT
            self._checkpoint("interval")
            self._flush()

    def _checkpoint(self, reason: str) -> None:
        """A checkpoint is a boundary: what it holds is published; the synchronous trainer closes its episodes."""
        checkpoints = self.checkpoints
        if checkpoints is None or not checkpoints.wanted(self.opt_steps, self.counters.env_steps):
            return
        self.source.cut()
        self._publish()
        replay, shares_rows = checkpoints.config.replay, checkpoints.shares_rows
        state, missing = capture(
            self.agent, self.buffer, self.source, self.counters, replay=replay, shares_rows=shares_rows
        )
        state["best_score"], state["last_score"] = self.best_score, self._last_score
        moment = Moment(self.opt_steps, self.counters.env_steps, self.meter.seconds(), self._last_score, reason)
        missing += tuple(f"the evaluation at {n} opt steps" for n in self.scorer.open())
        checkpoints.take(moment, state, missing)
        self.recorder.store(self._axes() | checkpoints.statistics())

    def restore(self, checkpoint: Checkpoint) -> list[str]:
        """Go on from a checkpoint; call it before `run`.

        Returns:
            What could not be restored, a sentence each.

        Raises:
            CheckpointError: The agent cannot take its state.
        """
        notes = restore(checkpoint, self.agent, self.buffer, self.source, self.counters)
        self.best_score, self._last_score = checkpoint.state["best_score"], checkpoint.state["last_score"]
        self._seconds_before = checkpoint.moment.time_s
        return notes

    def _finish(self, reason: str) -> None:
        """The final publication, save, checkpoint and flush: each happens whatever the others do."""
        with ExitStack() as last:  # the last callback is called first
            last.callback(self.recorder.flush, self.opt_steps)
            last.callback(self._checkpoint, reason)
            last.callback(self.recorder.save_model, "last", self.agent)
            last.callback(self._publish)
            last.callback(lambda: self.recorder.store(self._statistics()))  # before the save: rates are of training

    def stat(self) -> AsyncTrainStat:
        """What was done so far."""
        buffer = self.buffer
        return AsyncTrainStat(
            samples=buffer.inserted,
            sampled=buffer.sampled,
            env_steps=self.counters.env_steps,
            opt_steps=self.opt_steps,
            updates=getattr(self.agent, "updates", self.opt_steps),
            episodes=self.counters.episodes,
            samples_per_insert=self.balance.achieved(buffer.inserted, buffer.sampled),
            duration_s=self.meter.seconds(),
            best_score=self.best_score,
            stopped_by=self.stopped_by,
        )


@contextmanager
def _prepared(agent: Agent, stopping: Callable[[], bool]) -> Iterator[None]:
    if not isinstance(agent, Preparable):
        yield
        return
    try:
        agent.prepare(stopping)
        yield
    finally:
        agent.close()


def build_buffer(config: ReplayBufferConfig, layout: Layout) -> ReplayBuffer:
    """Build the replay buffer for these items.

    Raises:
        LayoutMismatch: It cannot store them.
    """
    buffer = config.build(layout)
    if not buffer.accepts(layout):
        columns = ", ".join(map(str, layout.fields))
        raise LayoutMismatch(f"{type(buffer).__name__} cannot store the step processor's {layout.kind}: {columns}")
    return buffer


def _due(n: int, interval: int) -> bool:
    return interval > 0 and n % interval == 0
