"""Every exception of the package.

::

    OutriderError
    ├── ConfigError            an impossible configuration (also a ValueError); the CLI exits with 2
    │   ├── UnknownKey         a key that there is not
    │   └── UnsupportedSpace   a space that cannot be stored, or not by this agent
    ├── EnvFailed              an environment could not be built or described; carries its traceback
    ├── ChannelError           misuse of a channel
    │   ├── Unbound            a channel end used before its layout is known
    │   ├── ChannelClosed      the other side is gone for good
    │   └── LayoutMismatch     both ends, or two actors, do not agree on the bytes
    ├── ResourceError          memory, disk or descriptors: needed against free; the CLI exits with 2
    ├── RunDirError            a run directory that is not empty, in use, or not one
    ├── CheckpointError        state that cannot be stored, or a checkpoint that is damaged
    ├── BadData                NaN or infinity in an observation, action or reward
    ├── BadUpdate              NaN or infinity in a loss or gradient
    ├── ActorFailed            an actor ended; carries its traceback, exit code or signal
    │   └── ActorHung          an actor showed no sign of life and was killed; says what it was doing
    ├── EvaluatorFailed        the evaluator's process ended or hung, and nothing else can end the run
    ├── Stalled                nothing moved for too long; says who waits for whom
    └── Interrupted            a signal asked the run to end; carries the exit code

All of them say *where*, *what was expected* and *what came*, and all of them can be pickled.
"""

from __future__ import annotations

import signal


class OutriderError(Exception):
    """Root of all exceptions that outrider raises on purpose."""


class ConfigError(OutriderError, ValueError):
    """A configuration that cannot work, found before any process starts.

    Args:
        key: Dotted key of the value, such as ``trainer.warmup_period``.
        expected: What would have been accepted, in words.
        got: What was given.
    """

    def __init__(self, key: str, expected: str, got: object) -> None:
        super().__init__(key, expected, got)
        self.key = key
        self.expected = expected
        self.got = got

    def __str__(self) -> str:
        return f"{self.key}: expected {self.expected}, got {self.got}"

    def below(self, prefix: str) -> ConfigError:
        """The same error with its key seen from one level further up."""
        return type(self)(f"{prefix}.{self.key}" if self.key else prefix, self.expected, self.got)


class UnknownKey(ConfigError):
    """A key that there is not."""


class UnsupportedSpace(ConfigError):
    """A space that cannot be stored as columns, or that an agent cannot handle."""


class EnvFailed(OutriderError):
    """An environment failed while it was built or described.

    Args:
        where: Which environment, and doing what.
        cause: One line that says what happened.
        traceback_text: The original traceback, empty if there is none (a crash in native code).
    """

    def __init__(self, where: str, cause: str, traceback_text: str = "") -> None:
        super().__init__(where, cause, traceback_text)
        self.where = where
        self.cause = cause
        self.traceback_text = traceback_text

    def __str__(self) -> str:
        text = f"{self.where}: {self.cause}"
        return f"{text}\n{self.traceback_text.rstrip()}" if self.traceback_text else text


class ChannelError(OutriderError):
    """Misuse of a channel."""


class Unbound(ChannelError):
    """A channel end was used before its layout was known; the message names the missing call."""


class ChannelClosed(ChannelError):
    """The other side of a channel is gone for good."""


class LayoutMismatch(ChannelError):
    """Two sides do not agree on the fields, shapes or dtypes of what they exchange."""


class ResourceError(OutriderError):
    """Memory, disk or descriptors do not suffice; the message says needed and free."""


class RunDirError(OutriderError):
    """A run directory that is not empty, is in use, or is not one."""


class CheckpointError(OutriderError):
    """State that cannot be stored, by its name in the state, or a checkpoint that is damaged; says what and where."""


class BadData(OutriderError):
    """A row with a value that is not finite.

    Args:
        actor_id: Index of the actor.
        column: Name of the column.
        env_steps: Env steps of that actor when it was found, at most a message after it happened.
        value: The row's value, as text.
    """

    def __init__(self, actor_id: int, column: str, env_steps: int, value: str) -> None:
        super().__init__(actor_id, column, env_steps, value)
        self.actor_id = actor_id
        self.column = column
        self.env_steps = env_steps
        self.value = value

    def __str__(self) -> str:
        return (
            f"actor {self.actor_id}, before env step {self.env_steps}: "
            f"expected finite values in {self.column!r}, got {self.value}"
        )


class BadUpdate(OutriderError):
    """Updates whose loss or gradient was not finite; each was left out, so the parameters are those before it.

    Args:
        agent: Class of the agent.
        opt_step: The opt step in which it was found, at most a record of the agent after it happened.
        skipped: Updates left out since the record before, one for each optimiser.
    """

    def __init__(self, agent: str, opt_step: int, skipped: int) -> None:
        super().__init__(agent, opt_step, skipped)
        self.agent = agent
        self.opt_step = opt_step
        self.skipped = skipped

    def __str__(self) -> str:
        return (
            f"{self.agent}, opt step {self.opt_step}: expected finite losses and gradients; "
            f"updates left out since the last record, as theirs were not: {self.skipped} (agent.bad_updates)"
        )


class ActorFailed(OutriderError):
    """An actor ended before it was asked to.

    Args:
        actor_id: Index of the actor.
        traceback_text: Traceback of the original exception, empty if the process just died.
        exitcode: Exit code as ``multiprocessing`` reports it (negative: killed by that signal).
    """

    def __init__(self, actor_id: int, traceback_text: str = "", exitcode: int | None = None) -> None:
        super().__init__(actor_id, traceback_text, exitcode)
        self.actor_id = actor_id
        self.traceback_text = traceback_text
        self.exitcode = exitcode

    def __str__(self) -> str:
        return _how_it_ended(f"actor {self.actor_id}", self.traceback_text, self.exitcode)


def _how_it_ended(who: str, traceback_text: str, exitcode: int | None) -> str:
    """What a process ended of: the last line of its traceback and then all of it, a signal, or an exit code."""
    if traceback_text:
        last = traceback_text.strip().splitlines()[-1]
        return f"{who} failed: {last}\n{traceback_text.rstrip()}"
    if exitcode is not None and exitcode < 0:
        try:
            name = signal.Signals(-exitcode).name
        except ValueError:
            name = f"signal {-exitcode}"
        return f"{who} was killed by {name}"
    return f"{who} ended by itself with exit code {exitcode}"


class ActorHung(ActorFailed):
    """An actor showed no sign of life for too long, and was killed.

    Args:
        actor_id: Index of the actor.
        stage: What it was doing, such as ``a step``.
        key: Name of the time-out, such as ``step_timeout_s``.
        limit_s: Its seconds.
        stack: Stacks of its threads at that time, as far as they are known.
    """

    def __init__(self, actor_id: int, stage: str, key: str, limit_s: float, stack: str = "") -> None:
        super().__init__(actor_id, stack, -signal.SIGKILL)
        self.args = actor_id, stage, key, limit_s, stack
        self.stage = stage
        self.key = key
        self.limit_s = limit_s

    def __str__(self) -> str:
        text = f"actor {self.actor_id} hung in {self.stage}: killed after {self.limit_s:g} s (actors.{self.key})"
        return f"{text}\n{self.traceback_text.rstrip()}" if self.traceback_text else text


class EvaluatorFailed(OutriderError):
    """The process of the evaluator ended before it was asked to, or hung and was killed.

    Args:
        traceback_text: Traceback of the original exception, empty if the process just died.
        exitcode: Exit code as ``multiprocessing`` reports it (negative: killed by that signal).
        hung_s: Seconds without a sign of life, if it was killed for that.
    """

    def __init__(self, traceback_text: str = "", exitcode: int | None = None, hung_s: float | None = None) -> None:
        super().__init__(traceback_text, exitcode, hung_s)
        self.traceback_text = traceback_text
        self.exitcode = exitcode
        self.hung_s = hung_s

    def __str__(self) -> str:
        if self.hung_s is not None:
            return f"the evaluator hung: killed after {self.hung_s:g} s (trainer.evaluation.timeout_s)"
        return _how_it_ended("the evaluator", self.traceback_text, self.exitcode)


class Stalled(OutriderError):
    """Nothing moved anywhere for too long.

    Args:
        timeout_s: For how many seconds.
        learner: What the learner was doing.
        actors: A line on what each actor was doing.
    """

    def __init__(self, timeout_s: float, learner: str, actors: tuple[str, ...] = ()) -> None:
        super().__init__(timeout_s, learner, actors)
        self.timeout_s = timeout_s
        self.learner = learner
        self.actors = actors

    def __str__(self) -> str:
        head = f"no progress for {self.timeout_s:g} s (trainer.stall_timeout_s); the learner: {self.learner}"
        return "\n".join([head, *self.actors])


class Interrupted(OutriderError):
    """A signal asked the run to end; everything was flushed and saved before this was raised.

    Args:
        signum: The signal, such as ``signal.SIGINT``.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """Exit code a shell expects: 128 + signal."""
        return 128 + self.signum

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.signum).name}"
