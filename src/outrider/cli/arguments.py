"""Options of the verbs: argparse, with errors in the one form that all errors of outrider have."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import NoReturn

from outrider.config import require
from outrider.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """An argument parser that raises :class:`ConfigError` instead of printing its usage and leaving."""

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Say what argparse found in our words: key, expected, got."""
        if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
            raise ConfigError(self.prog, missing[1], "nothing")
        if unknown := re.fullmatch(r"unrecognized arguments: (.*)", message):
            if not unknown[1].startswith("--"):
                meant = f" (did you mean --{unknown[1]}?)" if re.match(r"[a-z_]+[\w.]*=", unknown[1]) else ""
                raise ConfigError(self.prog, "no more arguments", unknown[1] + meant)
            options = [o for action in self._actions for o in action.option_strings if o.startswith("--")]
            raise ConfigError(self.prog, f"options among {', '.join(options)}", unknown[1])
        if value := re.fullmatch(r"argument (\S+?)(?:/\S+)?: expected (.*)", message):
            raise ConfigError(value[1], value[2], "nothing")
        raise ConfigError(self.prog, "arguments as --help has them", message)


def integer(text: str, key: str, least: int) -> int:
    """The integer that an option was given.

    Raises:
        ConfigError: It is no integer, or less than the least possible.
    """
    require(bool(re.fullmatch(r"[0-9_]+", text)) and int(text) >= least, key, f"an integer >= {least}", repr(text))
    return int(text)


def import_from_here() -> None:
    """Let own classes beside the user, ``my_env:MyEnvConfig``, be imported as ``python -m`` would let them.

    Last in the path, so that a file here never hides an installed package.
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
