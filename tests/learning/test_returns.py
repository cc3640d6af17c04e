"""Presets learn what they promise: real actors, the shipped hyperparameters, the return of an evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

import outrider
from outrider.loaded_policy import evaluate_run
from outrider.run_config import RunConfig
from outrider.wiring import run


def train(preset: str, run_dir: Path, **overrides: object) -> outrider.AsyncTrainStat:
    given = {"run_dir": str(run_dir), "recorder.console": "plain", "evaluator.n_episodes": 20, **overrides}
    return run(RunConfig.from_sources(preset, given)).stats


@pytest.mark.timeout(240)
def test_cartpole_is_solved(tmp_path: Path) -> None:
    stats = train("cartpole-dqn", tmp_path / "run", **{"trainer.target_score": 475})
    assert stats.stopped_by == "target_score"
    score, _ = evaluate_run(tmp_path / "run", "best", episodes=20, seed=1)
    assert score >= 400, "what was reached holds on other episodes"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(5))
def test_cartpole_is_solved_whatever_the_seed(seed: int, tmp_path: Path) -> None:
    stats = train("cartpole-dqn", tmp_path / "run", seed=seed, **{"trainer.target_score": 475})
    print(f"seed {seed}: {stats.duration_s:.1f} s, {stats.opt_steps} opt steps, {stats.env_steps} env steps")
    assert stats.stopped_by == "target_score"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
def test_pendulum_swings_up(seed: int, tmp_path: Path) -> None:
    stats = train("pendulum-sac", tmp_path / "run", seed=seed)
    score, _ = evaluate_run(tmp_path / "run", "best", episodes=20, seed=1)
    print(f"seed {seed}: {score:.1f} after {stats.duration_s:.1f} s, {stats.opt_steps} opt steps")
    assert score >= -200
