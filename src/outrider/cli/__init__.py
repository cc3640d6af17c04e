"""The command ``outrider``: train, resume, eval, presets, doctor. A thin layer over what Python offers.

An error is one line on stderr, ``outrider: error: <dotted key>: expected ..., got ...``. Exit codes: 0 done, 2 refused
before anything started, 1 failed while running, 128 + signal when a signal ended it (130 for Ctrl-C).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from outrider.cli import doctor, evaluate, resume, train
from outrider.cli import presets as presets_verb
from outrider.cli.printing import drop_output
from outrider.config import did_you_mean
from outrider.errors import (
    CheckpointError,
    ConfigError,
    Interrupted,
    OutriderError,
    ResourceError,
    RunDirError,
)
from outrider.interrupts import Interrupts
from outrider.version import __version__

VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": train.main,
    "resume": resume.main,
    "eval": evaluate.main,
    "presets": presets_verb.main,
    "doctor": doctor.main,
}

HELP = """\
usage: outrider VERB ...

Asynchronous off-policy reinforcement learning: many actor processes, one learner that never waits.

verbs:
  train PRESET_OR_YAML [--dotted.key=value ...]   train; writes a run directory
  resume RUN_DIR [--dotted.key=value ...]         go on with a run from its newest checkpoint
  eval RUN_DIR [--episodes N] [--model NAME]      play with what a run has learned
  presets [NAME]                                  list the presets, or print one
  doctor [PRESET_OR_YAML] [--dotted.key=value]    look at this machine, and try an environment

options:
  --help       this text; also: outrider VERB --help
  --version    the version

examples:
  outrider train cartpole-dqn
  outrider train sac --env.id=MountainCarContinuous-v0 --actors.n_actors=4
  outrider resume runs/CartPole-v1-dqn-20260102-030405 --trainer.max_opts=200000
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments after the command's name; None: those of the process.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with Interrupts():
            return _dispatch(arguments)
    except (CheckpointError, ConfigError, ResourceError, RunDirError) as error:
        return _fail(" ".join(str(error).split()), 2)
    except Interrupted as error:
        print(f"outrider: {error}", file=sys.stderr)
        return error.exit_code
    except OutriderError as error:  # says all itself, the traceback of a failed actor included
        return _fail(str(error), 1)
    except SystemExit as done:  # argparse, after it has printed --help
        return int(done.code or 0)
    except KeyboardInterrupt:  # in the moments before and after that
        print("outrider: stopped by SIGINT", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `outrider presets | head`
        drop_output()
        return 1


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if arguments[0] == "--version":
        print(f"outrider {__version__}")
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        raise ConfigError("verb", f"one of {', '.join(VERBS)}", f"{verb!r}{did_you_mean(verb, VERBS)}")
    return VERBS[verb](rest)


def _fail(message: str, code: int) -> int:
    print(f"outrider: error: {message}", file=sys.stderr)
    return code
