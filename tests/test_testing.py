"""The checks find what they are for: a part that breaks its contract in one way is told so."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from outrider.config import Config
from outrider.core import EnvSpec
from outrider.data import Array, Batch, Items, Layout, Obs, Step, column_names
from outrider.envs.gymnasium import GymEnvConfig
from outrider.envs.serial import SerialEnv
from outrider.errors import LayoutMismatch
from outrider.sampling import NStepProcessorConfig, SimpleStepProcessor, SimpleStepProcessorConfig, transition_layout
from outrider.testing import (
    CountEnv,
    FakeAgent,
    FakeAgentConfig,
    FakePolicy,
    ListBuffer,
    RowsBuffer,
    TagEnv,
    check_agent_config,
    check_env_config,
    check_evaluator,
    check_recorder,
    check_replay_buffer_config,
    check_step_processor_config,
    random_rows,
)

SPEC = EnvSpec("test", spaces.Box(-1, 1, (3,)), spaces.Discrete(3, start=1))
LAYOUT = transition_layout(SPEC)


def broken(parent: type, **methods: Any) -> Any:
    return type("Broken", (parent,), methods)


# --- environments


def env_config(**methods: Any) -> Any:
    """A config of CountEnv whose environments have these methods instead."""

    class BrokenConfig(GymEnvConfig):
        def build(self, seed: Any, n_envs: int) -> Any:
            seeds = seed if isinstance(seed, list) else [seed]
            return broken(SerialEnv, **methods)([CountEnv(3) for _ in range(n_envs)], seeds)

        def eval(self) -> Any:
            return GymEnvConfig(id=CountEnv)

        def __reduce__(self) -> Any:
            return GymEnvConfig.of, (CountEnv,)

    return BrokenConfig(id=CountEnv)


def changed_step(**changes: Any) -> Any:
    def step(self: SerialEnv, act: Array) -> Step:
        made = SerialEnv.step(self, act)
        for name, change in changes.items():
            setattr(made, name, change(made))
        return made

    return step


def test_a_sound_env_config_passes():
    check_env_config(GymEnvConfig(id="outrider.testing:TagEnv"))
    check_env_config(env_config())


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ({"step": changed_step(reward=lambda s: s.reward.astype(np.float32))}, r"reward must be \[2\] float64"),
        ({"step": changed_step(valid=lambda s: s.valid[:1])}, r"valid must be \[2\] bool"),
        ({"step": changed_step(obs=lambda s: s.obs.astype(np.float64))}, r"obs must be \[2, 1\] float32"),
        ({"step": changed_step(act=lambda s: s.act.copy())}, "Step.act must be the actions that were asked for"),
        ({"step": changed_step(init_obs=lambda s: s.obs + 1)}, "where no episode ended, init_obs must be obs"),
        ({"step": changed_step(valid=lambda s: ~s.valid)}, "only a reset must have reward 0"),
        ({"reset": lambda self: np.random.random((2, 1)).astype(np.float32)}, "equal seeds must give equal first"),
        ({"reset": lambda self: {"a": np.zeros((2, 1))}}, "must have the parts of the space"),
    ],
)
def test_a_broken_environment_is_told_so(methods: dict[str, Any], words: str):
    with pytest.raises(AssertionError, match=words):
        check_env_config(env_config(**methods))


def test_an_environment_that_changes_its_actions_is_told_so():
    def step(self: SerialEnv, act: Array) -> Step:
        act[:] = 1 - act
        return SerialEnv.step(self, act)

    with pytest.raises(AssertionError, match="must not change the actions"):
        check_env_config(env_config(step=step))


# --- step processors


@dataclass(frozen=True, kw_only=True)
class BrokenProcessorConfig(SimpleStepProcessorConfig):
    kind: type

    def build(self, env_spec: EnvSpec, n_envs: int) -> Any:
        return self.kind(self.layout(env_spec), n_envs)


def processor_that(change: Any) -> Any:
    def process(self: SimpleStepProcessor, step: Step) -> Any:
        items = SimpleStepProcessor.process(self, step)
        return None if items is None else change(items, step)

    return BrokenProcessorConfig(kind=broken(SimpleStepProcessor, process=process))


def test_sound_step_processors_pass():
    check_step_processor_config(SimpleStepProcessorConfig(), SPEC)
    check_step_processor_config(NStepProcessorConfig(n_steps=5, gamma=0.99), SPEC, n_envs=3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda items, step: items[:0], "must return None when there are no items"),
        (lambda items, step: {"obs": items["obs"]}, "items must have the columns"),
        (lambda items, step: {n: items[n].astype("f4") for n in column_names(items)}, "must be .* int64"),
        (lambda items, step: items[:1], "every start state must give a transition"),
    ],
)
def test_a_broken_step_processor_is_told_so(change: Any, words: str):
    with pytest.raises(AssertionError, match=words):
        check_step_processor_config(processor_that(change), SPEC)


def test_a_step_processor_that_keeps_references_is_told_so():
    class Keeps:
        def __init__(self, layout: Layout, n_envs: int) -> None:
            self.layout = layout

        def reset(self, init_obs: Obs) -> None:
            self.obs: Any = init_obs

        def process(self, step: Step) -> Any:
            rows = np.zeros(len(step.reward), self.layout.record_dtype())
            rows["obs"], rows["next_obs"], self.obs = self.obs, step.obs, step.init_obs
            return rows[step.valid] if step.valid.any() else None

    with pytest.raises(AssertionError, match="must keep copies: column obs"):
        check_step_processor_config(BrokenProcessorConfig(kind=Keeps), SPEC)


# --- agents


@dataclass(frozen=True, kw_only=True)
class BrokenAgentConfig(FakeAgentConfig):
    kind: type = FakeAgent

    def build(self, env_spec: EnvSpec, *, device: str = "cpu", seed: int = 0) -> Any:
        return self.kind(env_spec.action_space, self.n_weights, self.batch_size, seed)


def test_a_sound_agent_passes():
    check_agent_config(FakeAgentConfig(), SPEC)
    check_agent_config(FakeAgentConfig(), replace(SPEC, action_space=spaces.Box(-2, -1, (2, 2))))


def growing(self: FakeAgent) -> Any:
    return self.n_opts, {"weights": self.weights[: 10 - self.n_opts]}


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ({"sample": lambda self, obs: np.zeros(64)}, r"act must be \[64\] int64, it is \[64\] float64"),
        ({"opt": lambda self, buffer: None}, "division by zero|must count the calls of opt"),
        ({"model_info": growing}, "names, shapes and dtypes of model_info must never change: weights did"),
        ({"load_state_dict": lambda self, state: None}, "load_state_dict must restore"),
        ({"opt_with_record": lambda self, buffer: FakeAgent.opt(self, buffer)}, "opt_with_record must return a dict"),
        ({"sample": lambda self, obs: act_by_weights(self, obs)}, ""),
    ],
)
def test_a_broken_agent_is_told_so(methods: dict[str, Any], words: str):
    config = BrokenAgentConfig(kind=broken(FakeAgent, **methods))
    if not words:
        check_agent_config(config, SPEC)
        return
    with pytest.raises((AssertionError, ZeroDivisionError), match=words):
        check_agent_config(config, SPEC)


def act_by_weights(agent: FakeAgent, obs: Any) -> Array:
    return np.full(len(obs), int(agent.weights[0]) % 3, np.int64)


@pytest.mark.parametrize("call", ["sync_model", "load_params"])
def test_an_agent_that_does_not_pass_its_model_on_is_told_so(call: str):
    kind = broken(FakeAgent, sample=act_by_weights, **{call: lambda self, given: None})
    with pytest.raises(AssertionError, match=f"after {call} both must act alike"):
        check_agent_config(BrokenAgentConfig(kind=kind), SPEC)


# --- replay buffers


@dataclass(frozen=True, kw_only=True)
class RowsConfig(Config):
    kind: type = RowsBuffer
    refuses: bool = True

    def build(self, layout: Layout) -> Any:
        if self.refuses and layout.kind != "transitions":
            raise LayoutMismatch("it stores transitions")
        return self.kind()


def test_a_sound_replay_buffer_passes():
    check_replay_buffer_config(RowsConfig(), LAYOUT)


class KeepsReferences(RowsBuffer):
    def push(self, items: Items) -> None:
        self.pushes.append({name: items[name] for name in column_names(items)})
        self.inserted += len(items["reward"])


class Forgets(RowsBuffer):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampled = state["sampled"]


class Miscounts(RowsBuffer):
    def batch(self, size: int) -> Batch:
        self.sampled += 1
        return super().batch(size)


class Widens(RowsBuffer):
    def batch(self, size: int) -> Batch:
        batch = super().batch(size)
        batch.rows = {**{n: batch.rows[n] for n in column_names(batch.rows)}, "obs": batch.rows["obs"].astype("f8")}
        return batch


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (RowsConfig(kind=Forgets), "load_state_dict must restore rows and counters"),
        (RowsConfig(kind=Miscounts), "sampled must count the rows drawn: 16, it says 17"),
        (RowsConfig(kind=Widens), r"a batch: obs must be \[16, 3\] float32, it is \[16, 3\] float64"),
        (
            RowsConfig(refuses=False),
            "must refuse frames, in accepts.. or with LayoutMismatch, if it stores transitions",
        ),
    ],
)
def test_a_broken_replay_buffer_is_told_so(config: Any, words: str):
    with pytest.raises(AssertionError, match=words):
        check_replay_buffer_config(config, LAYOUT)


def test_a_replay_buffer_that_keeps_references_is_told_so():
    with pytest.raises(AssertionError, match="a batch must hold what was pushed"):
        check_replay_buffer_config(RowsConfig(kind=KeepsReferences), LAYOUT)


# --- evaluators and recorders


class OneStepEvaluator:
    def __init__(self, mode: str = "eval", after: str = "train", score: Any = 1.0) -> None:
        self.mode, self.after, self.score = mode, after, score

    def evaluate(self, agent: Any) -> Any:
        getattr(agent, self.mode)()
        agent.sample(np.zeros((1, 3)))
        getattr(agent, self.after)()
        return self.score, {"eval/mean_reward": 1.0}

    def close(self) -> None:
        pass


def test_a_sound_evaluator_passes_and_a_broken_one_is_told_so():
    check_evaluator(OneStepEvaluator(), FakePolicy(SPEC.action_space))
    for evaluator, words in (
        (OneStepEvaluator(mode="train"), "must put the policy in eval mode"),
        (OneStepEvaluator(after="eval"), "must leave the policy in training mode"),
        (OneStepEvaluator(score=1), "the score must be a float"),
    ):
        with pytest.raises(AssertionError, match=words):
            check_evaluator(evaluator, FakePolicy(SPEC.action_space))


class FileRecorder:
    def __init__(self, path: Path, keeps: bool = True) -> None:
        self.path, self.keeps = path, keeps

    def store(self, record: Any) -> None:
        pass

    def flush(self, step: int) -> None:
        pass

    def save_model(self, name: str, agent: Any) -> None:
        agent.save_params(self.path)

    def load_model(self, name: str, agent: Any) -> None:
        if self.keeps:
            agent.load_params(self.path)

    def close(self) -> None:
        pass


def test_a_sound_recorder_passes_and_a_forgetful_one_is_told_so(tmp_path: Path):
    agent = FakeAgentConfig().build(SPEC)
    check_recorder(FileRecorder(tmp_path), agent)
    with pytest.raises(AssertionError, match="load_model must restore what save_model kept"):
        check_recorder(FileRecorder(tmp_path, keeps=False), FakeAgentConfig().build(SPEC))


# --- fakes


def test_random_rows_fit_their_layout_and_their_spaces():
    space = spaces.Dict(a=spaces.Box(5, 6, (2,)), b=spaces.Discrete(3, start=7))
    spec = EnvSpec("test", space, spaces.Discrete(3, start=1))
    layout = transition_layout(spec)
    rows = random_rows(layout, 50, 1, spec)
    assert tuple(rows) == layout.names
    for f in layout.fields:
        assert (rows[f.name].shape, rows[f.name].dtype) == ((50, *f.shape), f.dtype)
    assert set(rows["act"]) == {0, 1, 2}
    assert set(rows["obs.b"]) == {7, 8, 9}
    assert not np.array_equal(rows["obs.a"], rows["next_obs.a"])
    again = random_rows(layout, 50, 1, spec)
    assert all(np.array_equal(rows[name], again[name]) for name in rows)


def test_a_list_buffer_keeps_copies():
    buffer, rows = ListBuffer(), random_rows(LAYOUT, 3)
    buffer.push(rows)
    kept = rows["reward"].copy()
    rows["reward"] += 1
    buffer.push(rows)
    assert len(buffer) == 6
    assert np.array_equal(buffer.columns()["reward"], [*kept, *(kept + 1)])
    assert ListBuffer().columns() == {}


def test_tags_tell_stream_episode_and_step():
    env = TagEnv((2, 3), terminates=None)
    assert env.reset(seed=9)[0].tolist() == [9, 0, 0, 0]
    steps = []
    for _ in range(5):
        obs, reward, dead, cut, _ = env.step(1)
        steps.append((obs.tolist(), reward, dead, cut))
        if dead or cut:
            env.reset()
    assert steps == [
        ([9, 0, 1, 1], 1.0, False, False),
        ([9, 0, 2, 2], 5.0, True, False),
        ([9, 1, 1, 3], 9.0, False, False),
        ([9, 1, 2, 4], 13.0, False, False),
        ([9, 1, 3, 5], 17.0, False, True),
    ]


def test_tags_in_a_reused_array_change_in_place():
    env = TagEnv(reuse=True)
    first = env.reset(seed=1)[0]
    assert env.step(0)[0] is first
    assert first.tolist() == [1, 0, 1, 1]
