"""Recorders that write nothing: none at all, in memory for tests and notebooks, and several as one."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from outrider.core import Agent, Recorder
from outrider.data import Array, Record
from outrider.errors import RunDirError
from outrider.recording.metrics import Aggregate, Line


class NullRecorder:
    """Keeps nothing.

    Process: any. Owns, blocks and closes nothing.
    """

    def store(self, record: Record) -> None:
        """Forget the metrics."""

    def flush(self, step: int) -> None:
        """Do nothing."""

    def save_model(self, name: str, agent: Agent) -> None:
        """Do nothing."""

    def load_model(self, name: str, agent: Agent) -> None:
        """Refuse: there is no model.

        Raises:
            RunDirError: Always.
        """
        raise RunDirError(f"expected a model {name!r}, got a {type(self).__name__}, which keeps none")

    def close(self) -> None:
        """Do nothing."""


class MemoryRecorder:
    """Keeps everything in memory.

    Process: the learner. Owns: lines and models. Blocks: never. Closes: nothing, the lines stay readable.

    Attributes:
        lines: One dict per flush: ``opt_steps``, ``env_steps``, ``time_s`` and the metrics.
        models: The files of each saved model, by the model's name and by their path in it.
    """

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.models: dict[str, dict[str, bytes]] = {}
        self._aggregate = Aggregate()
        self._last_step = 0

    def store(self, record: Record) -> None:
        """Take metrics until the next flush."""
        self._aggregate.add(record)

    def flush(self, step: int) -> None:
        """Add a line of what was stored since the last flush, if anything was."""
        self._last_step = step
        line = self._aggregate.take(step)
        if line is not None:
            self.lines.append(line)

    def series(self, name: str, x: str = "env_steps") -> tuple[Array, Array]:
        """A metric over an axis: two arrays ``[n]`` of the flushes that had it."""
        points = [(line[x], line[name]) for line in self.lines if name in line]
        return np.array([p[0] for p in points]), np.array([p[1] for p in points])

    def save_model(self, name: str, agent: Agent) -> None:
        """Keep the files that the agent writes."""
        with tempfile.TemporaryDirectory() as folder:
            agent.save_params(Path(folder))
            files = [path for path in Path(folder).rglob("*") if path.is_file()]
            self.models[name] = {str(path.relative_to(folder)): path.read_bytes() for path in files}

    def load_model(self, name: str, agent: Agent) -> None:
        """Give the agent the files kept under this name.

        Raises:
            RunDirError: There is no such model; lists those there are.
        """
        if name not in self.models:
            raise RunDirError(f"expected a model {name!r}, got {', '.join(self.models) or 'none at all'}")
        with tempfile.TemporaryDirectory() as folder:
            for file, data in self.models[name].items():
                path = Path(folder, file)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            agent.load_params(Path(folder))

    def close(self) -> None:
        """Flush what is left. May be called twice."""
        self.flush(self._last_step)


class TeeRecorder:
    """Several recorders as one.

    Process, owns, blocks: as they do. Closes: all of them, each even if another fails.

    Args:
        recorders: They are given everything, in this order.
    """

    def __init__(self, *recorders: Recorder) -> None:
        self.recorders = recorders

    def store(self, record: Record) -> None:
        """Give the metrics to all of them."""
        for recorder in self.recorders:
            recorder.store(record)

    def flush(self, step: int) -> None:
        """Flush all of them."""
        for recorder in self.recorders:
            recorder.flush(step)

    def save_model(self, name: str, agent: Agent) -> None:
        """Have all of them keep the model."""
        for recorder in self.recorders:
            recorder.save_model(name, agent)

    def load_model(self, name: str, agent: Agent) -> None:
        """Load the model from the first of them that has it.

        Raises:
            RunDirError: None has it; says what each of them has.
        """
        refusals = []
        for recorder in self.recorders:
            try:
                recorder.load_model(name, agent)
            except RunDirError as error:
                refusals.append(str(error))
            else:
                return
        raise RunDirError("; ".join(refusals) or f"expected a model {name!r}, got no recorder at all")

    def close(self) -> None:
        """Close all of them."""
        with ExitStack() as stack:
            for recorder in reversed(self.recorders):
                stack.callback(recorder.close)
