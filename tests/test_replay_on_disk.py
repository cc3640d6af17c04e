"""Rows in a mapped file are drawn, saved and restored as those in memory are."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from outrider.checkpoint import CheckpointConfig, Checkpoints
from outrider.checkpoint_files import Moment, newest_checkpoint
from outrider.core import EnvSpec
from outrider.errors import ConfigError, ResourceError
from outrider.frame_stream import frame_layout
from outrider.replay import FrameReplayBufferConfig, PrioritizedReplayBufferConfig, SimpleReplayBufferConfig, storage
from outrider.replay.priorities import PriorityConfig
from outrider.sampling import transition_layout
from outrider.testing import random_rows

SPEC = EnvSpec("stacks", spaces.Box(0, 255, (3, 8, 8), np.uint8), spaces.Discrete(5), frame_stack=3)
CAPACITY, MESSAGE = 500, 64
PADDING = 8  # bytes of a row that two dtypes of it may differ by
CONFIGS: dict[str, Any] = {
    "uniform": SimpleReplayBufferConfig(capacity=CAPACITY, seed=3),
    "prioritized": PrioritizedReplayBufferConfig(capacity=CAPACITY, seed=3),
    "frames": FrameReplayBufferConfig(capacity=CAPACITY, n_steps=2, gamma=0.9, seed=3),
    "frames by priority": FrameReplayBufferConfig(capacity=CAPACITY, prioritized=PriorityConfig(), seed=3),
}
every_buffer = pytest.mark.parametrize("name", CONFIGS)


def layout(name: str) -> Any:
    return frame_layout(SPEC) if "frames" in name else transition_layout(SPEC)


def message(name: str, k: int) -> dict[str, np.ndarray]:
    """The k-th, of one environment."""
    rows = random_rows(layout(name), MESSAGE, seed=k)
    if "frames" in name:
        rows["t"][...] = k * MESSAGE + np.arange(MESSAGE)
        rows["env"][...] = 0
    return rows


def course(buffer: Any, name: str, first: int = 0, messages: int = 15) -> list[bytes]:
    """What is drawn while the buffer is filled and overwritten."""
    drawn = []
    for k in range(first, first + messages):
        buffer.push(message(name, k))
        batch = buffer.batch(32)
        drawn += [np.ascontiguousarray(batch[column]).tobytes() for column in ("obs", "act", "reward", "next_obs")]
        drawn += [batch.ixs.tobytes(), b"" if batch.weights is None else batch.weights.tobytes()]
        buffer.update_priority(batch.ixs, np.arange(32.0))
    return drawn


@every_buffer
def test_the_same_is_drawn_as_from_memory(name: str, tmp_path: Path) -> None:
    in_memory, on_disk = (replace(CONFIGS[name], disk=disk).build(layout(name)) for disk in (None, str(tmp_path)))
    assert course(on_disk, name) == course(in_memory, name)
    assert on_disk.state_dict()["rows"].tobytes() == in_memory.state_dict()["rows"].tobytes()
    assert on_disk.inserted > 1.5 * CAPACITY


@every_buffer
@pytest.mark.parametrize("saved_on_disk", [True, False])
def test_a_checkpoint_of_either_goes_on_in_the_other(name: str, saved_on_disk: bool, tmp_path: Path) -> None:
    places = (str(tmp_path), None) if saved_on_disk else (None, str(tmp_path))
    saved, restored = (replace(CONFIGS[name], disk=disk).build(layout(name)) for disk in places)
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder, CheckpointConfig()) as checkpoints:
        checkpoints.start(saved)
        course(saved, name)
        checkpoints.take(Moment(1, 0, 0.0, None, "interval"), {"replay": saved.state_without_rows()})
    newest, damages = newest_checkpoint(folder)
    assert newest is not None
    assert damages == []
    restored.load_rows(newest.state["replay"], newest.blocks())
    assert course(restored, name, 15) == course(saved, name, 15)


@every_buffer
def test_bytes_on_the_disk_are_what_the_config_says_and_the_file_has_no_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    stats: list[os.stat_result] = []
    mapped = mmap.mmap

    def noting(fd: int, nbytes: int) -> Any:
        sizes.append(nbytes)
        stats.append(os.fstat(fd))
        return mapped(fd, nbytes)

    monkeypatch.setattr(mmap, "mmap", noting)
    config = replace(CONFIGS[name], disk=str(tmp_path))
    buffer = config.build(layout(name))
    buffer.push(message(name, 0))
    no_frame = 64 if "frames" in name else 0  # what lies before the first frame of an episode
    assert 0 <= config.disk_bytes(layout(name)) + no_frame - sum(sizes) <= PADDING * CAPACITY
    assert config.disk_bytes(layout(name)) <= config.nbytes(layout(name))
    assert CONFIGS[name].disk_bytes(layout(name)) == 0
    assert list(tmp_path.iterdir()) == []
    for size, stat in zip(sizes, stats, strict=True):
        assert stat.st_mode & 0o777 == 0o600
        assert stat.st_blocks * 512 >= size  # reserved, not only promised


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors")
def test_a_mapped_file_is_given_back_with_its_buffer(tmp_path: Path) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    before = len(os.listdir("/proc/self/fd"))
    buffer = replace(CONFIGS["frames"], disk=str(tmp_path)).build(layout("frames"))
    assert mapped() == 2
    assert len(os.listdir("/proc/self/fd")) == before + 2
    del buffer
    assert mapped() == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_nothing_is_left_of_a_process_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys, numpy as np\n"
        "from outrider.replay.storage import zeros\n"
        "zeros((1000, 1000), np.dtype(float), sys.argv[1], 'rows')[:] = 1\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == -9
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_refused_with_needed_and_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "free_disk", lambda path: 3 * 10**9)
    config = SimpleReplayBufferConfig(capacity=10**8, disk=str(tmp_path))
    with pytest.raises(ResourceError, match=r"\(100000000 rows\): needs .* GB of disk, 3.00 GB are free in /"):
        config.build(transition_layout(SPEC))


def full(fd: int, offset: int, nbytes: int) -> None:
    raise OSError(28, "No space left on device")


def missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return tmp_path / "missing"


def filled_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "posix_fallocate", full)
    return tmp_path


@pytest.mark.parametrize(
    ("where", "why"), [(missing, "No such file or directory"), (filled_meanwhile, "No space left")]
)
def test_what_the_system_refuses_is_said(
    where: Callable[[Path, pytest.MonkeyPatch], Path], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = where(tmp_path, monkeypatch)
    with pytest.raises(ResourceError, match=rf"needs .* of disk in {disk} \(replay.disk\), the system says: {why}"):
        replace(CONFIGS["uniform"], disk=str(disk)).build(transition_layout(SPEC))


@every_buffer
def test_a_directory_without_a_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="disk: expected a directory, or null, got"):
        replace(CONFIGS[name], disk="")


def test_priorities_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("outrider.replay.records.require_memory", lambda nbytes, what: asked.append(nbytes))
    for disk in (None, str(tmp_path)):
        for name, config in CONFIGS.items():
            asked.clear()
            told = replace(config, disk=disk)
            told.build(layout(name))
            in_memory = told.nbytes(layout(name)) - told.disk_bytes(layout(name))
            assert len(asked) == 1
            assert abs(asked[0] - in_memory) <= PADDING * CAPACITY
