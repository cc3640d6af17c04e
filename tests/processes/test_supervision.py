"""Actors that end or hang are replaced, within a budget, and nothing that they had sent is lost."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from children_faults import FaultAgentConfig, actor_id, fault_env, note
from runs_with_faults import noted, nothing_left, train

from outrider.actor import ActorState
from outrider.actor_manager import ActorManager
from outrider.envs.gymnasium import GymEnvConfig
from outrider.errors import ActorFailed, Stalled
from outrider.process_scorer import EvaluationConfig
from outrider.recording import MemoryRecorder
from outrider.seeding import env_seeds
from outrider.testing import FailingEnv

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> None:
    fault_env().spec()


class OnceEnv(FailingEnv):
    """Fails in the first `times` incarnations of one actor; notes its process and the seeds it gets.

    Args:
        folder: Where to note.
        where: As there.
        how: As there; or ``stop``: SIGSTOP.
        at: As there.
        times: Incarnations that fail.
        actor: The actor that fails.
    """

    def __init__(
        self, folder: str, where: Any = "step", how: Any = "raise", at: int = 0, times: int = 1, actor: int = 0
    ) -> None:
        self.folder, self.me = Path(folder), actor_id()
        life = len(list(self.folder.glob(f"life-{self.me}-*")))
        if self.me is not None:
            note(folder, f"life-{self.me}-{life}", os.getpid())
        self.life = life
        super().__init__(where if self.me == actor and life < times else "never", how, at)  # type: ignore[arg-type]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None and self.me is not None:
            note(str(self.folder), f"seed-{self.me}-{self.life}", seed)
        return super().reset(seed=seed, options=options)

    def _fail_in(self, where: str) -> None:
        if where == self.where and self.at == 0 and self.how == "stop":  # type: ignore[comparison-overlap]
            os.kill(os.getpid(), signal.SIGSTOP)
        super()._fail_in(where)


def once(folder: Path, **kwargs: Any) -> GymEnvConfig:
    return GymEnvConfig(id=OnceEnv, kwargs={"folder": str(folder), **kwargs})


def train_until(condition: Any, env: Any, recorder: Any = None, **options: Any) -> Any:
    """Train until `condition(stats of the actors)` holds, 30 s at most."""
    kept: list[ActorManager] = []
    run = ActorManager.run

    def run_and_keep(self: ActorManager, guard: Any) -> None:
        run(self, guard)
        kept.append(self)

    def watch() -> None:
        met = False
        while not met and not ended.wait(0.02) and not (kept and kept[0].stop.is_set()):
            met = bool(kept) and condition(kept[0].stats())
        held.append(met)
        for actors in kept:
            actors.stop.set()

    ended, held = threading.Event(), list[bool]()
    thread = threading.Thread(target=watch)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActorManager, "run", run_and_keep)
        try:
            result = train(env, recorder, **options)
        finally:
            ended.set()
            thread.join()
            kept.clear()
    assert held == [True]
    return result


@pytest.mark.parametrize(
    ("where", "how", "limit", "text"),
    [
        ("init", "hang", {"build_timeout_s": 4.0}, "actor 0 hung in building its environments: killed after 4 s (a"),
        ("reset", "hang", {"reset_timeout_s": 1.0}, "actor 0 hung in the first reset: killed after 1 s (actors.reset"),
        ("step", "hang", {"step_timeout_s": 1.0, "reset_timeout_s": 0.5}, "actor 0 hung in a step: killed after 1 s"),
        ("step", "stop", {"step_timeout_s": 1.0, "reset_timeout_s": 0.5}, "actor 0 hung in a step: killed after 1 s"),
    ],
)
def test_an_actor_that_hangs_shows_its_stack_and_is_replaced(
    where: str, how: str, limit: dict[str, float], text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with nothing_left():
        result = train_until(
            restarted_and_running(1),
            once(tmp_path, where=where, how=how),
            logs=tmp_path,
            actors={"n_buffer": 8, **limit},
        )
    assert result.actor_stats[0].restarts == 1
    assert [r.getMessage()[: len(text)] for r in caplog.records] == [text]
    if how == "hang":
        written = (tmp_path / "actor-0.log").read_text()
        assert "(most recent call first)" in written
        assert f"in {'__init__' if where == 'init' else where}\n" in written
        assert text in written


def test_an_actor_that_fails_too_often_ends_the_run_with_its_first_failure(tmp_path: Path) -> None:
    env = once(tmp_path, times=9, at=60)
    with nothing_left():
        with pytest.raises(ActorFailed, match="ValueError: as asked") as caught:
            train(env, actors={"n_buffer": 8, "restarts": 2})
        del caught
    assert len(list(tmp_path.glob("life-0-*"))) == 3
    assert len(list(tmp_path.glob("life-1-*"))) == 1


def test_all_actors_failing_before_any_message_end_the_run_at_once(tmp_path: Path) -> None:
    with nothing_left():
        start = time.monotonic()
        with pytest.raises(ActorFailed, match=r"actor \d failed: ValueError: as asked") as caught:
            train(fault_env(where="reset", folder=str(tmp_path)), n_actors=3)
        assert time.monotonic() - start < 10.0
        del caught


def test_one_actor_failing_before_its_first_message_is_replaced_while_the_others_work(tmp_path: Path) -> None:
    result = train_until(restarted_and_running(2), once(tmp_path, where="reset", times=2))
    assert result.actor_stats[0].restarts == 2


def test_an_actor_that_waits_for_a_learner_is_not_taken_for_stuck(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {"step_timeout_s": 1.0, "reset_timeout_s": 1.0, "build_timeout_s": 10.0}
    slow = FaultAgentConfig(opt_s=2.5)
    result = train(
        once(tmp_path, times=0), agent=slow, max_time_s=6.0, samples_per_insert=1000.0, actors={"n_buffer": 8, **limits}
    )
    assert all(s.wait_s > 1.0 for s in result.actor_stats)
    assert caplog.records == []


@dataclass(frozen=True, kw_only=True)
class HoldingConfig(FaultAgentConfig):
    """An agent whose 50th opt step takes long, asleep or computing; 0: not at all."""

    asleep_s: float = 0.0
    computing_s: float = 0.0

    def build(self, env_spec: Any, *, device: str = "cpu", seed: int = 0) -> Any:
        agent = super().build(env_spec, device=device, seed=seed)
        opt = agent.opt

        def hold(buffer: Any) -> None:
            if agent.n_opts == 50:
                time.sleep(self.asleep_s)
                end = time.monotonic() + self.computing_s
                while time.monotonic() < end:
                    pass
            opt(buffer)

        agent.opt = hold  # type: ignore[method-assign]
        return agent


INLINE = EvaluationConfig(process=False)


class LongEvaluator:
    """Plays for some seconds, and asks whether to stop, or does not."""

    stop: Any = None

    def __init__(self, seconds: float, asks: bool = True) -> None:
        self.seconds, self.asks = seconds, asks

    def evaluate(self, agent: Any) -> tuple[float, dict[str, Any]]:
        end = time.monotonic() + self.seconds
        while time.monotonic() < end and not (self.asks and self.stop()):
            time.sleep(0.01)
        return 0.0, {}

    def close(self) -> None:
        pass


def stalled(env: Any, **options: Any) -> Stalled:
    with nothing_left():
        with pytest.raises(Stalled) as caught:
            train(env, stall_timeout_s=1.0, **options)
        error = caught.value.with_traceback(None)
        error.__context__ = None
        del caught
    return error


def test_a_run_whose_actors_are_all_stuck_ends_and_says_who_waits_for_whom(tmp_path: Path) -> None:
    actors = {"n_buffer": 8, "step_timeout_s": 0.0, "stop_timeout_s": 0.5}
    error = stalled(fault_env(how="hang", at=100), actors=actors, samples_per_insert=1.0)
    first, *actor_lines = str(error).splitlines()
    assert first == "no progress for 1 s (trainer.stall_timeout_s); the learner: waiting for the actors"
    for i, line in enumerate(actor_lines):
        assert re.fullmatch(rf"actor {i}: running, \d+ env steps, [\d.]+ samples/s, its ring 0% full", line)
    assert len(actor_lines) == 2


def test_a_run_whose_learner_is_stuck_ends_though_its_main_thread_is_blocked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    start = time.monotonic()
    error = stalled(once(tmp_path, times=0), agent=HoldingConfig(asleep_s=600.0))
    assert time.monotonic() - start < 30.0
    assert error.learner == "an opt step"
    assert [line.split(",")[0] for line in error.actors] == ["actor 0: waiting for room", "actor 1: waiting for room"]
    assert all(line.endswith("its ring 100% full") for line in error.actors)
    assert "in hold\n" in capfd.readouterr().err, "the learner's stack"


def test_a_stuck_evaluation_ends_the_run(tmp_path: Path) -> None:
    evaluator = LongEvaluator(600.0, asks=False)
    error = stalled(once(tmp_path, times=0), evaluator=evaluator, evaluation=INLINE, eval_interval=10)
    assert error.learner == "an evaluation"


@pytest.mark.parametrize("what", ["evaluation", "computation"])
def test_a_long_evaluation_or_computation_is_no_stall(what: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"agent": HoldingConfig(computing_s=3.0)}
    if what == "evaluation":
        options = {"evaluator": LongEvaluator(3.0), "evaluation": INLINE, "eval_interval": 50}
    result = train(once(tmp_path, times=0), stall_timeout_s=1.0, max_opts=60, **options)
    assert result.stats.stopped_by == "max_opts"
    assert result.stats.duration_s > 3.0


def test_the_metrics_tell_how_many_actors_are_alive_and_what_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.supervisor.BACK_OFF_S", 1.5)  # long enough to be seen by a look every half second
    recorder = MemoryRecorder()
    train_until(restarted_and_running(1), once(tmp_path, at=60), recorder)
    lines = recorder.lines
    assert {line["async/actors_alive"] for line in lines} >= {1, 2}  # fewer in the last one: they were stopped
    assert lines[-1]["async/actor_restarts"] == 1
    assert "restarting" in {line["actor/0/state"] for line in lines}


def restarted_and_running(n: int, env_steps: int = 200) -> Any:
    return lambda stats: (
        stats[0].restarts >= n and stats[0].state is ActorState.RUNNING and stats[0].env_steps >= env_steps
    )


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "actor 0 failed: ValueError: as asked; restart 1 of 5 within 600 s follows in 0.5 s"),
        ("exit", "actor 0 failed: SystemExit: 0; restart 1 of 5 "),
        ("segfault", "actor 0 was killed by SIGSEGV; restart 1 of 5 "),
        ("kill", "actor 0 was killed by SIGKILL; restart 1 of 5 "),
    ],
)
def test_an_actor_that_ends_is_replaced_by_one_with_a_new_seed(
    how: str, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with nothing_left():
        result = train_until(restarted_and_running(1), once(tmp_path, how=how, at=60))
    first, second = (int(noted(tmp_path, f"seed-0-{life}")[0]) for life in (0, 1))
    assert (first, second) == (env_seeds(0, 0, 0, 1)[0], env_seeds(0, 0, 1, 1)[0])
    assert result.actor_stats[0].restarts == 1
    assert result.actor_stats[1].restarts == 0
    assert [r.getMessage()[: len(text)] for r in caplog.records] == [text]


def test_one_slow_actor_slows_no_other(tmp_path: Path) -> None:
    class SlowEnv(FailingEnv):
        def step(self, action: Any) -> Any:
            if actor_id() == 0:
                time.sleep(0.2)
            return super().step(action)

    env = GymEnvConfig(id=SlowEnv, kwargs={"where": "close", "how": "raise", "at": 10**9})
    slow, *others = train_until(lambda stats: stats[0].env_steps >= 10, env, n_actors=3).actor_stats
    assert all(s.env_steps > 20 * slow.env_steps for s in others)
    assert slow.share < 0.05 < min(s.share for s in others)
