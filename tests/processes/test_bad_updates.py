"""Losses that are not finite are never trained on, and never passed over in silence."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import pytest

from outrider.errors import BadUpdate
from outrider.recording.files import read_metrics
from outrider.run_config import RunConfig
from outrider.wiring import TrainResult, resume, run


class Huge(gymnasium.Env[Any, Any]):
    """Rewards that are finite, and whose squares are not."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.ones(3, np.float32), 1e30, False, self.t == 50, {}


def train(run_dir: Path, policy: Literal["raise", "skip"], mode: str = "async") -> TrainResult:
    overrides: dict[str, Any] = {
        "env.id": Huge,
        "agent": {"hidden": [8], "loss": "mse", "batch_size": 8, "bad_updates": policy},
        "actors": {"n_actors": 1, "n_buffer": 8},
        "trainer": {
            "max_opts": 60,
            "warmup_period": 100,
            "record_agent_info_interval": 20,
            "mode": mode,
            "eval_interval": 0,
        },
        "recorder": {"console": "off"},
        "run_dir": str(run_dir),
    }
    return run(RunConfig.from_sources("dqn", overrides))


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_updates_that_are_not_finite_end_the_run_by_default(mode: str, tmp_path: Path) -> None:
    with pytest.raises(BadUpdate, match=r"Dqn, opt step 20: .* were not: 20 \(agent\.bad_updates\)"):
        train(tmp_path / "run", "raise", mode)
    assert (tmp_path / "run" / "checkpoints").is_dir(), "the state before the bad updates was saved"


def test_a_run_may_go_on_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "outrider.agents"):
        result = train(tmp_path / "run", "skip")
    assert result.stats.opt_steps == 60
    assert [r.message.partition(":")[0] for r in caplog.records] == ["Dqn, opt step 20"]
    assert read_metrics(tmp_path / "run")[-1]["train/skipped_updates"] == 60


def test_a_run_that_was_ended_by_bad_updates_is_resumed_with_the_other_policy(tmp_path: Path) -> None:
    with pytest.raises(BadUpdate):
        train(tmp_path / "run", "raise", "sync")
    result = resume(tmp_path / "run", {"agent.bad_updates": "skip"})
    assert result.stats.opt_steps == 60
