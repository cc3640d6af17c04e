"""Tries the parts of a run in a short-lived process: whatever crashes or hangs there is a finding, nobody's death."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import psutil
from gymnasium.utils.env_checker import check_env

from outrider.core import Env, EnvConfig, EnvSpec
from outrider.data import Array, Obs, leaves
from outrider.processes import dumps, kill_group, lead_group, loads, start_process
from outrider.testing.contracts import check_env_config
from outrider.testing.fakes import FakePolicy

TRIAL_STEPS = 500
"""Vector steps with random actions, as long as they take no more than half the time."""

Kind = Literal["stage", "problem", "warning", "fact"]
Tell = Callable[[Kind, str], None]
Check = tuple[str, Callable[[], object]]
"""What is checked, in words, and a function that raises if it is not well."""


@dataclass
class Trial:
    """What was found.

    Attributes:
        problems: What keeps a run from working, or makes it train on nonsense.
        warnings: What may be as it is meant.
        facts: Figures.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)


def try_parts(
    env_config: EnvConfig, env_spec: EnvSpec, checks: Sequence[Check] = (), *, n_envs: int = 1, timeout_s: float = 60.0
) -> Trial:
    """Build environments, check and step them with random actions, then run further checks, in a process of its own.

    Args:
        env_config: The environments.
        env_spec: What it says of itself.
        checks: What else to check; travel by cloudpickle.
        n_envs: Environments stepped together.
        timeout_s: Seconds for each stage, after which the process is killed.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with receiver, tempfile.NamedTemporaryFile() as stacks:
        with sender:
            data = dumps((env_config, env_spec, list(checks), n_envs, timeout_s))
            process = start_process(_child, (sender, data, stacks.name), "outrider: doctor")
        assert process.pid is not None
        try:
            return _listen(receiver, process, Path(stacks.name), timeout_s)
        finally:
            kill_group(process.pid)
            if process.is_alive():  # its group may not exist yet
                process.kill()
            process.join()
            process.close()


def _listen(receiver: Connection, process: BaseProcess, stacks: Path, timeout_s: float) -> Trial:
    """Take what the process finds, until it ends or says nothing for that long; then say where it was."""
    assert process.pid is not None
    trial, stage = Trial(), "start"
    lists = {"problem": trial.problems, "warning": trial.warnings, "fact": trial.facts}
    how = ""
    try:
        while receiver.poll(timeout_s):
            kind, text = loads(receiver.recv_bytes())
            if kind == "stage":
                stage = text
            else:
                lists[kind].append(text)
        how = f"not done within {timeout_s:g} s"
        os.kill(process.pid, signal.SIGUSR1)
        process.join(0.5)  # until it has written where it is
    except (EOFError, OSError):  # it is gone, maybe in the middle of a word
        process.join(timeout_s)
        if process.exitcode != 0 or stage != "end":
            how = f"the process {_end(process.exitcode)}"
    if how:
        trial.problems.append(f"{stage}: {how}{_innermost(stacks.read_text(errors='replace'))}")
    return trial


def _end(exitcode: int | None) -> str:
    if exitcode is None:
        return "did not end"
    return f"was killed by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"ended with exit code {exitcode}"


def _innermost(stack: str) -> str:
    """The innermost line of a stack dump that is not of Python itself, in brackets; empty if there is none."""
    found = [line.strip() for line in stack.splitlines() if line.lstrip().startswith("File ")]
    return f" ({found[0]})" if found else ""


def _child(conn: Connection, data: bytes, stacks: str) -> None:
    lead_group()
    with open(stacks, "w") as file, warnings.catch_warnings():
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file=file)
        env_config, env_spec, checks, n_envs, timeout_s = loads(data)

        def tell(kind: Kind, text: str) -> None:
            conn.send_bytes(dumps((kind, text)))

        with _stage("Gymnasium's check_env", tell):
            _check_single(env_config, tell)
        with _stage("arrays", tell):
            _check_arrays(env_config, tell)
        with _stage("random actions", tell):
            _step(env_config, env_spec, n_envs, timeout_s / 2, tell)
        if type(env_config).__module__.split(".")[0] != "outrider" or not _is_single(env_config):
            checks.insert(0, ("contract of the environment", lambda: check_env_config(env_config)))
        for name, check in checks:
            with _stage(name, tell):
                check()
        tell("stage", "end")


def _is_single(env_config: EnvConfig) -> bool:
    return hasattr(env_config, "single")


@contextmanager
def _stage(name: str, tell: Tell) -> Iterator[None]:
    """Tell what is done and what comes of it: each warning once, and the exception that ended it."""
    tell("stage", name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except Exception as error:  # noqa: BLE001  whatever an environment raises is the finding
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{name}: {type(error).__name__}: {_one_line(error)} ({place.filename}, line {place.lineno})"
            tell("problem", text)
    for text in dict.fromkeys(_plain(warning.message) for warning in caught):
        tell("warning", text)


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def _plain(message: object) -> str:
    """A warning of Gymnasium's without its colours and its prefix."""
    return _one_line(message).removeprefix("\x1b[33mWARN: ").removesuffix("\x1b[0m")


def _check_single(env_config: Any, tell: Tell) -> None:
    """Gymnasium's own checks, on what it wraps where that has the same spaces."""
    env = env_config.single() if _is_single(env_config) else None
    if env is None:
        tell("fact", "a vector environment: Gymnasium's check_env is for single ones")
        return
    try:
        bare = env.unwrapped
        same = (bare.observation_space, bare.action_space) == (env.observation_space, env.action_space)
        check_env(bare if same else env, skip_render_check=True)
    finally:
        env.close()


def _check_arrays(env_config: Any, tell: Tell) -> None:
    """Observations have the dtype of their space; whether one array is used again and again."""
    env = env_config.single() if _is_single(env_config) else None
    if env is None:
        return
    try:
        first, _ = env.reset(seed=0)
        env.action_space.seed(0)
        second = env.step(env.action_space.sample())[0]
    finally:
        env.close()
    for space, obs, name in _parts(env.observation_space, first, "obs"):
        dtype = np.asarray(obs).dtype
        if space.dtype is not None and dtype != space.dtype and not np.can_cast(dtype, space.dtype, "same_kind"):
            tell("problem", f"{name} has dtype {dtype}, its space says {space.dtype}: values are cast")
        elif space.dtype is not None and dtype != space.dtype:
            tell("warning", f"{name} has dtype {dtype}, its space says {space.dtype}: values are cast")
    firsts, seconds = (_parts(env.observation_space, obs, "obs") for obs in (first, second))
    again = [
        name
        for (_, a, name), (_, b, _) in zip(firsts, seconds, strict=True)
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.shares_memory(a, b)
    ]
    if again:
        tell("fact", f"returns the same array every time ({', '.join(again)}); actors copy what they keep")


def _parts(space: gymnasium.Space[Any], obs: Any, name: str) -> list[tuple[gymnasium.Space[Any], Any, str]]:
    if isinstance(space, gymnasium.spaces.Dict):
        return [part for key, sub in space.spaces.items() for part in _parts(sub, obs[key], f"{name}.{key}")]
    return [(space, obs, name)]


def _step(env_config: EnvConfig, spec: EnvSpec, n_envs: int, limit_s: float, tell: Tell) -> None:
    """Random actions as an actor takes steps: what is not finite, speed, memory, episodes."""
    process = psutil.Process()
    before = process.memory_full_info().uss
    env = env_config.build(0, n_envs)
    try:
        health = _Health(spec, n_envs)
        begin = time.perf_counter()
        _play(env, spec, health, begin + limit_s)
        seconds = time.perf_counter() - begin
        memory = process.memory_full_info().uss - before
        health.tell(seconds, memory, tell)
    finally:
        env.close()


def _play(env: Env, spec: EnvSpec, health: _Health, deadline: float) -> None:
    policy = FakePolicy(spec.action_space)
    obs = env.reset()
    health.look(obs)
    for _ in range(TRIAL_STEPS):
        step = env.step(policy.sample(obs))
        health.look(step.obs)
        health.count(step.reward, step.terminated | step.truncated, step.valid)
        obs = step.init_obs
        if time.perf_counter() > deadline:
            break


class _Health:
    """What random actions show."""

    def __init__(self, spec: EnvSpec, n_envs: int) -> None:
        self.spec, self.n_envs = spec, n_envs
        self.bad: dict[str, str] = {}
        self.lengths: list[int] = []
        self.open = np.zeros(n_envs, np.int64)
        self.steps = 0
        self.rewards = (np.inf, -np.inf)

    def look(self, obs: Obs) -> None:
        for name, part in leaves(obs, "obs"):
            self._finite(name, part)

    def count(self, reward: Array, ended: Array, valid: Array) -> None:
        self._finite("the reward", reward)
        if valid.any():
            least, most = float(reward[valid].min()), float(reward[valid].max())
            self.rewards = min(self.rewards[0], least), max(self.rewards[1], most)
        self.steps += int(valid.sum())
        self.open += valid
        self.lengths += self.open[ended].tolist()
        self.open[ended] = 0

    def _finite(self, name: str, values: Array) -> None:
        if values.dtype.kind == "f" and name not in self.bad and not np.isfinite(values).all():
            self.bad[name] = f"{name} is {values[~np.isfinite(values)][0]} after {self.steps} env steps"

    def tell(self, seconds: float, memory: int, tell: Tell) -> None:
        for text in self.bad.values():
            tell("problem", text)
        tell(
            "fact",
            f"{self.steps / seconds:,.0f} env steps/s in one process with "
            f"{self.n_envs} environment{'s' * (self.n_envs > 1)}",
        )
        tell("fact", f"{max(0, memory) / 1e6:.1f} MB of memory per actor for its environments")
        low, high = self.rewards
        tell("fact", f"rewards from {low:g} to {high:g}")
        if self.lengths:
            lengths = np.array(self.lengths)
            mean, least, most = lengths.mean(), lengths.min(), lengths.max()
            tell("fact", f"{len(lengths)} episodes of {least} to {most} steps, {mean:.1f} in the mean")
        elif self.spec.max_episode_steps is None:
            tell("warning", f"no episode ended in {self.steps} env steps, and no limit is known: env.max_episode_steps")
        else:
            tell("fact", f"no episode ended in {self.steps} env steps; the limit is {self.spec.max_episode_steps}")
