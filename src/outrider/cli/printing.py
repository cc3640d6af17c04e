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


def aligned(table: str) -> str:
    """A table of cells with commas between them, each below the end of its heading. The headings stay as they are."""
    head, *lines = table.splitlines()
    rows = [line.split(", ") for line in (head, *lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [", ".join(map(str.rjust, row, widths)) for row in rows[1:]]
    return "\n".join((head, *padded))


def drop_output() -> None:
    """Send what is printed from now on, and what still waits to be, nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
