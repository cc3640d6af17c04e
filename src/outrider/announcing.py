"""What is said to whoever looks at the screen: to the log, and to stderr."""

from __future__ import annotations

import contextlib
import logging
import sys

log = logging.getLogger(__name__)


def announce(message: str, level: int = logging.ERROR) -> None:
    """Say what nobody should overlook, to the log and to stderr: that is where one looks who configured no log.

    Args:
        message: One line, or more.
        level: Its level in the log.
    """
    if log.hasHandlers():
        log.log(level, message)
    with contextlib.suppress(OSError, ValueError):
        print(f"outrider: {message}", file=sys.stderr, flush=True)
