"""Where a replay buffer's rows lie: in memory, or in a file on a disk that is mapped into it.

A mapped file is read and written like memory, and the kernel keeps in memory what fits. It has no name, so it is gone
with the process, however that ends; and it is reserved whole, so that a disk too small is an error at the start and
not a bus error hours later.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from outrider.data import Array
from outrider.errors import ResourceError
from outrider.machine import free_disk
from outrider.shared_memory import size_text


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any], disk: str | None, what: str) -> Array:
    """An array of zeros.

    Args:
        shape: Its shape, of at least one element.
        dtype: Its dtype.
        disk: Directory on whose disk it lies; None: in memory.
        what: What it is, for the error.

    Raises:
        ResourceError: The directory cannot be written, or its disk has not as much free; says needed and free.
    """
    if disk is None:
        return np.zeros(shape, dtype)
    mapping = _mapped(Path(disk), math.prod(shape) * dtype.itemsize, what)
    return np.frombuffer(mapping, dtype, math.prod(shape)).reshape(shape)


def _mapped(folder: Path, nbytes: int, what: str) -> mmap.mmap:
    try:
        free = free_disk(folder)
        if nbytes > free:
            raise ResourceError(f"{what}: needs {size_text(nbytes)} of disk, {size_text(free)} are free in {folder}")
        with tempfile.TemporaryFile(dir=folder, prefix=".replay-") as file:  # only this user may open it
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, nbytes)
            else:
                os.ftruncate(file.fileno(), nbytes)
            mapping = mmap.mmap(file.fileno(), nbytes)
        if hasattr(mmap, "MADV_RANDOM"):  # else each row that is not in memory brings 128 kB along
            mapping.madvise(mmap.MADV_RANDOM)
        return mapping
    except (OSError, ValueError) as error:  # the second: no path, as one with a zero byte in it
        reason = f"the system says: {getattr(error, 'strerror', None) or error}"
        raise ResourceError(f"{what}: needs {size_text(nbytes)} of disk in {folder} (replay.disk), {reason}") from error
