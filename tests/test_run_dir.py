from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from gymnasium import spaces

from outrider.core import EnvSpec
from outrider.durable import replace_text
from outrider.errors import RunDirError
from outrider.run_dir import RunDir, default_path, model_meta, read_model_meta, save_model

HOLDER = """
import sys, time
from outrider.run_dir import RunDir
run = RunDir.open(sys.argv[1])
print("locked", flush=True)
time.sleep(600)
"""


class FakeAgent:
    def save_params(self, path: Path) -> None:
        (path / "weights").write_bytes(b"123")

    def model_info(self):
        return 42, {}


def create(path: Path) -> RunDir:
    return RunDir.create(path, "seed: 3\n", ["outrider", "train", "a b.yaml"])


def test_a_new_run_directory_says_what_was_asked_and_where_it_ran(tmp_path):
    with create(tmp_path / "deep" / "run") as run:
        assert yaml.safe_load(run.config_yaml) == {"seed": 3}
        assert (run.path / "command.txt").read_text() == "outrider train 'a b.yaml'\n"
        system = json.loads((run.path / "system.json").read_text())
        assert system["versions"]["numpy"] == np.__version__
        assert system["cores"] >= system["usable_cores"] >= 1
        assert system["memory_bytes"] > 2**20
        assert system["torch_threads"] >= 1
        assert all(folder.is_dir() for folder in (run.models, run.checkpoints, run.logs))


def test_an_empty_directory_is_taken_and_one_with_something_in_it_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    create(tmp_path / "empty").close()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    with pytest.raises(RunDirError, match=r"full: expected an empty run directory, got one with thesis\.tex"):
        create(tmp_path / "full")
    with pytest.raises(RunDirError, match="expected an empty run directory, got one with checkpoints, "):
        create(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match="file: expected a directory that can be written"):
        create(tmp_path / "file")


def test_a_second_user_is_refused_until_the_first_is_done(tmp_path):
    run = create(tmp_path / "run")
    with pytest.raises(RunDirError, match=f"run: expected .* nobody uses, got one in use by process {os.getpid()} on"):
        RunDir.open(tmp_path / "run")
    with pytest.raises(RunDirError, match="in use by process"):
        create(tmp_path / "run")
    with RunDir.open(tmp_path / "run", lock=False) as reader:
        assert reader.config_yaml == "seed: 3\n"
    run.close()
    run.close()
    RunDir.open(tmp_path / "run").close()


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path):
    create(tmp_path / "run").close()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(RunDirError, match=f"in use by process {holder.pid} on"):
            RunDir.open(tmp_path / "run")
        holder.send_signal(signal.SIGKILL)
        holder.wait(30)
    RunDir.open(tmp_path / "run").close()


def test_a_run_that_never_began_leaves_its_name_free_and_models_stay(tmp_path):
    with RunDir.create(tmp_path / "run", "env: {}\n", ["outrider"]) as run:
        run.discard()
    assert not run.path.exists()
    with RunDir.create(tmp_path / "run", "env: {}\n", ["outrider"]) as run:
        (run.models / "last").mkdir()
        run.discard()
    assert (tmp_path / "run" / "models" / "last").is_dir()


def test_what_is_no_run_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for name, got in (("none", "nothing there"), ("file", "a file"), (".", "a directory without it")):
        with pytest.raises(RunDirError, match=f"expected a run directory .*, got {got}"):
            RunDir.open(tmp_path / name)


def test_models_are_found_by_name_or_number_and_listed_when_missing(tmp_path):
    spec = EnvSpec("CartPole-v1", spaces.Box(-1, 1, (4,)), spaces.Discrete(2))
    with create(tmp_path / "run") as run:
        with pytest.raises(RunDirError, match="expected a model 'best', got none at all"):
            run.model_path()
        for name in ("last", "900", "1000", "best"):
            save_model(run.models, name, FakeAgent(), model_meta(spec))
        assert run.model_path("best") == run.models / "best"
        assert run.model_path(900) == run.models / "900"
        with pytest.raises(RunDirError, match="expected a model '7', got best, last, 900, 1000"):
            run.model_path(7)
        with pytest.raises(RunDirError, match=r"expected a model '\.\.'"):
            run.model_path("..")
        assert read_model_meta(run.model_path("best")) == {
            "env_id": "CartPole-v1",
            "observation_space": "Box(-1.0, 1.0, (4,), float32)",
            "action_space": "Discrete(2)",
            "opt_steps": 42,
        }
        assert read_model_meta(run.logs) == {}


def test_stats_are_strict_json_whatever_is_in_them(tmp_path):
    with create(tmp_path / "run") as run:
        run.write_stats({"score": math.nan, "n": np.int64(3), "xs": np.array([1.5, math.inf]), "path": tmp_path})
        text = (run.path / "stats.json").read_text()
        stats = json.loads(text, parse_constant=pytest.fail)
        assert stats == {"score": None, "n": 3, "xs": [1.5, None], "path": str(tmp_path)}


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "stats.json"
    replace_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "new \ud800")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["stats.json"]


def test_default_directories_name_env_and_agent_and_never_collide(tmp_path):
    paths = [default_path("my_module:ns/Env-v0", "dqn", tmp_path) for _ in range(3)]
    assert len(set(paths)) == 3
    for path in paths:
        assert path.parent == tmp_path
        assert path.name.startswith("my_module-ns-Env-v0-dqn-20")
        create(path).close()
