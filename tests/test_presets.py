from __future__ import annotations

from typing import Any

import pytest

from outrider import presets
from outrider.run_config import RunConfig, load_preset

ANY_ENV = {"dqn": "CartPole-v1", "sac": "Pendulum-v1"}


def whole(name: str) -> dict[str, Any]:
    return {"env.id": ANY_ENV[name]} if name in ANY_ENV else {}


def test_the_presets_are_those_of_the_design() -> None:
    assert presets.names() == ["cartpole-dqn", "dqn", "pendulum-sac", "pong-dqn", "sac"]


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_is_a_possible_run(name: str) -> None:
    config = RunConfig.from_sources(name, whole(name))
    assert RunConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_balances_both_sides_and_leaves_the_target_to_the_user(name: str) -> None:
    trainer = load_preset(name)["trainer"]
    assert trainer["samples_per_insert"] > 0
    assert trainer["eval_interval"] > 0
    assert "target_score" not in trainer
    assert RunConfig.from_sources(name, whole(name)).trainer.target_score is None


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_says_in_its_first_line_what_it_is_for(name: str) -> None:
    first = presets.text(name).splitlines()[0]
    assert first == f"# {presets.summary(name)}"
    assert 10 < len(presets.summary(name)) <= 80
    assert presets.text(name).splitlines()[1] == "format_version: 1"
