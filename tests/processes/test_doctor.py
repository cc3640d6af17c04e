"""Environments that are broken in every way, tried for real."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from outrider.cli import main
from outrider.core import EnvSpec
from outrider.env_trial import Trial, try_parts
from outrider.envs.gymnasium import GymEnvConfig
from outrider.testing import CountEnv, FailingEnv, TagEnv, vector_count_env

SOURCES = str(Path(__file__).resolve().parents[2] / "src")


class NanEnv(CountEnv):
    """Observations are NaN from the third step on, which no check of a few steps finds."""

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return np.where(self.t > 3, np.nan, obs).astype(np.float32), *rest


class InfRewardEnv(CountEnv):
    def reward(self) -> float:
        return float("inf") if self.t == 4 else 1.0


class WrongDtypeEnv(CountEnv):
    """Says bytes, gives float64."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (1,), np.uint8)

    def reset(self, **kwargs: Any) -> Any:
        obs, info = super().reset(**kwargs)
        return obs.astype(np.float64), info

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return obs.astype(np.float64), *rest


class EndlessEnv(CountEnv):
    def __init__(self) -> None:
        super().__init__(length=10**9)


def tried(env: Any, timeout_s: float = 30.0, n_envs: int = 2, **kwargs: Any) -> Trial:
    config = GymEnvConfig(id=env, kwargs=kwargs)
    return try_parts(config, config.spec(), n_envs=n_envs, timeout_s=timeout_s)


def test_an_environment_that_is_well_has_no_problem_and_its_figures_are_told() -> None:
    trial = tried("CartPole-v1")
    assert trial.problems == []
    patterns = [
        r"[\d,]+ env steps/s in one process with 2 environments",
        r"\d+\.\d MB of memory per actor for its environments",
        r"rewards from 1 to 1",
        r"\d+ episodes of \d+ to \d+ steps, \d+\.\d in the mean",
    ]
    assert len(trial.facts) == len(patterns)
    for pattern, fact in zip(patterns, trial.facts, strict=True):
        assert re.fullmatch(pattern, fact), fact
    assert any("infinity" in text for text in trial.warnings)
    assert not any("\x1b" in text or "WARN" in text for text in trial.warnings)


def test_observations_and_rewards_that_are_not_finite_are_problems() -> None:
    assert [p for p in tried(NanEnv).problems if p.startswith("obs is nan after")]
    assert [p for p in tried(InfRewardEnv).problems if p.startswith("the reward is inf after")]


def test_a_dtype_that_the_space_does_not_have_is_a_problem() -> None:
    problems = tried(WrongDtypeEnv).problems
    assert any("check_env" in problem for problem in problems)
    assert "obs has dtype float64, its space says uint8: values are cast" in problems


@pytest.mark.parametrize("how", ["segfault", "kill", "exit"])
def test_an_environment_that_crashes_is_a_problem_and_nobodys_death(how: str) -> None:
    words = {"segfault": "was killed by SIGSEGV", "kill": "was killed by SIGKILL", "exit": "ended with exit code 0"}
    trial = tried(FailingEnv, where="step", how=how, at=40)
    assert [problem.partition(" (")[0] for problem in trial.problems] == [f"random actions: the process {words[how]}"]


def test_an_environment_that_raises_is_a_problem_with_its_place_and_the_rest_is_still_tried() -> None:
    trial = tried(FailingEnv, where="step", how="raise", at=40)
    (problem,) = trial.problems
    assert problem.startswith("random actions: ValueError: as asked (")
    assert re.search(r"environments\.py, line \d+\)$", problem)


def test_a_reset_that_never_ends_is_killed_and_its_place_is_told() -> None:
    began = time.monotonic()
    trial = tried(FailingEnv, timeout_s=3.0, where="reset", how="hang")
    assert time.monotonic() - began < 20
    (problem,) = trial.problems
    assert problem.startswith("Gymnasium's check_env: not done within 3 s (File ")
    assert "_fail_in" in problem


def test_an_environment_without_any_end_is_warned_of() -> None:
    assert (
        "no episode ended in 1000 env steps, and no limit is known: env.max_episode_steps" in tried(EndlessEnv).warnings
    )


def test_arrays_that_are_used_again_are_told() -> None:
    assert any(fact.startswith("returns the same array every time (obs)") for fact in tried(TagEnv, reuse=True).facts)
    assert not any("same array" in fact for fact in tried(TagEnv).facts)


def test_a_vector_environment_is_held_to_our_contract() -> None:
    trial = tried(vector_count_env)
    assert trial.problems == []
    assert "a vector environment: Gymnasium's check_env is for single ones" in trial.facts


@dataclass(frozen=True)
class OwnEnvConfig:
    """Not reproducible: equal seeds give other first observations."""

    def spec(self) -> EnvSpec:
        return GymEnvConfig(id=CountEnv).spec()

    def eval(self) -> OwnEnvConfig:
        return self

    def build(self, seed: Any, n_envs: int) -> Any:
        env = GymEnvConfig(id=CountEnv).build(seed, n_envs)
        reset = env.reset

        def random_reset(seed: Any = None) -> Any:
            obs = reset(seed)
            assert isinstance(obs, np.ndarray)
            obs[...] = time.monotonic_ns() % 10**6
            return obs

        env.reset = random_reset  # type: ignore[method-assign]
        return env


def test_an_own_env_config_and_further_checks_are_held_to_their_contracts() -> None:
    def refuse() -> None:
        raise AssertionError("sample() must be an array")

    trial = try_parts(OwnEnvConfig(), OwnEnvConfig().spec(), [("contract of the agent", refuse)], timeout_s=60)
    first, second = trial.problems
    assert first.startswith("contract of the environment: AssertionError: equal seeds must give equal first")
    assert second.startswith("contract of the agent: AssertionError: sample() must be an array (")


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(("doctor", *arguments))
    out, err = capsys.readouterr()
    return code, out, err


def test_doctor_of_a_preset_shows_machine_needs_and_trial(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = doctor(capsys, "cartpole-dqn")
    assert (code, err) == (0, "")
    labels = [line[:11].strip() for line in out.splitlines()]
    machine = ["outrider", "packages", "cpu", "memory", "disk", "descriptors", "processes"]
    assert labels[:10] == [*machine, "fork server", "compiler", "cuda"]
    assert labels[11:16] == ["memory", "disk", "descriptors", "processes", "cores"]
    assert out.splitlines()[-1].startswith("result       no problems, ")


def test_doctor_of_a_broken_environment_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    kwargs = "--env.kwargs={where: reset, how: hang}"
    code, out, err = doctor(capsys, "dqn", "--env.id=outrider.testing:FailingEnv", kwargs, "--timeout=2")
    assert (code, err) == (1, "")
    assert "\nproblem      Gymnasium's check_env: not done within 2 s" in out
    kwargs = "--env.kwargs={where: init, how: segfault}"
    code, out, err = doctor(capsys, "dqn", "--env.id=outrider.testing:FailingEnv", kwargs)
    assert code == 1
    assert (
        "\nproblem      environment outrider.testing:FailingEnv: the process that built it was killed by SIGSEGV" in out
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no-such",), "preset: expected one of "),
        (("cartpole-dqn", "--agent.gama=1"), "agent.gama: expected one of "),
        (("dqn", "--env.id=NoSuch-v0"), "env.id: expected "),
        (("cartpole-dqn", "--timeout=soon"), "--timeout: expected seconds > 0, got 'soon'"),
        (("cartpole-dqn", "--timeout"), "--timeout: expected seconds > 0, got ''"),
        (("--seed=1",), "outrider doctor: expected PRESET_OR_YAML before overrides, got none"),
        (("cartpole-dqn", "--replay.capacity=1_000_000_000_000"), "memory: needs at least 64000."),
    ],
)
def test_doctor_of_what_cannot_be_run_ends_with_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = doctor(capsys, *arguments)
    assert code == 2
    assert err.startswith(f"outrider: error: {message}")
    assert err.count("\n") == 1


def test_doctor_alone_shows_the_machine_and_starts_nothing(tmp_path: Path) -> None:
    script = """
import sys, psutil
from outrider.cli import main
code = main(["doctor"])
assert psutil.Process().children() == []
sys.exit(code)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SOURCES},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 10
    assert list(tmp_path.iterdir()) == []
