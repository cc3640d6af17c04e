"""Runs whose updates are compiled, or would be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from outrider.cli import main
from outrider.errors import ConfigError
from outrider.recording.files import read_metrics
from outrider.run_config import RunConfig
from outrider.run_dir import RunDir
from outrider.wiring import TrainResult, run


def train(run_dir: Path, compile: str, **trainer: Any) -> TrainResult:
    overrides: dict[str, Any] = {
        "agent": {"hidden": [16], "batch_size": 16, "compile": compile},
        "actors.n_actors": 1,
        "trainer": {"warmup_period": 100, "record_agent_info_interval": 20, "eval_interval": 0, **trainer},
        "recorder": {"console": "off"},
        "run_dir": str(run_dir),
        "env.id": "CartPole-v1",
    }
    return run(RunConfig.from_sources("dqn", overrides))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "outrider" / "compiled"


def test_the_synchronous_trainer_leaves_nothing_to_chance(cache: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", "auto", mode="sync", max_opts=40)
    assert "train/compiled" not in read_metrics(tmp_path / "run")[-1]
    assert not cache.exists()


def test_a_run_that_ends_ends_its_compilation(cache: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", "auto", max_opts=40)
    assert read_metrics(tmp_path / "run")[-1]["train/compiled"] == 0
    assert list(cache.iterdir()) == []
    assert not [p for p in psutil.Process().children(recursive=True) if "outrider-compile" in p.cmdline()[:1]]


@pytest.mark.usefixtures("cache")
def test_a_run_that_has_to_be_compiled_ends_where_there_is_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(RunDir, "create", None)  # nothing is begun
    with pytest.raises(
        ConfigError, match=r"agent\.compile: expected a C\+\+ compiler, got no program 'no-such-compiler'"
    ):
        train(tmp_path / "on", "on", max_opts=40)
    assert not (tmp_path / "on").exists(), "a run that never began leaves nothing"


def test_a_run_that_is_refused_before_its_first_opt_step_shows_no_statistics(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.parent.mkdir(parents=True)
    cache.touch()  # where the compiled update would be kept
    arguments = ["--env.id=CartPole-v1", "--agent.compile=on", "--actors.n_actors=1", f"--run_dir={tmp_path / 'run'}"]
    assert main(["train", "dqn", *arguments]) == 2
    out, err = capsys.readouterr()
    assert "Stats of" not in out
    assert "Run directory" not in out
    assert err.splitlines()[-1].startswith("outrider: error: agent.compile: expected an update that can be compiled")
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(240)
def test_ctrl_c_while_it_is_compiled_ends_the_run(tmp_path: Path) -> None:
    arguments = ["dqn", "--env.id=CartPole-v1", "--agent.compile=on", f"--run_dir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "outrider", "train", *arguments]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        learner = psutil.Process(running.pid)
        compiling: list[psutil.Process] = []
        until = time.monotonic() + 100
        while not compiling and time.monotonic() < until:
            time.sleep(0.05)
            compiling = [p for p in learner.children(recursive=True) if "outrider-compile" in p.cmdline()[:1]]
        started = time.monotonic()
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
        assert time.monotonic() - started < 30
    assert compiling
    assert not any(p.is_running() for p in compiling)
    assert list((tmp_path / "outrider" / "compiled").iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_with_compiled_updates_trains_and_says_so(cache: Path, tmp_path: Path) -> None:
    result = train(tmp_path / "run", "on", max_opts=200)
    assert result.stats.opt_steps == result.stats.updates == 200
    assert read_metrics(tmp_path / "run")[-1]["train/compiled"] == 1
    (made,) = cache.iterdir()
    assert made.suffix == ".pt2"
