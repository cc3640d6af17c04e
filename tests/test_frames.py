"""The same steps through the frame stream and through stacked rows give the same transitions."""

from __future__ import annotations

import importlib.util
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.agents.dqn import DqnConfig
from outrider.core import EnvSpec
from outrider.data import Array, Items, Step, column_names
from outrider.envs.atari import AtariEnvConfig
from outrider.errors import ConfigError, LayoutMismatch
from outrider.frame_stream import FrameStreamProcessorConfig, frame_layout
from outrider.replay import FrameReplayBuffer, FrameReplayBufferConfig
from outrider.replay.priorities import PriorityConfig
from outrider.run_config import RunConfig
from outrider.sampling import NStepProcessorConfig, SimpleStepProcessorConfig, transition_layout
from outrider.testing import FakePolicy, check_replay_buffer_config
from outrider.trainer_config import AsyncTrainerConfig

STACK, GAMMA = 3, 0.5  # sums of a few rewards stay exact in float32
SPEC = EnvSpec("stacks", spaces.Box(0, 2**31, (STACK, 1, 2), np.uint32), spaces.Discrete(5), frame_stack=STACK)
LAYOUT = frame_layout(SPEC)
COLUMNS = ("obs", "act", "reward", "next_obs", "terminated", "truncated", "n_steps")


class Player:
    """An actor that steps made-up environments: frames are numbers that never come twice."""

    def __init__(self, actor: int, n_envs: int, n_steps: int, resets: bool, rng: np.random.Generator) -> None:
        self.actor, self.n, self.rng, self.resets = actor, n_envs, rng, resets
        self.counter = 1 + actor * 1_000_000
        self.frames = FrameStreamProcessorConfig().build(SPEC, n_envs)
        config: Any = NStepProcessorConfig(n_steps=n_steps, gamma=GAMMA) if n_steps > 1 else SimpleStepProcessorConfig()
        self.rows = config.build(SPEC, n_envs)
        self.obs = np.stack([self.first() for _ in range(n_envs)])
        self.resetting = np.zeros(n_envs, np.bool_)
        self.frames.reset(self.obs)
        self.rows.reset(self.obs)

    def frame(self) -> Array:
        self.counter += 1
        return np.full((1, 2), self.counter, np.uint32)

    def first(self) -> Array:
        return np.concatenate([np.zeros((STACK - 1, 1, 2), np.uint32), self.frame()[None]])

    def step(self) -> tuple[Items | None, Items | None]:
        """Entries and rows of one vector step."""
        n, rng = self.n, self.rng
        obs = np.stack([np.concatenate([stack[1:], self.frame()[None]]) for stack in self.obs])
        for i in np.flatnonzero(self.resetting):
            obs[i] = self.first()
        valid = ~self.resetting
        ended = (rng.random(n) < 0.25) & valid
        terminated = ended & (rng.random(n) < 0.5)
        init = obs.copy()
        self.resetting = ended & self.resets  # the next step is only a reset
        for i in np.flatnonzero(ended & ~self.resetting):
            init[i] = self.first()
        act, reward = rng.integers(0, 5, n), np.where(valid, rng.integers(-8, 9, n) / 4, 0.0)
        step = Step(act, obs, init, reward, terminated, ended & ~terminated, valid)
        self.obs = init
        return copied(self.frames.process(step)), copied(self.rows.process(step))


def copied(items: Items | None) -> Array | None:
    return None if items is None else np.array(items)


def key(rows: Any, i: int) -> tuple[Any, ...]:
    return tuple(np.asarray(rows[name][i]).tobytes() for name in COLUMNS)


def keys(rows: Any, n: int) -> list[tuple[Any, ...]]:
    return [key(rows, i) for i in range(n)]


def everything(buffer: FrameReplayBuffer) -> list[tuple[Any, ...]]:
    """Each transition that can be drawn, once, the oldest start first."""
    memory = buffer._frames
    starts = np.flatnonzero(memory.ready)
    assert len(starts) == len(buffer)
    if not len(starts):
        return []
    starts = starts[np.argsort(memory.entries.numbers(starts))]
    out = buffer._output(len(starts))
    buffer._walk(starts, out)
    buffer._frame_bytes.take(out.places.reshape(-1), out=out.bytes, mode="clip")
    return keys(out.columns, len(starts))


@given(
    capacity=st.integers(1, 120),
    n_steps=st.sampled_from([1, 3, 5]),
    n_actors=st.integers(1, 3),
    n_envs=st.integers(1, 3),
    resets=st.booleans(),
    message=st.integers(1, 9),
    seed=st.integers(0, 2**20),
    prioritized=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_transitions_are_those_of_the_stacked_rows(
    capacity, n_steps, n_actors, n_envs, resets, message, seed, prioritized
):
    rng = np.random.default_rng(seed)
    config = FrameReplayBufferConfig(
        capacity=capacity, n_steps=n_steps, gamma=GAMMA, prioritized=PriorityConfig() if prioritized else None
    )
    buffer = config.build(LAYOUT)
    players = [Player(actor, n_envs, n_steps, resets, rng) for actor in range(n_actors)]
    expected: Counter[Any] = Counter()
    sent: list[tuple[int, int]] = []  # newest frame of each entry and its stack's oldest, in the order of arrival
    waiting: list[list[Array]] = [[] for _ in players]
    last: dict[Any, list[int]] = {}
    for _ in range(60):
        player = players[int(rng.integers(n_actors))]
        entries, rows = player.step()
        if rows is not None:
            expected.update(keys(rows, len(rows)))
        if entries is not None:
            waiting[player.actor] += list(entries)
        while len(waiting[player.actor]) >= message:
            block = np.stack(waiting[player.actor][:message])
            del waiting[player.actor][:message]
            buffer.push_from(block, player.actor)
            for entry in as_stored(block, capacity):
                stream = (player.actor, int(entry["env"]))
                stack = [] if entry["t"] == 0 else last[stream][-(STACK - 1) :]
                last[stream] = [*stack, int(entry["frame"][0, 0])]
                sent.append((int(entry["frame"][0, 0]), last[stream][0]))
        if rng.random() < 0.2:
            check(buffer, expected, sent, capacity)
    check(buffer, expected, sent, capacity)


def as_stored(block: Array, capacity: int) -> list[Array]:
    """The entries of a message in the order in which they overwrite older ones."""
    parts = [block[i : i + capacity] for i in range(0, len(block), capacity)]
    return [entry for part in parts for entry in part[np.argsort(part["env"], kind="stable")]]


def check(buffer: FrameReplayBuffer, expected: Counter[Any], sent: list[tuple[int, int]], capacity: int) -> None:
    found = everything(buffer)
    assert len(set(found)) == len(found)
    assert not set(found) - set(expected), "a transition that the step processor did not make"
    stored = {frame for frame, _ in sent[-capacity:]}
    whole = {frame for frame, oldest in sent[-capacity:] if oldest in stored}
    newest = {np.frombuffer(k[0], np.uint32).reshape(STACK, 1, 2)[-1, 0, 0] for k in found}
    assert newest <= whole
    arrived = {frame for frame, _ in sent}
    must = set()
    for k in expected:  # those whose frames have all arrived, and are there still
        start, end = (int(np.frombuffer(k[i], np.uint32).reshape(STACK, 1, 2)[-1, 0, 0]) for i in (0, 3))
        if start in whole and end in arrived:
            must.add(start)
    assert must == newest


def filled(capacity: int = 60, n_steps: int = 1, steps: int = 200, seed: int = 0, **values: Any) -> FrameReplayBuffer:
    buffer = FrameReplayBufferConfig(capacity=capacity, n_steps=n_steps, gamma=GAMMA, **values).build(LAYOUT)
    players = [Player(actor, 2, n_steps, False, np.random.default_rng(seed + actor)) for actor in range(2)]
    for i in range(steps):
        entries, _ = players[i % 2].step()
        assert entries is not None
        buffer.push_from(entries, i % 2)
    return buffer


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("prioritized", [None, PriorityConfig()])
def test_a_batch_holds_complete_transitions_each_with_the_same_probability_at_first(n_steps, prioritized):
    buffer = filled(n_steps=n_steps, prioritized=prioritized)
    known = everything(buffer)
    counts: Counter[Any] = Counter()
    for _ in range(300):
        batch = buffer.batch(100)
        counts.update(keys(batch, 100))
    assert set(counts) == set(known)
    observed = np.array([counts[k] for k in known])
    expected = 30_000 / len(known)
    assert abs(float(((observed - expected) ** 2 / expected).sum()) - len(known)) < 6 * np.sqrt(2 * len(known))
    assert batch["obs"].shape == batch["next_obs"].shape == (100, STACK, 1, 2)
    assert batch["obs"].dtype == np.uint32
    assert buffer.sampled == 30_000


def test_few_transitions_among_many_frames_are_drawn_evenly():
    buffer = FrameReplayBufferConfig(capacity=1000).build(LAYOUT)
    entries = np.zeros(1000, LAYOUT.record_dtype())
    entries["env"], entries["reward"] = np.arange(1000), np.arange(1000)  # 1000 episodes that go no further
    entries[500:505]["env"], entries["t"][500:505] = 3, range(5)
    buffer.push(entries)
    assert len(buffer) == 4
    counts = np.bincount(buffer.batch(4000)["reward"].astype(int))
    assert counts[500:504].min() > 850
    assert counts.sum() == counts[500:504].sum()


def test_the_end_of_a_killed_actors_episode_is_no_end_and_is_not_drawn():
    buffer = FrameReplayBufferConfig(capacity=100, n_steps=3, gamma=GAMMA).build(LAYOUT)
    entries = np.zeros(8, LAYOUT.record_dtype())
    entries["t"] = [0, 1, 2, 3, 4, 0, 1, 2]  # the new incarnation begins with a reset
    entries["reward"] = range(8)
    buffer.push(entries[:5])
    buffer.push(entries[5:])
    assert len(buffer) == 2
    batch = buffer.batch(64)
    assert set(batch["reward"].tolist()) == {0 + 1 * 0.5 + 2 * 0.25, 1 + 2 * 0.5 + 3 * 0.25}
    assert set(batch["n_steps"].tolist()) == {3}
    assert not batch["terminated"].any()
    assert not batch["truncated"].any()


def test_an_entry_that_is_missing_breaks_stacks_and_windows():
    buffer = FrameReplayBufferConfig(capacity=100).build(LAYOUT)
    entries = np.zeros(10, LAYOUT.record_dtype())
    entries["t"] = entries["reward"] = np.arange(10)
    buffer.push(np.delete(entries, 4))  # its reward was not finite
    assert sorted(set(buffer.batch(200)["reward"].tolist())) == [0, 1, 2, 7, 8]


def test_frames_that_were_overwritten_are_in_no_stack():
    buffer = FrameReplayBufferConfig(capacity=8).build(LAYOUT)
    entries = np.zeros(30, LAYOUT.record_dtype())
    entries["t"] = entries["reward"] = np.arange(30)
    entries["frame"] = np.arange(1, 31)[:, None, None]
    for i in range(30):
        buffer.push(entries[i : i + 1])
        if len(buffer):
            batch = buffer.batch(50)
            stacks = batch["obs"][:, :, 0, 0].astype(int)
            assert (stacks[:, -1] == batch["reward"] + 1).all()
            assert (stacks == np.maximum(0, stacks[:, -1:] - [2, 1, 0])).all()
            assert stacks[:, -1].min() >= max(1, i + 1 - 8 + 1 + (2 if i >= 8 else 0))


@pytest.mark.parametrize("capacity", [60, 25, 90])
@pytest.mark.parametrize("prioritized", [None, PriorityConfig(beta_samples=1000)])
def test_a_restored_buffer_goes_on_as_the_saved_one(capacity, prioritized):
    saved = filled(n_steps=3, prioritized=prioritized)
    for _ in range(5):
        saved.update_priority(saved.batch(16).ixs, np.random.default_rng(0).normal(size=16))
    config = FrameReplayBufferConfig(capacity=capacity, n_steps=3, gamma=GAMMA, prioritized=prioritized)
    restored = config.build(LAYOUT)
    state, middle = pickle.loads(pickle.dumps(saved.state_without_rows())), (saved.oldest + saved.inserted) // 2
    blocks = [(saved.oldest, saved.copy_rows(saved.oldest, middle)), (middle, saved.copy_rows(middle, saved.inserted))]
    restored.load_rows(state, blocks)
    assert restored.statistics() == saved.statistics()
    player = Player(0, 2, 3, False, np.random.default_rng(9))
    for _ in range(30):
        entries, _ = player.step()
        for buffer in (saved, restored):
            buffer.push_from(entries, 5)  # type: ignore[arg-type]
        if capacity == 60:
            a, b = saved.batch(32), restored.batch(32)
            assert keys(a, 32) == keys(b, 32)
            assert a.ixs.tolist() == b.ixs.tolist()
            saved.update_priority(a.ixs, np.arange(32.0))
            restored.update_priority(b.ixs, np.arange(32.0))
    both = [everything(buffer) for buffer in (saved, restored)]
    fewer = min(map(len, both))
    assert fewer > 0
    assert both[0][-fewer:] == both[1][-fewer:]


@pytest.mark.parametrize("prioritized", [None, PriorityConfig()])
def test_nothing_is_left_of_what_a_buffer_had_before_it_was_restored(prioritized):
    saved, used = (filled(n_steps=3, prioritized=prioritized, seed=seed) for seed in (0, 7))
    used.load_state_dict(pickle.loads(pickle.dumps(saved.state_dict())))
    assert len(used) == len(saved)
    assert everything(used) == everything(saved)
    a, b = saved.batch(64), used.batch(64)
    assert keys(a, 64) == keys(b, 64)


@pytest.mark.parametrize("n_steps", [1, 2, 5])
@pytest.mark.parametrize("length", [4, 60])
def test_a_buffer_that_is_restored_with_another_number_of_steps_draws_all_of_its_transitions(n_steps, length):
    saved = FrameReplayBufferConfig(capacity=60, n_steps=4, gamma=GAMMA, prioritized=PriorityConfig()).build(LAYOUT)
    entries = np.zeros(length, LAYOUT.record_dtype())
    entries["t"] = np.arange(length)
    saved.push(entries)
    config = FrameReplayBufferConfig(capacity=60, n_steps=n_steps, gamma=GAMMA, prioritized=PriorityConfig())
    restored = config.build(LAYOUT)
    restored.load_state_dict(saved.state_dict())
    assert len(restored) == max(0, length - n_steps)
    if len(restored):
        batch = restored.batch(600)
        assert set(batch.ixs.tolist()) == set(range(length - n_steps))
        assert np.isfinite(np.asarray(batch.weights)).all()


def test_a_state_without_priorities_gives_all_rows_the_highest():
    saved, restored = filled(), filled(steps=0, prioritized=PriorityConfig())
    restored.load_state_dict(saved.state_dict())
    assert everything(saved) == everything(restored)
    assert set(np.asarray(restored.batch(64).weights).tolist()) == {1.0}


def test_priorities_of_entries_that_cannot_be_drawn_any_more_are_dropped_and_counted():
    buffer = FrameReplayBufferConfig(capacity=8, prioritized=PriorityConfig(alpha=1.0)).build(LAYOUT)
    entries = np.zeros(20, LAYOUT.record_dtype())
    entries["t"] = entries["reward"] = np.arange(20)
    buffer.push(entries[:8])
    batch = buffer.batch(7)
    assert sorted(batch.ixs.tolist()) == list(range(7))
    buffer.push(entries[8:9])  # overwrites 0, which the stacks of 1 and 2 need
    buffer.update_priority(np.arange(8), np.full(8, 50.0))
    assert buffer.statistics()["async/stale_priorities"] == 3
    assert sorted(buffer.batch(5).ixs.tolist()) == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("prioritized", [None, PriorityConfig()])
def test_an_atari_transition_takes_little_more_than_its_frame(prioritized):
    spec = EnvSpec("atari", spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(6), frame_stack=4)
    config = FrameReplayBufferConfig(capacity=2000, prioritized=prioritized)
    assert config.build(frame_layout(spec)).nbytes <= 2000 * 7_400


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("prioritized", [None, PriorityConfig()])
def test_the_contract_holds(n_steps, prioritized):
    check_replay_buffer_config(
        FrameReplayBufferConfig(capacity=64, n_steps=n_steps, gamma=1.0, prioritized=prioritized), LAYOUT
    )


def test_what_cannot_be_is_refused():
    with pytest.raises(LayoutMismatch, match="FrameReplayBuffer stores frames, the step processor makes transitions"):
        FrameReplayBufferConfig().build(transition_layout(SPEC))
    with pytest.raises(ConfigError, match=r"replay\.gamma: expected the agent's gamma, got None"):
        FrameReplayBufferConfig(n_steps=2).build(LAYOUT)
    with pytest.raises(ValueError, match="there is none"):
        FrameReplayBufferConfig(capacity=5).build(LAYOUT).batch(1)
    for values, name in (({"capacity": 0}, "capacity"), ({"n_steps": 0}, "n_steps"), ({"gamma": 1.1}, "gamma")):
        with pytest.raises(ConfigError) as caught:
            FrameReplayBufferConfig(**values)  # type: ignore[arg-type]
        assert caught.value.key == name
    buffer = FrameReplayBufferConfig(capacity=5).build(LAYOUT)
    bad = {name: np.zeros((2, *f.shape), f.dtype) for name, f in zip(LAYOUT.names, LAYOUT.fields, strict=True)}
    with pytest.raises(LayoutMismatch, match="'t'"):
        buffer.push(bad | {"t": np.zeros(2)})


@pytest.mark.skipif(importlib.util.find_spec("ale_py") is None, reason="needs ale-py")
@pytest.mark.parametrize(("episodic_life", "n_steps"), [(False, 1), (True, 3)])
def test_a_real_game_gives_the_transitions_of_stacked_rows(episodic_life, n_steps):
    config = AtariEnvConfig(id="breakout", max_frames=300, episodic_life=episodic_life)
    spec, env = config.spec(), config.build(0, 2)
    policy, frames = FakePolicy(spec.action_space), FrameStreamProcessorConfig().build(spec, 2)
    rows = NStepProcessorConfig(n_steps=n_steps, gamma=GAMMA).build(spec, 2)
    buffer = FrameReplayBufferConfig(capacity=2000, n_steps=n_steps, gamma=GAMMA).build(frame_layout(spec))
    obs = env.reset()
    frames.reset(obs)
    rows.reset(obs)
    expected: list[Any] = []
    for _ in range(200):
        step = env.step(policy.sample(obs))
        entries, made = frames.process(step), rows.process(step)
        if entries is not None:
            buffer.push(entries)
        if made is not None:
            assert set(column_names(made)) >= set(COLUMNS)
            expected += keys(made, len(made))
        obs = step.init_obs
    env.close()
    found = everything(buffer)
    # Frames may repeat, and with them transitions; those that end with the very last frames are not sent yet.
    assert not Counter(found) - Counter(expected)
    assert len(expected) - 2 <= len(found) <= len(expected)


@pytest.mark.parametrize("length", [1, 2, 5, 1000])
@pytest.mark.parametrize(("capacity", "streams", "n_steps"), [(40, 4, 1), (61, 7, 3), (40, 1, 3), (100, 16, 3)])
def test_a_warm_up_within_the_limit_stays_ended_while_frames_are_overwritten(capacity, streams, n_steps, length):
    config = FrameReplayBufferConfig(capacity=capacity, n_steps=n_steps, gamma=GAMMA)
    buffer, limit, t = config.build(LAYOUT), config.warmup_limit(streams, STACK), [0] * streams
    for i in range(4 * capacity):
        stream = i % streams
        entry = np.zeros(1, LAYOUT.record_dtype())
        entry["t"], entry["terminated"] = t[stream], t[stream] == length
        t[stream] = 0 if t[stream] == length else t[stream] + 1
        buffer.push_from(entry, stream)
        assert i < capacity or len(buffer) >= limit


def test_a_warm_up_that_never_ends_with_so_many_environments_is_refused():
    replay, agent = FrameReplayBufferConfig(capacity=1000, n_steps=3, gamma=0.99), DqnConfig(batch_size=32)
    trainer = AsyncTrainerConfig(warmup_period=400)
    trainer.require_possible(replay, agent, 8, 4)
    expected = "trainer.warmup_period: expected at most 276 with replay.capacity 1000 and 64 environments, got 400"
    with pytest.raises(ConfigError, match=expected):
        trainer.require_possible(replay, agent, 64, 4)
    few = {"replay.capacity": 1000, "trainer.warmup_period": 400, "agent.batch_size": 32}
    RunConfig.from_sources("pong-dqn", few | {"actors.n_actors": 2})
    with pytest.raises(ConfigError, match=r"warmup_period: expected at most 0 with replay.capacity 1000 and 2400"):
        RunConfig.from_sources("pong-dqn", few | {"actors.n_actors": 600})
