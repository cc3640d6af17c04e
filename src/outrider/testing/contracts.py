"""A check for each contract of :mod:`outrider.core`: it uses the part as its loop does."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from outrider.core import (
    Agent,
    AgentConfig,
    Env,
    EnvConfig,
    EnvSpec,
    Evaluator,
    Policy,
    Recorder,
    ReplayBuffer,
    ReplayBufferConfig,
    RowStore,
    StepProcessorConfig,
)
from outrider.data import (
    ENV_STEPS,
    Array,
    Field,
    Items,
    Layout,
    ModelInfo,
    Obs,
    Step,
    column_names,
    leaves,
    n_rows,
    nest,
)
from outrider.errors import LayoutMismatch
from outrider.processes import dumps, loads
from outrider.sampling import transition_layout
from outrider.spaces import act_field, obs_fields
from outrider.testing.fakes import FakePolicy, RowsBuffer, random_rows


def check_env_config(config: EnvConfig, n_envs: int = 2, n_steps: int = 50) -> None:
    """An env config describes, builds, resets and steps its environments as it has to.

    Args:
        config: The config to check.
        n_envs: Environments that are built.
        n_steps: Vector steps that are made; enough for an episode to end, or its end is not checked.

    Raises:
        AssertionError: Says what is wrong.
    """
    spec = config.spec()
    assert isinstance(spec, EnvSpec), f"spec() must return an EnvSpec, it returned {type(spec)}"
    for kind, other in (("pickled", loads(dumps(config))), ("evaluation", config.eval())):
        its = other.spec()
        same = (its.observation_space, its.action_space) == (spec.observation_space, spec.action_space)
        assert same, f"the {kind} config must describe the same spaces"
    seeds = list(range(100, 100 + n_envs))
    first = [_run_env(config.build(seeds, n_envs), spec, n_envs, n_steps if once else 0) for once in (True, False)]
    for name in first[0]:
        same = np.array_equal(first[0][name], first[1][name])
        assert same, f"equal seeds must give equal first observations, {name} differs"
    _run_env(config.build(7, 1), spec, 1, 1)


def check_step_processor_config(config: StepProcessorConfig, spec: EnvSpec, n_envs: int = 2) -> None:
    """A step processor makes items of its layout, copies what it keeps, and loses no transition.

    Raises:
        AssertionError: Says what is wrong.
    """
    layout = config.layout(spec)
    assert isinstance(layout, Layout), f"layout() must return a Layout, it returned {type(layout)}"
    made, start_states = [], 0
    for scribble in (False, True):
        processor = config.build(spec, n_envs)
        rows = []
        for step in _made_up_steps(spec, n_envs, 23):
            if isinstance(step, Step):
                items = processor.process(step)
                if items is not None:
                    _check_rows(items, layout)
                    rows.append({name: np.array(items[name]) for name in column_names(items)})
                start_states += int(step.valid.sum())
                if scribble:
                    _scribble(step)
            else:
                processor.reset(step)
                if scribble:
                    _fill(step)
        made.append({name: np.concatenate([part[name] for part in rows]) for name in layout.names})
    for name in layout.names:
        same = made[0][name].tobytes() == made[1][name].tobytes()
        assert same, f"the processor must keep copies: column {name} changed with the environment's arrays"
    if layout.kind == "transitions":
        n = 2 * len(made[0]["reward"])
        assert n == start_states, f"every start state must give a transition: {start_states} states, {n} transitions"


def check_agent_config(config: AgentConfig, spec: EnvSpec, n_states: int = 64) -> None:
    """An agent acts, learns from a buffer, and passes its model on: to an actor's policy, a file, a resumed run.

    In eval mode it has to act alike, after that, in most states.

    Raises:
        AssertionError: Says what is wrong.
    """
    config = loads(dumps(config))
    agent = config.build(spec, device="cpu", seed=0)
    obs = _obs_of(spec, n_states)
    _check_policy(agent, obs, spec, n_states)
    n_opts, info = agent.model_info()
    assert n_opts == 0, f"a new agent must report 0 opt steps, it reported {n_opts}"
    kept = _copied(info)
    buffer = RowsBuffer()
    buffer.push(random_rows(transition_layout(spec), 1000, env_spec=spec))
    agent.opt(buffer)
    record = agent.opt_with_record(buffer)
    assert isinstance(record, dict), f"opt_with_record must return a dict, it returned {type(record)}"
    n_opts, info = agent.model_info()
    assert n_opts == 2, f"model_info must count the calls of opt, it says {n_opts} after 2"
    for name in {*kept, *info}:
        same = name in kept and name in info and _form(kept[name]) == _form(info[name])
        assert same, f"names, shapes and dtypes of model_info must never change: {name} did"
    _check_actor(config, agent, spec, obs)
    other = config.for_actor(0, 2).build(spec, device="cpu", seed=1)
    other.load_state_dict(agent.state_dict())
    _check_same_model(other, agent, "load_state_dict")
    double = config.build(spec, device="cpu", seed=3)  # as that in which a snapshot that was evaluated is saved
    double.sync_model({**_copied(agent.model_info()[1]), ENV_STEPS: np.array(0, np.int64)})
    for saved, call in ((agent, "load_params"), (double, "sync_model, save_params and load_params")):
        with tempfile.TemporaryDirectory() as path:
            saved.save_params(Path(path))
            another = config.build(spec, device="cpu", seed=2)
            another.load_params(Path(path))
        _check_same_actions(another, agent, obs, call)


def check_replay_buffer_config(config: ReplayBufferConfig, layout: Layout) -> None:
    """A replay buffer keeps copies of rows, counts them, draws only what was pushed, and can be restored.

    Raises:
        AssertionError: Says what is wrong.
    """
    buffer = loads(dumps(config)).build(layout)
    assert buffer.accepts(layout), "it must accept the layout that it was built for"
    assert len(buffer) == 0, f"a new buffer must be empty, it has {len(buffer)} rows"
    rows = random_rows(layout, 64)
    if layout.kind == "frames":
        _make_stream(rows)
    rows["reward"] = (np.arange(64) + 2).astype(rows["reward"].dtype)
    buffer.push({name: column[:40] for name, column in rows.items()})
    buffer.push(_structured(rows, layout)[40:])
    for column in rows.values():
        _fill(column)
    assert buffer.inserted == 64, f"inserted must count the rows pushed: 64, it says {buffer.inserted}"
    assert 0 < len(buffer) <= 64, f"after 64 rows it must hold some of them, it says {len(buffer)}"
    batch = buffer.batch(16)
    assert buffer.sampled == 16, f"sampled must count the rows drawn: 16, it says {buffer.sampled}"
    assert len(batch) == 16, f"batch(16) must have 16 rows, it has {len(batch)}"
    if layout.kind == "transitions":
        for f in layout.fields:
            _check_array(batch[f.name], f, 16, "a batch")
    if getattr(config, "n_steps", 1) == 1:  # else rewards are sums
        drawn = set(batch["reward"].tolist())
        assert drawn <= set(range(2, 66)), f"a batch must hold what was pushed, it holds rewards {sorted(drawn)}"
    buffer.update_priority(batch.ixs, np.ones(16, np.float32))
    restored = config.build(layout)
    restored.load_state_dict(buffer.state_dict())
    counts = (len(restored), restored.inserted, restored.sampled)
    assert counts == (len(buffer), 64, 16), f"load_state_dict must restore rows and counters, they are {counts}"
    if isinstance(buffer, RowStore):
        _check_row_store(buffer, config.build(layout))
    _check_refuses(config, layout)


def check_evaluator(evaluator: Evaluator, policy: FakePolicy) -> None:
    """An evaluator gives a score and metrics, evaluates in eval mode, and leaves the policy training.

    Args:
        evaluator: Closed in the end.
        policy: Fits its environment.

    Raises:
        AssertionError: Says what is wrong.
    """
    policy.modes.clear()
    score, record = evaluator.evaluate(policy)
    assert isinstance(score, float), f"the score must be a float, it is {type(score)}"
    assert isinstance(record, dict), f"the metrics must be a dict, they are {type(record)}"
    assert policy.modes, "an evaluation must ask the policy for actions"
    assert policy.modes == {"eval"}, "an evaluation must put the policy in eval mode"
    assert policy.training, "an evaluation must leave the policy in training mode"
    evaluator.close()
    evaluator.close()


def check_recorder(recorder: Recorder, agent: Agent) -> None:
    """A recorder takes any metrics and keeps models; it is closed in the end.

    Raises:
        AssertionError: Says what is wrong.
    """
    recorder.store({"train/loss": 0.5, "opt": 3, "text": "words", "array": np.arange(3.0), "bad": float("nan")})
    recorder.store({"train/loss": 1.5, "env_steps": 10, "time_s": 0.1})
    recorder.flush(1)
    recorder.flush(2)
    before = _copied(agent.model_info()[1])
    recorder.save_model("best", agent)
    changed = _copied(before)
    for value in changed.values():
        _fill(value)
    agent.sync_model({**changed, ENV_STEPS: np.array(0)})
    recorder.load_model("best", agent)
    after = agent.model_info()[1]
    for name, value in before.items():
        assert np.array_equal(after[name], value), f"load_model must restore what save_model kept, {name} differs"
    recorder.close()
    recorder.close()


def _run_env(env: Env, spec: EnvSpec, n: int, n_steps: int) -> dict[str, Array]:
    assert env.n_envs == n, f"n_envs must be {n}, it is {env.n_envs}"
    obs = env.reset()
    first = {name: np.array(part) for name, part in leaves(obs, "obs")}
    _check_obs(obs, spec, n, "reset()")
    policy = FakePolicy(spec.action_space)
    for _ in range(n_steps):
        act = policy.sample(obs)
        kept = act.copy()
        step = env.step(act)
        assert np.array_equal(act, kept), "an environment must not change the actions it is given"
        assert step.act is act, "Step.act must be the actions that were asked for"
        _check_step(step, spec, n)
        obs = step.init_obs
    env.close()
    env.close()
    return first


def _check_step(step: Step, spec: EnvSpec, n: int) -> None:
    for name in ("terminated", "truncated", "valid"):
        _check_array(getattr(step, name), Field(name, (), np.dtype(np.bool_)), n, "Step")
    _check_array(step.reward, Field("reward", (), np.dtype(np.float64)), n, "Step")
    _check_obs(step.obs, spec, n, "Step.obs")
    _check_obs(step.init_obs, spec, n, "Step.init_obs")
    ended = step.terminated | step.truncated
    assert not ended[~step.valid].any(), "a row that was only a reset must not end an episode"
    assert not step.reward[~step.valid].any(), "a row that was only a reset must have reward 0"
    first = dict(leaves(step.init_obs, "obs"))
    for name, part in leaves(step.obs, "obs"):
        same = part[~ended].tobytes() == first[name][~ended].tobytes()
        assert same, f"where no episode ended, init_obs must be obs; {name} differs"


def _check_obs(obs: Obs, spec: EnvSpec, n: int, where: str) -> None:
    parts = dict(leaves(obs, "obs"))
    fields = obs_fields(spec.observation_space)
    assert set(parts) == {f.name for f in fields}, f"{where} must have the parts of the space, it has {sorted(parts)}"
    for f in fields:
        _check_array(parts[f.name], f, n, where)


def _check_array(array: Any, f: Field, n: int, where: str) -> None:
    assert isinstance(array, np.ndarray), f"{where}: {f.name} must be an array, it is {type(array)}"
    got = f"{list(array.shape)} {array.dtype}"
    assert (array.shape, array.dtype) == ((n, *f.shape), f.dtype), (
        f"{where}: {f.name} must be {[n, *f.shape]} {f.dtype}, it is {got}"
    )


def _check_rows(items: Items, layout: Layout) -> None:
    names = column_names(items)
    assert names == layout.names, f"items must have the columns {layout.names}, they have {names}"
    assert n_rows(items) > 0, "process must return None when there are no items"
    for f in layout.fields:
        _check_array(items[f.name], f, n_rows(items), "items")


def _obs_of(spec: EnvSpec, n: int, seed: int = 0) -> Obs:
    rows = random_rows(transition_layout(spec), n, seed, spec)
    return nest(rows, "obs")


def _made_up_steps(spec: EnvSpec, n: int, n_steps: int) -> Iterator[Obs | Step]:
    """First observations, and steps after them, in arrays of their own; the last step ends every episode."""
    obs = _obs_of(spec, n)
    yield _copied_obs(obs)
    skip = np.zeros(n, np.bool_)
    for t in range(n_steps):
        last = t == n_steps - 1
        ended = np.array([(t + i) % 4 == 3 or last for i in range(n)]) & ~skip
        kinds = np.arange(n) % 2 == 0
        final, following = _obs_of(spec, n, 2 * t + 1), _obs_of(spec, n, 2 * t + 2)
        init = _chosen(ended, following, final)
        act = random_rows(transition_layout(spec), n, t, spec)["act"]
        reward = np.where(skip, 0.0, np.arange(n) + 10.0 * t)
        yield Step(act, final, _copied_obs(init), reward, ended & kinds, ended & ~kinds, ~skip, model_version=t)
        skip = ended & (t % 8 > 3)  # some environments reset in a step of their own


def _chosen(which: Array, a: Obs, b: Obs) -> Obs:
    if isinstance(a, dict):
        assert isinstance(b, dict)
        return {key: _chosen(which, part, b[key]) for key, part in a.items()}
    assert not isinstance(b, dict)
    return np.where(which.reshape(-1, *[1] * (a.ndim - 1)), a, b).astype(a.dtype)


def _scribble(step: Step) -> None:
    for value in (step.act, step.obs, step.init_obs, step.reward, step.terminated, step.truncated, step.valid):
        _fill(value)


def _fill(obs: Obs) -> None:
    if isinstance(obs, dict):
        for part in obs.values():
            _fill(part)
    else:
        obs[...] = 1


def _copied_obs(obs: Obs) -> Obs:
    return {key: _copied_obs(part) for key, part in obs.items()} if isinstance(obs, dict) else np.array(obs)


def _copied(info: ModelInfo) -> dict[str, Array]:
    return {name: np.array(value) for name, value in info.items()}


def _form(value: Any) -> tuple[Any, ...]:
    return np.shape(value), np.asarray(value).dtype


def _make_stream(rows: dict[str, Array]) -> None:
    """Entries of a single environment's episodes, 16 each."""
    n = len(rows["t"])
    rows["t"], rows["env"] = np.arange(n, dtype=np.int32) % 16, np.zeros(n, np.int32)
    rows["terminated"], rows["truncated"] = rows["t"] == 15, np.zeros(n, np.bool_)


def _structured(rows: dict[str, Array], layout: Layout) -> Array:
    block = np.zeros(n_rows(rows), layout.record_dtype())
    for name, column in rows.items():
        block[name] = column
    return block


def _check_policy(policy: Policy, obs: Obs, spec: EnvSpec, n: int) -> None:
    for mode in (policy.eval, policy.train):
        mode()
        _check_array(policy.sample(obs), act_field(spec.action_space), n, "sample()")


def _check_actor(config: AgentConfig, agent: Agent, spec: EnvSpec, obs: Obs) -> None:
    actor = config.for_actor(1, 2).build_actor(spec, seed=3)
    n_opts, info = agent.model_info()
    actor.sync_model({**_copied(info), ENV_STEPS: np.array(1000, np.int64)})
    _check_policy(actor, obs, spec, n_rows({"act": actor.sample(obs)}))
    _check_same_actions(actor, agent, obs, "sync_model")
    assert agent.model_info()[0] == n_opts, "an actor's policy must not change the agent"


def _check_same_model(a: Agent, b: Agent, call: str) -> None:
    (n_opts, model), (expected_n, expected) = a.model_info(), b.model_info()
    assert n_opts == expected_n, f"{call} must restore the number of opt steps"
    for name, value in expected.items():
        assert np.array_equal(model[name], value), f"{call} must restore {name}"


def _check_same_actions(a: Policy, b: Policy, obs: Obs, call: str) -> None:
    a.eval()
    b.eval()
    got, expected = np.array(a.sample(obs)), np.array(b.sample(obs))
    alike = np.isclose(got, expected, atol=1e-5).reshape(len(got), -1).all(axis=1).mean()
    assert alike > 0.5, f"after {call} both must act alike in eval mode, they do in {alike:.0%} of the states"


def _check_row_store(buffer: RowStore, restored: ReplayBuffer) -> None:
    """Rows that are saved in blocks make the same buffer."""
    assert isinstance(restored, RowStore)
    first, stop = buffer.oldest, buffer.inserted
    middle = (first + stop) // 2
    blocks = [(start, buffer.copy_rows(start, end)) for start, end in ((first, middle), (middle, stop))]
    assert blocks[0][1].dtype == buffer.row_dtype, f"rows must be of row_dtype, they are {blocks[0][1].dtype}"
    state = buffer.state_without_rows()
    assert state["inserted"] == stop, f"state_without_rows must have 'inserted': {stop}, it has {state['inserted']}"
    restored.load_rows(state, blocks)
    again = (restored.oldest, restored.inserted)
    assert again == (first, stop), f"load_rows must restore rows {first} to {stop}, they are {again}"
    same = restored.copy_rows(first, stop).tobytes() == b"".join(rows.tobytes() for _, rows in blocks)
    assert same, "load_rows must restore the rows as they were"


def _check_refuses(config: ReplayBufferConfig, layout: Layout) -> None:
    other = Layout("frames" if layout.kind == "transitions" else "transitions", layout.fields)
    try:
        accepted = config.build(other).accepts(other)
    except LayoutMismatch:
        return
    assert not accepted, f"it must refuse {other.kind}, in accepts() or with LayoutMismatch, if it stores {layout.kind}"
