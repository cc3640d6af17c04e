from __future__ import annotations

import pickle
import re
import signal

import pytest

from outrider import errors
from outrider.errors import (
    ActorFailed,
    ActorHung,
    BadData,
    BadUpdate,
    ChannelClosed,
    ChannelError,
    CheckpointError,
    ConfigError,
    EnvFailed,
    EvaluatorFailed,
    Interrupted,
    LayoutMismatch,
    OutriderError,
    ResourceError,
    RunDirError,
    Stalled,
    Unbound,
    UnknownKey,
    UnsupportedSpace,
)

EXAMPLES: list[OutriderError] = [
    OutriderError("what happened"),
    ConfigError("trainer.max_opts", "an integer", "many"),
    UnknownKey("agent.gama", "one of gamma, lr", "an unknown key"),
    UnsupportedSpace("env.action_space", "a Box", "Discrete(2)"),
    EnvFailed("environment E", "ValueError: no", "Traceback ...\nValueError: no\n"),
    EvaluatorFailed("Traceback ...\nValueError: no\n", 1),
    EvaluatorFailed("", -9, 3.0),
    ChannelError("what happened"),
    Unbound("call bind"),
    ChannelClosed("it was closed"),
    LayoutMismatch("column 'a' differs"),
    ResourceError("needs 2 GB, 1 GB are free"),
    RunDirError("expected an empty one"),
    CheckpointError("agent.x: expected a tensor, got a lock"),
    BadData(2, "reward", 640, "nan"),
    BadUpdate("Dqn", 500, 3),
    Stalled(300.0, "an opt step", ("actor 0: running",)),
    ActorHung(2, "a step", "step_timeout_s", 60.0, "File x"),
    ActorFailed(3, "Traceback ...\nValueError: no\n", 1),
    ActorFailed(3, exitcode=-9),
    ActorFailed(3, exitcode=0),
    Interrupted(signal.SIGTERM),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=repr)
def test_every_error_comes_back_from_a_pickle_as_it_was(error: OutriderError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error) != ""
    assert vars(again) == vars(error)


def test_no_error_is_missing_here_or_in_the_tree_of_the_docstring() -> None:
    classes = {c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, OutriderError)}
    assert {type(error) for error in EXAMPLES} == classes
    assert errors.__doc__ is not None
    assert set(re.findall(r"^\s*[│├└─ ]*([A-Z]\w+)", errors.__doc__.split("::")[1], re.MULTILINE)) >= {
        c.__name__ for c in classes
    }


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConfigError("trainer.max_opts", "an integer", "many"), "trainer.max_opts: expected an integer, got many"),
        (ConfigError("max_opts", "an integer", 1).below("trainer"), "trainer.max_opts: expected an integer, got 1"),
        (ActorFailed(3, "Traceback\nValueError: no\n"), "actor 3 failed: ValueError: no\nTraceback\nValueError: no"),
        (ActorFailed(3, exitcode=-11), "actor 3 was killed by SIGSEGV"),
        (ActorFailed(3, exitcode=-99), "actor 3 was killed by signal 99"),
        (ActorFailed(3, exitcode=0), "actor 3 ended by itself with exit code 0"),
        (EnvFailed("env E", "it crashed"), "env E: it crashed"),
        (Interrupted(signal.SIGINT), "stopped by SIGINT"),
    ],
)
def test_errors_say_where_what_was_expected_and_what_came(error: OutriderError, text: str) -> None:
    assert str(error) == text


def test_a_signal_knows_the_exit_code_a_shell_expects() -> None:
    assert (Interrupted(signal.SIGINT).exit_code, Interrupted(signal.SIGTERM).exit_code) == (130, 143)
