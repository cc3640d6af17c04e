"""What goes wrong in actors and in the learner, provoked for real; and what is left behind: nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from children_faults import FaultAgentConfig, FaultStepProcessorConfig, StuckConfig, fault_env, released
from runs_with_faults import Pythons, TimedRecorder, alive, gone, noted, nothing_left, train

from outrider.actor_manager import ActorManager, ActorManagerConfig
from outrider.async_trainer import AsyncTrainer, AsyncTrainerConfig
from outrider.channel import item_channel
from outrider.errors import ActorFailed, Unbound
from outrider.evaluation import DefaultEvaluator
from outrider.flags import InitGuard, StopFlag
from outrider.model_sync import model_channel
from outrider.process_scorer import EvaluationConfig
from outrider.recording import MemoryRecorder
from outrider.replay.uniform import SimpleReplayBuffer, SimpleReplayBufferConfig
from outrider.sampling import SimpleStepProcessorConfig
from outrider.testing import FakeAgentConfig

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.timeout(50)

NOTICED_S = 2.0
"""An actor's end is noticed within a second; another one for a machine that has better things to do."""


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> None:
    fault_env().spec()


@pytest.fixture
def pythons() -> Iterator[Pythons]:
    with closing(Pythons()) as pythons:
        yield pythons


class Wrapped:
    """An env config around another one."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def spec(self) -> Any:
        return self.config.spec()

    def eval(self) -> Any:
        return self.config

    def build(self, seed: Any, n_envs: int) -> Any:
        return self.config.build(seed, n_envs)


def failure(env: Any, recorder: TimedRecorder | None = None, **options: Any) -> ActorFailed:
    """Train until an actor fails, once. The error is without the frames that keep the memory of the run."""
    options["actors"] = {"restarts": 0} | options.get("actors", {})
    with nothing_left():
        with pytest.raises(ActorFailed) as caught:
            train(env, recorder, **options)
        error = caught.value.with_traceback(None)
        error.__context__ = None
        del caught
    return error


@pytest.mark.parametrize("backend", ["processes", "threads"])
@pytest.mark.parametrize(("where", "at"), [("init", 0), ("reset", 0), ("reset", 2), ("step", 0), ("step", 100)])
def test_an_actor_whose_env_raises_ends_the_run_with_its_traceback(
    where: str, at: int, backend: str, tmp_path: Path
) -> None:
    recorder = TimedRecorder()
    env = fault_env(where=where, at=at, actor=1, folder=str(tmp_path))
    error = failure(env, recorder, actors={"backend": backend})
    assert error.actor_id == 1
    assert str(error).startswith("actor 1 failed: ValueError: as asked\nTraceback (most recent call last):\n")
    assert 'children_faults.py", line' in error.traceback_text
    assert "in _fail_in" in error.traceback_text
    assert recorder.saved_at - noted(tmp_path, "failed")[0] < NOTICED_S
    assert "last" in recorder.models
    assert recorder.lines, "the statistics were flushed"


@pytest.mark.parametrize("backend", ["processes", "threads"])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"agent": FaultAgentConfig(policy=True)}, "ZeroDivisionError: in the policy"),
        ({"step_processor": FaultStepProcessorConfig()}, "ZeroDivisionError: in the step processor"),
    ],
)
def test_an_actor_whose_policy_or_step_processor_raises_ends_the_run_with_its_traceback(
    options: dict[str, Any], text: str, backend: str
) -> None:
    error = failure(fault_env(where="never"), actors={"backend": backend}, **options)
    assert f"failed: {text}\nTraceback" in str(error)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("exit", "actor 0 failed: SystemExit: 0\nTraceback"),
        ("_exit", "actor 0 ended by itself with exit code 0"),
        ("segfault", "actor 0 was killed by SIGSEGV"),
        ("kill", "actor 0 was killed by SIGKILL"),
    ],
)
def test_an_actor_that_exits_crashes_or_is_killed_is_named(how: str, text: str, tmp_path: Path) -> None:
    recorder = TimedRecorder()
    error = failure(fault_env(how=how, at=60, actor=0, folder=str(tmp_path), child=True), recorder)
    assert str(error).startswith(text)
    assert recorder.saved_at - noted(tmp_path, "failed")[0] < NOTICED_S
    assert "last" in recorder.models
    assert gone(noted(tmp_path, "child-*", 2)), "what the environments had started was left"


@pytest.mark.parametrize("how", ["raise", "segfault"])
def test_all_actors_failing_at_once_end_the_run_with_one_of_them(how: str) -> None:
    error = failure(fault_env(where="reset", how=how), n_actors=4, warmup_period=1000)
    assert ("as asked" in str(error)) == (how == "raise")


def test_a_failure_is_noticed_while_the_learner_evaluates_and_while_it_may_not_insert(tmp_path: Path) -> None:
    class Endless:
        """Plays until it is told to stop."""

        stop: Any = None
        calls = 0

        def evaluate(self, agent: Any) -> tuple[float, dict[str, Any]]:
            self.calls += 1
            while not self.stop():
                time.sleep(0.01)
            return float("nan"), {}

        def close(self) -> None:
            pass

    recorder, evaluator = TimedRecorder(), Endless()
    env = fault_env(how="late", at=100, folder=str(tmp_path))
    inline = EvaluationConfig(process=False)
    failure(
        env, recorder, evaluator=evaluator, n_actors=1, eval_interval=1, samples_per_insert=1000.0, evaluation=inline
    )
    assert recorder.saved_at - noted(tmp_path, "failed")[0] < 1.0 + NOTICED_S
    assert evaluator.calls == 1
    assert set(recorder.models) == {"last"}, "an evaluation that was stopped makes no best model"
    assert evaluator.stop is None


def test_a_long_message_of_any_text_reaches_the_learner(tmp_path: Path) -> None:
    error = failure(fault_env(how="text"))
    assert error.traceback_text.rstrip().endswith("is as asked')")
    assert error.traceback_text.startswith("[...]")


def test_an_env_that_fails_twice_is_reported_with_the_first_failure() -> None:
    class Twice(Wrapped):
        def build(self, seed: Any, n_envs: int) -> Any:
            env = super().build(seed, n_envs)

            def close() -> None:
                raise OSError("while closing")

            env.close = close
            return env

    error = failure(Twice(fault_env()))
    assert "failed: ValueError: as asked\n" in str(error)


def test_an_actor_that_is_gone_before_its_start_is_over_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    open_now = os.pidfd_open

    def too_late(pid: int) -> int:
        os.kill(pid, signal.SIGKILL)
        gone([pid])
        while Path(f"/proc/{pid}").exists():  # until it is reaped
            time.sleep(0.01)
        return open_now(pid)

    monkeypatch.setattr(os, "pidfd_open", too_late)
    assert str(failure(fault_env(where="never"), n_actors=1)) == "actor 0 was killed by SIGKILL"


def test_a_stuck_actor_is_killed_and_logged_when_its_time_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env = fault_env(how="hang", actor=0, folder=str(tmp_path), child=True)
    with nothing_left():
        start = time.monotonic()
        result = train(env, max_time_s=1.0, warmup_period=1000, actors={"stop_timeout_s": 0.5})
        assert time.monotonic() - start < 1.0 + 0.5 + 1.0 + NOTICED_S
        assert result.actor_stats[1].samples > 0
    assert [r.getMessage() for r in caplog.records] == ["actor 0 did not end within 0.5 s: killed"]
    assert gone(noted(tmp_path, "child-*", 2))


def test_a_stuck_thread_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    start = time.monotonic()
    train(
        fault_env(where="never"),
        max_time_s=0.5,
        warmup_period=1000,
        agent=StuckConfig(),
        n_actors=1,
        actors={"stop_timeout_s": 0.5, "backend": "threads"},
    )
    assert time.monotonic() - start < 0.5 + 0.5 + 1.0 + NOTICED_S
    assert "actor 0 is a thread and cannot be killed" in caplog.text
    released.set()


def test_actors_that_wait_for_a_slow_build_or_for_parameters_end_at_once(tmp_path: Path) -> None:
    stop, guard = StopFlag(), InitGuard()
    with nothing_left(), guard:
        item_sender, _ = item_channel()
        model_sender, model_receiver = model_channel()
        agents = [FakeAgentConfig()] * 3
        actors = ActorManager.build(
            ActorManagerConfig(), agents, fault_env(), SimpleStepProcessorConfig(), item_sender, model_receiver, stop
        )
        model_sender.bind(FakeAgentConfig().build(fault_env().spec()).model_info()[1])
        actors.run(guard)
        time.sleep(0.5)
        start = time.monotonic()
        stats = actors.stop_and_join()
        assert time.monotonic() - start < NOTICED_S
        assert [s.env_steps for s in stats] == [0, 0, 0]
        del item_sender, _, model_sender, model_receiver, actors


def test_many_actors_end_at_once_though_nobody_reads_what_they_send() -> None:
    n = 32
    stop, guard = StopFlag(), InitGuard()
    with nothing_left():
        item_sender, item_receiver = item_channel()
        model_sender, model_receiver = model_channel()
        agent, env = FakeAgentConfig(), fault_env(where="never")
        config = ActorManagerConfig(n_buffer=4, n_slots=2)
        actors = ActorManager.build(
            config, [agent] * n, env, SimpleStepProcessorConfig(), item_sender, model_receiver, stop
        )
        info = agent.build(env.spec()).model_info()[1]
        model_sender.bind(info)
        model_sender.publish(0, info, 0)
        actors.run(guard)
        deadline = time.monotonic() + 30
        while item_receiver.fill() < 1.0:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        start = time.monotonic()
        stats = actors.stop_and_join()
        assert time.monotonic() - start < 5.0 + 1.0
        assert all(s.samples == 8 for s in stats)
        del item_sender, item_receiver, model_sender, model_receiver, actors


@pytest.mark.parametrize("where", ["agent", "evaluator", "evaluator's env", "recorder", "replay", "save"])
def test_a_learner_that_raises_ends_with_the_original_error_and_no_actor(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise ZeroDivisionError(f"in the {where}")

    env, recorder = fault_env(where="never"), MemoryRecorder()
    inline = EvaluationConfig(process=False)
    options: dict[str, Any] = {"eval_interval": 5, "evaluator": DefaultEvaluator(env), "evaluation": inline}
    if where == "agent":
        options["agent"] = FaultAgentConfig(fail_at=7)
    elif where == "evaluator":
        monkeypatch.setattr(options["evaluator"], "evaluate", fail)
    elif where == "evaluator's env":
        monkeypatch.setattr(options["evaluator"], "_play", fail)
    elif where == "replay":
        monkeypatch.setattr(SimpleReplayBuffer, "push", fail)
    else:
        monkeypatch.setattr(recorder, {"recorder": "store", "save": "save_model"}[where], fail)
    with nothing_left():
        with pytest.raises(ZeroDivisionError, match=f"in the {where}") as caught:
            train(env, recorder, **options)
        frames = [entry.name for entry in caught.traceback]
        assert frames[-1] == ("opt" if where == "agent" else "fail")
        del caught
        options["evaluator"].close()
    assert ("last" in recorder.models) == (where != "save")


def test_a_learner_killed_takes_all_actors_and_their_children_with_it(tmp_path: Path, pythons: Pythons) -> None:
    shm = set(os.listdir("/dev/shm"))
    script = (
        "from children_faults import fault_env\nfrom runs_with_faults import train\n"
        "import multiprocessing, sys\n"
        "hows = ['hang', 'stop', 'gil', 'raise']\n"
        "class Each:\n"
        "    def __init__(self): self.env = fault_env(where='never')\n"
        "    def spec(self): return self.env.spec()\n"
        "    def eval(self): return self.env\n"
        "    def build(self, seed, n_envs):\n"
        "        from children_faults import actor_id\n"
        "        how = hows[actor_id()]\n"
        f"        kwargs = dict(folder={str(tmp_path)!r}, child=True, how=how)\n"
        "        return fault_env(**kwargs, where='never' if how == 'raise' else 'step').build(seed, n_envs)\n"
        "train(Each(), n_actors=4, max_time_s=60.0)\n"
    )
    learner = pythons.start("-c", script)
    pids = noted(tmp_path, "actor-*", 4) + noted(tmp_path, "child-*", 4)
    noted(tmp_path, "failed")
    time.sleep(0.3)
    assert all(map(alive, pids))
    learner.kill()
    learner.communicate()
    assert gone(pids, timeout_s=5.0)
    assert set(os.listdir("/dev/shm")) <= shm


def test_the_command_ends_with_code_1_and_the_traceback_when_all_actors_raise(tmp_path: Path, pythons: Pythons) -> None:
    start = time.monotonic()
    done = command(pythons, tmp_path, "--env.kwargs={where: reset}")
    assert time.monotonic() - start < 30.0, "a hang, or a wait for a time-out"
    assert done.returncode == 1
    assert "failed: ValueError: as asked\nTraceback (most recent call last):\n" in done.stderr
    assert (tmp_path / "run/models/last").exists()
    assert (tmp_path / "run/metrics.jsonl").read_text().count("\n") > 0


def test_the_command_ends_with_code_1_and_the_traceback_when_the_learner_raises(
    tmp_path: Path, pythons: Pythons
) -> None:
    (tmp_path / "own_evaluator.py").write_text(
        "from dataclasses import dataclass\n"
        "from outrider.config import Config\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class OwnConfig(Config):\n"
        "    def build(self, env): return self\n"
        "    def evaluate(self, agent): raise ZeroDivisionError('in the evaluator')\n"
        "    def close(self): pass\n"
    )
    done = command(
        pythons,
        tmp_path,
        "--evaluator.class=own_evaluator:OwnConfig",
        "--trainer.eval_interval=2",
        "--trainer.evaluation.process=false",
        "--env.kwargs={where: no}",
    )
    assert done.returncode == 1
    assert "in evaluate\n" in done.stderr
    assert done.stderr.endswith("ZeroDivisionError: in the evaluator\n")
    assert (tmp_path / "run/models/last").exists()


def command(pythons: Pythons, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    run = pythons.start(
        *["-m", "outrider", "train", "dqn", "--env.id=children_faults:FaultEnv", "--run_dir=run"],
        *["--agent.hidden=[8]", "--actors.n_actors=2", "--trainer.warmup_period=100", *options],
        cwd=folder,
    )
    out, err = run.communicate(timeout=45)
    return subprocess.CompletedProcess(run.args, run.returncode, out, err)


PARTS = """
from children_faults import FaultAgentConfig, fault_env
from outrider import *
agent, env = FaultAgentConfig(opt_s=0.002), fault_env(where="never", folder={folder!r}, child=True)
class Own(NullRecorder):
    def store(self, record):
        pass
stop, guard = StopFlag(), InitGuard()
item_sender, item_receiver = item_channel()
model_sender, model_receiver = model_channel()
actors = ActorManager.build(ActorManagerConfig(), [agent, agent], env, SimpleStepProcessorConfig(),
                            item_sender, model_receiver, stop)
config = AsyncTrainerConfig(max_opts=20, warmup_period=64, eval_interval=0)
trainer = AsyncTrainer.build(config, agent, env, SimpleReplayBufferConfig(capacity=1000),
                             item_receiver, model_sender, stop)
actors.run(guard)
"""
TRAIN = "stats = trainer.train(Own(), None)\nprint(stats.opt_steps)\n"


def test_the_parts_by_hand_work_in_a_script_from_stdin(tmp_path: Path, pythons: Pythons) -> None:
    text = PARTS.format(folder=str(tmp_path)) + TRAIN + "print(len(actors.stop_and_join()))\n"
    run = pythons.start("-", cwd=tmp_path, stdin=subprocess.PIPE)
    out, err = run.communicate(text, timeout=45)
    assert (run.returncode, out) == (0, "20\n2\n"), err
    assert gone(noted(tmp_path, "actor-*", 2) + noted(tmp_path, "child-*", 2))


@pytest.mark.parametrize(("rest", "code"), [(TRAIN, 0), ("raise ValueError('between')\n", 1)])
def test_a_script_without_main_guard_that_forgets_its_actors_ends_and_leaves_nothing(
    rest: str, code: int, tmp_path: Path, pythons: Pythons
) -> None:
    wait = "import time; time.sleep(0.5)\n"  # until the actors are at work
    (tmp_path / "script.py").write_text(PARTS.format(folder=str(tmp_path)) + wait + rest)
    run = pythons.start("script.py", cwd=tmp_path)
    _, err = run.communicate(timeout=45)
    assert run.returncode == code, err
    assert ("ValueError: between" in err) == (code == 1)
    assert gone(noted(tmp_path, "actor-*", 2) + noted(tmp_path, "child-*", 2))


def test_a_call_too_early_names_the_missing_one() -> None:
    env, agent, stop = fault_env(where="never"), FakeAgentConfig(), StopFlag()
    item_sender, item_receiver = item_channel()
    model_sender, model_receiver = model_channel()
    replay = SimpleReplayBufferConfig(capacity=100)
    with pytest.raises(Unbound, match=r"call ActorManager\.build"):
        AsyncTrainer.build(AsyncTrainerConfig(), agent, env, replay, item_receiver, model_sender, stop)
    actors = ActorManager.build(
        ActorManagerConfig(), [agent], env, SimpleStepProcessorConfig(), item_sender, model_receiver, stop
    )
    with pytest.raises(Unbound, match=r"call AsyncTrainer\.build"):
        actors.run(InitGuard())
    assert actors.stop_and_join()[0].samples == 0


def test_a_stop_flag_set_by_hand_ends_the_training() -> None:
    stop = StopFlag()
    env, agent = fault_env(where="never"), FakeAgentConfig()
    item_sender, item_receiver = item_channel()
    model_sender, model_receiver = model_channel()
    actors = ActorManager.build(
        ActorManagerConfig(), [agent], env, SimpleStepProcessorConfig(), item_sender, model_receiver, stop
    )
    config = AsyncTrainerConfig(max_opts=None, max_time_s=30.0, warmup_period=10**6)
    replay = SimpleReplayBufferConfig(capacity=2 * 10**6)
    trainer = AsyncTrainer.build(config, agent, env, replay, item_receiver, model_sender, stop)
    timer = threading.Timer(0.5, stop.set)
    with actors:
        actors.run(InitGuard())
        timer.start()
        assert trainer.train(MemoryRecorder(), DefaultEvaluator(env)).stopped_by == "request"
    timer.join()


@pytest.fixture
def actor(tmp_path: Path) -> Iterator[Any]:
    """A running actor, as a psutil.Process."""

    class Redirected(Wrapped):
        def build(self, seed: Any, n_envs: int) -> Any:
            os.dup2(os.open(tmp_path / "stderr", os.O_WRONLY | os.O_CREAT), 2)
            return super().build(seed, n_envs)

    env = Redirected(fault_env(where="never", folder=str(tmp_path)))
    trainer = threading.Thread(target=train, args=(env,), kwargs={"max_time_s": 2.0, "n_actors": 4})
    trainer.start()
    noted(tmp_path, "actor-*", 4)
    yield psutil.Process(int(noted(tmp_path, "actor-3")[0]))
    trainer.join()


def test_an_actor_has_few_threads_a_title_and_no_ctrl_c_and_shows_its_stack(actor: Any, tmp_path: Path) -> None:
    assert "".join(actor.cmdline()) == "outrider: actor 3"
    assert actor.num_threads() <= 3
    assert os.getpgid(actor.pid) == actor.pid
    ignored = int(Path(f"/proc/{actor.pid}/status").read_text().split("SigIgn:")[1].split()[0], 16)
    assert ignored >> (signal.SIGINT - 1) & 1
    os.kill(actor.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 5
    while "in _actor_main" not in (text := (tmp_path / "stderr").read_text()):
        assert time.monotonic() < deadline, text
        time.sleep(0.05)
    assert "(most recent call first)" in text


def test_an_actor_sees_no_gpu_and_one_compute_thread() -> None:
    class Spy(Wrapped):
        def build(self, seed: Any, n_envs: int) -> Any:
            import torch

            raise ValueError(os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.is_available(), torch.get_num_threads())

    seen = failure(Spy(fault_env()))
    assert "ValueError: ('', False, 1)" in str(seen)
