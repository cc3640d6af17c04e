"""Recorders that write into a directory: ``metrics.jsonl``, models, and TensorBoard events."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import sys
import time
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from outrider.core import Agent
from outrider.data import Record
from outrider.durable import AppendFile, json_text, replace_text
from outrider.errors import RunDirError
from outrider.recording.metrics import AXES, Aggregate, Line
from outrider.run_dir import find_model, save_model

METRICS_FILE = "metrics.jsonl"
logger = logging.getLogger(__name__)


class JsonlRecorder:
    """Metrics into ``metrics.jsonl``, models into ``models/NAME``.

    A full or broken disk does not end the training: the first failure of each kind is reported on stderr and in
    the log, lines that could not be written are kept and tried again, and what is lost in the end is counted.

    Process: the learner. There is no thread.
    Owns: ``metrics.jsonl``.
    Blocks: in `flush` and `save_model`, as long as the disk does.
    Closes: its files, in `close`.

    Args:
        path: The directory; made if there is none, continued if there is one.
        meta: What to write beside each model, such as :func:`outrider.run_dir.model_meta`.

    Attributes:
        failures: How many writes failed so far.

    Raises:
        RunDirError: The directory cannot be written.
    """

    def __init__(self, path: Path | str, meta: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        self.meta = dict(meta or {})
        self.failures = 0
        self._reported: set[str] = set()
        self._aggregate = Aggregate()
        self._last_step = 0
        self._closed = False
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._files = self._open()
        except OSError as error:
            raise RunDirError(f"{self.path}: expected a directory that can be written, got {error}") from error

    def _open(self) -> list[AppendFile]:
        """Open the files that every flush appends to."""
        _cut_torn_line(self.path / METRICS_FILE)
        return [AppendFile(self.path / METRICS_FILE)]

    def _blocks(self, line: Line) -> list[bytes]:
        """What to append to each of the files."""
        return [json_text(line).encode() + b"\n"]

    def store(self, record: Record) -> None:
        """Take metrics until the next flush."""
        self._aggregate.add(record)

    def flush(self, step: int) -> None:
        """Write one line of what was stored since the last flush; nothing if that is nothing."""
        self._last_step = step
        line = self._aggregate.take(step)
        if line is None or self._closed:
            return
        for file, block in zip(self._files, self._blocks(line), strict=True):
            try:
                file.write(block)
            except OSError as error:
                self._failed(f"writing {file.path}", error)

    def save_model(self, name: str, agent: Agent) -> None:
        """Replace ``models/NAME``, whole or not at all."""
        try:
            save_model(self.path / "models", name, agent, self.meta)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch: RuntimeError when the disk is full
            self._failed(f"saving the model {self.path / 'models' / name}", error)

    def load_model(self, name: str, agent: Agent) -> None:
        """Give the agent the parameters kept under this name.

        Raises:
            RunDirError: There is no such model; lists those there are.
        """
        agent.load_params(find_model(self.path / "models", name))

    def close(self) -> None:
        """Write what is left and close the files; what still cannot be written is reported as lost."""
        if self._closed:
            return
        self.flush(self._last_step)
        self._closed = True
        for file in self._files:
            try:
                file.write()
            except OSError as error:
                self._failed(f"writing {file.path}", error)
            finally:
                file.close()
            lost = file.lost + len(file.pending)
            if lost:
                _report(f"{file.path}: {lost} flushes could not be written and are lost")

    def _failed(self, doing: str, error: Exception) -> None:
        self.failures += 1
        if doing not in self._reported:
            self._reported.add(doing)
            _report(f"{doing} failed, training goes on: {type(error).__name__}: {error}")


class TensorboardRecorder(JsonlRecorder):
    """The same, and TensorBoard events at the top of the directory, over env steps.

    Events are written by `flush` itself, as everything else: a writer thread would drop them silently once the
    disk is full.
    """

    def _open(self) -> list[AppendFile]:
        events = AppendFile(_events_path(self.path))
        events.write(_framed(Event(wall_time=time.time(), file_version="brain.Event:2")))
        return [*super()._open(), events]

    def _blocks(self, line: Line) -> list[bytes]:
        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in line.items()
            if name not in AXES and not isinstance(value, str)
        ]
        event = Event(wall_time=time.time(), step=int(line["env_steps"]), summary=Summary(value=values))
        return [*super()._blocks(line), _framed(event)]


def _framed(event: Any) -> bytes:
    """An event as a record with checksums, as TensorBoard reads it."""
    buffer = BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


def _cut_torn_line(path: Path) -> None:
    """Drop the end of a line that a crash of the machine left, so that the next line starts at its beginning."""
    if path.exists():
        with path.open("rb+") as file:
            data = file.read()
            file.truncate(data.rfind(b"\n") + 1)


def rewind(path: Path, opt_steps: int, env_steps: int) -> tuple[int, float | None]:
    """Take a run's metrics back to an earlier moment, from which it goes on.

    Later lines of ``metrics.jsonl`` are cut. What TensorBoard has of later steps stays in its files, but it is told to
    forget it, by an event in a file of its own.

    Args:
        path: The run directory; no recorder has it open.
        opt_steps: Lines of more opt steps are cut.
        env_steps: So are those of more env steps.

    Returns:
        How many lines were cut, and the best score that there is in any line, which the model ``best`` has.

    Raises:
        OSError: It could not be done.
    """
    file = path / METRICS_FILE
    if not file.exists():
        return 0, None
    _cut_torn_line(file)
    kept, cut, scores = [], 0, []
    for row in file.read_bytes().splitlines(keepends=True):
        line = json.loads(row)
        scores.append(line.get("eval/best_mean_reward"))
        if line["opt_steps"] > opt_steps or line["env_steps"] > env_steps:
            cut += 1
        else:  # also one after those that are cut: the score of an evaluation comes later than its moment
            kept.append(row)
    if cut:
        replace_text(file, b"".join(kept).decode())
    if any(path.glob("events.out.tfevents.*")):
        events = AppendFile(_events_path(path))
        restart = SessionLog(status=SessionLog.START)
        events.write(_framed(Event(wall_time=time.time(), file_version="brain.Event:2")))
        events.write(_framed(Event(wall_time=time.time(), step=env_steps + 1, session_log=restart)))
        events.close()
    return cut, max((score for score in scores if score is not None), default=None)


def _events_path(path: Path) -> Path:
    """A new file of events; TensorBoard reads them in the order of their names."""
    now = time.time()
    return path / f"events.out.tfevents.{int(now):010d}.{platform.node()}.{os.getpid()}.{time.monotonic_ns()}"


def _report(message: str) -> None:
    """One line to the log and to stderr, which is where a user looks who configured no log."""
    if logger.hasHandlers():
        logger.error(message)
    with contextlib.suppress(OSError, ValueError):  # stderr may lie on the same full disk, or be closed
        print(f"outrider: {message}", file=sys.stderr, flush=True)


def read_metrics(path: Path | str) -> list[Line]:
    """Lines of a ``metrics.jsonl``, or of the one in a run directory; null comes back as NaN.

    Raises:
        OSError: It cannot be read.
        ValueError: A line is not JSON.
    """
    path = Path(path)
    text = (path / METRICS_FILE if path.is_dir() else path).read_text()
    lines = [json.loads(row) for row in text.splitlines()]
    return [{name: math.nan if value is None else value for name, value in line.items()} for line in lines]
