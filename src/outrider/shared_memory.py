"""Shared memory without names: what the channels and flags stand on.

An :class:`Arena` belongs to whoever holds its descriptor or a mapping of it, and the kernel frees it with the
last of them: ``kill -9`` leaks nothing. It is reserved whole when it is made, after a comparison with the memory
that is free: too little is a :class:`~outrider.errors.ResourceError` at start, not a bus error hours later.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
import weakref
from contextlib import suppress
from multiprocessing import context, reduction
from pathlib import Path
from typing import Any, Literal, TypeAlias

from outrider.errors import ResourceError
from outrider.machine import CGROUPS, PROC, control_groups

Backend: TypeAlias = Literal["processes", "threads"]
"""Where the actors run. Threads share plain memory by reference."""

CACHE_LINE = 64
"""Alignment of whatever is written by different processes, and of every array, in bytes."""


class Fence:
    """A full memory barrier for the one thread that owns it; 0.16 µs.

    Releasing and *then* acquiring one lock orders everything before against everything after, on ARM too. The
    other way round (a ``with lock:``) does not: writes may sink into the critical section from both sides and
    pass each other there.
    """

    __slots__ = ("_acquire", "_release")

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self._release, self._acquire = lock.release, lock.acquire

    def __call__(self) -> None:
        """Whatever this thread did before is seen before whatever it does after."""
        try:  # noqa: SIM105 - suppress() would cost more than the fence
            self._release()
        except RuntimeError:
            pass  # an exception of a signal handler fell between the two calls last time
        self._acquire()


class Arena:
    """Nameless shared memory, zeroed, that can be handed to a process while it is started.

    Args:
        nbytes: Size, at least 1.

    Attributes:
        nbytes: Size in bytes.
        buf: The mapping, aligned to a page.

    Owns:
        A descriptor and a mapping. :meth:`close` gives back the descriptor at once, and the mapping with the last
        view of it; so does dropping the last reference.

    Raises:
        ResourceError: The memory could not be reserved.
    """

    def __init__(self, nbytes: int) -> None:
        self._adopt(nbytes, nameless_file(nbytes))

    def _adopt(self, nbytes: int, fd: int) -> None:
        # What comes from another process is inheritable; a simulator that is exec'ed must not keep the memory.
        os.set_inheritable(fd, False)
        self.nbytes = nbytes
        self._close_fd = weakref.finalize(self, os.close, fd)
        self._fd = fd
        self.buf = mmap.mmap(fd, nbytes)

    def __reduce__(self) -> tuple[Any, ...]:
        context.assert_spawning(self)
        if not self._close_fd.alive:
            raise ValueError("arena: expected an open one to hand to a process, got a closed one")
        return _attach, (self.nbytes, reduction.DupFd(self._fd))

    def close(self) -> None:
        """Free it; views that still exist stay valid and keep their pages. May be called twice."""
        self._close_fd()
        with suppress(BufferError):
            self.buf.close()


def _attach(nbytes: int, duplicate: Any) -> Arena:
    arena = Arena.__new__(Arena)
    arena._adopt(nbytes, duplicate.detach())
    return arena


class LocalArena:
    """The same over memory of this process alone, for actors that are threads; shared by reference.

    Args:
        nbytes: Size, at least 1.

    Attributes:
        nbytes: Size in bytes.
        buf: The memory, aligned to a page.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.buf = mmap.mmap(-1, nbytes)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("memory of the threads back end cannot be handed to a process: bind with backend='processes'")

    def close(self) -> None:
        """Free it, or leave it to its last view. May be called twice."""
        with suppress(BufferError):
            self.buf.close()


def allocate(nbytes: int, backend: Backend, what: str) -> Arena | LocalArena:
    """Reserve memory for a channel.

    Args:
        nbytes: Size in bytes.
        backend: Who will use it.
        what: What it is for, for the error.

    Raises:
        ResourceError: Not enough memory is free; says needed and free.
    """
    require_memory(nbytes, what)
    return Arena(nbytes) if backend == "processes" else LocalArena(nbytes)


def aligned(nbytes: int) -> int:
    """Round up to whole cache lines."""
    return -(-nbytes // CACHE_LINE) * CACHE_LINE


def nameless_file(nbytes: int) -> int:
    """A descriptor of `nbytes` zeroed bytes in memory that no name leads to; the caller closes it.

    Raises:
        ResourceError: The system cannot provide it.
    """
    fd = _open_nameless()
    try:
        os.ftruncate(fd, nbytes)
        if nbytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.close(fd)
        raise ResourceError(f"shared memory: needs {size_text(nbytes)}, the system says: {error.strerror}") from error
    return fd


def _open_nameless() -> int:
    if hasattr(os, "memfd_create"):
        # Refused where vm.memfd_noexec is 2, or by a sandbox that does not know the call.
        with suppress(OSError):
            return os.memfd_create("outrider", os.MFD_CLOEXEC)
    shm = "/dev/shm"
    try:
        with tempfile.TemporaryFile(dir=shm if os.path.isdir(shm) else None) as file:
            return os.dup(file.fileno())
    except OSError as error:
        raise ResourceError(f"shared memory: no nameless file could be made, the system says: {error}") from error


def require_memory(nbytes: int, what: str) -> None:
    """Refuse before anything is allocated.

    Args:
        nbytes: Bytes that are about to be allocated.
        what: What for, such as ``item channel of 4 actors``.

    Raises:
        ResourceError: Less than that is free; says needed and free.
    """
    free = available_bytes()
    if nbytes > free:
        raise ResourceError(f"{what}: needs {size_text(nbytes)} of memory, {size_text(free)} are free")


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Memory that can still be allocated: what the kernel calls available, or less where a cgroup (v1, v2) limits it.

    Args:
        proc: Where procfs is mounted.
        cgroups: Where the control groups are mounted.

    Returns:
        Bytes; ``sys.maxsize`` where the system does not say.
    """
    free = [sys.maxsize]
    with suppress(OSError):
        words = (proc / "meminfo").read_text().split()
        free.append(int(words[words.index("MemAvailable:") + 1]) * 1024)
    for group, unified in control_groups("memory", proc, cgroups):
        with suppress(OSError, ValueError):  # no such file, or the limit is the word "max"
            free.append(_group_free(group, unified))
    return max(0, min(free))


def _group_free(group: Path, unified: bool) -> int:
    """What a control group leaves free; page cache counts as free, the kernel takes it back."""
    limit, use, cache = (
        ("memory.max", "memory.current", "inactive_file")
        if unified
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    allowed, used = int((group / limit).read_text()), int((group / use).read_text())
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return allowed - used + int(stat.get(cache, 0))


def size_text(nbytes: int) -> str:
    """Bytes in GB or MB."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"
