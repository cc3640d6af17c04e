"""Output that nobody takes: it ends no run, and leaves no traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reader_optional() -> Iterator[None]:
    """Print in here. Where nobody reads (a closed pipe) or nothing fits (a full disk), the rest is dropped."""
    try:
        yield
        sys.stdout.flush()
    except OSError:
        drop_output()


def drop_output() -> None:
    """Send what is printed from now on, and what still waits to be, nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
