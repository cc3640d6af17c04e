from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import outrider

SCRIPT = {
    "ActorManager",
    "ActorManagerConfig",
    "AsyncTrainer",
    "AsyncTrainerConfig",
    "DefaultEvaluator",
    "GymEnvConfig",
    "InitGuard",
    "SimpleReplayBufferConfig",
    "SimpleStepProcessorConfig",
    "StopFlag",
    "TensorboardRecorder",
    "actor_stats_fmt",
    "item_channel",
    "model_channel",
    "Actor",
    "ActorStat",
    "AsyncTrainStat",
    "PushedItemMessage",
    "ReplayBufferProxy",
    "ReplayBufferProxyConfig",
    "Sampler",
    "SyncModel",
    "train_async",
    "train",
    "load_policy",
    "TrainResult",
}


def test_every_public_name_can_be_imported() -> None:
    missing = [name for name in outrider.__all__ if not hasattr(outrider, name)]
    assert missing == []
    assert set(outrider.__all__) >= SCRIPT


def test_every_exception_is_public() -> None:
    from outrider import errors

    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.OutriderError)]
    assert {c.__name__ for c in classes} <= set(outrider.__all__)


def positional(function: Callable[..., Any]) -> str:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    return " ".join(p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds)


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (
            outrider.train_async,
            "agent_config agent_configs env_config_train env_config_eval step_proc_config replay_buffer_config"
            " actor_man_config async_trainer_config recorder evaluator",
        ),
        (
            outrider.Actor.build,
            "id agent_config env_config step_proc_config replay_buffer_config stop env_seed stats",
        ),
        (outrider.load_policy, "run_dir model"),
        (outrider.AsyncTrainer.train, "self recorder evaluator guard_init_env"),
        (outrider.ActorManager.run, "self guard_init_env"),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_a_public_call_takes_what_the_documentation_says(function: Callable[..., Any], parameters: str) -> None:
    assert positional(function) == parameters


def test_the_short_way_has_its_defaults_and_its_result() -> None:
    assert list(inspect.signature(outrider.train).parameters) == ["env", "agent", "n_actors", "run_dir", "overrides"]
    assert [f.name for f in dataclasses.fields(outrider.TrainResult)] == ["stats", "actor_stats", "run_dir"]


def test_importing_the_package_and_its_command_does_not_wait_for_torch() -> None:
    code = "import sys, outrider, outrider.cli; outrider.cli.main(['presets']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
