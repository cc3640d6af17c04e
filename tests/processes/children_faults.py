"""What fails on purpose inside actors. They import this by its plain name, and so it imports little."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core import EnvSpec
from outrider.data import Array, Items, Obs, Step
from outrider.envs.gymnasium import GymEnvConfig
from outrider.sampling import SimpleStepProcessor, SimpleStepProcessorConfig
from outrider.testing import FailingEnv, FakeAgent, FakeAgentConfig


def actor_id() -> int | None:
    """Of the actor whose process or thread this is; None elsewhere, as where an environment is described."""
    for name in (multiprocessing.current_process().name, threading.current_thread().name):
        if name.startswith(("outrider: actor ", "outrider-actor-")):
            return int(name.replace("-", " ").split()[-1])
    return None


class FaultEnv(FailingEnv):
    """A :class:`FailingEnv` that fails in actors only, in more ways, and notes when.

    Args:
        where: The call that fails.
        how: As there; or ``_exit`` (without a word, exit code 0), ``stop`` (SIGSTOP), ``gil`` (sleeps in C with the
            interpreter's lock held), ``text`` (raises much text that is no text), ``late`` (raises a second later).
        at: The call that fails, counted from 0.
        actor: The actor that fails; None: all.
        folder: Where to note the time of the failure, and the pids of the actors and of their children.
        child: Start a ``sleep`` that nobody ends.
    """

    def __init__(
        self,
        where: Any = "step",
        how: Any = "raise",
        at: int = 0,
        actor: int | None = None,
        folder: str = "",
        child: bool = False,
    ) -> None:
        self.actor, self.folder = actor, folder
        me = actor_id()
        if me is not None and folder:
            note(folder, f"actor-{me}", os.getpid())
            if child:
                note(folder, f"child-{me}", subprocess.Popen(["sleep", "600"], stderr=subprocess.DEVNULL).pid)
        super().__init__(where, how, at)

    def _fail_in(self, where: str) -> None:
        me = actor_id()
        if where != self.where or me is None or self.actor not in (None, me):
            return
        if self.at == 0 and self.folder:
            note(self.folder, "failed", time.monotonic())
        if self.at == 0 and self.how in MORE:
            MORE[self.how]()
        else:
            super()._fail_in(where)


def _text() -> None:
    raise ValueError("the end of ", "é\udc80" * 100_000, " is as asked")


def _late() -> None:
    time.sleep(1.0)
    raise ValueError("as asked")


MORE = {
    "late": _late,
    "_exit": lambda: os._exit(0),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "gil": lambda: ctypes.PyDLL(None).sleep(600),
    "text": _text,
}


def note(folder: str, name: str, value: float) -> None:
    """Write a number into a file, whole or not at all."""
    path = Path(folder, name)
    path.with_suffix(".tmp").write_text(repr(value))
    path.with_suffix(".tmp").rename(path)


def fault_env(**kwargs: Any) -> GymEnvConfig:
    """Config of a :class:`FaultEnv`."""
    return GymEnvConfig(id="children_faults:FaultEnv", kwargs=kwargs)


@dataclass(frozen=True, kw_only=True)
class FaultAgentConfig(FakeAgentConfig):
    """A fake agent that takes its time, or fails.

    Attributes:
        opt_s: Seconds that an opt step takes.
        fail_at: The opt step that raises, counted from 1; 0: none.
        policy: Actors' policies raise.
    """

    opt_s: float = 0.0
    fail_at: int = 0
    policy: bool = False

    def build(self, env_spec: EnvSpec, *, device: str = "cpu", seed: int = 0) -> FaultAgent:
        agent = FaultAgent(env_spec.action_space, self.n_weights, self.batch_size, seed)
        agent.config = self
        return agent


class FaultAgent(FakeAgent):
    config: FaultAgentConfig

    def sample(self, obs: Obs) -> Array:
        if self.config.policy and actor_id() is not None:
            raise ZeroDivisionError("in the policy")
        return super().sample(obs)

    def opt(self, buffer: Any) -> None:
        if self.n_opts + 1 == self.config.fail_at:
            raise ZeroDivisionError("in the agent")
        time.sleep(self.config.opt_s)
        super().opt(buffer)


@dataclass(frozen=True, kw_only=True)
class FaultStepProcessorConfig(SimpleStepProcessorConfig):
    """Step processors that raise."""

    def build(self, env_spec: EnvSpec, n_envs: int) -> SimpleStepProcessor:
        return FaultStepProcessor(self.layout(env_spec), n_envs)


class FaultStepProcessor(SimpleStepProcessor):
    def process(self, step: Step) -> Items | None:
        raise ZeroDivisionError("in the step processor")


class StuckConfig(FaultAgentConfig):
    """Policies that ignore the stop flag until :data:`released`."""

    def build(self, env_spec: EnvSpec, *, device: str = "cpu", seed: int = 0) -> FaultAgent:
        agent = super().build(env_spec, device=device, seed=seed)
        if actor_id() is not None:
            agent.sample = lambda obs: released.wait(30) and FaultAgent.sample(agent, obs)  # type: ignore
        return agent


released = threading.Event()
