"""The worker's side of `contest.py`: requests on stdin, answers on what stdout was, one line of JSON each.

Needs nothing but Python, since every peer imports it from its own environment.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

Marks = list[tuple[float, int, int]]  # seconds since the first env step, opt steps, env steps


def answer(work: Callable[[dict[str, Any]], dict[str, Any]], *packages: str) -> None:
    """Answer until there are no more requests.

    Args:
        work: Makes an answer of a request.
        *packages: Whose versions belong to the result.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    versions = ", ".join([*map(_named, packages), f"Python {platform.python_version()}"])
    for line in sys.stdin:
        started = time.process_time()
        reply = work(json.loads(line))
        reply |= {"cpu_s": time.process_time() - started, "versions": versions}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def _named(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"
