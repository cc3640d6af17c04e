"""Compiling an update ahead of time, in a process of low priority, into a private directory of the user.

A compiled update is native code. It is made on this machine from the agent's own graph and kept below
``$XDG_CACHE_HOME/outrider`` (or ``~/.cache/outrider``), which only the user may enter; it is never taken from a run
directory or a checkpoint.
"""

from __future__ import annotations

import atexit
import hashlib
import multiprocessing
import os
import platform
import shutil
import stat
import tempfile
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from outrider import processes
from outrider.agents.draws import Draw
from outrider.agents.tracing import CannotTrace, Parts, StepFunction, Traced, copies, state_tensors, trace
from outrider.version import __version__

KEPT = 32
"""Compiled updates in the cache; the ones that were not used for longest are deleted."""

SCRATCH = "scratch-"
BUILDING = "building"
"""What the compiling process says when it has not found the result of an earlier compilation."""

LOG = "failed.log"
"""File in the cache with all that the last compilation that failed has written."""


def cache_dir() -> Path:
    """The directory of compiled updates: made if it is missing, never used if others may write there.

    Raises:
        PermissionError: It belongs to somebody else, others have access, or it is no directory.
        OSError: It cannot be made.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(home) / "outrider" / "compiled"
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path}: expected a directory of this user that nobody else has access to (chmod 700)")
    return path


@dataclass(frozen=True)
class Traceable:
    """What a compilation needs of an agent: a twin of it, made in the compiling process.

    Attributes:
        parts: What the twin trains.
        step: Its update.
        inputs: A batch with noise, of the shapes and dtypes that the learner will have.
    """

    parts: Parts
    step: StepFunction
    inputs: tuple[Tensor, ...]


class Compiled(NamedTuple):
    """A compiled update on disk.

    Attributes:
        path: The package.
        draws: What gives its last arguments: the random numbers that networks draw.
    """

    path: Path
    draws: tuple[Draw, ...]


class CannotCompile(Exception):
    """Why an update cannot be compiled, in one line."""


def compiler() -> str:
    """The C++ compiler that is used, a name or a path: what the variable ``CXX`` says."""
    return os.environ.get("CXX") or "g++"


def lacks_compiler() -> str | None:
    """What to say where the compiler is not there, None where it is."""
    if shutil.which(compiler()) is not None:
        return None
    return f"no program {compiler()!r} (the variable CXX names another; agent.compile=off needs none)"


class Compilation:
    """A compilation under way.

    **Process**: the learner. **Owns**: the compiling process. **Blocks**: never. **Closes**: the process, with all
    that it has started.

    Args:
        make: Makes the twin; pickled by cloudpickle.

    Attributes:
        building: Whether it has turned out that there is something to compile, which takes long; set in :meth:`poll`.

    Raises:
        OSError: There is no private directory for the result.
    """

    def __init__(self, make: Callable[[], Traceable]) -> None:
        self.building = False
        self._directory = cache_dir()
        self._scratch = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=self._directory))
        self._results, sending = multiprocessing.Pipe(duplex=False)
        arguments = (make, self._directory, self._scratch, torch.get_num_threads(), compiler(), sending)
        self._process = processes.start_process(_compile, arguments, name="outrider-compile")
        sending.close()
        atexit.register(self.close)  # before multiprocessing waits for its processes

    def poll(self, timeout_s: float = 0.0) -> Compiled | None:
        """The compiled update, None while it is not ready.

        Raises:
            CannotCompile: There will be none.
        """
        if not self._results.poll(timeout_s):
            return None
        try:
            made, reason = self._results.recv()
            if reason == BUILDING:
                self.building = True
                return None
        except EOFError:
            self._process.join(1.0)
            made, reason = None, f"the compiling process ended with exit code {self._process.exitcode}"
        if made is None:
            os.replace(self._scratch / LOG, self._directory / LOG)
        self.close()
        if made is None:
            raise CannotCompile(reason)
        return cast(Compiled, made)

    def close(self) -> None:
        """End the process, whatever it is doing. May be called again."""
        if self._results.closed:
            return
        self._results.close()
        assert self._process.pid is not None
        processes.kill_group(self._process.pid)
        self._process.kill()  # it may not lead its group yet
        self._process.join()
        self._process.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
        atexit.unregister(self.close)


class _Reason:
    """Tells the learner why this process fails, if it does; the traceback goes to the log as ever."""

    def __init__(self, results: Connection) -> None:
        self._results = results

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        if e is not None:
            text = str(e).strip() or "no message"
            name = "" if isinstance(e, (CannotCompile, CannotTrace)) else f"{type(e).__name__}: "
            self._results.send((None, f"{name}{text.splitlines()[0][:300]}"))


def _compile(
    make: Callable[[], Traceable], directory: Path, scratch: Path, threads: int, cxx: str, results: Connection
) -> None:
    """The compiling process."""
    processes.lead_group()
    os.nice(10)
    os.environ["CXX"] = cxx  # the fork server may have begun with another environment
    torch.set_num_threads(1)
    fd = os.open(scratch / LOG, os.O_CREAT | os.O_WRONLY, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    with _Reason(results):
        twin = make()
        traced = trace(twin.parts, twin.step, twin.inputs)
        path = directory / f"{_key(traced.graph, threads)}.pt2"
        if not _intact(path):
            results.send((None, BUILDING))
            _build(traced, twin, path, scratch, threads)
        os.utime(path)
        made = Compiled(path, traced.draws)
        CompiledUpdate(made, state_tensors(twin.parts))(twin.inputs)  # if it crashes, then here
        _tidy(directory)
        results.send((made, ""))


def _build(traced: Traced, twin: Traceable, path: Path, scratch: Path, threads: int) -> None:
    if lacking := lacks_compiler():
        raise CannotCompile(f"expected a C++ compiler, got {lacking}")
    drawn = [draw() for draw in traced.draws]
    arguments = copies((*state_tensors(twin.parts), *twin.inputs, *drawn))  # equal ones would be made one
    program = torch.export.export(traced.graph, arguments, strict=False)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch)  # private, too: what is compiled there is run
    from torch import _inductor  # more than a second

    options: dict[str, Any] = {"cpp.threads": threads, "compile_threads": 1}
    if hasattr(_inductor.config, "cpp_cache_precompile_headers"):
        options["cpp_cache_precompile_headers"] = False  # 150 MB, to be deleted at once
    made = _inductor.aoti_compile_and_package(
        program, package_path=str(scratch / "update.pt2"), inductor_configs=options
    )
    os.replace(made, path)


def _key(graph: fx.GraphModule, threads: int) -> str:
    """Everything that the native code depends on."""
    digest = hashlib.sha256()
    said = [__version__, torch.__version__, torch.backends.cpu.get_cpu_capability(), *platform.uname()[4:], threads]
    for node in graph.graph.nodes:
        said.append(f"{node.op} {node.target} {node.args} {node.kwargs}")
        value = node.meta.get("val") if node.op == "placeholder" else None
        if isinstance(value, Tensor):
            said.append(f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}")
        if node.op == "get_attr":
            constant = getattr(graph, node.target)
            said.append(constant.dtype)
            digest.update(constant.detach().cpu().numpy().tobytes())
    said.append(_cpu())
    digest.update("\n".join(map(str, said)).encode())
    return digest.hexdigest()[:32]


def _cpu() -> str:
    """What tells this kind of CPU from others; a home directory may be used by several machines."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        wanted = ("model name", "flags", "Features", "CPU part")
        return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
    return platform.processor()


def _intact(path: Path) -> bool:
    """Whether there is an archive whose contents have their checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False


def _tidy(directory: Path) -> None:
    """Delete old results, and what learners that were killed have left; another process may be doing the same."""
    with suppress(FileNotFoundError):
        for left in directory.glob(f"{SCRATCH}*"):
            if time.time() - left.stat().st_mtime > 86_400:
                shutil.rmtree(left, ignore_errors=True)
        by_age = sorted(directory.glob("*.pt2"), key=lambda path: path.stat().st_mtime)
        for path in by_age[:-KEPT]:
            path.unlink()


class CompiledUpdate:
    """A compiled update on these tensors, which it changes in place.

    Args:
        made: A result of a compilation of this very kind of agent.
        state: As :func:`outrider.agents.tracing.state_tensors` gives them.
    """

    def __init__(self, made: Compiled, state: list[Tensor]) -> None:
        # What torch._inductor.aoti_load_package wraps. Importing that package takes more than a second.
        self._loader = torch._C._aoti.AOTIModelPackageLoader(str(made.path), "model", False, 1, -1)
        self._state = state
        self._draws = made.draws

    def __call__(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """One update on a batch with noise, of the strides that were compiled; gives what the step function does."""
        return self.on(self._state, inputs)

    def on(self, state: list[Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """The same on other tensors."""
        return self._loader.boxed_run([*state, *inputs, *[draw() for draw in self._draws]])
