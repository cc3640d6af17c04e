"""The rows of a replay buffer on disk: each is written once, and shared by all checkpoints that hold it.

A *segment* is a file of consecutive rows that never changes. Whole segments are written while training goes on, so a
checkpoint has to write only the rows since the last of them, its *tail*::

    rows      0        S        2S       3S       4S    inserted
    segments  |--------|--------|--------|--------|--tail--|
                  ^ oldest row still in the buffer
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from outrider.core import RowStore
from outrider.data import Array
from outrider.durable import sync_path
from outrider.errors import CheckpointError
from outrider.state_files import write_npy

SEGMENT_BYTES = 16 * 2**20
"""Size of a whole segment: the learner copies one at a time (about 4 ms), and rewrites less than one per checkpoint."""

MAX_QUEUED = 4
"""Segments that wait in memory for the disk while training goes on."""

DISK_TIMEOUT_S = 60.0
"""A disk that has not taken a segment by then counts as broken."""

Submit = Callable[[Callable[[], Any]], "Future[Any]"]


@dataclass(frozen=True)
class Segment:
    """A file of rows ``[first, stop)``, counted from 0 in the order of their insertion."""

    file: str
    first: int
    stop: int
    sha256: str

    def read(self, folder: Path) -> Array:
        """The rows.

        Raises:
            CheckpointError: The file is missing, torn, or another one.
        """
        path = folder / self.file
        try:
            with path.open("rb") as file:
                rows: Array = np.load(file, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise CheckpointError(f"{path}: expected rows of a replay buffer, got {error}") from error
        if rows.shape != (self.stop - self.first,):
            raise CheckpointError(f"{path}: expected {self.stop - self.first} rows, got {list(rows.shape)}")
        return rows

    def check(self, folder: Path) -> None:
        """Compare the file with its checksum.

        Raises:
            CheckpointError: It is missing, or differs.
        """
        check_file(folder / self.file, self.sha256)


def check_file(path: Path, sha256: str) -> None:
    """Compare a file with its checksum.

    Raises:
        CheckpointError: It is missing, or differs.
    """
    try:
        found = file_sha256(path)
    except OSError as error:
        raise CheckpointError(f"{path}: expected a file that can be read, got {error}") from error
    if found != sha256:
        raise CheckpointError(f"{path}: expected contents with checksum {sha256[:12]}..., got {found[:12]}...")


def file_sha256(path: Path) -> str:
    """Checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_segment(folder: Path, first: int, rows: Array) -> Segment:
    """Write rows into a file that is whole or absent, named by what is in it; one that is there is not written again.

    Raises:
        OSError: It could not be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / ".new"
    try:
        with aside.open("wb") as file:
            write_npy(file, rows)
            file.flush()
            os.fsync(file.fileno())
        sha256 = file_sha256(aside)
        segment = Segment(f"{first}-{first + len(rows)}-{sha256[:16]}.npy", first, first + len(rows), sha256)
        aside.replace(folder / segment.file)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_path(folder)
    return segment


def read_blocks(folder: Path, segments: Iterable[Segment]) -> Iterator[tuple[int, Array]]:
    """First row and rows of each segment, one at a time: no more than one is in memory."""
    for segment in segments:
        yield segment.first, segment.read(folder)


class ReplayJournal:
    """Hands the rows of a replay buffer to a thread that writes them, a segment at a time.

    Process: the learner.
    Owns: copies of segments that wait for the disk, at most :data:`MAX_QUEUED`.
    Blocks: in `snapshot`, while more than that have to wait; never in `offer`.
    Closes: nothing.

    Args:
        folder: Directory of the segments.
        buffer: The buffer.
        submit: Runs a function in the writing thread, in order.
        discard: Told, in that thread, of segments whose rows are in the buffer no more.
        segment_rows: Rows of a whole segment; 0: as many as :data:`SEGMENT_BYTES` hold.
    """

    def __init__(
        self,
        folder: Path,
        buffer: RowStore,
        submit: Submit,
        discard: Callable[[Segment], None] = lambda segment: None,
        segment_rows: int = 0,
    ) -> None:
        self.segment_rows = segment_rows or max(1, SEGMENT_BYTES // buffer.row_dtype.itemsize)
        self._folder = folder
        self._buffer = buffer
        self._submit = submit
        self._discard = discard
        self._handed: deque[tuple[int, Future[Segment]]] = deque()  # whole segments: row after the last, and the file
        self._queued: list[Future[Segment]] = []
        self.forget()

    def forget(self) -> None:
        """Take nothing for written any more: after a failure, or when the rows were replaced."""
        self._handed.clear()
        self._next = self._floor(self._buffer.oldest)

    def adopt(self, segments: Iterable[Segment]) -> None:
        """Take whole segments of a checkpoint that was loaded for written."""
        self.forget()
        for segment in segments:
            if segment.stop == self._next + self.segment_rows:
                written: Future[Segment] = Future()
                written.set_result(segment)
                self._handed.append((segment.stop, written))
                self._next = segment.stop

    def offer(self) -> None:
        """Hand over whole segments as far as there is room; costs next to nothing where there is none to hand over."""
        while self._buffer.inserted - self._next >= self.segment_rows and self._has_room():
            self._hand_whole()

    def snapshot(self) -> list[Future[Segment]]:
        """Hand over all that is missing, and list the files of all rows that the buffer holds now.

        Raises:
            TimeoutError: The disk takes nothing.
        """
        while self._buffer.inserted - self._next >= self.segment_rows:
            while not self._has_room():
                self._queued[0].exception(DISK_TIMEOUT_S)  # whoever gets the list sees what failed
            self._hand_whole()
        self._drop_overwritten()
        files = [file for _, file in self._handed]
        first = max(self._next, self._buffer.oldest)
        if first < self._buffer.inserted:
            files.append(self._hand(first, self._buffer.inserted))
        return files

    def _hand_whole(self) -> None:
        self._drop_overwritten()
        if self._next + self.segment_rows <= self._buffer.oldest:  # the disk is slower than the actors
            self._next = self._floor(self._buffer.oldest)
            return
        stop = self._next + self.segment_rows
        file = self._hand(max(self._next, self._buffer.oldest), stop)
        self._queued.append(file)
        self._handed.append((stop, file))
        self._next = stop

    def _hand(self, first: int, stop: int) -> Future[Segment]:
        rows = self._buffer.copy_rows(first, stop)
        return self._submit(lambda: write_segment(self._folder, first, rows))

    def _has_room(self) -> bool:
        self._queued = [file for file in self._queued if not file.done()]
        return len(self._queued) < MAX_QUEUED

    def _drop_overwritten(self) -> None:
        while self._handed and self._handed[0][0] <= self._buffer.oldest:
            _, file = self._handed.popleft()
            self._submit(partial(_then, self._discard, file))

    def _floor(self, row: int) -> int:
        return row - row % self.segment_rows


def _then(do: Callable[[Segment], None], file: Future[Segment]) -> None:
    if file.exception() is None:  # else there is no such file
        do(file.result())
