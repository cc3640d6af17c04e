from __future__ import annotations

import math
import os
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from outrider import machine


def proc(tmp_path: Path, cgroup: str) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    return tmp_path / "proc"


def group(path: Path, **files: object) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (path / name.replace("__", ".")).write_text(f"{value}\n")


def test_a_cpu_quota_is_the_least_of_all_groups_of_the_second_version(tmp_path: Path) -> None:
    root, cg = proc(tmp_path, "0::/pod/me\n"), tmp_path / "cg"
    assert machine.cpu_quota(root, cg) == math.inf
    group(cg / "pod/me", cpu__max="max 100000")
    assert machine.cpu_quota(root, cg) == math.inf
    group(cg / "pod", cpu__max="150000 100000")
    assert machine.cpu_quota(root, cg) == 1.5
    group(cg / "pod/me", cpu__max="50000 100000")
    assert machine.cpu_quota(root, cg) == 0.5


def test_a_cpu_quota_of_the_first_version_is_found_under_either_name_of_its_mount(tmp_path: Path) -> None:
    root, cg = proc(tmp_path, "4:cpu,cpuacct:/x\n0::/\n"), tmp_path / "cg"
    group(cg / "cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert machine.cpu_quota(root, cg) == math.inf
    group(cg / "cpu,cpuacct/x", cpu__cfs_quota_us=300000, cpu__cfs_period_us=100000)
    assert machine.cpu_quota(root, cg) == 3.0


@pytest.mark.parametrize(("quota", "cores"), [(0.5, 1), (1.9, 1), (2.0, 2), (math.inf, 3)])
def test_usable_cores_are_whole_ones_within_affinity_and_quota(
    quota: float, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 4, 5})
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    assert machine.usable_cores() == cores


def test_free_processes_are_those_that_groups_and_the_limit_of_the_user_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, cg = proc(tmp_path, "0::/me\n"), tmp_path / "cg"
    monkeypatch.setattr(machine, "_soft_limit", lambda name: 2**30)
    monkeypatch.setattr(machine, "_threads_of", lambda uid: 2**30 - 500)
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # against whom the kernel does not hold it
    assert machine.free_processes(root, cg) == sys.maxsize
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert machine.free_processes(root, cg) == 500
    group(cg / "me", pids__max=100, pids__current=90)
    assert machine.free_processes(root, cg) == 10
    group(cg / "me", pids__max=80)
    assert machine.free_processes(root, cg) == 0


def test_free_descriptors_are_those_within_the_limit_that_are_not_open(tmp_path: Path) -> None:
    before = machine.free_descriptors()
    assert 0 < before < resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with (tmp_path / "a").open("w"), (tmp_path / "b").open("w"):
        assert machine.free_descriptors() == before - 2


def test_the_threads_of_a_user_are_counted() -> None:
    assert machine._threads_of(os.getuid()) >= 1
    assert machine._threads_of(2**31 - 2) == 0


def test_what_takes_memory_and_what_is_one_disk_is_known_for_directories_that_are_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [
        SimpleNamespace(mountpoint="/", fstype="ext4"),
        SimpleNamespace(mountpoint=str(tmp_path), fstype="tmpfs"),
        SimpleNamespace(mountpoint=str(tmp_path / "disk"), fstype="xfs"),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    (tmp_path / "disk").mkdir()
    assert machine.is_memory(tmp_path / "a/b")
    assert not machine.is_memory(tmp_path / "disk/a/b")
    assert not machine.is_memory(tmp_path.parent / "a")
    assert machine.same_disk(tmp_path / "a", tmp_path / "disk/b")
    assert not machine.same_disk(tmp_path, Path("/proc/none"))


def test_free_disk_is_known_for_directories_that_are_not_there_yet(tmp_path: Path) -> None:
    free = machine.free_disk(tmp_path / "runs/a/b")
    assert abs(free - os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize) < 10**9
