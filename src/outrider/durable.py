"""Files that are whole or absent: after a crash, a power loss or on a full disk."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_PENDING = 10_000
"""Blocks an :class:`AppendFile` keeps for another try."""


def json_text(value: Any, indent: int | None = None) -> str:
    """Strict JSON; NaN and infinities, which JSON lacks, become null, what it does not know becomes its text."""
    return json.dumps(_finite(value), indent=indent, default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    if hasattr(value, "tolist"):  # numpy
        return _finite(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def replace_text(path: Path, text: str) -> None:
    """Write a text file; whoever reads it, also after a power loss, sees the old text or the new one, whole.

    Raises:
        OSError: It could not be written; the old file is still there.
    """
    aside = path.with_name(f".{path.name}.new")
    try:
        aside.write_text(text)
        sync_path(aside)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def replace_directory(path: Path, fill: Callable[[Path], None]) -> None:
    """Write a directory anew, whole: it is filled aside, synced, and renamed.

    A crash between the two renames leaves the old directory as ``.NAME.old``: read through
    :func:`whole_directory`. The next call puts it back.

    Args:
        path: The directory; replaced if it exists.
        fill: Writes the contents into the empty directory that it is given.

    Raises:
        OSError: It could not be written; the old directory is still there. So it is whatever `fill` raises.
    """
    aside, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
    path.parent.mkdir(parents=True, exist_ok=True)
    _recover(path, old)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        fill(aside)
        for folder, _, files in os.walk(aside):
            for name in files:
                sync_path(Path(folder, name))
            sync_path(Path(folder))
        if path.exists():
            path.rename(old)
        aside.rename(path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        _recover(path, old)
        raise
    sync_path(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def whole_directory(path: Path) -> Path:
    """Where to read what :func:`replace_directory` wrote: `path`, or the old one after a crash between its renames."""
    old = path.with_name(f".{path.name}.old")
    return old if old.is_dir() and not path.exists() else path


def _recover(path: Path, old: Path) -> None:
    """Put the old directory back if a crash came between the two renames. For the writer alone."""
    if old.exists():
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(path)


def sync_path(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk.

    Raises:
        OSError: They could not be written.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class AppendFile:
    """A file that grows by whole blocks.

    A write that fails leaves no part of a block behind; the block is kept and written by the next call. A file that
    somebody has deleted is such a failure: what is written into it is gone.

    Owns: the open file.
    Blocks: as long as the disk does.
    Closes: the file, in `close`.

    Args:
        path: Created if there is none, else continued.

    Attributes:
        pending: Blocks not yet written, at most :data:`MAX_PENDING`.
        lost: Blocks given up because more than that were pending.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pending: deque[bytes] = deque()
        self.lost = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def write(self, block: bytes = b"") -> None:
        """Append what is pending and this block.

        Raises:
            OSError: They could not be written, and are pending.
        """
        if block:
            self.pending.append(block)
        while len(self.pending) > MAX_PENDING:
            self.pending.popleft()
            self.lost += 1
        there = os.fstat(self._fd)
        if not there.st_nlink:
            raise FileNotFoundError(errno.ENOENT, "deleted while it was in use", str(self.path))
        start = there.st_size
        data = memoryview(b"".join(self.pending))
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to report
                os.ftruncate(self._fd, start)
            raise
        self.pending.clear()

    def close(self) -> None:
        """Close the file; what is pending is lost. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
