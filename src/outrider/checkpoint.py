"""Takes checkpoints: everything that a run needs to go on, whole or absent, in files that run no code.

A directory is filled aside, synced and renamed; the rows of the replay buffer are synced before. The learner only
copies: a thread writes. What the files are: :mod:`outrider.checkpoint_files`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError

from outrider.announcing import announce
from outrider.checkpoint_files import MANIFEST, ROWS, Checkpoint, Manifest, Moment, rotate, sweep
from outrider.config import Config, require
from outrider.core import RowStore
from outrider.data import Record
from outrider.durable import replace_directory
from outrider.errors import CheckpointError, RunDirError
from outrider.replay_segments import DISK_TIMEOUT_S, ReplayJournal, Segment, file_sha256
from outrider.state_files import STATE_FILES, PackedState

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Config):
    """When a run is saved so that it can be resumed. It always is at its end, also by Ctrl-C or an error.

    Attributes:
        interval: Opt steps between checkpoints; 0: none at opt steps.
        interval_min: Minutes between checkpoints; null: none by time. The synchronous trainer has none by time,
            since each one changes what follows: it closes the open episodes.
        keep: Checkpoints kept: the newest ones, and besides that with the best score; 0: no checkpoints at all.
        replay: Save the replay buffer too. Without it a resumed run has to fill a new one.
    """

    interval: int = 0
    interval_min: float | None = 10.0
    keep: int = 3
    replay: bool = True

    def __post_init__(self) -> None:
        require(self.interval >= 0, "interval", "an int >= 1, or 0 for off", self.interval)
        minutes = self.interval_min
        require(minutes is None or minutes > 0, "interval_min", "a number > 0, or null", minutes)
        require(self.keep >= 0, "keep", "an int >= 1, or 0 for no checkpoints", self.keep)


class Checkpoints:
    """Takes checkpoints of a run, and keeps the newest and the best.

    A disk that is full or broken does not end the training: the last good checkpoint stays, the first failure is
    reported on stderr and in the log, and each is counted in :meth:`statistics`.

    Process: the learner, and a thread of it that writes.
    Owns: the directory of the checkpoints; copies of what is to be written.
    Blocks: in `take`, while the former checkpoint is still being written; in `close`, until the last one is.
    Closes: the thread, in `close` or at the end of a ``with`` block.

    Args:
        folder: The directory; made if there is none.
        config: When they are taken, and what is kept.
        resumed: The checkpoint that the run goes on from.

    Attributes:
        failures: Checkpoints that could not be written.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, resumed: Checkpoint | None = None) -> None:
        self.folder = folder
        self.config = config
        self.resumed = resumed
        self.failures = 0
        self._exact = False
        self._last = 0 if resumed is None else resumed.moment.opt_steps
        self._last_at = time.monotonic()
        self._taken: tuple[int, int] | None = None
        self._writing: Future[bool] | None = None
        self._journal: ReplayJournal | None = None
        self._needed: set[str] = set()  # files of rows that a checkpoint refers to; belongs to the thread
        self._reported = False
        self._pause_ms = 0.0
        self._thread = ThreadPoolExecutor(1, "outrider-checkpoints")

    def start(self, buffer: object, *, exact: bool = False) -> None:
        """Begin with this replay buffer, and remove what a run that was killed has left half written.

        Args:
            buffer: A :class:`~outrider.core.RowStore` is written as it grows; of any other the state is saved whole.
            exact: Only opt steps count, and none is left out, so that the run can be repeated.

        Raises:
            RunDirError: The directory cannot be written.
        """
        self._exact = exact
        self._last_at = time.monotonic()
        if not self.config.keep:
            return
        try:
            self.folder.mkdir(exist_ok=True)
            sweep(self.folder)
            self._needed = rotate(self.folder, self.config.keep)
        except OSError as error:
            raise RunDirError(f"{self.folder}: expected a directory that can be written, got {error}") from error
        if self.config.replay and isinstance(buffer, RowStore):
            self._journal = ReplayJournal(self.folder / ROWS, buffer, self._thread.submit, self._discard)
            if self.resumed is not None and buffer.inserted:
                self._journal.adopt(self.resumed.manifest.segments)

    @property
    def shares_rows(self) -> bool:
        """Whether rows are written by themselves, and must not be in the state."""
        return self._journal is not None

    def due(self, opt_steps: int) -> bool:
        """Whether a checkpoint is to be taken now; lets rows be written meanwhile. Costs about a microsecond."""
        config = self.config
        if not config.keep:
            return False
        by_time = config.interval_min is not None and not self._exact
        if self._journal is not None and (config.interval or by_time):
            self._journal.offer()
        if config.interval and opt_steps // config.interval > self._last // config.interval:
            return self._exact or self._idle()
        if config.interval_min is not None and by_time:
            return time.monotonic() - self._last_at >= 60 * config.interval_min and self._idle()
        return False

    def _idle(self) -> bool:
        return self._writing is None or self._writing.done()

    def wanted(self, opt_steps: int, env_steps: int) -> bool:
        """Whether there is anything to save: not if the last one that was taken is of this very moment."""
        return self.config.keep > 0 and self._taken != (opt_steps, env_steps)

    def take(self, moment: Moment, state: dict[str, Any], not_contained: tuple[str, ...] = ()) -> None:
        """Copy the state and the rows that are not written yet; the thread does the rest.

        Args:
            moment: Where the run is.
            state: What to save, by name.
            not_contained: What is not in it.
        """
        started = time.perf_counter()
        self._last, self._last_at = moment.opt_steps, time.monotonic()
        try:
            if self._writing is not None and not self._writing.result(DISK_TIMEOUT_S) and self._journal is not None:
                self._journal.forget()  # some of it may be missing
            packed = PackedState(state)
            segments = [] if self._journal is None else self._journal.snapshot()
        except (CheckpointError, TimeoutError) as error:
            self._failed(moment, error)
            return
        self._taken = moment.opt_steps, moment.env_steps
        self._writing = self._thread.submit(lambda: self._write(moment, packed, segments, not_contained))
        self._pause_ms = (time.perf_counter() - started) * 1e3

    def statistics(self) -> Record:
        """How long the learner stood still for the last checkpoint, and how many failed."""
        return {"async/checkpoint_pause_ms": self._pause_ms, "async/checkpoint_failures": self.failures}

    def close(self) -> None:
        """Wait until all is written. May be called twice."""
        self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # In the thread.

    def _write(
        self, moment: Moment, packed: PackedState, segments: list[Future[Segment]], not_contained: tuple[str, ...]
    ) -> bool:
        def fill(path: Path) -> None:
            packed.write(path)
            written = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            files = {name: file_sha256(path / name) for name in STATE_FILES}
            rows = tuple(segment.result() for segment in segments)
            (path / MANIFEST).write_text(Manifest(moment, files, rows, not_contained, written).to_json())

        try:
            replace_directory(self.folder / str(moment.opt_steps), fill)
            self._needed = rotate(self.folder, self.config.keep)
        except (OSError, SafetensorError, CheckpointError) as error:
            self._failed(moment, error)
            with contextlib.suppress(OSError, CheckpointError):
                self._needed = rotate(self.folder, self.config.keep)  # makes room: rows that nobody refers to go
            return False
        if self._reported:
            announce(f"checkpoint {moment.opt_steps}: written, after {self.failures} that could not be")
            self._reported = False
        return True

    def _discard(self, segment: Segment) -> None:
        """Delete rows that are in the buffer no more, unless a checkpoint refers to them."""
        if segment.file not in self._needed:
            (self.folder / ROWS / segment.file).unlink(missing_ok=True)

    def _failed(self, moment: Moment, error: Exception) -> None:
        self.failures += 1
        if not self._reported:
            self._reported = True
            what = f"{type(error).__name__}: {error}"
            announce(f"checkpoint {moment.opt_steps}: could not be written, training goes on: {what}")
