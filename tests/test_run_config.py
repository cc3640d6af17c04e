from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from outrider.config import Config
from outrider.core import EnvSpec
from outrider.data import Layout
from outrider.errors import ConfigError, LayoutMismatch, UnknownKey
from outrider.replay.frames import FrameReplayBuffer, FrameReplayBufferConfig
from outrider.run_config import RunConfig, load_preset, override, parse_overrides, require_suitable_replay
from outrider.wiring import train

HERE = __name__


class AnyPart:
    """Has the methods of every section."""

    def build(self) -> None: ...
    def build_actor(self) -> None: ...
    def for_actor(self) -> None: ...
    def eval(self) -> None: ...
    def spec(self) -> None: ...
    def layout(self) -> None: ...


@dataclass(frozen=True)
class OwnEnv(AnyPart):
    id: str = "my/Own Env-v0"
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OwnAgent(AnyPart):
    gain: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Learner(AnyPart, Config):
    gamma: float = 0.9
    batch_size: int = 32
    rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class Summing(AnyPart, Config):
    gamma: float | None = None


@dataclass(frozen=True, kw_only=True)
class Store(AnyPart, Config):
    capacity: int = 5000


BASE: dict[str, Any] = {
    "env": {"class": f"{HERE}:OwnEnv"},
    "agent": {"class": f"{HERE}:Learner", "rate": 0.5},
    "replay": {"class": f"{HERE}:Store"},
    "trainer": {"warmup_period": 1000},
}


def refusal(build: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        build()
    return str(caught.value)


def run(**overrides: Any) -> RunConfig:
    return RunConfig.from_dict(override(BASE, {key.replace("__", "."): value for key, value in overrides.items()}))


def test_the_top_level_keys_are_those_of_the_design() -> None:
    keys = "env agent actors step_processor replay trainer evaluator recorder seed run_dir"
    assert list(run().to_dict()) == keys.split()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"trainer__warmup_period": 6000}, "trainer.warmup_period: expected at most replay.capacity (5000), got 6000"),
        ({"agent__batch_size": 1001}, "agent.batch_size: expected at most trainer.warmup_period (1000), got 1001"),
        (
            {"step_processor": {"class": f"{HERE}:Summing", "gamma": 0.5}},
            "step_processor.gamma: expected agent.gamma (0.9), got 0.5",
        ),
        (
            {"agent": f"{HERE}:OwnAgent", "step_processor": f"{HERE}:Summing"},
            "step_processor.gamma: expected a number, as the agent has no gamma, got null",
        ),
        ({"seed": -1}, "seed: expected an integer >= 0, got -1"),
        ({"run_dir": ""}, "run_dir: expected a path, or null, got an empty one"),
        ({"trainer": None}, "trainer: expected a mapping of keys to values, got null"),
        ({"agent": None}, "agent: expected a mapping, or the name of a class, got null"),
        ({"env.id": 3}, "env.id: expected a string, got 3"),
    ],
)
def test_what_no_section_sees_alone_is_refused(overrides: dict[str, Any], message: str) -> None:
    assert refusal(lambda: run(**overrides)) == message


def test_sections_that_just_fit_are_taken() -> None:
    config = run(trainer__warmup_period=5000, agent__batch_size=5000)
    assert config.trainer.warmup_period == 5000


def test_a_step_processor_takes_the_discount_of_the_agent() -> None:
    assert run(step_processor=f"{HERE}:Summing").step_processor == Summing(gamma=0.9)
    same = run(step_processor={"class": f"{HERE}:Summing", "gamma": 0.9})
    assert same.step_processor == Summing(gamma=0.9)


def test_what_is_left_out_is_the_default_and_written_by_its_short_name() -> None:
    sections = run().to_dict()
    assert {name: sections[name]["class"] for name in ("step_processor", "evaluator", "recorder")} == {
        "step_processor": "simple",
        "evaluator": "default",
        "recorder": "default",
    }


def test_own_classes_are_checked_only_as_far_as_they_have_the_fields() -> None:
    config = run(agent=f"{HERE}:OwnAgent", replay=f"{HERE}:OwnAgent")
    assert (config.agent, config.replay) == (OwnAgent(), OwnAgent())


@dataclass(frozen=True)
class OnlyBuilds:
    def build(self) -> None: ...


@pytest.mark.parametrize(
    ("section", "expected", "missing"),
    [
        ("env", "build, eval, spec", "eval, spec"),
        ("agent", "build, build_actor, for_actor", "build_actor, for_actor"),
        ("step_processor", "layout, build", "layout"),
    ],
)
def test_an_own_class_without_the_methods_of_its_contract_is_refused(section: str, expected: str, missing: str) -> None:
    assert refusal(lambda: run(**{section: f"{HERE}:OnlyBuilds"})) == (
        f"{section}: expected a config with the methods {expected}, got OnlyBuilds without {missing}"
    )


def test_a_run_config_comes_back_from_its_file(tmp_path: Path) -> None:
    config = run(step_processor=f"{HERE}:Summing", env__kwargs={"a": [1, {"b": None}]}, seed=3, run_dir="runs/x")
    path = tmp_path / "config.yaml"
    config.save(path)
    assert RunConfig.load(path) == config
    assert RunConfig.from_sources(path) == config
    assert RunConfig.from_sources(str(path), {"seed": 4}).seed == 4


def test_configs_made_in_python_may_stand_for_sections() -> None:
    agent = Learner(gamma=0.5)
    assert run(agent=agent).agent is agent
    assert RunConfig(env=OwnEnv(), agent=agent).seed == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ([], {}),
        (["--trainer.max_opts=3"], {"trainer.max_opts": 3}),
        (["--trainer.max-opts", "3"], {"trainer.max_opts": 3}),
        (["--agent.lr=3e-4", "--agent.lr=1"], {"agent.lr": 1}),
        (["--agent.lr", "-1"], {"agent.lr": -1}),
        (["--agent.hidden=[1, 2]"], {"agent.hidden": [1, 2]}),
        (["--env.kwargs={a: {b: '3'}}"], {"env.kwargs": {"a": {"b": "3"}}}),
        (["--env.id=my-module:ns/My-Env-v0"], {"env.id": "my-module:ns/My-Env-v0"}),
        (["--trainer.target-score=null", "--run-dir="], {"trainer.target_score": None, "run_dir": None}),
        (["--a.b=c=d"], {"a.b": "c=d"}),
    ],
)
def test_overrides_are_read_as_yaml(options: list[str], values: dict[str, Any]) -> None:
    assert parse_overrides(options) == values


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed"], "seed: expected a value, as in --seed=VALUE, got nothing"),
        (["--seed", "--run_dir=x"], "seed: expected a value, as in --seed=VALUE, got nothing"),
        (["seed=3"], "seed=3: expected an override such as --trainer.max_opts=1000, got seed=3"),
        (["--"], "--: expected an override such as --trainer.max_opts=1000, got --"),
        (["--agent.hidden=[1"], "agent.hidden: expected valid YAML, got an error in line 1, column "),
    ],
)
def test_what_is_no_override_is_refused(options: list[str], message: str) -> None:
    assert refusal(lambda: parse_overrides(options)).startswith(message)


def test_a_mapping_for_a_section_is_merged_and_one_below_replaces() -> None:
    data = {"env": {"kwargs": {"a": 1}}, "trainer": {"max_opts": 1, "sync_interval": 2}}
    assert override(data, {"trainer": {"max_opts": 3}})["trainer"] == {"max_opts": 3, "sync_interval": 2}
    assert override(data, {"env.kwargs": {"b": 2}})["env"] == {"kwargs": {"b": 2}}
    assert override(data, {"env.kwargs.b": 2})["env"] == {"kwargs": {"a": 1, "b": 2}}
    assert override({}, {"env.kwargs.b.c": 2}) == {"env": {"kwargs": {"b": {"c": 2}}}}
    assert data == {"env": {"kwargs": {"a": 1}}, "trainer": {"max_opts": 1, "sync_interval": 2}}


def test_another_class_begins_its_section_anew() -> None:
    data = {"agent": {"class": "dqn", "double": True}, "env": {"id": "X"}}
    renewed = {"class": "sac", "tau": 0.1}
    assert override(data, {"agent.tau": 0.1, "agent.class": "sac"})["agent"] == renewed
    assert override(data, {"agent": {"tau": 0.1, "class": "sac"}})["agent"] == renewed
    assert override(data, {"agent": "sac", "agent.tau": 0.1})["agent"] == renewed
    assert override(data, {"agent": "dqn"})["agent"] == {"class": "dqn", "double": True}
    assert override({"agent": "dqn"}, {"agent.double": True})["agent"] == {"class": "dqn", "double": True}
    assert override(data, {"env.class": "gym"})["env"] == {"class": "gym", "id": "X"}
    assert override(data, {"env.class": "atari"})["env"] == {"class": "atari"}


def test_a_key_below_a_plain_value_is_refused() -> None:
    assert refusal(lambda: override({"env": {"id": "X"}}, {"env.id.x": 1})) == (
        "env.id.x: expected env.id to have keys, got 'X' there"
    )


def test_a_key_without_its_section_is_told_where_it_belongs() -> None:
    assert refusal(lambda: run(max_opts=3)).endswith("got an unknown key (did you mean trainer.max_opts?)")
    assert refusal(lambda: run(rate=3)).endswith("got an unknown key (did you mean agent.rate?)")
    assert refusal(lambda: run(n_actors=3)).endswith("got an unknown key (did you mean actors.n_actors?)")
    assert refusal(lambda: run(seeed=3)).endswith("got an unknown key (did you mean seed?)")
    assert refusal(lambda: run(trainr__max_opts=3)).endswith("got an unknown key (did you mean trainer?)")
    assert refusal(lambda: run(trainer__max_opt=3)).endswith("got an unknown key (did you mean max_opts?)")


def test_a_name_that_is_neither_preset_nor_file_is_refused(tmp_path: Path) -> None:
    text = refusal(lambda: load_preset("cartpol-dqn"))
    assert text.startswith("preset: expected one of cartpole-dqn, ")
    assert text.endswith(", or the path of a YAML file, got 'cartpol-dqn' (did you mean cartpole-dqn?)")
    (tmp_path / "config.yaml").write_text("env: {}\n")
    assert refusal(lambda: load_preset(tmp_path)).endswith(
        f", a run directory (did you mean `outrider resume {tmp_path}`, or {tmp_path / 'config.yaml'}?)"
    )
    missing = tmp_path / "x.yaml"
    assert refusal(lambda: load_preset(missing)) == f"{missing}: expected a YAML file, got no file at that path"


IMAGES = EnvSpec("images", spaces.Box(0, 255, (4, 8, 8), np.uint8), spaces.Discrete(2), frame_stack=4)
VECTORS = EnvSpec("vectors", spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2))


@dataclass(frozen=True)
class OwnReplay:
    """Stores frames, and says in its own words what it does not store."""

    capacity: int = 10**15
    disk: str | None = "no/such/directory"

    def build(self, layout: Layout) -> FrameReplayBuffer:
        if layout.kind != "frames":
            raise LayoutMismatch("OwnReplay wants frames")
        return FrameReplayBufferConfig(capacity=self.capacity, disk=self.disk).build(layout)


@pytest.mark.parametrize(
    ("spec", "replay", "processor", "message"),
    [
        (
            IMAGES,
            {"class": "frames"},
            "simple",
            "replay.class: expected uniform or prioritized with step_processor.class simple, got frames "
            "(FrameReplayBuffer stores frames, the step processor makes transitions; "
            "frames needs --step_processor.class=frames)",
        ),
        (
            IMAGES,
            {"class": "uniform"},
            "frames",
            "replay.class: expected frames with step_processor.class frames, got uniform (SimpleReplayBuffer stores "
            "transitions, the step processor makes frames; uniform needs --step_processor.class=simple)",
        ),
        (
            VECTORS,
            OwnReplay(),
            "simple",
            "replay.class: expected uniform or prioritized with step_processor.class simple, "
            f"got {__name__}:OwnReplay (OwnReplay wants frames)",
        ),
    ],
)
def test_a_replay_buffer_that_cannot_store_what_is_made_is_refused(
    spec: EnvSpec, replay: Any, processor: str, message: str
) -> None:
    config = RunConfig.from_sources("cartpole-dqn", {"replay": replay, "step_processor": processor})
    assert refusal(lambda: require_suitable_replay(config, spec)) == message


@pytest.mark.parametrize(("replay", "processor"), [({"class": "frames"}, "frames"), (OwnReplay(), "frames")])
def test_a_replay_buffer_that_stores_what_is_made_is_taken_whatever_its_size(replay: Any, processor: str) -> None:
    config = RunConfig.from_sources("cartpole-dqn", {"replay": replay, "step_processor": processor})
    require_suitable_replay(config, IMAGES)


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("agnt: {class: dqn}", {"seed": 1}, "agnt: .*unknown key .did you mean agent.* .in FILE."),
        ("agent: {class: dqn, gama: 1}", {}, "agent.gama: .*unknown key .did you mean gamma.* .in FILE."),
        ("agent: {class: dqn, gamma: 1.5}", {"env.id": "x"}, "agent.gamma: .*, got 1.5 .in FILE."),
        ("agent:\n  lr: 1\n  lr: 2", {}, "agent.lr: expected a key once, got it a second time .line 4. .in FILE."),
        ("agent: {class: dqn, gamma: 1}", {"agent.gamma": 2.5}, "agent.gamma: .*, got 2.5"),
        ("agent: {class: dqn, gamma: 1}", {"agent.gama": 0.5}, "agent.gama: .*did you mean gamma.."),
    ],
)
def test_what_a_file_says_wrongly_is_told_with_its_name(
    text: str, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "my_run.yaml"
    file.write_text(f"env: {{id: CartPole-v1}}\n{text}\n")
    said = refusal(lambda: RunConfig.from_sources(file, overrides))
    assert re.fullmatch(message.replace("FILE", re.escape(str(file))), said), said


def test_an_empty_file_is_told_to_be_empty(tmp_path: Path) -> None:
    file = tmp_path / "my_run.yaml"
    file.write_text("# nothing yet\n")
    assert refusal(lambda: RunConfig.from_sources(file)) == f"env: expected a value, got nothing ({file} is empty)"


def test_a_preset_without_an_environment_says_how_to_name_one() -> None:
    expected = "env.id: expected a value, as in --env.id=CartPole-v1, got nothing"
    assert refusal(lambda: RunConfig.from_sources("dqn")) == expected


def test_an_own_class_that_is_not_found_says_where_it_is_looked_for() -> None:
    said = refusal(lambda: run(agent="my_package.agents:MyConfig"))
    assert said.endswith("No module named 'my_package' (run it where my_package lies, or set PYTHONPATH)")


def test_a_misspelt_argument_of_the_short_way_is_a_public_error() -> None:
    with pytest.raises(UnknownKey, match=r"^n_actor: expected one of n_actors, env, .* \(did you mean n_actors\?\)$"):
        train("CartPole-v1", "dqn", n_actor=3)
