"""A run directory: what a run was asked, where it ran, and everything it leaves.

::

    config.yaml    resolved, can be run again      metrics.jsonl        one line per flush
    command.txt    how it was called               events.out.*         the same for TensorBoard
    system.json    versions, cores, memory         stats.json           what the run came to
    models/        best, last, N: for acting       checkpoints/N        everything, for resume
    logs/          of the actors
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from outrider.core import Agent, EnvSpec
from outrider.durable import json_text, replace_directory, replace_text, whole_directory
from outrider.errors import RunDirError
from outrider.machine import usable_cores

LOCK = ".lock"
META = "meta.json"
PACKAGES = ("outrider", "torch", "numpy", "gymnasium", "ale-py", "tensorboard", "cloudpickle", "pydantic")


class RunDir:
    """A run directory in use.

    Process: the learner; readers open it without the lock.
    Owns: the lock of the directory. The kernel frees it when the process dies.
    Blocks: never; a directory in use is refused.
    Closes: the lock, in `close` or at the end of a ``with`` block.

    Use :meth:`create` or :meth:`open`.
    """

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def create(cls, path: Path | str, config_yaml: str, command: Sequence[str]) -> Self:
        """Make a run directory and lock it.

        Args:
            path: A directory that is empty or does not exist.
            config_yaml: The resolved configuration.
            command: The command and its arguments.

        Raises:
            RunDirError: It is not empty, in use, no directory, or cannot be written.
        """
        path = Path(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            run = cls(path, _lock(path))
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            require_new_or_empty(path)
            for folder in (run.models, run.checkpoints, run.logs):
                folder.mkdir()
            replace_text(path / "command.txt", shlex.join(command) + "\n")
            replace_text(path / "system.json", json_text(system_info(), indent=2) + "\n")
            replace_text(path / "config.yaml", config_yaml)  # last: a directory with it is a whole one
        except OSError as error:
            run.close()
            raise _unwritable(path, error) from error
        except RunDirError:
            run.close()
            raise
        return run

    @classmethod
    def open(cls, path: Path | str, *, lock: bool = True) -> Self:
        """Use an existing run directory.

        Args:
            path: The directory.
            lock: Lock it, to go on with the run. False: only read it, also while the run is going on.

        Raises:
            RunDirError: It is none, or in use.
        """
        path = Path(path)
        if not (path / "config.yaml").is_file():
            raise RunDirError(f"{path}: expected a run directory (with config.yaml), got {_what(path)}")
        try:
            return cls(path, _lock(path) if lock else -1)
        except OSError as error:
            raise RunDirError(f"{path}: expected a directory that can be locked, got {error}") from error

    def go_on(self, config_yaml: str, command: Sequence[str]) -> None:
        """Note that the run goes on: with which configuration, and by which command. The directory must be locked.

        Raises:
            RunDirError: It cannot be written.
        """
        try:
            commands = (self.path / "command.txt").read_text() if (self.path / "command.txt").exists() else ""
            replace_text(self.path / "command.txt", commands + shlex.join(command) + "\n")
            replace_text(self.path / "config.yaml", config_yaml)
        except OSError as error:
            raise RunDirError(f"{self.path}: expected a directory that can be written, got {error}") from error

    @property
    def models(self) -> Path:
        """Models by name, for acting."""
        return self.path / "models"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints by opt step, for resuming."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Logs of the actors."""
        return self.path / "logs"

    @property
    def config_yaml(self) -> str:
        """The resolved configuration."""
        return (self.path / "config.yaml").read_text()

    def model_path(self, name: str | int = "best") -> Path:
        """Directory of the model ``best``, ``last`` or of an opt step.

        Raises:
            RunDirError: There is none; lists those there are.
        """
        return find_model(self.models, str(name))

    def default_model(self) -> str:
        """``best``, or ``last`` where the run was never evaluated."""
        return "best" if (self.models / "best").is_dir() else "last"

    def write_stats(self, stats: Mapping[str, Any]) -> None:
        """Write ``stats.json``.

        Raises:
            OSError: It could not be written.
        """
        replace_text(self.path / "stats.json", json_text(dict(stats), indent=2) + "\n")

    def discard(self) -> None:
        """Remove the directory, so that its name is free again, unless it holds a model or a checkpoint."""
        if not any(entry for folder in (self.models, self.checkpoints) for entry in folder.iterdir()):
            shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Free the lock. May be called twice."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def require_new_or_empty(path: Path) -> None:
    """Refuse a directory that cannot become that of a new run, without making it.

    Raises:
        RunDirError: It has something in it, or cannot be read.
    """
    try:
        there = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK) if path.is_dir() else []
    except OSError as error:
        raise _unwritable(path, error) from error
    if there:
        more = ", ..." if len(there) > 3 else ""
        raise RunDirError(f"{path}: expected an empty run directory, got one with {', '.join(there[:3])}{more}")


def default_path(env_id: str, agent: str, root: Path | str = "runs") -> Path:
    """Make a new empty directory ``root/<env>-<agent>-<timestamp>``, with ``-2``, ``-3``, ... if that one is taken.

    Raises:
        RunDirError: It cannot be made.
    """
    stem = re.sub(r"[^A-Za-z0-9_.]+", "-", f"{env_id}-{agent}").strip("-.")
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    k = 1
    while True:
        path = Path(root) / (name if k == 1 else f"{name}-{k}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            k += 1
        except OSError as error:
            raise RunDirError(f"{path}: expected a place where directories can be made, got {error}") from error
        else:
            return path


def _lock(path: Path) -> int:
    """Take the lock of a directory; the file stays, only the lock on it counts."""
    fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 100, 0).decode(errors="replace").strip() or "another process"
        os.close(fd)
        raise RunDirError(f"{path}: expected a run directory that nobody uses, got one in use by {holder}") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
    return fd


def _unwritable(path: Path, error: OSError) -> RunDirError:
    return RunDirError(f"{path}: expected a directory that can be written, got an error: {error.strerror or error}")


def _what(path: Path) -> str:
    if not path.exists():
        return "nothing there"
    if not path.is_dir():
        return "a file"
    return "a directory without it"


def save_model(models: Path, name: str, agent: Agent, meta: Mapping[str, Any] | None = None) -> None:
    """Keep what acting needs in the directory ``models/name``, whole or not at all, with ``meta.json`` beside it.

    Args:
        models: The directory of the models.
        name: ``best``, ``last`` or a number.
        agent: Its ``save_params`` writes the files.
        meta: What else to write into ``meta.json`` than ``opt_steps``.

    Raises:
        OSError: It could not be written; so does whatever ``save_params`` raises. A former model is still there.
    """

    def fill(path: Path) -> None:
        agent.save_params(path)
        opt_steps, _ = agent.model_info()
        (path / META).write_text(json_text({**(meta or {}), "opt_steps": opt_steps}, indent=2) + "\n")

    replace_directory(models / name, fill)


def find_model(models: Path, name: str) -> Path:
    """Directory of a model.

    Raises:
        RunDirError: There is none of this name; lists those there are.
    """
    path = whole_directory(models / name)
    if not path.is_dir() or name.startswith("."):
        there = sorted((p.name for p in models.glob("[!.]*")), key=lambda n: (n.isdigit(), len(n), n))
        raise RunDirError(f"{models}: expected a model {name!r}, got {', '.join(there) or 'none at all'}")
    return path


def read_model_meta(path: Path) -> dict[str, Any]:
    """What :func:`save_model` wrote beside a model, empty if there is nothing."""
    meta = path / META
    return dict(json.loads(meta.read_text())) if meta.is_file() else {}


def model_meta(env_spec: EnvSpec) -> dict[str, str]:
    """What a model must be told of its environment to be used elsewhere: id and spaces, as text."""
    return {
        "env_id": env_spec.id,
        "observation_space": str(env_spec.observation_space),
        "action_space": str(env_spec.action_space),
    }


def system_info() -> dict[str, Any]:
    """Versions, processor, cores, memory and threads, for ``system.json``."""
    import torch  # here, because readers of a run directory need not wait a second for it

    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "python": sys.version,
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "torch_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "threads_set": {
            name: os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ
        },
        "versions": versions,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor()
