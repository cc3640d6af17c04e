"""A run that is resumed goes on as if nothing had happened: bit for bit in the synchronous trainer."""

from __future__ import annotations

import hashlib
import importlib.util
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from outrider.agents.dqn import DqnConfig
from outrider.agents.exploration import EpsilonGreedyConfig
from outrider.agents.sac import SacConfig
from outrider.checkpoint_files import newest_checkpoint
from outrider.errors import CheckpointError, ConfigError, RunDirError
from outrider.recording import read_metrics
from outrider.run_config import RunConfig
from outrider.wiring import resume, run

N = 120
AGENTS: dict[str, Any] = {
    "dqn": DqnConfig(hidden=(16, 16), batch_size=32, explorer=EpsilonGreedyConfig(decay_env_steps=500)),
    "sac": SacConfig(hidden=(16, 16), batch_size=32),
}
ENVS = {"dqn": "CartPole-v1", "sac": "Pendulum-v1"}


def config(path: Path, name: str = "dqn", **overrides: Any) -> RunConfig:
    small = {
        "run_dir": str(path),
        "env.id": ENVS[name],
        "agent": AGENTS[name],
        "actors.n_actors": 2,
        "actors.n_envs": 2,
        "replay.capacity": 300,
        "trainer": {
            "mode": "sync",
            "max_opts": N,
            "warmup_period": 200,
            "samples_per_insert": 16.0,
            "eval_interval": 50,
            "sync_interval": 7,
            "flush_record_interval": 10,
            "record_agent_info_interval": 10,
        },
        "trainer.checkpoint": {"interval": N},
        "evaluator.n_episodes": 2,
        "recorder.console": "off",
        "seed": 5,
    }
    return RunConfig.from_sources("dqn", small | overrides)


def parameters(run_dir: Path) -> str:
    """A hash of everything trained, and of what was drawn for it."""
    found, _ = newest_checkpoint(run_dir / "checkpoints")
    assert found is not None
    parts: list[bytes] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                walk(value[key])
        elif isinstance(value, torch.Tensor):
            parts.append(value.numpy().tobytes())
        else:
            parts.append(repr(value).encode())

    walk(found.state["agent"])
    walk(found.state["replay"])
    parts.extend(rows.tobytes() for _, rows in found.blocks())
    return hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize(
    ("agent", "replay"), [("dqn", "uniform"), ("dqn", "prioritized"), ("sac", "uniform"), ("sac", "prioritized")]
)
def test_a_run_of_2n_steps_is_a_run_of_n_steps_resumed_for_n(
    agent: str, replay: str, n_steps: int, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"replay.class": replay}
    changes["step_processor"] = {"class": "n_step", "n_steps": n_steps} if n_steps > 1 else {"class": "simple"}
    run(config(tmp_path / "whole", agent, **changes, **{"trainer.max_opts": 2 * N}))
    run(config(tmp_path / "parts", agent, **changes))
    halfway = parameters(tmp_path / "parts")
    result = resume(tmp_path / "parts", {"trainer.max_opts": 2 * N})
    assert result.stats.opt_steps == 2 * N
    assert parameters(tmp_path / "parts") == parameters(tmp_path / "whole")
    assert parameters(tmp_path / "parts") != halfway
    whole, parts = (read_metrics(tmp_path / name) for name in ("whole", "parts"))
    for name in ("eval/mean_reward", "train/loss"):
        both = [[(line["opt_steps"], line[name]) for line in lines if name in line] for lines in (whole, parts)]
        assert both[0] == both[1]
        assert both[0][-1][0] > N


@pytest.mark.skipif(importlib.util.find_spec("ale_py") is None, reason="needs ale-py")
@pytest.mark.parametrize("prioritized", [None, {"alpha": 0.7}])
def test_so_is_one_on_frames(prioritized: dict[str, Any] | None, tmp_path: Path) -> None:
    n = 12
    changes: dict[str, Any] = {
        "env": {"class": "atari", "id": "breakout", "max_frames": 200},
        "agent": DqnConfig(hidden=(16,), batch_size=8),
        "step_processor": "frames",
        "replay": {"class": "frames", "capacity": 150, "n_steps": 3, "prioritized": prioritized},
        "trainer.warmup_period": 60,
        "trainer.samples_per_insert": 1.0,
        "trainer.eval_interval": 0,
        "trainer.checkpoint": {"interval": n},
    }
    run(config(tmp_path / "whole", **changes, **{"trainer.max_opts": 2 * n}))
    run(config(tmp_path / "parts", **changes, **{"trainer.max_opts": n}))
    halfway = parameters(tmp_path / "parts")
    assert resume(tmp_path / "parts", {"trainer.max_opts": 2 * n}).stats.opt_steps == 2 * n
    assert parameters(tmp_path / "parts") == parameters(tmp_path / "whole") != halfway


def test_it_makes_no_difference_whether_a_checkpoint_is_the_last_act_of_a_run(tmp_path: Path) -> None:
    run(config(tmp_path / "interval"))
    run(config(tmp_path / "end", **{"trainer.checkpoint": {"interval": 0}}))
    assert parameters(tmp_path / "interval") == parameters(tmp_path / "end")


def test_counters_and_metrics_go_on_along_one_axis(tmp_path: Path) -> None:
    first = run(config(tmp_path))
    for max_opts in (2 * N, 3 * N):
        result = resume(tmp_path, {"trainer.max_opts": max_opts})
    lines = read_metrics(tmp_path)
    for axis in ("opt_steps", "env_steps", "time_s", "async/inserted", "async/sampled", "async/episodes"):
        values = [line[axis] for line in lines if axis in line]
        assert values == sorted(values), axis
    assert lines[-1]["opt_steps"] == 3 * N
    assert lines[-1]["async/samples_per_insert"] == pytest.approx(16.0, rel=0.05)
    assert result.stats.duration_s > first.stats.duration_s
    assert result.stats.sampled == 3 * N * 32
    warm_ups = sum(line["opt_steps"] == 0 for line in lines)
    assert warm_ups <= 1, "the warm-up is not repeated"


def test_what_was_recorded_after_the_checkpoint_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(config(tmp_path, **{"trainer.max_opts": 2 * N, "trainer.checkpoint": {"interval": N}}))
    resume(tmp_path, {"trainer.max_opts": N + 20}, checkpoint=N)
    said = capsys.readouterr().err
    assert f"goes on from {tmp_path / 'checkpoints' / str(N)}: {N} opt steps" in said
    assert "later lines of metrics are cut" in said
    assert f"{2 * N}.set-aside: set aside" in said
    steps = [line["opt_steps"] for line in read_metrics(tmp_path)]
    assert steps == sorted(steps)
    assert steps[-1] == N + 20
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    env_steps = [event.step for event in events.Scalars("train/loss")]
    assert env_steps == sorted(set(env_steps))
    assert len(env_steps) == (N + 20) // 10


def test_the_new_configuration_wins_and_differences_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(config(tmp_path))
    resume(tmp_path, {"trainer.max_opts": N + 10, "agent.lr": 0.5, "trainer.target_score": None})
    said = capsys.readouterr().err
    assert f"changed: trainer.max_opts: {N} -> {N + 10}\n" in said
    assert "changed: agent.lr: " in said
    assert "target_score" not in said
    assert "not in the checkpoint: open episodes" in said
    assert RunConfig.load(tmp_path / "config.yaml").agent.lr == 0.5  # type: ignore[attr-defined]
    resume(tmp_path)
    assert "changed" not in capsys.readouterr().err


def test_without_the_replay_both_counters_of_the_balance_start_at_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(config(tmp_path, **{"trainer.checkpoint": {"interval": N, "replay": False}}))
    assert not list((tmp_path / "checkpoints").glob("replay/*"))
    result = resume(tmp_path, {"trainer.max_opts": N + 10})
    assert "the replay buffer is not restored: it is not in the checkpoint" in capsys.readouterr().err
    assert result.stats.opt_steps == N + 10
    assert result.stats.sampled == 10 * 32
    assert 200 <= result.stats.samples <= 200 + 10 * 32 / 16 + 8, "a warm-up, and no burst of owed updates"


@pytest.mark.parametrize("capacity", [250, 400])
def test_a_buffer_of_another_capacity_takes_the_newest_rows(capacity: int, tmp_path: Path) -> None:
    run(config(tmp_path))
    before, _ = newest_checkpoint(tmp_path / "checkpoints")
    result = resume(tmp_path, {"trainer.max_opts": N + 20, "replay.capacity": capacity})
    assert before is not None
    assert result.stats.samples == before.state["replay"]["inserted"] + 20 * 32 // 16
    after, _ = newest_checkpoint(tmp_path / "checkpoints")
    assert after is not None
    kept = np.concatenate([rows for _, rows in after.blocks()])
    assert len(kept) == (250 if capacity == 250 else 300 + 20 * 32 // 16)


@pytest.mark.parametrize("change", [{"agent.hidden": [8]}, {"env.id": "Acrobot-v1"}])
def test_what_cannot_go_on_is_refused_and_changes_nothing(change: dict[str, Any], tmp_path: Path) -> None:
    run(config(tmp_path))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(CheckpointError, match="agent: expected one that can take the state"):
        resume(tmp_path, change)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before


@pytest.mark.parametrize(
    "goal", [{"max_opts": N - 1}, {"max_env_steps": 10}, {"max_time_s": 1e-3}, {"target_score": -1.0}]
)
def test_a_new_goal_that_the_run_has_passed_is_refused_before_anything_starts(
    goal: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(config(tmp_path))
    before = (tmp_path / "config.yaml").read_bytes()
    monkeypatch.setattr("outrider.wiring._require_possible", None)
    (name,) = goal
    with pytest.raises(
        ConfigError, match=rf"trainer\.{name}: expected more than [0-9.]+, where the run already is, got"
    ):
        resume(tmp_path, {f"trainer.{name}": goal[name]})
    assert (tmp_path / "config.yaml").read_bytes() == before


def test_a_run_that_has_reached_its_goal_just_ends_again(tmp_path: Path) -> None:
    run(config(tmp_path))
    assert resume(tmp_path, {"trainer.max_opts": N}).stats.opt_steps == N


class ForgetfulConfig(DqnConfig):
    """Its agent keeps something that no checkpoint can hold."""

    def build(self, env_spec: Any, *, device: str = "cpu", seed: int = 0) -> Any:
        agent: Any = super().build(env_spec, device=device, seed=seed)
        state_dict = agent.state_dict
        agent.state_dict = lambda: {**state_dict(), "own": {"lock": threading.Lock()}}
        return agent


def test_a_state_that_cannot_be_stored_is_refused_before_a_run_begins(tmp_path: Path) -> None:
    own = config(tmp_path / "run", agent=ForgetfulConfig(hidden=(16,), batch_size=32))
    with pytest.raises(CheckpointError, match=r"state agent\.own\.lock: expected .*, got _thread.lock"):
        run(own)
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_checkpoint_starts_from_the_beginning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(config(tmp_path, **{"trainer.checkpoint": {"keep": 0}}))
    assert not list((tmp_path / "checkpoints").iterdir())
    resume(tmp_path, {"trainer.max_opts": 20})
    assert "no checkpoint yet, the run starts from the beginning" in capsys.readouterr().err
    assert max(line["opt_steps"] for line in read_metrics(tmp_path)) == 20


def test_a_checkpoint_with_damaged_rows_gives_all_but_the_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(config(tmp_path))
    for file in (tmp_path / "checkpoints" / "replay").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    result = resume(tmp_path, {"trainer.max_opts": N + 5})
    said = capsys.readouterr().err
    assert "outrider: damaged: " in said
    assert "the replay buffer is not restored" in said
    assert result.stats.opt_steps == N + 5


def test_the_best_score_is_that_of_the_model_best(tmp_path: Path) -> None:
    whole = run(config(tmp_path, **{"trainer.max_opts": 2 * N}))
    resumed = resume(tmp_path, {"trainer.max_opts": N + 1}, checkpoint=N)
    assert resumed.stats.best_score == whole.stats.best_score


def test_the_directory_of_a_run_that_goes_on_cannot_be_another(tmp_path: Path) -> None:
    run(config(tmp_path, **{"trainer.max_opts": 5}))
    with pytest.raises(ConfigError, match="run_dir"):
        resume(tmp_path, {"run_dir": str(tmp_path / "other")})
    with pytest.raises(RunDirError, match=r"expected a run directory \(with config.yaml\)"):
        resume(tmp_path / "nothing")
    needs: list[object] = []
    with pytest.raises(CheckpointError, match="expected a checkpoint 3, got 5"):
        resume(tmp_path, checkpoint=3, show_needs=needs.append)
    assert needs == []


def test_time_alone_is_no_reason_for_a_checkpoint_of_the_synchronous_trainer(tmp_path: Path) -> None:
    often = {"trainer.checkpoint": {"interval": 0, "interval_min": 1e-9}}
    run(config(tmp_path / "often", **often))
    run(config(tmp_path / "never", **{"trainer.checkpoint": {"interval": 0, "interval_min": None}}))
    assert parameters(tmp_path / "often") == parameters(tmp_path / "never")
    assert [path.name for path in (tmp_path / "often" / "checkpoints").glob("[0-9]*")] == [str(N)]
