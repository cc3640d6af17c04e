"""Whole runs, as a user starts them: what they print, what they leave, what can be done with it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import outrider
from outrider.cli import main

SMALL = (
    "--trainer.max_opts=60",
    "--trainer.warmup_period=200",
    "--trainer.eval_interval=20",
    "--evaluator.n_episodes=2",
)
STATS = r"""Stats of async trainer
samples/sec, opt_steps/sec, duration
 *\d+\.\d+, +\d+\.\d+, +\d+\.\d+
Stats of generated samples in actors
actor_id, samples, samples/sec, duration
       0, +\d+, +\d+\.\d+, +\d+\.\d+
       1, +\d+, +\d+\.\d+, +\d+\.\d+
"""


def command(*arguments: str | Path, cwd: Path | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "outrider", *map(str, arguments)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=90, check=False, cwd=cwd)
    assert done.returncode == code, done.stderr
    return done


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    run_dir = tmp_path_factory.mktemp("runs") / "cartpole"
    done = command("train", "cartpole-dqn", *SMALL, f"--run_dir={run_dir}", "--actors.n_actors=2")
    return run_dir, done.stdout


def test_a_run_prints_both_statistics(cartpole: tuple[Path, str]) -> None:
    assert re.search(STATS, cartpole[1]), cartpole[1]


def test_a_run_directory_has_everything(cartpole: tuple[Path, str]) -> None:
    run_dir, _ = cartpole
    there = {path.name for path in run_dir.iterdir() if not path.name.startswith((".", "events.out"))}
    assert there == {
        "config.yaml",
        "command.txt",
        "system.json",
        "metrics.jsonl",
        "models",
        "checkpoints",
        "stats.json",
        "logs",
    }
    assert {path.name for path in (run_dir / "models").iterdir()} == {"best", "last"}
    assert "cartpole-dqn" in (run_dir / "command.txt").read_text()
    stats = json.loads((run_dir / "stats.json").read_text())
    assert stats["trainer"]["opt_steps"] == 60
    assert stats["trainer"]["stopped_by"] == "max_opts"
    assert [actor["state"] for actor in stats["actors"]] == ["finished"] * 2


def test_every_line_of_the_metrics_has_the_three_axes(cartpole: tuple[Path, str]) -> None:
    run_dir, _ = cartpole
    written = lines(run_dir)
    assert [type(line[axis]) for line in written for axis in ("opt_steps", "env_steps", "time_s")] == [
        int,
        int,
        float,
    ] * len(written)
    assert [line["opt_steps"] for line in written if "eval/mean_reward" in line] in ([20, 40, 60], [20, 60])
    assert written[-1]["async/inserted"] >= 200
    assert {"time/fps", "async/ring_fill", "async/samples_per_insert", "actor/1/wait"} <= set().union(*written)


def test_tensorboard_can_read_the_run(cartpole: tuple[Path, str]) -> None:
    run_dir, _ = cartpole
    events = EventAccumulator(str(run_dir))
    events.Reload()
    assert len(events.Scalars("eval/mean_reward")) == sum("eval/mean_reward" in line for line in lines(run_dir)) > 1


def test_the_config_of_a_run_can_be_run_again(cartpole: tuple[Path, str], tmp_path: Path) -> None:
    run_dir, _ = cartpole
    command("train", run_dir / "config.yaml", f"--run_dir={tmp_path / 'again'}", "--trainer.max_opts=5")
    assert json.loads((tmp_path / "again" / "stats.json").read_text())["trainer"]["opt_steps"] == 5


def test_a_run_is_evaluated_by_command_and_by_policy(cartpole: tuple[Path, str]) -> None:
    run_dir, _ = cartpole
    shown = command("eval", run_dir, "--episodes=4", "--model=last").stdout
    assert command("eval", run_dir, "--episodes=4", "--model=last").stdout == shown, "equal policies, equal scores"
    assert "Score of model last over 4 episodes" in shown
    policy = outrider.load_policy(run_dir)
    one = policy.sample(np.zeros(4, np.float32))
    many = policy.sample(np.zeros((3, 4), np.float32))
    assert one.shape == ()
    assert many.tolist() == [one.item()] * 3
    assert gymnasium.make("CartPole-v1").action_space.contains(one)


def test_a_used_run_directory_is_refused(cartpole: tuple[Path, str]) -> None:
    run_dir, _ = cartpole
    done = command("train", "cartpole-dqn", f"--run_dir={run_dir}", code=2)
    assert done.stdout == "", "not even the table of needs"
    assert done.stderr.startswith(f"outrider: error: {run_dir}: expected an empty run directory")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("cartpole-dqn", "--trainer.max_optz=1"), "trainer.max_optz"),
        (("cartpole-dqn", "--trainer.max_opts=many"), "trainer.max_opts"),
        (("cartpole-dqn", "--trainer.sync_interval=0"), "trainer.sync_interval"),
        (("cartpole-dqn", "--actors.n_actors=0"), "actors.n_actors"),
        (("cartpole-dqn", "--trainer.warmup_period=10"), "agent.batch_size"),
        (("cartpole-dqn", "--replay.capacity=100"), "trainer.warmup_period"),
        (("dqn", "--env.id=NoSuchEnv-v0"), "env.id"),
        (("dqn", "--env.id=Pendulum-v1"), "agent"),
        (("sac", "--env.id=CartPole-v1"), "agent"),
        (
            ("cartpole-dqn", "--agent.device=abacus"),
            "agent.device: expected a device of this machine, such as cpu, "
            f"got 'abacus' (torch here is {torch.__version__})",
        ),
        (("cartpole-dqn", "--replay.class=frames"), "replay.class"),
        (("dqn", "--env.id=children_envs:TupleEnv"), "env.observation_space"),
        (("sac", "--env.id=children_envs:UnboundedEnv"), "env.action_space"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line_before_a_run_begins(
    arguments: tuple[str, ...], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments, f"--run_dir={tmp_path / 'run'}"]) == 2
    printed, shown = capsys.readouterr()
    assert printed == "", "not even the table of needs"
    assert shown.startswith(f"outrider: error: {key}"), shown
    assert ": expected " in shown
    assert ", got " in shown
    assert shown.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["replay.capacity", "actors.n_slots"])
def test_a_run_that_needs_too_much_memory_is_refused_and_leaves_no_directory(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "cartpole-dqn", f"--{key}=1_000_000_000_000", f"--run_dir={tmp_path / 'run'}"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("outrider: error: memory: needs at least ")
    assert "GB free" in shown
    assert shown.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_short_way_trains_in_one_call(tmp_path: Path) -> None:
    result = outrider.train(
        env="CartPole-v1",
        agent=outrider.DqnConfig(hidden=(16,), batch_size=32),
        n_actors=2,
        run_dir=tmp_path / "run",
        trainer={"max_opts": 30, "warmup_period": 100, "eval_interval": 0},
        recorder={"console": "off"},
    )
    assert result.stats.opt_steps == 30
    policy = outrider.load_policy(tmp_path / "run")  # the last model, since nothing was evaluated
    assert policy.sample(np.zeros(4, np.float32)) in (0, 1)
    assert [s.actor_id for s in result.actor_stats] == [0, 1]
    assert result.run_dir == tmp_path / "run"


def test_the_synchronous_mode_runs_from_the_command_too(tmp_path: Path) -> None:
    done = command("train", "pendulum-sac", "--trainer.mode=sync", "--trainer.max_opts=20", f"--run_dir={tmp_path}/r")
    assert "Stats of generated samples in actors" in done.stdout


def test_threads_train_too(tmp_path: Path) -> None:
    command("train", "cartpole-dqn", *SMALL, "--actors.backend=threads", f"--run_dir={tmp_path}/r")


def test_pong_runs_on_frames_and_is_evaluated_in_whole_games(tmp_path: Path) -> None:
    """A random policy loses every game by about 20 points, which clipped or cut games would not show."""
    run_dir = tmp_path / "pong"
    command(
        "train",
        "pong-dqn",
        "--trainer.max_opts=3",
        "--trainer.warmup_period=64",
        "--replay.capacity=500",
        "--actors.n_envs=4",
        f"--run_dir={run_dir}",
    )
    score = re.search(r"Score of model last over 1 episodes: (-?\d+)", command("eval", run_dir, "--episodes=1").stdout)
    assert score is not None
    assert -21 <= int(score[1]) <= -15


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_an_interrupted_run_reports_what_it_did(mode: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = ("cartpole-dqn", f"--trainer.mode={mode}", "--trainer.eval_interval=0", f"--run_dir={run_dir}")
    call = [sys.executable, "-m", "outrider", "train", *arguments, "--trainer.flush_record_interval=10"]
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith("0:00:"):  # progress: it trains
                break
        running.send_signal(signal.SIGINT)
        shown = running.communicate(timeout=30)[0]
    assert running.returncode == 130
    assert re.search(STATS, shown), shown
    stats = json.loads((run_dir / "stats.json").read_text())
    assert stats["trainer"]["stopped_by"] == "SIGINT"
    assert stats["trainer"]["opt_steps"] > 0
    assert sum(actor["samples"] for actor in stats["actors"]) >= stats["trainer"]["samples"]


def test_a_run_that_fails_reports_what_it_did_too(tmp_path: Path) -> None:
    class Failing(gymnasium.Wrapper[Any, Any, Any, Any]):
        def __init__(self) -> None:
            super().__init__(gymnasium.make("CartPole-v1"))
            self.steps = 0

        def step(self, action: Any) -> Any:
            self.steps += 1
            if self.steps == 400:
                raise ValueError("as asked")
            return super().step(action)

    reported: list[outrider.TrainResult] = []
    given = {"env": outrider.GymEnvConfig(id=Failing), "recorder.console": "off", "run_dir": str(tmp_path / "run")}
    given["actors.restarts"] = 0
    with pytest.raises(outrider.ActorFailed, match="as asked"):
        outrider.run(outrider.RunConfig.from_sources("cartpole-dqn", given), report=reported.append)
    (result,) = reported
    assert result.stats.stopped_by == "error"
    assert result.run_dir == tmp_path / "run"
    stats = json.loads((tmp_path / "run" / "stats.json").read_text())
    assert stats["trainer"]["samples"] == result.stats.samples > 0
