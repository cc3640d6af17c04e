from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from outrider import durable
from outrider.errors import RunDirError
from outrider.recording import (
    METRICS,
    ConsoleRecorder,
    Goals,
    JsonlRecorder,
    MemoryRecorder,
    NullRecorder,
    RecorderConfig,
    TeeRecorder,
    TensorboardRecorder,
    read_metrics,
    rewind,
)
from outrider.recording.console import Progress, clock_text, render
from outrider.recording.metrics import Aggregate, find_metric, markdown

DOCS = Path(__file__).parent.parent / "docs"


class FakeAgent:
    """Its parameters are one number; `fail` is raised after half of them is written."""

    def __init__(self, value: int = 0, fail: Exception | None = None) -> None:
        self.value, self.fail = value, fail

    def save_params(self, path: Path) -> None:
        (path / "net").mkdir()
        (path / "net" / "w.txt").write_text(str(self.value))
        if self.fail is not None:
            raise self.fail

    def load_params(self, path: Path) -> None:
        self.value = int((path / "net" / "w.txt").read_text())

    def model_info(self):
        return self.value, {}


@contextmanager
def disk_full_after(n_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond this size; writes then fail as on a full disk, part way through."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def axes(opt_steps: int, env_steps: int, time_s: float) -> dict[str, float]:
    return {"opt_steps": opt_steps, "env_steps": env_steps, "time_s": time_s}


# ---------------------------------------------------------------- the table, and what becomes of values


def test_values_between_two_flushes_are_reduced_as_the_table_says():
    aggregate = Aggregate()
    for loss, version, stale, wait in ((1.0, 5, 3, 0.2), (2.0, 6, 9, 0.4), (6.0, 7, 4, 0.6)):
        aggregate.add(
            {"train/loss": loss, "train/n_updates": version, "async/staleness_max": stale, "actor/3/wait": wait}
        )
    aggregate.add({"env_steps": 40, "time_s": 1.5, "mine/own": 1})
    aggregate.add({"env_steps": 50, "time_s": 2.5, "mine/own": 2, "note": "warm"})
    assert aggregate.take(11) == {
        "opt_steps": 11,
        "env_steps": 50,
        "time_s": 2.5,
        "train/loss": 3.0,
        "train/n_updates": 7,
        "async/staleness_max": 9,
        "actor/3/wait": pytest.approx(0.4),
        "mine/own": 1.5,
        "note": "warm",
    }


def test_a_flush_starts_anew_but_remembers_the_env_steps():
    aggregate = Aggregate()
    assert aggregate.take(0) is None
    aggregate.add({"env_steps": 40, "train/loss": 1.0})
    aggregate.take(1)
    assert aggregate.take(1) is None
    aggregate.add({"train/loss": 5.0})
    line = aggregate.take(2)
    assert line is not None
    assert (line["env_steps"], line["train/loss"]) == (40, 5.0)
    assert isinstance(line["time_s"], float)


def test_a_value_that_is_not_finite_stays_visible():
    aggregate = Aggregate()
    for value in (1.0, math.nan, 2.0):
        aggregate.add({"train/loss": value, "async/staleness_max": value})
    line = aggregate.take(1)
    assert line is not None
    assert math.isnan(line["train/loss"])
    aggregate.add({"async/staleness_max": 1.0})
    aggregate.add({"async/staleness_max": math.nan})
    line = aggregate.take(2)
    assert line is not None
    assert math.isnan(line["async/staleness_max"])


def test_numpy_scalars_become_numbers_and_arrays_their_mean_min_and_max():
    aggregate = Aggregate()
    aggregate.add({"train/q": np.array([1.0, 2.0, 6.0]), "train/loss": np.float32(0.5), "train/n_updates": np.int64(3)})
    line = aggregate.take(1)
    assert line is not None
    assert {k: v for k, v in line.items() if "/" in k} == {
        "train/q/mean": 3.0,
        "train/q/min": 1.0,
        "train/q/max": 6.0,
        "train/loss": 0.5,
        "train/n_updates": 3,
    }
    assert all(type(v) in (int, float) for v in line.values())


def test_whatever_is_stored_raises_nothing_and_stays_to_be_seen():
    loss = torch.tensor(0.5, requires_grad=True)
    for recorder in (MemoryRecorder(), TeeRecorder(MemoryRecorder()), ConsoleRecorder("plain", file=io.StringIO())):
        for _ in range(2):
            recorder.store(
                {"train/loss": loss, "a": None, "b": {"c": 1}, "d": True, "e": [], "f": "text", "g": [1, "x"]}
            )
        recorder.flush(1)
        recorder.close()
    aggregate = Aggregate()
    aggregate.add({"train/loss": loss, "a": None, "b": {"c": 1}, "d": True, "e": [], "f": "text"})
    line = aggregate.take(1)
    assert line is not None
    assert {name: line.get(name) for name in ("train/loss", "a", "b", "d", "e", "f")} == {
        "train/loss": 0.5,
        "a": "None",
        "b": "{'c': 1}",
        "d": 1,
        "e": None,
        "f": "text",
    }
    json.dumps(line, allow_nan=False)


def test_metrics_of_actors_are_found_by_their_pattern():
    metric = find_metric("actor/12/wait")
    assert metric is not None
    assert metric.name == "actor/*/wait"
    assert find_metric("mine/own") is None


def test_the_documented_table_is_up_to_date():
    assert (DOCS / "metrics.md").read_text() == markdown(), "run: python docs/make_metrics.py"
    assert len({metric.name for metric in METRICS}) == len(METRICS)


# ---------------------------------------------------------------- files


def test_every_line_of_the_metrics_file_has_the_axes_in_their_types(tmp_path):
    recorder = JsonlRecorder(tmp_path / "new" / "run")
    recorder.store(axes(0, 10, 1))
    recorder.flush(0)
    recorder.store({**axes(5, 20, 2.5), "train/loss": 0.25})
    recorder.flush(5)
    recorder.flush(5)
    recorder.close()
    rows = [json.loads(row) for row in (tmp_path / "new" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows == [axes(0, 10, 1.0), {**axes(5, 20, 2.5), "train/loss": 0.25}]
    for row in rows:
        assert [type(row[name]) for name in ("opt_steps", "env_steps", "time_s")] == [int, int, float]


def test_values_that_json_lacks_are_null_and_come_back_as_nan(tmp_path):
    recorder = JsonlRecorder(tmp_path)
    recorder.store({**axes(1, 2, 3), "a": math.nan, "b": math.inf, "c": "text"})
    recorder.flush(1)
    recorder.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["a"] is None
    (line,) = read_metrics(tmp_path)
    assert math.isnan(line["a"])
    assert math.isnan(line["b"])
    assert line["c"] == "text"


def test_events_lie_at_the_top_of_the_directory_over_env_steps(tmp_path):
    before = threading.active_count()
    recorder = TensorboardRecorder(tmp_path)
    for k in range(3):
        recorder.store({**axes(k, 100 * k, 0.5 * k), "train/loss": 1.0 / (k + 1), "note": "text"})
        recorder.flush(k)
    assert threading.active_count() == before
    recorder.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    points = events.Scalars("train/loss")
    assert [point.step for point in points] == [0, 100, 200]
    assert [point.value for point in points] == pytest.approx([1.0, 1 / 2, 1 / 3])
    assert [line["train/loss"] for line in read_metrics(tmp_path)] == pytest.approx([1.0, 1 / 2, 1 / 3])


def test_records_stored_after_the_last_flush_are_written_by_close(tmp_path):
    recorder = JsonlRecorder(tmp_path)
    recorder.store({"train/loss": 1.0})
    recorder.flush(7)
    recorder.store({"train/loss": 2.0})
    recorder.close()
    recorder.close()
    assert [(line["opt_steps"], line["train/loss"]) for line in read_metrics(tmp_path)] == [(7, 1.0), (7, 2.0)]


def test_a_second_recorder_goes_on_after_a_torn_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"opt_steps": 1}\n{"opt_st')
    recorder = JsonlRecorder(tmp_path)
    recorder.store({"train/loss": 2.0})
    recorder.flush(2)
    recorder.close()
    assert [line["opt_steps"] for line in read_metrics(tmp_path)] == [1, 2]


def test_a_full_disk_is_reported_once_and_nothing_is_lost_when_there_is_room_again(tmp_path, capsys, caplog):
    recorder = TensorboardRecorder(tmp_path)
    for k in range(5):
        recorder.store({**axes(k, k, k), "train/loss": float(k)})
        recorder.flush(k)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    with disk_full_after(size + 10), caplog.at_level(logging.ERROR):
        for k in range(5, 9):
            recorder.store({**axes(k, k, k), "train/loss": float(k)})
            recorder.flush(k)
        text = (tmp_path / "metrics.jsonl").read_text()
    assert text.endswith("}\n")
    assert len(text.splitlines()) == 5
    assert recorder.failures >= 4
    errors = capsys.readouterr().err.splitlines()
    assert len([line for line in errors if "metrics.jsonl failed, training goes on" in line]) == 1
    assert len([r for r in caplog.records if "metrics.jsonl" in r.getMessage()]) == 1
    recorder.flush(8)
    recorder.store({**axes(9, 9, 9), "train/loss": 9.0})
    recorder.flush(9)
    recorder.close()
    assert [line["train/loss"] for line in read_metrics(tmp_path)] == [float(k) for k in range(10)]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [point.value for point in events.Scalars("train/loss")] == [float(k) for k in range(10)]
    assert "lost" not in capsys.readouterr().err


def test_what_stays_unwritten_at_the_end_is_counted(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(durable, "MAX_PENDING", 3)
    recorder = JsonlRecorder(tmp_path)
    with disk_full_after(5):
        for k in range(5):
            recorder.store({"train/loss": float(k)})
            recorder.flush(k)
        recorder.close()
    assert "metrics.jsonl: 5 flushes could not be written and are lost" in capsys.readouterr().err


def test_not_even_the_report_of_a_full_disk_ends_the_training(tmp_path, monkeypatch):
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr("sys.stderr", log)
        recorder = JsonlRecorder(tmp_path / "run")
        with disk_full_after(0):
            recorder.store({"train/loss": 1.0})
            recorder.flush(1)
            assert recorder.failures == 1
        recorder.close()
    assert len(read_metrics(tmp_path / "run")) == 1


def test_a_directory_that_cannot_be_made_is_refused_at_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match="file/run: expected a directory that can be written"):
        TensorboardRecorder(tmp_path / "file" / "run")


def test_a_saved_model_is_loaded_again_and_says_what_it_is_for(tmp_path):
    recorder = TensorboardRecorder(tmp_path, meta={"env_id": "CartPole-v1"})
    recorder.save_model("best", FakeAgent(3))
    recorder.save_model("best", FakeAgent(4))
    recorder.save_model("100", FakeAgent(100))
    agent = FakeAgent()
    recorder.load_model("best", agent)
    assert agent.value == 4
    assert sorted(os.listdir(tmp_path / "models")) == ["100", "best"]
    meta = json.loads((tmp_path / "models" / "best" / "meta.json").read_text())
    assert meta == {"env_id": "CartPole-v1", "opt_steps": 4}
    with pytest.raises(RunDirError, match="expected a model 'last', got best, 100"):
        recorder.load_model("last", agent)
    recorder.close()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed")])
def test_a_model_that_cannot_be_written_leaves_the_former_one_and_training_goes_on(tmp_path, capsys, error):
    recorder = JsonlRecorder(tmp_path)
    recorder.save_model("best", FakeAgent(1))
    for _ in range(3):
        recorder.save_model("best", FakeAgent(2, fail=error))
    agent = FakeAgent()
    recorder.load_model("best", agent)
    recorder.close()
    assert agent.value == 1
    assert os.listdir(tmp_path / "models") == ["best"]
    assert recorder.failures == 3
    assert capsys.readouterr().err.count("training goes on") == 1


def test_a_mistake_in_an_agent_is_not_hidden(tmp_path):
    recorder = JsonlRecorder(tmp_path)
    with pytest.raises(TypeError, match="my bug"):
        recorder.save_model("best", FakeAgent(2, fail=TypeError("my bug")))
    recorder.close()
    assert os.listdir(tmp_path / "models") == []


def test_a_crash_between_the_two_renames_of_a_save_loses_no_model(tmp_path):
    recorder = JsonlRecorder(tmp_path)
    recorder.save_model("best", FakeAgent(1))
    (tmp_path / "models" / "best").rename(tmp_path / "models" / ".best.old")
    agent = FakeAgent()
    recorder.load_model("best", agent)
    assert agent.value == 1
    recorder.save_model("best", FakeAgent(2))
    recorder.load_model("best", agent)
    recorder.close()
    assert agent.value == 2
    assert os.listdir(tmp_path / "models") == ["best"]


# ---------------------------------------------------------------- in memory, none, several


def test_the_memory_recorder_gives_series_and_models_back():
    recorder = MemoryRecorder()
    for k in range(3):
        recorder.store({**axes(k, 10 * k, k), **({"eval/mean_reward": 5.0 * k} if k != 1 else {})})
        recorder.flush(k)
    recorder.save_model("last", FakeAgent(7))
    recorder.close()
    xs, ys = recorder.series("eval/mean_reward")
    assert (xs.tolist(), ys.tolist()) == ([0, 20], [0.0, 10.0])
    agent = FakeAgent()
    recorder.load_model("last", agent)
    assert agent.value == 7
    with pytest.raises(RunDirError, match="expected a model 'best', got last"):
        recorder.load_model("best", agent)


def test_the_null_recorder_takes_everything_and_has_no_model(tmp_path):
    recorder = NullRecorder()
    recorder.store({"train/loss": 1.0})
    recorder.flush(1)
    recorder.save_model("best", FakeAgent())
    recorder.close()
    with pytest.raises(RunDirError, match="NullRecorder, which keeps none"):
        recorder.load_model("best", FakeAgent())


def test_several_recorders_get_everything_and_the_first_with_the_model_gives_it():
    a, b = MemoryRecorder(), MemoryRecorder()
    recorder = TeeRecorder(a, NullRecorder(), b)
    recorder.store({"train/loss": 1.0})
    recorder.flush(1)
    recorder.save_model("best", FakeAgent(1))
    b.save_model("last", FakeAgent(2))
    agent = FakeAgent()
    recorder.load_model("last", agent)
    assert agent.value == 2
    with pytest.raises(RunDirError, match=r"got best; .*NullRecorder.*got best, last"):
        recorder.load_model("9", agent)
    recorder.close()
    assert [line["train/loss"] for line in a.lines] == [line["train/loss"] for line in b.lines] == [1.0]


def test_all_recorders_are_closed_even_if_one_fails():
    class Failing(NullRecorder):
        def close(self) -> None:
            raise OSError("first")

    last = MemoryRecorder()
    last.store({"train/loss": 1.0})
    with pytest.raises(OSError, match="first"):
        TeeRecorder(Failing(), last).close()
    assert len(last.lines) == 1


@pytest.mark.parametrize(("tensorboard", "events"), [(True, 1), (False, 0)])
def test_the_config_builds_what_it_says(tmp_path, tensorboard, events):
    recorder = RecorderConfig(tensorboard=tensorboard, console="off").build(tmp_path)
    recorder.store({"train/loss": 1.0})
    recorder.flush(1)
    recorder.close()
    assert len(read_metrics(tmp_path)) == 1
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == events
    assert isinstance(RecorderConfig(console="plain").build(tmp_path), TeeRecorder)


# ---------------------------------------------------------------- console


def feed(recorder: ConsoleRecorder) -> None:
    for k in range(1, 4):
        recorder.store(axes(100 * k, 400 * k, float(k)))
        recorder.store({"rollout/ep_rew_mean": 20.5 * k, "train/loss": 0.125, "time/fps": 400.0})
        recorder.store({"async/learner_wait": 0.25, "actor/0/wait": 0.25, "actor/1/wait": 0.75})
        if k != 3:
            recorder.store({"eval/mean_reward": 30.0 / k})
        recorder.flush(100 * k)


def test_without_a_terminal_each_flush_is_one_plain_line():
    out = io.StringIO()
    recorder = ConsoleRecorder(goals=Goals(max_opts=1000), file=out)
    feed(recorder)
    recorder.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert out.getvalue().isascii()
    assert "\x1b" not in out.getvalue()
    assert "opt 200/1000  env 800  eval 15.0 (best 30.0)  return 41.0  loss 0.125" in lines[1]
    assert re.match(r"0:00:0\d \(0:00:0\d left\)  opt", lines[1])
    assert "learner waits 25%  actors wait 50%" in lines[1]
    assert "eval" not in lines[2]


def test_actors_are_told_of_once_something_has_happened_to_one():
    out = io.StringIO()
    recorder = ConsoleRecorder("plain", file=out)
    for step, (alive, restarts) in enumerate([(2, 0), (1, 0), (2, 1)]):
        states = {"actor/0/state": "running", "actor/1/state": "restarting"}
        recorder.store({**states, "async/actors_alive": alive, "async/actor_restarts": restarts})
        recorder.flush(step)
    first, second, third = out.getvalue().splitlines()
    assert "actors" not in first
    assert second.endswith("actors 1 of 2 alive, 0 restarts")
    assert third.endswith("actors 2 of 2 alive, 1 restarts")


def test_a_last_flush_with_nothing_new_prints_no_line_again():
    out = io.StringIO()
    recorder = ConsoleRecorder(file=out)
    for record in ({"opt_steps": 5, "eval/mean_reward": 1.0}, {"opt_steps": 5, "train/loss": 1.0}):
        recorder.store(record)
        recorder.flush(5)
    assert len(out.getvalue().splitlines()) == 1


def test_a_plain_line_comes_now_and_then_while_nothing_is_flushed(monkeypatch):
    monkeypatch.setattr("outrider.recording.console.PLAIN_INTERVAL_S", 0.0)
    out = io.StringIO()
    recorder = ConsoleRecorder(goals=Goals(max_opts=1000), file=out)
    recorder.store({"opt_steps": 0, "env_steps": 128, "time_s": 0.5})
    assert "opt 0/1000  env 128" in out.getvalue()


@pytest.fixture
def terminal(monkeypatch):
    """A pseudo terminal of 80 columns: what is written to `file` can be read from `screen()`."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "JUPYTER_COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", "80"), ("LINES", "24")):
        monkeypatch.setenv(name, value)
    master, slave = os.openpty()
    os.set_blocking(master, False)
    file = os.fdopen(slave, "w", encoding="utf-8")

    def screen() -> str:
        data = b""
        try:
            while chunk := os.read(master, 65536):
                data += chunk
        except BlockingIOError:
            pass
        return data.decode()

    yield file, screen
    file.close()
    os.close(master)


def test_on_a_terminal_a_live_display_shows_the_run_and_gives_the_terminal_back(terminal):
    file, screen = terminal
    before = threading.active_count()
    recorder = ConsoleRecorder(title="CartPole-v1", goals=Goals(max_opts=1000, target_score=475), file=file)
    feed(recorder)
    assert threading.active_count() == before + 1
    recorder.close()
    recorder.close()
    assert threading.active_count() == before
    text = screen()
    for part in ("CartPole-v1", "30%", "300", "1,200", "61.5", "best 30.0", "475", "learner 25%  actors 50%"):
        assert part in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_the_live_display_shows_what_is_stored_long_before_it_is_flushed(terminal):
    file, screen = terminal
    recorder = ConsoleRecorder(title="Pong", file=file)
    recorder.store({**axes(3, 700, 2.5), "time/fps": 436.0, "async/learner_wait": 0.25, "actor/0/wait": 0.5})
    recorder.close()
    text = screen()
    for part in ("700", "436/s", "learner 25%  actors 50%"):
        assert part in text


def test_the_cursor_rests_on_an_empty_line_where_an_echo_of_the_terminal_moves_nothing(terminal):
    file, screen = terminal
    recorder = ConsoleRecorder(title="CartPole-v1", file=file)
    feed(recorder)
    recorder._live.refresh()
    last = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", screen()).split("\n")[-1]
    assert last == ""
    recorder.close()


@pytest.mark.parametrize(("width", "n_lines"), [(40, 7), (80, 7), (120, 6), (200, 6)])
def test_the_live_display_keeps_to_its_lines_whatever_the_width(width, n_lines):
    progress = Progress(Goals(max_opts=1_000_000, target_score=475.0))
    for k in (1, 2):
        progress.update(
            {**axes(100_000 * k, 9_000_000 * k, 100.0 * k), "eval/mean_reward": -1234.5 * k, "async/learner_wait": 0.5}
        )
    out = io.StringIO()
    Console(file=out, width=width).print(render(progress, "Name-v0 " * 5, width))
    lines = out.getvalue().splitlines()
    assert len(lines) == n_lines
    assert max(len(line) for line in lines) <= min(width, 120)
    if width > 40:
        assert re.search(r"0:03:2\d  ≤ 0:1[23]:\d\d left", lines[0])
        assert "-2,469  best -1,234 / 475" in out.getvalue()
        assert "200,000 / 1M" in out.getvalue()


def test_output_of_the_run_appears_above_the_live_display(terminal, monkeypatch):
    file, screen = terminal
    monkeypatch.setattr("sys.stdout", file)
    recorder = ConsoleRecorder(title="Pendulum-v1", goals=Goals(max_opts=1000))
    feed(recorder)
    print("a line of the user's own")
    recorder.close()
    text = screen()
    assert "a line of the user's own" in text
    assert text.rindex("Pendulum-v1") > text.rindex("a line of the user's own")


def test_a_closed_pipe_ends_the_output_and_not_the_training():
    read, write = os.pipe()
    os.close(read)
    file = os.fdopen(write, "w")
    recorder = ConsoleRecorder("plain", file=file)
    feed(recorder)
    feed(recorder)
    recorder.close()
    with pytest.raises(BrokenPipeError):
        file.close()


def test_the_time_left_follows_the_goal_that_is_reached_first():
    goals = Goals(max_opts=1000, max_env_steps=2000, max_time_s=100.0)
    assert goals.fraction(100, 800, 10.0) == 0.4
    assert goals.fraction(900, 800, 10.0) == 0.9
    assert goals.fraction(900, 800, 500.0) == 1.0
    assert Goals(target_score=1.0).fraction(1, 1, 1) is None


def test_a_score_that_comes_late_does_not_turn_the_display_back():
    progress = Progress(Goals(max_opts=100))
    progress.update({"opt_steps": 50, "env_steps": 90, "time_s": 5.0})
    progress.update({"opt_steps": 40, "env_steps": 70, "time_s": 4.0, "eval/mean_reward": 3.0})
    assert progress.line == {"opt_steps": 50, "env_steps": 90, "time_s": 5.0, "eval/mean_reward": 3.0}
    assert progress.best == 3.0


def test_going_back_keeps_a_score_that_was_written_late(tmp_path):
    recorder = TensorboardRecorder(tmp_path)
    for opt_steps, score in ((10, None), (40, None), (20, 7.0), (50, None), (45, 9.0)):
        record = {"opt_steps": opt_steps, "env_steps": 2 * opt_steps, "time_s": 1.0, "train/loss": 1.0}
        recorder.store(record if score is None else record | {"eval/best_mean_reward": score})
        recorder.flush(opt_steps)
    recorder.close()
    assert rewind(tmp_path, 40, 80) == (2, 9.0)
    assert [line["opt_steps"] for line in read_metrics(tmp_path)] == [10, 40, 20]
    assert rewind(tmp_path, 30, 60) == (1, 7.0)
    assert [line["opt_steps"] for line in read_metrics(tmp_path)] == [10, 20]


@pytest.mark.parametrize("row", ["no JSON", "[1]", "{}", '{"opt_steps": "1", "env_steps": 2}'])
def test_going_back_in_a_file_that_no_recorder_wrote_is_refused_in_words(row, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(row + "\n")
    with pytest.raises(
        RunDirError, match=r"metrics\.jsonl: expected lines of JSON with opt_steps and env_steps, got b"
    ):
        rewind(tmp_path, 1, 1)


def test_a_run_directory_that_is_deleted_meanwhile_is_said_once_and_what_was_lost_at_the_end(tmp_path, capsys):
    recorder = JsonlRecorder(tmp_path / "run")
    recorder.store({"opt_steps": 1, "env_steps": 1, "time_s": 0.1})
    recorder.flush(1)
    shutil.rmtree(tmp_path / "run")
    for n in (2, 3):
        recorder.store({"opt_steps": n, "env_steps": n, "time_s": 0.1})
        recorder.flush(n)
    recorder.close()
    said = capsys.readouterr().err
    assert said.count("metrics.jsonl failed, training goes on: FileNotFoundError") == 1
    assert "metrics.jsonl: 2 flushes could not be written and are lost" in said


def test_an_evaluation_without_a_score_is_never_the_best():
    out = io.StringIO()
    recorder = ConsoleRecorder("plain", file=out)
    for score in (math.nan, -20.0, math.nan, -30.0):
        recorder.store({"eval/mean_reward": score})
        recorder.flush(1)
    assert [line.split("(best ")[1].split(")")[0] for line in out.getvalue().splitlines()] == ["-", *["-20.0"] * 3]


def test_the_clock_counts_hours():
    assert clock_text(7.9) == "0:00:07"
    assert clock_text(3 * 3600 + 25 * 60 + 1) == "3:25:01"
