"""Evaluation beside training: snapshots of the model go to an evaluator's process, scores come back later."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from outrider import processes
from outrider.announcing import announce
from outrider.config import Config, require
from outrider.core import Agent, AgentConfig, EnvSpec, Evaluator
from outrider.data import ENV_STEPS, Array, ModelInfo, Record
from outrider.errors import EvaluatorFailed
from outrider.evaluation import attended
from outrider.evaluator_process import PICKLING_ERRORS, EvaluatorOrder, EvaluatorProcess
from outrider.flags import InitGuard
from outrider.model_sync import model_channel
from outrider.run_state import random_states, set_random_states
from outrider.scoring import InlineScorer, Scored, Scorer
from outrider.seeding import Role, derive

log = logging.getLogger(__name__)

DUMP_S = 0.5  # a stuck evaluator has that long to write its stack
END_S = 0.5  # one that is no longer needed, to close its environments
LONGEST_LOOK_S = 5.0  # more between two looks is not counted: this process was stopped, and so was the evaluator


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Config):
    """Where the agent is evaluated.

    Attributes:
        process: In a process of its own, while training goes on, of a snapshot of the model. Otherwise, and always
            with ``mode: sync``, in the learner's process, which waits meanwhile.
        timeout_s: Seconds without a sign of life after which an evaluation counts as hung, and its process is
            killed; 0: no limit. Each step is a sign of life; for an own evaluator that has no attribute ``stop``
            there is none, so it is the limit of a whole evaluation.
        restarts: Failures of the process in a row after which another one is started; one more, and there are no
            more evaluations in this run.
        finish_timeout_s: Seconds that a run which has reached its end waits for evaluations that are still open.
    """

    process: bool = True
    timeout_s: float = 300.0
    restarts: int = 5
    finish_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        require(self.timeout_s >= 0, "timeout_s", "a number > 0, or 0 for no limit", self.timeout_s)
        require(self.restarts >= 0, "restarts", "an int >= 0", self.restarts)
        require(self.finish_timeout_s >= 0, "finish_timeout_s", "a number >= 0", self.finish_timeout_s)


@dataclass(frozen=True)
class PolicySource:
    """What builds the policy that is evaluated.

    Attributes:
        agent_config: Of the learner's agent.
        env_spec: The environment.
        seed: Of the run.
    """

    agent_config: AgentConfig
    env_spec: EnvSpec
    seed: int


@dataclass(frozen=True)
class Snapshot:
    """The model at one moment. `info` holds copies that nobody changes."""

    axes: Record
    n_opts: int
    info: ModelInfo

    @property
    def opt_steps(self) -> int:
        """Opt steps of the moment."""
        return int(cast(int, self.axes["opt_steps"]))

    @property
    def env_steps(self) -> int:
        """Env steps of the moment."""
        return int(cast(int, self.axes["env_steps"]))


class ProcessScorer:
    """Evaluates snapshots, one after the other, in a process that harms nothing when it fails or hangs.

    While an evaluation runs, one more waits; a newer one takes the place of that. An evaluation whose process fails
    is lost, and the next one has a new process.

    **Process**: the learner.
    **Owns** the evaluator's process, a model channel to it, copies of the models that run and wait, and a second
    agent, in which a snapshot is saved as any agent is.
    **Blocks**: never; in `close` for a second or two.
    **Closes** the process, in `close`.

    Args:
        config: Time-outs and budget.
        agent: The learner's agent.
        double: A second one; see :func:`build_double`.
        payload: A pickled :class:`EvaluatorOrder`.
        guard: Held while the evaluator builds its environments.
        log_file: Where failures are written.
        indispensable: Whether nothing but a score can end the run.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        agent: Agent,
        double: Agent,
        payload: bytes,
        guard: InitGuard | None,
        *,
        log_file: Path | None = None,
        indispensable: bool = False,
    ) -> None:
        self.config = config
        self.patience_s = config.finish_timeout_s
        self._agent, self._double = agent, double
        self._payload, self._guard = payload, guard
        self._log_file, self._indispensable = log_file, indispensable
        self._sender, self._receiver = model_channel()
        self._sender.bind(agent.model_info()[1])
        self._process: EvaluatorProcess | None = None
        self._running: Snapshot | None = None
        self._waiting: Snapshot | None = None
        self._given_up = False
        self._failures = self._in_a_row = self._replaced = 0
        self._hang = _Hang(config.timeout_s)

    @property
    def steps(self) -> int:
        """Signs of life of the present process."""
        return 0 if self._process is None else self._process.pulse.beats

    @property
    def pid(self) -> int | None:
        """Of the present process."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, so that the first evaluation finds it ready."""
        if self._process is None and not self._given_up:
            self._process = EvaluatorProcess(self._payload, self._receiver, self._guard)

    def evaluate(self, axes: Record) -> None:
        """Take a snapshot, to be evaluated now or after the evaluation that runs."""
        if self._given_up:
            return
        n_opts, info = self._agent.model_info()
        snapshot = Snapshot(axes, n_opts, {name: np.array(value) for name, value in info.items()})
        if self._waiting is not None:
            self._replaced += 1
        self._waiting = snapshot
        self._begin_next()

    def _begin_next(self) -> None:
        if self._running is not None or self._waiting is None or self._given_up:
            return
        try:
            self.start()
        except (OSError, EOFError) as error:  # such as no memory, no descriptors; the next attempt may do better
            self._waiting = None
            self._on_failure(EvaluatorFailed(f"{type(error).__name__}: {error}"))
            return
        assert self._process is not None
        self._running, self._waiting = self._waiting, None
        self._sender.publish(self._running.n_opts, self._running.info, self._running.env_steps)
        self._hang.begin()
        self._process.begin()

    def arrived(self) -> Scored | None:
        """The evaluation that has just ended; raises if the process failed once too often and nothing else counts.

        Raises:
            EvaluatorFailed: No score can end the run any more, and nothing else can.
        """
        if self._process is None:
            return None
        came = self._process.poll()
        if came is None:
            if self._running is not None:
                self._hang.look(self._process)
            return None
        if isinstance(came, EvaluatorFailed):
            hung_s = self._hang.killed_after_s
            self._on_failure(came if hung_s is None else EvaluatorFailed(exitcode=came.exitcode, hung_s=hung_s))
            return None
        snapshot, self._running, self._in_a_row = self._running, None, 0
        assert snapshot is not None, "nobody asked for an evaluation"
        self._begin_next()
        score, record = came
        return Scored(snapshot.axes, score, record, lambda: self._double_of(snapshot))

    def _double_of(self, snapshot: Snapshot) -> Agent:
        self._double.sync_model({**snapshot.info, ENV_STEPS: np.array(snapshot.env_steps, np.int64)})
        return cast(Agent, _Double(self._double, snapshot))

    def _on_failure(self, failure: EvaluatorFailed) -> None:
        """Say what happened; the next evaluation gets a new process, if the budget allows."""
        if self._process is not None:
            self._process.close()
            self._process = None
        self._failures += 1
        self._in_a_row += 1
        lost, self._running = self._running, None
        self._given_up = self._in_a_row > self.config.restarts
        told = "" if lost is None else f"; the evaluation at {lost.opt_steps} opt steps is lost"
        if self._given_up:
            told += f"; no more evaluations after {self._in_a_row} failures in a row (trainer.evaluation.restarts)"
        self._say(failure, f"{told}; training goes on")
        if self._given_up:
            self._waiting = None
            if self._indispensable:
                raise failure
        self._begin_next()

    def _say(self, failure: EvaluatorFailed, told: str) -> None:
        head, _, rest = str(failure).partition("\n")
        if self._log_file is not None:
            with contextlib.suppress(OSError), self._log_file.open("a", errors="backslashreplace") as file:
                file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {failure}\n")
                told += f"; see {self._log_file}"
        if self._failures == 1 or self._given_up:
            announce(f"{head}{told}" + (f"\n{rest}" if rest else ""))
        else:
            log.warning("%s%s", head, told)

    def open(self) -> Sequence[int]:
        """See :class:`outrider.scoring.Scorer`."""
        return [snapshot.opt_steps for snapshot in (self._running, self._waiting) if snapshot is not None]

    def statistics(self) -> Record:
        """How often the process failed, and how many evaluations were replaced by newer ones."""
        return {"async/evaluator_failures": self._failures, "async/evaluations_skipped": self._replaced}

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.end(END_S)
            self._process = None
        self._receiver.close()
        self._sender.close()


class _Hang:
    """Finds out that an evaluation shows no sign of life, has it write its stack, and then kills it."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s or math.inf
        self.begin()

    def begin(self) -> None:
        self.killed_after_s: float | None = None
        self._seen, self._still_s, self._looked_at, self._kill_at = -1, 0.0, time.monotonic(), math.inf

    def look(self, process: EvaluatorProcess) -> None:
        now, beats = time.monotonic(), process.pulse.beats
        self._still_s = self._still_s + min(now - self._looked_at, LONGEST_LOOK_S) if beats == self._seen else 0.0
        self._seen, self._looked_at = beats, now
        if now >= self._kill_at:
            self._kill_at = math.inf
            self.killed_after_s = self._limit_s
            process.kill_group()
        elif self._still_s >= self._limit_s and self.killed_after_s is None and self._kill_at == math.inf:
            self._kill_at = now + DUMP_S
            process.dump()


class _Double:
    """An agent with the parameters of a snapshot, and the opt steps that belong to them."""

    def __init__(self, agent: Agent, snapshot: Snapshot) -> None:
        self._agent, self._snapshot = agent, snapshot

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def model_info(self) -> tuple[int, ModelInfo]:
        """That of the snapshot."""
        return self._snapshot.n_opts, self._snapshot.info


def build_double(source: PolicySource, agent: Agent) -> Agent | None:
    """A second agent on the CPU that takes over parameters of the first with `sync_model`; None if that fails.

    The global random generators, which an own agent may seed when it is built, are left as they are.
    """
    states = random_states()
    try:
        double = source.agent_config.build(source.env_spec, device="cpu", seed=derive(source.seed, Role.LEARNER))
        changed = {name: _changed(np.asarray(value)) for name, value in agent.model_info()[1].items()}
        double.sync_model({**{name: value.copy() for name, value in changed.items()}, ENV_STEPS: np.array(0, np.int64)})
        _, taken = double.model_info()
        same = changed.keys() == taken.keys() and all(_equal(changed[name], taken[name]) for name in changed)
    except (KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        log.debug("no second agent: %s: %s", type(error).__name__, error)
        return None
    finally:
        set_random_states(states)
    return double if same else None


def _changed(array: Array) -> Array:
    """Values that a new agent does not have by itself, where they may be any."""
    return array + array.dtype.type(1) if array.dtype.kind == "f" else array.copy()


def _equal(a: Array, b: Array) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@contextlib.contextmanager
def scorer_for(
    config: EvaluationConfig,
    agent: Agent,
    source: PolicySource | None,
    evaluator: Evaluator,
    guard: InitGuard | None,
    stop: Callable[[], bool],
    *,
    log_file: Path | None = None,
    indispensable: bool = False,
) -> Iterator[Scorer]:
    """Evaluation in a process of its own where that is wanted and possible, else inline; says why it is not.

    Args:
        config: Whether and how.
        agent: The learner's agent.
        source: What builds its policy elsewhere; None: inline.
        evaluator: Scores the agent; a process gets a copy.
        guard: Held while environments for it are built.
        stop: Ends an inline evaluation; asked once per step.
        log_file: See :class:`ProcessScorer`.
        indispensable: See :class:`ProcessScorer`.
    """
    why_not, payload, double = "", b"", None
    if config.process and source is not None:
        order = EvaluatorOrder(
            source.agent_config, source.env_spec, evaluator, derive(source.seed, Role.EVALUATOR_POLICY), log_file
        )
        try:
            payload = processes.dumps(order)
        except PICKLING_ERRORS as error:
            why_not = f"{type(evaluator).__name__} cannot be pickled ({type(error).__name__}: {error})"
        else:
            double = build_double(source, agent)
            if double is None:
                why_not = f"another {type(agent).__name__} does not take over its model with sync_model"
    if why_not:
        announce(f"evaluations run in the learner, which waits for them: {why_not}")
    if double is None:
        with attended(evaluator, stop, guard):
            yield InlineScorer(evaluator, agent)
        return
    scorer = ProcessScorer(config, agent, double, payload, guard, log_file=log_file, indispensable=indispensable)
    with contextlib.closing(scorer):
        with contextlib.suppress(OSError, EOFError):  # the first evaluation tries again, and says what is wrong
            scorer.start()
        yield scorer
