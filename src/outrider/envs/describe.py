"""Describes an environment by building it once in a short-lived process: its crash is an error, nobody's death."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Protocol

from outrider.core import EnvSpec
from outrider.errors import EnvFailed, OutriderError
from outrider.processes import dumps, kill_group, lead_group, loads, start_process

_CLOSE_TIMEOUT_S = 5.0  # for closing the environment, once it is described
_known: dict[bytes, EnvSpec] = {}


class Describable(Protocol):
    """A config that can describe its environment in the process it is called in."""

    def describe(self, report: Callable[[EnvSpec], None]) -> None:
        """Build the environment, report its description, and close it."""
        ...


def describe_in_child(config: Describable, where: str, timeout_s: float = 60.0) -> EnvSpec:
    """Have a config describe its environment in a process of its own; equal configs are described once.

    Args:
        config: Travels by cloudpickle.
        where: Names the environment in errors.
        timeout_s: Seconds after which the process is killed.

    Raises:
        ConfigError: As ``config.describe`` raised it.
        EnvFailed: Any other exception, with its traceback; or the process crashed, ended, or took too long.
    """
    data = dumps(config)
    if data not in _known:
        _known[data] = _describe(data, where, timeout_s)
    return _known[data]


def _describe(data: bytes, where: str, timeout_s: float) -> EnvSpec:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with receiver:
        with sender:
            process = start_process(_child, (sender, data), "outrider: describe an environment")
        answer: EnvSpec | OutriderError | tuple[str, str] | None = None
        try:
            in_time = bool(wait([receiver, process.sentinel], timeout_s))
            if receiver.poll():
                with suppress(EOFError):
                    answer = loads(receiver.recv_bytes())
            process.join(_CLOSE_TIMEOUT_S if in_time else 0.0)
        finally:
            _end(process)
    if isinstance(answer, EnvSpec):
        return answer
    if isinstance(answer, OutriderError):
        raise answer
    if answer is not None:
        raise EnvFailed(where, *answer)
    raise EnvFailed(where, _how_it_ended(process.exitcode) if in_time else f"was not built within {timeout_s:g} s")


def _child(conn: Connection, data: bytes) -> None:
    """What the short-lived process does; it leads a process group so that whatever it starts ends with it."""
    lead_group()
    with _Reported(conn):
        loads(data).describe(lambda spec: conn.send_bytes(dumps(spec)))


class _Reported:
    """Sends whatever exception leaves the block; the receiver takes only the first message."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        if error is not None:
            cause = traceback.format_exception_only(error)[-1].strip()
            answer = error if isinstance(error, OutriderError) else (cause, "".join(traceback.format_exception(error)))
            with suppress(BrokenPipeError):
                self._conn.send_bytes(dumps(answer))
        return True


def _end(process: BaseProcess) -> None:
    """Kill the process and what it has started, as far as they have not ended by themselves, and reap it."""
    assert process.pid is not None
    kill_group(process.pid)
    if process.is_alive():  # its group may not exist yet
        process.kill()
    process.join()


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"the process that built it was killed by {signal.Signals(-exitcode).name}"
    return f"the process that built it ended by itself with exit code {exitcode}"
