"""What this machine leaves to a run: cores, processes, descriptors, disk; control groups and limits counted."""

from __future__ import annotations

import math
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import psutil

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores that this process may use: its affinity, or less where a control group has a CPU quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(cores, cpu_quota())))


def cpu_quota(proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """Cores' worth of time that the control groups (v1, v2) allow; infinite without a quota."""
    quotas = [math.inf]
    for group, unified in control_groups("cpu", proc, cgroups):
        with suppress(OSError, ValueError):  # no such file, or the quota is the word "max"
            if unified:
                quota, period = map(int, (group / "cpu.max").read_text().split())
            else:
                quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0:
                quotas.append(quota / period)
    return min(quotas)


def free_processes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Processes and threads that may still be started: of this user, and in the control groups.

    Returns:
        Their number; ``sys.maxsize`` where there is no limit.
    """
    free = [sys.maxsize]
    for group, _ in control_groups("pids", proc, cgroups):
        with suppress(OSError, ValueError):
            free.append(int((group / "pids.max").read_text()) - int((group / "pids.current").read_text()))
    limit = _soft_limit("RLIMIT_NPROC")
    if limit < sys.maxsize and os.geteuid() != 0:  # the kernel does not hold it against root
        free.append(limit - _threads_of(os.getuid()))
    return max(0, min(free))


def free_descriptors() -> int:
    """Files that this process may still open; ``sys.maxsize`` without a limit."""
    return max(0, _soft_limit("RLIMIT_NOFILE") - psutil.Process().num_fds())


def free_disk(path: Path) -> int:
    """Bytes that this user may still write where `path` is, or will be."""
    return shutil.disk_usage(_existing(path)).free


def same_disk(one: Path, other: Path) -> bool:
    """Whether two places are, or will be, on one file system."""
    return _existing(one).stat().st_dev == _existing(other).stat().st_dev


def is_memory(path: Path) -> bool:
    """Whether the file system where `path` is, or will be, takes memory: ``/dev/shm``, on many systems ``/tmp``."""
    there = _existing(path).resolve()
    mounts = [m for m in psutil.disk_partitions(all=True) if there.is_relative_to(m.mountpoint)]
    deepest = max(mounts, key=lambda m: len(m.mountpoint), default=None)
    return deepest is not None and deepest.fstype in ("tmpfs", "ramfs")


def _existing(path: Path) -> Path:
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def control_groups(controller: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> list[tuple[Path, bool]]:
    """Directories of the groups that a controller holds this process in: its own and all above it.

    Args:
        controller: Such as ``memory``.
        proc: Where procfs is mounted.
        cgroups: Where the control groups are mounted.

    Returns:
        Each with whether it is of version 2. In a container the path may be the host's, which is not visible: the
        root of the mount is then the own group, so some of the directories may not exist.
    """
    found: list[tuple[Path, bool]] = []
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own = Path(path.lstrip("/"))
            if not controllers:
                found += [(cgroups / group, True) for group in (own, *own.parents)]
            elif controller in controllers.split(","):
                mounts = dict.fromkeys((controllers, controller))  # "cpu,cpuacct" is mounted under both names, or one
                found += [(cgroups / mount / group, False) for mount in mounts for group in (own, *own.parents)]
    return found


def _soft_limit(name: str) -> int:
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    soft = resource.getrlimit(getattr(resource, name))[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else int(soft)


def _threads_of(uid: int) -> int:
    """Threads of all processes of a user: what the kernel counts against the limit."""
    count = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == uid:
                count += process.num_threads()
    return count
