"""The evaluator in its own process: what it scores, and what its failures do to the run: nothing."""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from children_faults import FaultAgent, FaultAgentConfig, fault_env, note
from runs_with_faults import Pythons, alive, gone, noted, nothing_left, train

import outrider
from outrider import process_scorer
from outrider.agents.dqn import DqnConfig
from outrider.core import EnvSpec
from outrider.errors import EvaluatorFailed
from outrider.evaluation import DefaultEvaluator
from outrider.flags import InitGuard
from outrider.process_scorer import EvaluationConfig
from outrider.recording import MemoryRecorder, read_metrics
from outrider.run_dir import read_model_meta

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> None:
    fault_env().spec()


@pytest.fixture
def pythons() -> Iterator[Pythons]:
    with closing(Pythons()) as pythons:
        yield pythons


FAULTS = {
    "raise": lambda: 1 // 0,
    "nonsense": lambda: None,
    "no names": lambda: None,
    "exit": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "hang": lambda: time.sleep(600),
    "gil": lambda: [ctypes.PyDLL(None).sleep(600) for _ in range(9)],  # a signal ends one of them
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


class Weigher:
    """The score is the agent's weights, which are its opt steps; the first `times` evaluations fail.

    Args:
        folder: Where it notes its process, and that of a child which nobody ends, at each evaluation.
        how: What happens in those that fail.
        times: How many they are.
        takes_s: Seconds of the others.
    """

    stop: Any = None
    guard: Any = None

    def __init__(self, folder: Path, how: str = "", times: int = 0, takes_s: float = 0.0) -> None:
        self.folder, self.how, self.times, self.takes_s = folder, how, times, takes_s

    def evaluate(self, agent: Any) -> tuple[float, dict[str, Any]]:
        n = len(list(self.folder.glob("evaluator-*")))
        if self.how:
            note(str(self.folder), f"child-{n}", subprocess.Popen(["sleep", "600"]).pid)
        note(str(self.folder), f"evaluator-{n}", os.getpid())
        if n < self.times:
            FAULTS[self.how]()
            if self.how == "nonsense":
                return "a score", {}  # type: ignore[return-value]
            if self.how == "no names":
                return 1.0, {1: 2.0}  # type: ignore[dict-item]
        weights = agent.weights.copy()
        until = time.monotonic() + self.takes_s
        while time.monotonic() < until and not self.stop():
            time.sleep(0.01)
        assert (weights == weights[0]).all()
        assert (agent.weights == weights).all(), "the model changed during the evaluation"
        score = float(weights[0])
        record = {"eval/mean_reward": score, "eval/guarded": float(isinstance(self.guard, InitGuard))}
        return score, record | {"opt_steps": 10**9}  # which is the learner's to say

    def close(self) -> None:
        note(str(self.folder), "closed", os.getpid())


def scores(recorder: MemoryRecorder) -> dict[int, float]:
    """Scores by the opt steps of their line."""
    return {int(line["opt_steps"]): line["eval/mean_reward"] for line in recorder.lines if "eval/mean_reward" in line}  # type: ignore[misc]


def weights_of(recorder: MemoryRecorder, model: str) -> float:
    weights = np.load(io.BytesIO(recorder.models[model]["weights.npy"]))
    assert (weights == weights[0]).all()
    return float(weights[0])


@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.slow] * (how == "stop")) for how in FAULTS])
def test_an_evaluator_that_fails_or_hangs_harms_nothing_and_the_next_evaluation_has_a_new_process(
    how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recorder = MemoryRecorder()
    with nothing_left():
        result = train(
            fault_env(where="never"),
            recorder,
            Weigher(tmp_path, how, times=2),
            logs=tmp_path,
            eval_interval=50,
            target_score=1.0,
            evaluation=EvaluationConfig(timeout_s=2.0 if how in ("hang", "gil", "stop") else 30.0),
        )
    assert result.stats.stopped_by == "target_score"
    assert [stat.restarts for stat in result.actor_stats] == [0, 0]
    processes = noted(tmp_path, "evaluator-*", 3)
    assert len(set(processes)) >= 3
    assert gone(processes + noted(tmp_path, "child-*", 3)), "what an evaluator had started was left"
    assert noted(tmp_path, "closed")[0] in processes
    assert recorder.lines[-1]["async/evaluator_failures"] == 2
    said, log = capfd.readouterr().err, (tmp_path / "evaluator.log").read_text()
    expected = {
        "raise": "the evaluator failed: ZeroDivisionError: integer division or modulo by zero",
        "nonsense": "the evaluator failed: ValueError: could not convert string to float: 'a score'",
        "no names": "the evaluator failed: TypeError: evaluate: expected a record with names that are strings, got 1",
        "exit": "the evaluator ended by itself with exit code 0",
        "kill": "the evaluator was killed by SIGKILL",
        "segfault": "the evaluator was killed by SIGSEGV",
    }.get(how, "the evaluator hung: killed after 2 s (trainer.evaluation.timeout_s)")
    assert said.count(f"outrider: {expected}; the evaluation at ") == 1, "once, and not again"
    assert log.count(expected) == 2
    if how in ("raise", "segfault", "hang"):
        assert "in evaluate\n" in log, "the traceback, or the stack"
    assert ("in evaluate\n" in said) == (how == "raise")


def test_best_has_the_parameters_that_were_evaluated_although_training_has_moved_on(tmp_path: Path) -> None:
    recorder = MemoryRecorder()
    with nothing_left():
        result = train(
            fault_env(where="never"), recorder, Weigher(tmp_path, takes_s=0.4), eval_interval=20, target_score=30.0
        )
    evaluated = scores(recorder)
    assert all(opt_steps == score for opt_steps, score in evaluated.items()), "recorded where it was evaluated"
    assert result.stats.best_score == max(evaluated.values()) == weights_of(recorder, "best")
    assert weights_of(recorder, "last") == result.stats.opt_steps > weights_of(recorder, "best") + 20
    assert recorder.lines[-1]["async/evaluations_skipped"] > 0
    times = [(line["env_steps"], line["time_s"]) for line in recorder.lines if "eval/mean_reward" in line]
    assert times == sorted(times)
    assert all(line["eval/guarded"] for line in recorder.lines if "eval/mean_reward" in line)


def test_a_run_that_has_done_its_opt_steps_waits_for_the_last_evaluation(tmp_path: Path) -> None:
    recorder = MemoryRecorder()
    with nothing_left():
        result = train(
            fault_env(where="never"), recorder, Weigher(tmp_path, takes_s=0.3), max_opts=40, eval_interval=10
        )
    assert result.stats.stopped_by == "max_opts"
    assert 10 in scores(recorder)
    assert scores(recorder)[40] == weights_of(recorder, "best") == weights_of(recorder, "last") == 40.0
    assert result.stats.duration_s < recorder.lines[-1]["time_s"] + 0.2


def test_a_run_that_has_done_its_opt_steps_does_not_wait_for_ever(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recorder, evaluation = MemoryRecorder(), EvaluationConfig(finish_timeout_s=0.3)
    with nothing_left():
        train(
            fault_env(where="never"),
            recorder,
            Weigher(tmp_path, takes_s=600.0),
            max_opts=20,
            eval_interval=20,
            evaluation=evaluation,
        )
    assert scores(recorder) == {}
    assert set(recorder.models) == {"last"}
    assert "the evaluation at 20 opt steps had not ended when the run did: dropped" in capfd.readouterr().err
    assert gone(noted(tmp_path, "evaluator-*"))


def test_after_too_many_failures_in_a_row_training_goes_on_without_evaluations(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recorder, evaluation = MemoryRecorder(), EvaluationConfig(restarts=1)
    with nothing_left():
        result = train(
            fault_env(where="never"),
            recorder,
            Weigher(tmp_path, "raise", times=99),
            max_opts=400,
            eval_interval=20,
            evaluation=evaluation,
        )
    assert result.stats.stopped_by == "max_opts"
    assert len(noted(tmp_path, "evaluator-*", 2)) == 2
    said = capfd.readouterr().err
    assert said.count("no more evaluations after 2 failures in a row (trainer.evaluation.restarts)") == 1


def test_an_evaluator_that_cannot_be_started_at_first_is_started_for_the_first_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, started = MemoryRecorder(), []

    class NoDescriptorsAtFirst(process_scorer.EvaluatorProcess):
        def __init__(self, *args: Any) -> None:
            started.append(1)
            if len(started) == 1:
                raise OSError(errno.EMFILE, "Too many open files")
            super().__init__(*args)

    monkeypatch.setattr(process_scorer, "EvaluatorProcess", NoDescriptorsAtFirst)
    with nothing_left():
        train(fault_env(where="never"), recorder, Weigher(tmp_path), max_opts=20, eval_interval=20)
    assert len(started) == 2
    assert set(scores(recorder)) == {20}


def test_a_run_that_only_a_score_could_end_fails_when_there_are_no_more_evaluations(tmp_path: Path) -> None:
    recorder = MemoryRecorder()
    with nothing_left():
        with pytest.raises(EvaluatorFailed, match="the evaluator failed: ZeroDivisionError") as caught:
            train(
                fault_env(where="never"),
                recorder,
                Weigher(tmp_path, "raise", times=99),
                max_time_s=None,
                target_score=1e9,
                eval_interval=20,
                evaluation=EvaluationConfig(restarts=0),
            )
        del caught
    assert "last" in recorder.models


class Inline(Weigher):
    """Cannot be pickled."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.lock = threading.Lock()


class StubbornConfig(FaultAgentConfig):
    """Agents that take no model over."""

    def build(self, env_spec: EnvSpec, *, device: str = "cpu", seed: int = 0) -> FaultAgent:
        agent = super().build(env_spec, device=device, seed=seed)
        agent.weights += seed % 7 + 1
        agent.sync_model = lambda info: None  # type: ignore[method-assign]
        return agent


@pytest.mark.parametrize("why", ["unpicklable", "no sync_model", "as configured"])
def test_what_cannot_be_evaluated_elsewhere_is_evaluated_in_the_learner_and_that_is_said_once(
    why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recorder = MemoryRecorder()
    evaluator = Inline(tmp_path) if why == "unpicklable" else Weigher(tmp_path)
    agent = StubbornConfig() if why == "no sync_model" else FaultAgentConfig()
    with nothing_left():
        train(
            fault_env(where="never"),
            recorder,
            evaluator,
            agent=agent,
            max_opts=40,
            eval_interval=10,
            evaluation=EvaluationConfig(process=why != "as configured"),
        )
    assert set(noted(tmp_path, "evaluator-*", 4)) == {os.getpid()}
    assert list(scores(recorder)) == [10, 20, 30, 40], "each one is waited for"
    assert weights_of(recorder, "best") == scores(recorder)[40]
    said = [line for line in capfd.readouterr().err.splitlines() if "evaluations run in the learner" in line]
    words = {"unpicklable": ["Inline cannot be pickled (TypeError"], "no sync_model": ["does not take over its model"]}
    assert [word in line for line, word in zip(said, words.get(why, []), strict=True)] == [True] * len(said)


class Slow(DefaultEvaluator):
    """Takes its time."""

    takes_s = 0.0

    def evaluate(self, agent: Any) -> tuple[float, dict[str, Any]]:
        until = time.monotonic() + self.takes_s
        while time.monotonic() < until and self.stop is not None and not self.stop():
            time.sleep(0.01)
        return super().evaluate(agent)


@dataclass(frozen=True, kw_only=True)
class SlowConfig:
    takes_s: float = 0.0

    def build(self, env_config: Any) -> Slow:
        evaluator = Slow(env_config, n_episodes=3)
        evaluator.takes_s = self.takes_s
        return evaluator


def run_slowly(run_dir: Path, takes_s: float, **trainer: Any) -> None:
    outrider.train(
        "CartPole-v1",
        DqnConfig(hidden=(8,), batch_size=32),
        n_actors=1,
        run_dir=run_dir,
        evaluator=SlowConfig(takes_s=takes_s),
        recorder={"console": "off"},
        trainer={"warmup_period": 100, "target_score": None, **trainer},
    )


def test_the_best_model_in_a_run_directory_is_that_of_its_opt_steps_and_acts(tmp_path: Path) -> None:
    run_slowly(tmp_path / "run", 0.1, max_opts=300, eval_interval=50, save_interval=50)
    models = tmp_path / "run" / "models"
    opt_steps = read_model_meta(models / "best")["opt_steps"]
    assert opt_steps in range(50, 350, 50)
    evaluated = [line for line in read_metrics(tmp_path / "run") if line.get("eval/mean_reward") is not None]
    best = max(evaluated, key=lambda line: line["eval/mean_reward"])  # type: ignore[arg-type,return-value]
    assert best["opt_steps"] == opt_steps
    kept, saved = (sorted((models / name).iterdir()) for name in ("best", str(opt_steps)))
    assert [file.read_bytes() for file in kept] == [file.read_bytes() for file in saved]
    assert outrider.load_policy(tmp_path / "run").sample(np.zeros((3, 4), np.float32)).shape == (3,)


def test_a_checkpoint_says_which_evaluations_it_does_not_contain_and_a_resumed_run_goes_on_without_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    short = {"eval_interval": 20, "evaluation": {"finish_timeout_s": 0.2}}
    run_slowly(tmp_path / "run", 600.0, max_opts=50, **short)
    manifest = json.loads((tmp_path / "run/checkpoints/50/manifest.json").read_text())
    lost = ["the evaluation at 20 opt steps", "the evaluation at 40 opt steps"]
    assert manifest["not_contained"] == ["open episodes", *lost]
    capfd.readouterr()
    outrider.resume(
        tmp_path / "run", {"trainer.max_opts": 60, "trainer.evaluation.finish_timeout_s": 60, "evaluator.takes_s": 0.0}
    )
    assert f"not in the checkpoint: open episodes, {', '.join(lost)}" in capfd.readouterr().err
    scored = [line["opt_steps"] for line in read_metrics(tmp_path / "run") if "eval/mean_reward" in line]
    assert scored == [60]


def test_a_learner_killed_during_an_evaluation_takes_the_evaluator_and_its_children_with_it(
    tmp_path: Path, pythons: Pythons
) -> None:
    shm = set(os.listdir("/dev/shm"))
    script = (
        "import os, subprocess, time\n"
        "from children_faults import fault_env, note\nfrom runs_with_faults import train\n"
        "class Endless:\n"
        "    def evaluate(self, agent):\n"
        f"        note({str(tmp_path)!r}, 'child', subprocess.Popen(['sleep', '600']).pid)\n"
        f"        note({str(tmp_path)!r}, 'evaluator', os.getpid())\n"
        "        time.sleep(600)\n"
        "    def close(self): pass\n"
        "train(fault_env(where='never'), None, Endless(), eval_interval=5)\n"
    )
    learner = pythons.start("-c", script)
    pids = noted(tmp_path, "evaluator") + noted(tmp_path, "child")
    assert pids[0] != learner.pid
    assert all(map(alive, pids))
    learner.kill()
    learner.communicate()
    assert gone(pids, timeout_s=5.0)
    assert set(os.listdir("/dev/shm")) <= shm
