"""Ctrl-C and SIGTERM at every stage of `outrider train`, for real."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from runs_with_faults import Pythons, gone, noted

pytestmark = pytest.mark.timeout(90)

ORDERLY_S = 10.0
SLACK_S = 3.0
"""For a machine that has better things to do."""

TRAIN = (
    *("-m", "outrider", "train", "dqn", "--env.id=children_interrupts:SlowEnv", "--run_dir=run", "--agent.hidden=[8]"),
    *(
        "--actors.n_actors=2",
        "--actors.stop_timeout_s=3",
        "--trainer.warmup_period=100",
        "--trainer.max_opts=10_000_000",
    ),
)


RESUME = ("-m", "outrider", "resume", "run", "--env.kwargs={}", "--env.eval_kwargs={}", "--trainer.warmup_period=100")

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `outrider train` with these options; it is killed in the end."""
    with closing(Pythons()) as pythons:
        env = {"FOLDER": str(tmp_path), "TERM": "xterm"}

        def run(*options: str, command: tuple[str, ...] = TRAIN, **kwargs: Any) -> subprocess.Popen[str]:
            return pythons.start(*command, *options, cwd=tmp_path, env=env, **kwargs)

        yield run


def wait_for(path: Path, words: str = "") -> None:
    deadline = time.monotonic() + 30
    while not path.exists() or (words and words not in path.read_text()):
        assert time.monotonic() < deadline, f"no {path} after 30 s"
        time.sleep(0.02)


def lines(folder: Path) -> str:
    return (folder / "run/metrics.jsonl").read_text()


def wait_for_more_than(before: str, folder: Path) -> None:
    deadline = time.monotonic() + 30
    while len(lines(folder)) <= len(before) + 500:
        assert time.monotonic() < deadline, "no more metrics after 30 s"
        time.sleep(0.05)


def opt_steps(folder: Path) -> list[int]:
    """Of each line of metrics but those of evaluations, which have those of the model that was evaluated."""
    return [json.loads(line)["opt_steps"] for line in lines(folder).splitlines() if "eval/" not in line]


def pids(folder: Path) -> list[float]:
    return [float(f.read_text()) for pattern in ("actor-*", "child-*") for f in folder.glob(pattern)]


def in_start_up(run: subprocess.Popen[str]) -> None:
    """Wait until the command handles SIGTERM; it goes on to import torch."""
    deadline = time.monotonic() + 30
    while not int(Path(f"/proc/{run.pid}/status").read_text().split("SigCgt:")[1].split()[0], 16) >> 14 & 1:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def in_description(folder: Path) -> None:
    noted(folder, "child-describing")


def in_builds(folder: Path) -> None:
    noted(folder, "actor-*")
    wait_for(folder / "run/metrics.jsonl")


def in_warm_up(folder: Path) -> None:
    noted(folder, "stepped-*", 2)
    wait_for(folder / "run/metrics.jsonl")


def in_training(folder: Path) -> None:
    wait_for(folder / "run/metrics.jsonl", "opt_steps_per_s")


def in_evaluation(folder: Path) -> None:
    noted(folder, "evaluating")


def in_the_build_for_an_evaluation(folder: Path) -> None:
    noted(folder, "building")


SLOW = pytest.mark.slow
INLINE = "--trainer.evaluation.process=false"
PLAY, BUILD = "--env.eval_kwargs={slow: play}", "--env.eval_kwargs={slow: evaluation}"
STAGES = [
    pytest.param(signal.SIGINT, in_description, ("--env.kwargs={slow: describe}",)),
    pytest.param(signal.SIGTERM, in_description, ("--env.kwargs={slow: describe}",), marks=SLOW),
    pytest.param(signal.SIGINT, in_builds, ("--env.kwargs={slow: build}",)),
    pytest.param(signal.SIGTERM, in_builds, ("--env.kwargs={slow: build}",), marks=SLOW),
    pytest.param(signal.SIGINT, in_warm_up, ("--trainer.warmup_period=90_000",), marks=SLOW),
    pytest.param(signal.SIGTERM, in_warm_up, ("--trainer.warmup_period=90_000",), marks=SLOW),
    pytest.param(signal.SIGINT, in_training, (), marks=SLOW),
    pytest.param(signal.SIGTERM, in_training, (), marks=SLOW),
    pytest.param(signal.SIGHUP, in_training, (), marks=SLOW),
    pytest.param(signal.SIGINT, in_training, ("--trainer.checkpoint.interval=1",), marks=SLOW),  # in a checkpoint
    pytest.param(signal.SIGTERM, in_training, ("--trainer.checkpoint.interval=1",), marks=SLOW),
    pytest.param(signal.SIGINT, in_evaluation, ("--trainer.eval_interval=50", PLAY), marks=SLOW),
    pytest.param(signal.SIGTERM, in_evaluation, ("--trainer.eval_interval=50", PLAY)),
    pytest.param(signal.SIGINT, in_evaluation, ("--trainer.eval_interval=50", PLAY, INLINE), marks=SLOW),
    pytest.param(signal.SIGTERM, in_evaluation, ("--trainer.eval_interval=50", PLAY, INLINE), marks=SLOW),
    pytest.param(signal.SIGINT, in_the_build_for_an_evaluation, ("--trainer.eval_interval=50", BUILD), marks=SLOW),
    pytest.param(signal.SIGTERM, in_the_build_for_an_evaluation, ("--trainer.eval_interval=50", BUILD), marks=SLOW),
]


@pytest.mark.parametrize(("signum", "reached", "options"), STAGES)
def test_a_signal_ends_the_run_in_order_at_every_stage(
    signum: signal.Signals, reached: Callable[[Path], None], options: tuple[str, ...], start: Start, tmp_path: Path
) -> None:
    run = start(*options)
    reached(tmp_path)
    sent_at = time.monotonic()
    run.send_signal(signum)
    _, err = run.communicate(timeout=30)
    assert time.monotonic() - sent_at < ORDERLY_S + SLACK_S
    assert run.returncode == 128 + signum, err
    assert err.splitlines()[-1] == f"outrider: stopped by {signum.name}"
    assert "Traceback" not in err
    assert gone(pids(tmp_path))
    if reached is not in_description:
        assert (tmp_path / "run/models/last").exists()
        before = opt_steps(tmp_path)
        resumed = start(f"--trainer.max_opts={before[-1] + 20}", command=RESUME)
        _, err = resumed.communicate(timeout=40)
        assert resumed.returncode == 0, err
        after = opt_steps(tmp_path)
        assert after[: len(before)] == before
        assert after == sorted(after)
        assert after[-1] == before[-1] + 20


def test_ctrl_c_while_the_command_starts_up_ends_it(start: Start, tmp_path: Path) -> None:
    run = start()
    in_start_up(run)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=30)
    assert (run.returncode, err) == (130, "outrider: stopped by SIGINT\n")
    assert gone(pids(tmp_path))


IGNORED = [
    pytest.param(in_description, ("--env.kwargs={slow: describe}",), marks=SLOW),
    pytest.param(in_builds, ("--env.kwargs={slow: build}",), marks=SLOW),
    pytest.param(in_warm_up, ("--trainer.warmup_period=90_000",), marks=SLOW),
    pytest.param(in_training, ()),
    pytest.param(in_training, ("--trainer.checkpoint.interval=1",), marks=SLOW),
    pytest.param(in_evaluation, ("--trainer.eval_interval=50", PLAY, INLINE), marks=SLOW),
]


@pytest.mark.parametrize(("reached", "options"), IGNORED)
def test_ctrl_c_works_where_it_was_inherited_as_ignored(
    reached: Callable[[Path], None], options: tuple[str, ...], start: Start, tmp_path: Path
) -> None:
    run = start(*options, prefix=("sh", "-c", 'trap "" INT; exec "$@"', "sh"))
    reached(tmp_path)
    sent_at = time.monotonic()
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=30)
    assert time.monotonic() - sent_at < ORDERLY_S + SLACK_S
    assert run.returncode == 130, err
    assert reached is in_description or (tmp_path / "run/models/last").exists()
    assert gone(pids(tmp_path))


def test_a_run_under_nohup_goes_on_when_the_terminal_hangs_up(start: Start, tmp_path: Path) -> None:
    run = start(prefix=("sh", "-c", 'trap "" HUP; exec "$@"', "sh"))
    in_training(tmp_path)
    before = lines(tmp_path)
    run.send_signal(signal.SIGHUP)
    wait_for_more_than(before, tmp_path)
    assert run.poll() is None
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=30)
    assert run.returncode == 143, err


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGINT, marks=SLOW), signal.SIGTERM])
def test_a_signal_to_all_processes_at_once_is_an_orderly_end(
    signum: signal.Signals, start: Start, tmp_path: Path
) -> None:
    run = start()
    in_training(tmp_path)
    for pid in (*noted(tmp_path, "actor-*", 2), run.pid, run.pid):  # `timeout` sends it twice, too
        os.kill(int(pid), signum)
    _, err = run.communicate(timeout=30)
    assert run.returncode == 128 + signum, err
    assert (tmp_path / "run/models/last").exists()
    assert gone(pids(tmp_path))


@pytest.mark.parametrize("presses", [pytest.param(1, marks=SLOW), 2])
def test_a_terminal_is_as_it_was_after_ctrl_c_and_the_second_ends_even_a_thread_in_c(
    presses: int, start: Start, tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    os.set_blocking(ours, False)
    inline = ("--trainer.evaluation.process=false", "--trainer.eval_interval=1_000", "--env.eval_kwargs={slow: C}")
    slow = inline if presses == 2 else ()
    run = start(*slow, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=own_terminal)
    shown, pressed_at = b"", [0.0]
    deadline = time.monotonic() + 45
    while run.poll() is None:
        assert time.monotonic() < deadline, shown
        with suppress(BlockingIOError):
            shown += os.read(ours, 65536)
        time.sleep(0.02)
        begun = (tmp_path / "evaluating").exists() if presses == 2 else b"opt steps" in shown
        if begun and b"\x1b[?25l" in shown and len(pressed_at) <= presses and time.monotonic() > pressed_at[-1] + 1.0:
            os.write(ours, b"\x03")
            pressed_at.append(time.monotonic())
    ended_after = time.monotonic() - pressed_at[-1]
    with suppress(BlockingIOError):
        while True:
            shown += os.read(ours, 65536)
    after = termios.tcgetattr(theirs)
    os.close(ours)
    os.close(theirs)
    assert run.returncode == 130, shown
    assert ended_after < (1.0 if presses == 2 else ORDERLY_S) + SLACK_S
    assert (b"at once" in shown) == (presses == 2)
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l"), "the cursor is hidden"
    assert after == before
    assert b"Traceback" not in shown
    assert gone(pids(tmp_path))


def own_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
