"""Starting processes that need nothing from the caller's main module.

Every process of outrider is started here: by a fork server that has imported the heavy modules once (a new process
then takes milliseconds and a few MB of its own), by ``spawn`` where there is no fork server, never by ``fork``.

What crosses is pickled by cloudpickle, and the child does not re-import the caller's script. So a script without a
main guard, ``python -m``, a script from stdin and a notebook all work, and so do classes, closures and lambdas that
are defined in them.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import threading
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar

import cloudpickle
from setproctitle import setproctitle

PRELOAD = (
    "numpy",
    "gymnasium",
    "torch",
    "outrider.envs.gymnasium",
    "outrider.crew",
    "outrider.agents.dqn",
    "outrider.agents.sac",
)
"""What the fork server imports before the first process; a module that cannot be imported is skipped.
None of them may start a thread or touch CUDA."""

SIGNALS_TO_ALL = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""What terminals and service managers send to a whole process group."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment of every started process: one compute thread. The caller's own environment is left as it is."""

_PARENT_GONE = 3  # exit code of a process that finds its parent dead when it begins
_starting = threading.Lock()  # os.environ and __main__ are changed for a moment


def dumps(value: Any) -> bytes:
    """Pickle anything that cloudpickle can: also classes and functions of ``__main__``, closures and lambdas.

    Globals that such a function refers to are copied along, so a large array among them costs its size.
    """
    return bytes(cloudpickle.dumps(value))


def loads(data: bytes) -> Any:
    """The value that :func:`dumps` was given."""
    return cloudpickle.loads(data)


def ensure_server() -> None:
    """Start the fork server if there is none; returns at once, it imports :data:`PRELOAD` in parallel.

    To be called first thing by whatever will start processes. A server that somebody else has started keeps its
    modules and its environment. Does nothing where there is no fork server.
    """
    if "forkserver" in multiprocessing.get_all_start_methods():
        with _starting:
            _ensure_server()


def start_process(target: Callable[..., object], args: Sequence[Any] = (), name: str | None = None) -> BaseProcess:
    """Run ``target(*args)`` in a new process, which lives no longer than this one.

    The process is not daemonic (environments may have children): whoever starts it also ends and joins it. It has
    one compute thread (:data:`ONE_THREAD`) and ignores Ctrl-C, which is the caller's to handle. When this process
    dies, by whatever signal, the kernel kills it (Linux).

    Args:
        target: An importable function, or one that cloudpickle can copy.
        args: Anything that cloudpickle can copy, and what only a starting process can be given: pipe ends of
            ``multiprocessing``, its locks and semaphores, and objects that reduce to ``reduction.DupFd``.
        name: Name of the process.

    Returns:
        The started process.
    """
    forked = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forked else "spawn")
    with _starting:
        if forked:
            _ensure_server()
        main = _HiddenMain()
        process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=_run, args=(_Call(target, tuple(args), main),), name=name, daemon=False
        )
        main.hide()
        try:
            with _environment({} if forked else ONE_THREAD):
                process.start()
        finally:
            main.show()
    return process


def _ensure_server() -> None:
    from multiprocessing import forkserver, resource_tracker

    resource_tracker.ensure_running()  # a part of what follows that would end with the signal unblocked
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    # Its processes begin with this mask: no Ctrl-C hits one before it has said that it ignores them. The server itself
    # keeps it: who ends a whole process group must not end it before it has told how its processes ended.
    former = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_TO_ALL)
    try:
        with _environment(ONE_THREAD):
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


class _HiddenMain:
    """Keeps multiprocessing from finding a main module that the child would have to run again."""

    def __init__(self) -> None:
        self.hidden: dict[str, Any] = {}

    def hide(self) -> None:
        names = vars(sys.modules["__main__"])
        self.hidden = {key: names.pop(key) for key in ("__file__", "__spec__") if key in names}
        names["__spec__"] = None

    def show(self) -> None:
        if self.hidden:
            vars(sys.modules["__main__"]).update(self.hidden)
            self.hidden = {}


class _Call:
    """A call that is pickled by cloudpickle while multiprocessing pickles the process it is for."""

    def __init__(self, target: Callable[..., object], args: tuple[Any, ...], main: _HiddenMain) -> None:
        self.target, self.args, self.main = target, args, main

    def __reduce__(self) -> tuple[Any, ...]:
        # By now the main module has been looked for in vain; functions that are copied may refer to __file__.
        self.main.show()
        data = io.BytesIO()
        _Pickler(data).dump((self.target, self.args))
        return loads, (data.getvalue(),)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    # Pipe ends are added, but not all that may be registered with multiprocessing: torch would share its tensors.
    dispatch_table: ClassVar[Any] = ChainMap(
        {Connection: connection.reduce_connection},  # type: ignore[attr-defined]
        cloudpickle.Pickler.dispatch_table,
    )


def _run(call: tuple[Callable[..., object], tuple[Any, ...]]) -> None:
    """First and last function of every started process."""
    # The title goes where the arguments and the environment lie, which are found only while neither was changed.
    setproctitle(multiprocessing.current_process().name)
    # Ctrl-C reaches the whole foreground group; whoever started this process decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS_TO_ALL)
    os.environ.update(ONE_THREAD)  # for libraries that are loaded only now, under a server started by somebody else
    _die_with_parent()
    target, args = call
    target(*args)


def _die_with_parent() -> None:
    """Have the kernel kill this process as soon as its parent is gone; it reaches even a stopped process."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":
        import fcntl

        fd = parent.sentinel
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
        if wait([fd], 0):
            os._exit(_PARENT_GONE)
    else:
        threading.Thread(target=_exit_after, args=(parent.sentinel,), name="parent watch", daemon=True).start()


def lead_group() -> None:
    """Make this process, which :func:`start_process` started, the leader of a group that ends as a whole.

    When the process that started it dies, the kernel kills the group with all that it has started (Linux).
    """
    os.setpgid(0, 0)
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":
        import fcntl

        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, -os.getpid())


def kill_group(pid: int) -> None:
    """Kill the group that a process leads or led, if anything of it is left; reaches what the process has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _exit_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(_PARENT_GONE)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    saved = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in saved.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
