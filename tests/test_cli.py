from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from outrider import presets
from outrider.cli import main
from outrider.cli.printing import aligned
from outrider.cli.train import show
from outrider.data import Episode
from outrider.errors import ActorFailed, Interrupted, RunDirError
from outrider.run_config import RunConfig
from outrider.version import __version__

CORES = os.cpu_count() or 1


@dataclass(frozen=True)
class Stats:
    best_score: float | None = 21.5
    stopped_by: str = "max_opts"

    def fmt(self) -> str:
        return "samples/sec, opt_steps/sec, duration\n1.0, 2.0, 3.0"


@dataclass(frozen=True)
class Result:
    stats: Stats
    actor_stats: tuple[Any, ...]
    run_dir: Path


class Wiring(ModuleType):
    """Takes the place of the modules that run things, and notes what it was asked to do."""

    def __init__(self) -> None:
        super().__init__("outrider.wiring")
        self.calls: list[tuple[Any, ...]] = []
        self.failure: BaseException | None = None

    def run(
        self, config: RunConfig, *, argv: list[str], report: Callable[[Result], None], show_needs: Callable[..., None]
    ) -> None:
        self.calls.append((config, argv))
        if not isinstance(self.failure, RunDirError):  # which is raised before anything is done
            report(Result(Stats(), (), Path("runs/x")))
        if self.failure:
            raise self.failure

    def resume(
        self,
        run_dir: Path,
        overrides: dict[str, Any],
        *,
        checkpoint: int | None,
        argv: list[str],
        report: Callable[[Result], None],
        show_needs: Callable[..., None],
    ) -> None:
        self.calls.append((run_dir, overrides, checkpoint, argv))
        report(Result(Stats(), (), run_dir))

    def evaluate_run(
        self,
        run_dir: Path,
        model: str,
        episodes: int,
        seed: int,
        on_episode: Callable[[Episode], object] = lambda episode: None,
    ) -> tuple[float, dict[str, Any]]:
        self.calls.append((run_dir, model, episodes, seed))
        for ret in (-21.0, 20.5):
            on_episode(Episode(ret, 100, 0))
        return 21.5, {"eval/mean_reward": 21.5, "eval/episodes": 3}


@pytest.fixture
def wiring(monkeypatch: pytest.MonkeyPatch) -> Wiring:
    fake = Wiring()
    monkeypatch.setitem(sys.modules, "outrider.wiring", fake)
    monkeypatch.setitem(sys.modules, "outrider.loaded_policy", fake)
    return fake


Outrider = Callable[..., tuple[int, str, str]]


@pytest.fixture
def outrider(capsys: pytest.CaptureFixture[str]) -> Outrider:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_training_hands_the_resolved_config_on_and_prints_both_statistics(outrider: Outrider, wiring: Wiring) -> None:
    arguments = ("train", "--seed", "7", "cartpole-dqn", "--trainer.max-opts=2_000", "--actors.n_actors=3")
    code, out, err = outrider(*arguments)
    assert (code, err) == (0, "")
    config, argv = wiring.calls[0]
    assert (config.seed, config.trainer.max_opts, config.actors.n_actors) == (7, 2000, 3)
    assert argv == ["outrider", *arguments]
    numbers = "        1.0,           2.0,      3.0"
    assert out.startswith(f"Stats of async trainer\nsamples/sec, opt_steps/sec, duration\n{numbers}\n")
    assert "\nStats of generated samples in actors\nactor_id, samples, samples/sec, duration\n" in out
    assert out.endswith("\nEnded by max_opts, best score 21.5\nRun directory: runs/x\n")


def test_print_config_prints_what_can_be_run_again(outrider: Outrider, wiring: Wiring, tmp_path: Path) -> None:
    code, out, _ = outrider("train", "cartpole-dqn", "--print-config", "--seed=3")
    assert (code, wiring.calls) == (0, [])
    path = tmp_path / "again.yaml"
    path.write_text(out)
    assert outrider("train", str(path))[0] == 0
    assert wiring.calls[0][0] == RunConfig.from_sources("cartpole-dqn", {"seed": 3})


@pytest.mark.parametrize("checkpoint", [("--checkpoint=500",), ("--checkpoint", "500"), ()])
def test_resuming_hands_overrides_on_and_prints_both_statistics(
    checkpoint: tuple[str, ...], outrider: Outrider, wiring: Wiring
) -> None:
    arguments = ("resume", "--agent.lr=1e-4", "runs/x", *checkpoint, "--trainer.max-opts", "2_000")
    code, out, err = outrider(*arguments)
    assert (code, err) == (0, "")
    overrides = {"agent.lr": 1e-4, "trainer.max_opts": 2000}
    assert wiring.calls == [(Path("runs/x"), overrides, 500 if checkpoint else None, ["outrider", *arguments])]
    assert out.startswith("Stats of async trainer\n")
    assert "\nStats of generated samples in actors, since the run was resumed\n" in out
    assert out.endswith("\nRun directory: runs/x\n")


@pytest.mark.parametrize(("stopped_by", "hint"), [("SIGINT", True), ("error", True), ("target_score", False)])
def test_a_run_that_is_not_done_says_how_to_go_on_if_it_has_a_checkpoint(
    stopped_by: str, hint: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "my runs"
    result: Any = Result(Stats(stopped_by=stopped_by), (), run_dir)
    show(result)
    assert "outrider resume" not in capsys.readouterr().out
    (run_dir / "checkpoints" / "500").mkdir(parents=True)
    (run_dir / "checkpoints" / "500" / "manifest.json").touch()
    show(result)
    assert capsys.readouterr().out.endswith(f"\nTo go on: outrider resume '{run_dir}'\n") == hint


def test_numbers_stand_below_the_end_of_their_headings_which_stay_as_they_are() -> None:
    shown = aligned("actor_id, samples\n0, 12345678\n10, 5").splitlines()
    assert shown == ["actor_id, samples", "       0, 12345678", "      10,        5"]


def test_evaluation_prints_score_and_metrics(outrider: Outrider, wiring: Wiring) -> None:
    code, out, _ = outrider("eval", "runs/x", "--episodes", "3", "--model=last", "--seed=5")
    assert code == 0
    assert wiring.calls == [(Path("runs/x"), "last", 3, 5)]
    assert out == "Score of model last over 3 episodes: 21.5\neval/episodes: 3\neval/mean_reward: 21.5\n"


def test_evaluation_tells_each_episode_on_a_terminal(
    outrider: Outrider, wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, out, _ = outrider("eval", "runs/x", "--episodes=3", "--model=last")
    assert out.startswith("episode 1/3  return -21\nepisode 2/3  return 20.5\nScore of model last over 3 episodes: ")


@pytest.mark.parametrize(("chosen", "threads"), [({}, 1), ({"OMP_NUM_THREADS": str(CORES)}, CORES)])
def test_evaluation_computes_with_one_thread_unless_the_user_chose_a_number(
    chosen: dict[str, str], threads: int
) -> None:
    code = """
import sys, torch
from outrider import loaded_policy
from outrider.cli import main
loaded_policy.evaluate_run = lambda *arguments: (torch.get_num_threads(), {})
sys.exit(main(["eval", "x", "--model=last"]))
"""
    inherited = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=inherited | chosen, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"Score of model last over 10 episodes: {threads}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trian",), "verb: expected one of train, resume, eval, presets, doctor, got 'trian' (did you mean train?)"),
        (("train",), "outrider train: expected PRESET_OR_YAML, got nothing"),
        (("train", "cartpole-dqn", "pong-dqn"), "outrider train: expected no more arguments, got pong-dqn"),
        (("train", "cartpole-dqn", "-n", "3"), "outrider train: expected no more arguments, got -n 3"),
        (
            ("train", "cartpole-dqn", "seed=3"),
            "outrider train: expected no more arguments, got seed=3 (did you mean --seed=3?)",
        ),
        (("train", "no-such"), "preset: expected one of cartpole-dqn, dqn, "),
        (("train", "no/such.yaml"), "no/such.yaml: expected a YAML file, got no file at that path"),
        (("train", "cartpole-dqn", "--seed"), "seed: expected a value, as in --seed=VALUE, got nothing"),
        (("train", "cartpole-dqn", "--seed=x"), "seed: expected an integer, got 'x'"),
        (("train", "cartpole-dqn", "--agent.gama=1"), "agent.gama: expected one of "),
        (("train", "cartpole-dqn", "--max_opts=1"), "max_opts: expected one of env, agent, actors, "),
        (("train", "cartpole-dqn", "--agent.class=no_such_mod:X"), "agent.class: expected a module that can be "),
        (("train", "dqn"), "env.id: expected a value, as in --env.id=CartPole-v1, got nothing"),
        (("train", "sac"), "env.id: expected a value, as in --env.id=CartPole-v1, got nothing"),
        (("resume",), "outrider resume: expected RUN_DIR, got nothing"),
        (("resume", "x", "y"), "outrider resume: expected no more arguments, got y"),
        (("resume", "x", "--checkpoint=last"), "--checkpoint: expected an integer >= 0, got 'last'"),
        (("eval",), "outrider eval: expected RUN_DIR, got nothing"),
        (("eval", "x", "--episodes"), "--episodes: expected one argument, got nothing"),
        (("eval", "x", "--episodes=0"), "--episodes: expected an integer >= 1, got '0'"),
        (("eval", "x", "--seed=1.5"), "--seed: expected an integer >= 0, got '1.5'"),
        (("eval", "x", "--model=bets"), "--model: expected best, last or a number of opt steps, got 'bets'"),
        (("eval", "x", "--episode=3"), "outrider eval: expected options among --help, --episodes, --model, --seed, "),
        (
            ("presets", "pong"),
            "preset: expected one of cartpole-dqn, dqn, pendulum-sac, pong-dqn, sac, got 'pong' (did",
        ),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, outrider: Outrider, wiring: Wiring
) -> None:
    code, out, err = outrider(*arguments)
    assert (code, out, wiring.calls) == (2, "", [])
    assert err.startswith(f"outrider: error: {message}")
    assert err.count("\n") == 1
    assert err.endswith("\n")


def test_a_used_run_directory_is_refused_with_exit_code_2(outrider: Outrider, wiring: Wiring) -> None:
    wiring.failure = RunDirError("run_dir: expected a new or empty directory, got runs/x")
    assert outrider("train", "cartpole-dqn")[::2] == (2, f"outrider: error: {wiring.failure}\n")


def test_a_failed_actor_is_shown_with_its_own_traceback(outrider: Outrider, wiring: Wiring) -> None:
    wiring.failure = ActorFailed(3, "Traceback (most recent call last):\n  ...\nValueError: boom\n")
    code, _, err = outrider("train", "cartpole-dqn")
    assert code == 1
    assert err.startswith("outrider: error: actor 3 failed: ValueError: boom\nTraceback (most recent call last):\n")


def test_an_unexpected_exception_keeps_its_traceback(outrider: Outrider, wiring: Wiring) -> None:
    wiring.failure = ZeroDivisionError("boom")
    with pytest.raises(ZeroDivisionError):
        outrider("train", "cartpole-dqn")


@pytest.mark.parametrize(
    ("failure", "code", "text"),
    [
        (Interrupted(signal.SIGINT), 130, "outrider: stopped by SIGINT\n"),
        (Interrupted(signal.SIGTERM), 143, "outrider: stopped by SIGTERM\n"),
        (KeyboardInterrupt(), 130, "outrider: stopped by SIGINT\n"),
    ],
)
def test_a_signal_ends_with_its_exit_code(
    failure: BaseException, code: int, text: str, outrider: Outrider, wiring: Wiring
) -> None:
    wiring.failure = failure
    assert outrider("train", "cartpole-dqn")[::2] == (code, text)


def test_presets_are_listed_and_printed(outrider: Outrider) -> None:
    code, out, _ = outrider("presets")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == presets.names()
    assert yaml.safe_load(outrider("presets", "pong-dqn")[1])["env"]["class"] == "atari"


def test_help_and_version_are_printed(outrider: Outrider, capsys: pytest.CaptureFixture[str]) -> None:
    assert outrider("--version") == (0, f"outrider {__version__}\n", "")
    assert outrider()[:2] == outrider("--help")[:2]
    for verb in ("train", "eval", "presets"):
        assert verb in outrider("--help")[1]
        code, out, err = outrider(verb, "--help")
        assert (code, err) == (0, "")
        assert "examples:" in out
    assert "--print-config" in outrider("train", "--help")[1]


def test_own_classes_beside_the_user_are_found(
    outrider: Outrider, wiring: Wiring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_env_of_test_cli.py").write_text(
        "from dataclasses import dataclass\n\n\n@dataclass(frozen=True)\nclass OwnEnvConfig:\n    size: int = 1\n"
        "    def build(self): ...\n    def eval(self): ...\n    def spec(self): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    code, _, err = outrider("train", "dqn", "--env.class=own_env_of_test_cli:OwnEnvConfig", "--env.size=3")
    assert (code, err) == (0, "")
    assert wiring.calls[0][0].to_dict()["env"] == {"class": "own_env_of_test_cli:OwnEnvConfig", "size": 3}


def test_listing_presets_does_not_wait_for_torch() -> None:
    script = "import sys; from outrider.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    for arguments in (["presets"], ["--help"], ["train", "--help"], ["eval", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_leaves_early_is_no_error() -> None:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m outrider presets pong-dqn | true"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""


def test_a_flag_that_is_mistyped_is_told_from_an_override(outrider: Outrider, wiring: Wiring) -> None:
    code, _, err = outrider("train", "cartpole-dqn", "--print-confg")
    assert (code, wiring.calls) == (2, [])
    assert err.endswith("--print-confg: expected a value, or a flag (did you mean --print-config?), got nothing\n")


@pytest.mark.parametrize("into", ["| true", "> /dev/full"])
def test_output_that_nobody_takes_ends_no_run(into: str) -> None:
    script = (
        "import sys\n"
        "from outrider.cli.printing import reader_optional\n"
        "for _ in range(2):\n"
        "    with reader_optional():\n"
        "        print(200_000 * 'x')\n"
        "print('went on', file=sys.stderr)"
    )
    command = f'set -o pipefail; {sys.executable} -c "$SCRIPT" {into}'
    environment = os.environ | {"SCRIPT": script}
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "went on\n")
