from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core import EnvSpec
from outrider.data import Array, Episode, Layout, nest
from outrider.envs.gymnasium import GymEnvConfig
from outrider.envs.serial import SerialEnv
from outrider.envs.vector import VectorEnvAdapter
from outrider.errors import ConfigError, LayoutMismatch, UnsupportedSpace
from outrider.frame_stream import FrameStreamProcessorConfig, frame_layout
from outrider.sampling import (
    NStepProcessorConfig,
    Sampler,
    SimpleStepProcessorConfig,
    transition_layout,
)
from outrider.testing import (
    CountEnv,
    FakePolicy,
    ListBuffer,
    Pow2Env,
    SpacesEnv,
    TagEnv,
    TermEnv,
    check_step_processor_config,
    vector_count_env,
    vector_tag_env,
)

MODES = ("serial", "NextStep", "SameStep", "Disabled", "final_obs")
SEEDS = [11, 22, 33, 44]


class FinalObsVectorEnv(SyncVectorEnv):
    """Keeps SAME_STEP, as vector environments do that are not exactly Gymnasium's."""


def tag_env(mode: str, n_envs: int, **kwargs: Any) -> SerialEnv | VectorEnvAdapter:
    seeds = SEEDS[:n_envs]
    if mode == "serial":
        return SerialEnv([TagEnv(**kwargs) for _ in range(n_envs)], seeds)
    if mode == "final_obs":
        kwargs = {**kwargs, "reuse": False}
        made = FinalObsVectorEnv([lambda: TagEnv(**kwargs)] * n_envs, autoreset_mode=AutoresetMode.SAME_STEP)
        return VectorEnvAdapter(made, seeds)
    return VectorEnvAdapter(vector_tag_env(n_envs, mode, **kwargs), seeds)  # type: ignore[arg-type]


def spec_of(env: Any, **kwargs: Any) -> EnvSpec:
    return EnvSpec("test", env.observation_space, env.action_space, **kwargs)


def step(sampler: Sampler, buffer: ListBuffer, model_version: int) -> Sequence[Episode]:
    items, episodes = sampler.sample(model_version)
    if items is not None:
        buffer.push(items)
    return episodes


def sample(env: Any, config: Any, n_steps: int, versions: bool = False) -> tuple[dict[str, Array], list[Any], Sampler]:
    spec = spec_of(env)
    sampler = Sampler(env, FakePolicy(spec.action_space), config.build(spec, env.n_envs), config.layout(spec))
    buffer, episodes = ListBuffer(), []
    sampler.reset()
    for t in range(n_steps):
        episodes += step(sampler, buffer, t if versions else 7)
    env.close()
    return buffer.columns(), episodes, sampler


@dataclass
class Oracle:
    """What n-step transitions of TagEnv must look like, from its definition."""

    lengths: tuple[int, ...]
    terminates: bool | None
    n: int
    gamma: float

    def episodes(self) -> Iterator[tuple[int, int, bool]]:
        episode = 0
        while True:
            dies = episode % 2 == 0 if self.terminates is None else self.terminates
            yield episode, self.lengths[episode % len(self.lengths)], dies
            episode += 1

    def rows(self, stream: int, actions: dict[int, int], n_steps: int) -> dict[int, tuple[Any, ...]]:
        """By global step: (obs, reward, next_obs, terminated, truncated, k) of all windows complete after n_steps."""
        found: dict[int, tuple[Any, ...]] = {}
        begin = 0
        for episode, length, dies in self.episodes():
            if begin >= n_steps:
                return found
            for t in range(length):
                k = min(self.n, length - t)
                if begin + t + k > n_steps:
                    break
                reward = sum(self.gamma**i * (4.0 * (begin + t + i) + actions[begin + t + i]) for i in range(k))
                end = t + k == length
                obs, following = [stream, episode, t, begin + t], [stream, episode, t + k, begin + t + k]
                found[begin + t] = (obs, reward, following, end and dies, end and not dies, k)
            begin += length
        raise AssertionError


@given(
    mode=st.sampled_from(MODES),
    n_envs=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    terminates=st.sampled_from([True, False, None]),
    n=st.integers(1, 5),
    n_steps=st.integers(1, 40),
    reuse=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_every_transition_is_right_and_none_is_missing_or_double(
    mode: str, n_envs: int, lengths: list[int], terminates: bool | None, n: int, n_steps: int, reuse: bool
):
    env = tag_env(mode, n_envs, lengths=tuple(lengths), terminates=terminates, reuse=reuse)
    actions = record_actions(env)
    config = NStepProcessorConfig(n_steps=n, gamma=0.5)
    rows, episodes, sampler = sample(env, config, n_steps)
    taken = {stream: len(acts) for stream, acts in actions.items()}
    assert sampler.env_steps == sum(taken.values())
    check_rows(rows, Oracle(tuple(lengths), terminates, n, 0.5), actions)
    check_episodes(episodes, tuple(lengths), actions)


@given(
    mode=st.sampled_from(MODES),
    n_envs=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    terminates=st.sampled_from([True, False, None]),
    n_steps=st.integers(1, 40),
    reuse=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_the_simple_processor_is_the_one_step_case(
    mode: str, n_envs: int, lengths: list[int], terminates: bool | None, n_steps: int, reuse: bool
):
    made = []
    for config in (SimpleStepProcessorConfig(), NStepProcessorConfig(n_steps=1, gamma=0.9)):
        env = tag_env(mode, n_envs, lengths=tuple(lengths), terminates=terminates, reuse=reuse)
        made.append(sample(env, config, n_steps)[0])
    assert made[0].keys() == made[1].keys()
    for name, column in made[0].items():
        assert column.dtype == made[1][name].dtype
        assert column.tobytes() == made[1][name].tobytes(), name


def record_actions(env: Any) -> dict[int, dict[int, int]]:
    """Watches the environments below: action by stream and global step."""
    found: dict[int, dict[int, int]] = {}
    for single in env._envs if isinstance(env, SerialEnv) else env._env.envs:

        def step(action: Any, single: TagEnv = single, original: Any = single.step) -> Any:
            found.setdefault(single.stream, {})[single.global_step] = int(action)
            return original(action)

        single.step = step
    return found


def check_rows(rows: dict[str, Array], oracle: Oracle, actions: dict[int, dict[int, int]]) -> None:
    seen: set[tuple[int, int]] = set()
    expected = {s: oracle.rows(s, acts, len(acts)) for s, acts in actions.items()}
    for i in range(len(rows["reward"]) if rows else 0):
        stream, _, _, at = rows["obs"][i].tolist()
        assert (stream, at) not in seen
        seen.add((stream, at))
        obs, reward, following, dead, cut, k = expected[stream][at]
        assert rows["obs"][i].tolist() == obs
        assert rows["next_obs"][i].tolist() == following
        assert rows["act"][i] == actions[stream][at]
        assert rows["reward"][i] == np.float32(reward)
        assert (rows["terminated"][i], rows["truncated"][i], rows["n_steps"][i]) == (dead, cut, k)
    assert len(seen) == sum(len(e) for e in expected.values())


def check_episodes(episodes: list[Any], lengths: tuple[int, ...], actions: dict[int, dict[int, int]]) -> None:
    for env, stream in enumerate(SEEDS):
        acts = actions.get(stream, {})
        at, number = 0, 0
        for episode in (e for e in episodes if e.env == env):
            length = lengths[number % len(lengths)]
            assert episode.length == length
            assert episode.ret == sum(4.0 * g + acts[g] for g in range(at, at + length))
            at, number = at + length, number + 1
        assert len(acts) - at < lengths[number % len(lengths)]


@pytest.mark.parametrize("mode", ["serial", "NextStep", "SameStep", "Disabled"])
def test_five_steps_give_five_rows_and_no_row_from_the_end_to_the_start(mode: str):
    n = 3
    env: Any = SerialEnv([CountEnv(5) for _ in range(n)], SEEDS[:n])
    if mode != "serial":
        env = VectorEnvAdapter(vector_count_env(n, mode, 5), SEEDS[:n])  # type: ignore[arg-type]
    rows, episodes, sampler = sample(env, SimpleStepProcessorConfig(), 60)
    assert np.array_equal(rows["next_obs"], rows["obs"] + 1)
    assert rows["truncated"].sum() == len(episodes) == sampler.episodes
    assert not rows["terminated"].any()
    assert len(rows["reward"]) == sampler.env_steps == (150 if mode == "NextStep" else 180)
    assert {(e.ret, e.length) for e in episodes} == {(5.0, 5)}


def test_a_shorter_window_at_a_truncation_sums_only_its_own_episode():
    rows, _, _ = sample(SerialEnv([Pow2Env(5)], [0]), NStepProcessorConfig(n_steps=3, gamma=0.5), 20)
    third = rows["obs"][:, 0] == 3
    assert set(rows["reward"][third].tolist()) == {8 + 0.5 * 16}
    assert set(rows["n_steps"][third].tolist()) == {2}
    assert set(rows["next_obs"][third, 0].tolist()) == {5.0}


def test_every_state_of_a_terminated_episode_starts_a_transition():
    rows, _, _ = sample(SerialEnv([TermEnv(5)], [0]), NStepProcessorConfig(n_steps=3, gamma=1.0), 25)
    assert sorted(rows["obs"][:, 0].tolist()) == sorted([0.0, 1.0, 2.0, 3.0, 4.0] * 5)
    assert rows["reward"][rows["obs"][:, 0] == 4].tolist() == [1.0] * 5
    assert rows["terminated"].sum() == 15


def test_sums_over_many_steps_are_made_in_float64():
    n, gamma = 1000, 0.999

    class Third(CountEnv):
        def reward(self) -> float:
            return 1.0 / 3.0

    rows, _, _ = sample(SerialEnv([Third(n)], [0]), NStepProcessorConfig(n_steps=n, gamma=gamma), n)
    first = rows["reward"][rows["obs"][:, 0] == 0]
    assert first == np.float32((1 - gamma**n) / (1 - gamma) / 3)


def test_a_window_holds_the_version_that_chose_its_action():
    rows, _, _ = sample(SerialEnv([TagEnv((6,))], [0]), NStepProcessorConfig(n_steps=3, gamma=0.99), 30, versions=True)
    assert np.array_equal(rows["model_version"], rows["obs"][:, 3])


def test_the_version_is_the_samplers():
    rows, _, _ = sample(SerialEnv([TagEnv((3,)), TagEnv((4,))], [0, 1]), SimpleStepProcessorConfig(), 30, versions=True)
    assert np.array_equal(rows["model_version"], rows["obs"][:, 3])


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (), np.float64),
        spaces.Box(0, 255, (2, 3), np.uint8),
        spaces.Discrete(5, start=-2),
        spaces.MultiDiscrete([3, 4]),
        spaces.MultiBinary(4),
        spaces.Dict(image=spaces.Box(0, 255, (3, 3), np.uint8), pos=spaces.Dict(xy=spaces.Box(-1, 1, (2,)))),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "action_space",
    [
        spaces.Discrete(3, start=-1),
        spaces.Discrete(2, start=10),
        spaces.MultiDiscrete([12, 385, 217]),
        spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, -1], [0, 7]]),
        spaces.MultiBinary(4),
        spaces.Box(-1, 1, (), np.float32),
        spaces.Box(np.array([0, -0.785]), np.array([5, 0.785]), dtype=np.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "processor", [SimpleStepProcessorConfig(), NStepProcessorConfig(n_steps=3, gamma=0.99)], ids=["1", "3"]
)
def test_spaces_keep_their_shape_and_dtype_from_the_environment_to_the_items(space, action_space, processor):
    env = SerialEnv([SpacesEnv(space, action_space) for _ in range(2)], [1, 2])
    layout = processor.layout(spec_of(env))
    rows, _, _ = sample(env, processor, 40)
    assert tuple(rows) == layout.names
    for f in layout.fields:
        assert rows[f.name].dtype == f.dtype
        assert rows[f.name].shape[1:] == f.shape
    obs = nest(rows, "obs")
    for i in range(len(rows["reward"])):
        assert row_of(obs, i) in space
    start = getattr(action_space, "start", 0)
    assert all(np.asarray(a + start, action_space.dtype) in action_space for a in rows["act"])


def row_of(obs: Any, i: int) -> Any:
    if isinstance(obs, dict):
        return {key: row_of(part, i) for key, part in obs.items()}
    return np.asarray(obs[i])


def test_images_stay_uint8():
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    layout = transition_layout(EnvSpec("test", space, spaces.Discrete(6)))
    assert 2 * 4 * 84 * 84 < layout.record_dtype().itemsize < 2 * 4 * 84 * 84 + 64


class StackEnv(TagEnv):
    """Frames ``[1, 1]`` whose number is the global step, stacked three deep with zeros before the episode."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        super().__init__(lengths)
        self.observation_space = spaces.Box(0, 10**6, (3, 1, 1), np.int64)

    def _obs(self) -> Array:
        frames = [0 if self.t - age < 0 else 100 * self.episode + self.t - age + 1 for age in (2, 1, 0)]
        return np.array(frames).reshape(3, 1, 1)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    n_envs=st.integers(1, 3),
    mode=st.sampled_from(["serial", "NextStep", "SameStep"]),
)
@settings(max_examples=100, deadline=None)
def test_a_frame_stream_holds_every_frame_once_and_gives_back_the_stacks(lengths: list[int], n_envs: int, mode: str):
    config = FrameStreamProcessorConfig()
    envs = [StackEnv(tuple(lengths)) for _ in range(n_envs)]
    env: Any = SerialEnv(envs, SEEDS[:n_envs])
    if mode != "serial":
        from gymnasium.vector import AutoresetMode, SyncVectorEnv

        vector = SyncVectorEnv([lambda e=e: e for e in envs], autoreset_mode=AutoresetMode(mode))
        env = VectorEnvAdapter(vector, SEEDS[:n_envs])
    spec = spec_of(env, frame_stack=3)
    buffer, seen = ListBuffer(), []
    processor = config.build(spec, n_envs)
    policy = FakePolicy(spec.action_space)
    obs = env.reset()
    processor.reset(obs)
    for _ in range(30):
        before = np.array(obs)
        step = env.step(policy.sample(obs))
        items = processor.process(step)
        if items is not None:
            buffer.push(items)
        seen += [(i, before[i], np.array(step.obs[i]), step.reward[i]) for i in range(n_envs) if step.valid[i]]
        obs = step.init_obs
    rows = buffer.columns()
    assert list(rows) == list(frame_layout(spec).names)
    for i in range(n_envs):
        check_stream({name: column[rows["env"] == i] for name, column in rows.items()}, [s for s in seen if s[0] == i])


def check_stream(entries: dict[str, Array], seen: list[Any]) -> None:
    """Rebuild (stack, reward, next stack) from the entries of one environment and compare."""
    ended = entries["terminated"] | entries["truncated"]
    frames = entries["frame"][:, 0, 0]
    assert len(np.unique(frames)) == len(frames)
    stacks, first = [], 0
    for at, frame in enumerate(frames):
        if entries["t"][at] == 0:
            first = at
        stacks.append([*[0] * max(0, 2 - (at - first)), *frames[max(first, at - 2) : at], frame])
    starts = np.flatnonzero(~ended)
    assert len(starts) == len(seen)
    for at, (_, stack, following, reward) in zip(starts, seen, strict=True):
        assert stacks[at] == stack[:, 0, 0].tolist()
        assert entries["reward"][at] == np.float32(reward)
        if at + 1 < len(stacks):
            assert stacks[at + 1] == following[:, 0, 0].tolist()
    last = np.flatnonzero(ended)
    assert not entries["reward"][last].any()
    assert not entries["act"][last].any()
    assert not entries["t"][last[last + 1 < len(ended)] + 1].any()


def test_a_frame_stream_needs_stacked_frames():
    spec = EnvSpec("test", spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(6))
    with pytest.raises(UnsupportedSpace, match=r"env\.observation_space: expected a Box of stacked frames"):
        FrameStreamProcessorConfig().layout(spec)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (np.zeros(2, np.int32), r"expected \[2\] int64 from the policy, got \[2\] int32"),
        (np.zeros((2, 1), np.int64), r"expected \[2\] int64 from the policy, got \[2, 1\] int64"),
        (np.zeros(3, np.int64), r"expected \[2\] int64 from the policy, got \[3\] int64"),
        ([0, 0], r"expected an array \[2\] int64 from the policy, got list"),
    ],
)
def test_a_policy_whose_actions_do_not_fit_is_told_so_at_the_first_step(act: Any, words: str):
    env = SerialEnv([TagEnv(), TagEnv()], [0, 1])
    spec = spec_of(env)

    class Odd(FakePolicy):
        def sample(self, obs: Any) -> Any:
            return act

    config = SimpleStepProcessorConfig()
    sampler = Sampler(env, Odd(spec.action_space), config.build(spec, 2), config.layout(spec))
    with pytest.raises(LayoutMismatch, match=words):
        sampler.sample(0)


def test_the_sampler_counts_unclipped_rewards():
    class Clipped(SerialEnv):
        def step(self, act: Array) -> Any:
            step = super().step(act)
            step.raw_reward, step.reward = step.reward, np.sign(step.reward)
            return step

    rows, episodes, _ = sample(Clipped([Pow2Env(5)], [0]), SimpleStepProcessorConfig(), 5)
    assert rows["reward"].tolist() == [1.0] * 5
    assert [e.ret for e in episodes] == [31.0]


def test_a_sampler_that_is_reset_forgets_open_episodes_and_windows():
    env = SerialEnv([TagEnv((5,))], [0])
    spec, config, buffer = spec_of(env), NStepProcessorConfig(n_steps=3, gamma=1.0), ListBuffer()
    sampler = Sampler(env, FakePolicy(spec.action_space), config.build(spec, 1))
    for _ in range(2):
        step(sampler, buffer, 0)
    sampler.reset()
    episodes = [e for _ in range(5) for e in step(sampler, buffer, 0)]
    assert [e.length for e in episodes] == [5]
    assert buffer.columns()["obs"][:, 1].tolist() == [1] * 5
    assert sampler.env_steps == 7


@given(
    mode=st.sampled_from(MODES),
    n_envs=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    n=st.integers(1, 5),
    cuts=st.lists(st.integers(0, 12), min_size=1, max_size=4),
)
@settings(max_examples=200, deadline=None)
def test_a_cut_ends_every_open_window_as_a_truncation_would(
    mode: str, n_envs: int, lengths: list[int], n: int, cuts: list[int]
):
    env = tag_env(mode, n_envs, lengths=tuple(lengths), terminates=True, reuse=True)
    config, buffer = NStepProcessorConfig(n_steps=n, gamma=0.5), ListBuffer()
    spec, actions = spec_of(env), record_actions(env)
    sampler = Sampler(env, FakePolicy(spec.action_space), config.build(spec, n_envs), config.layout(spec))
    ends = {stream: set() for stream in SEEDS}  # global steps at which an episode was over
    for number, n_steps in enumerate(cuts):
        sampler.reset(SEEDS[:n_envs] if number else None)
        for _ in range(n_steps):
            step(sampler, buffer, 7)
        items = sampler.cut()
        if items is not None:
            assert set(items["truncated"].tolist()) == {True}
            buffer.push(items)
        for stream, taken in actions.items():
            ends[stream].add(len(taken))
    env.close()
    rows = buffer.columns()
    begun = [(stream, g) for stream, taken in actions.items() for g in taken]
    got = {(row[0], row[3]): i for i, row in enumerate(rows["obs"].tolist())} if rows else {}
    assert len(got) == (len(rows["reward"]) if rows else 0)
    assert set(got) == set(begun)
    for (stream, g), i in got.items():
        k = int(rows["n_steps"][i])
        dead = bool(rows["terminated"][i])
        assert rows["next_obs"][i].tolist()[:2] == rows["obs"][i].tolist()[:2]
        assert rows["next_obs"][i][3] == g + k
        assert rows["reward"][i] == np.float32(sum(0.5**j * (4.0 * (g + j) + actions[stream][g + j]) for j in range(k)))
        assert k == n or dead or g + k in ends[stream], "shorter only at an end"
        assert not any(g < end < g + k for end in ends[stream]), "never beyond a cut"
        assert bool(rows["truncated"][i]) <= (g + k in ends[stream])


def test_a_cut_frame_stream_ends_every_episode_that_has_begun():
    config, env = FrameStreamProcessorConfig(), SerialEnv([StackEnv((3, 9)), StackEnv((9,))], SEEDS[:2])
    spec, buffer = spec_of(env, frame_stack=3), ListBuffer()
    sampler = Sampler(env, FakePolicy(spec.action_space), config.build(spec, 2), config.layout(spec))
    for _ in range(3):
        step(sampler, buffer, 0)
    items = sampler.cut()
    assert items is not None
    assert items["env"].tolist() == [1], "the other episode has just ended, and nothing of the next was sent"
    assert items["frame"][:, 0, 0].tolist() == [4]
    assert (items["truncated"].tolist(), items["terminated"].tolist()) == ([True], [False])
    assert (items["reward"].tolist(), items["act"].tolist(), items["t"].tolist()) == ([0.0], [0], [3])


def test_a_processor_without_a_cut_loses_only_what_is_open():
    class Uncut:
        def reset(self, init_obs: Any) -> None:
            pass

        def process(self, step: Any) -> None:
            return None

    env = SerialEnv([TagEnv((5,))], [3])
    sampler = Sampler(env, FakePolicy(spec_of(env).action_space), Uncut())
    assert sampler.cut() is None
    sampler.sample(0)
    assert sampler.cut() is None
    sampler.sample(0)
    assert sampler.env_steps == 2


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"n_steps": 0}, "n_steps: expected at least 1, got 0"),
        ({"gamma": 1.5}, r"gamma: expected a number in \[0, 1\]"),
    ],
)
def test_impossible_windows_are_refused(kwargs: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        NStepProcessorConfig(**kwargs)


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize(
    "config",
    [
        SimpleStepProcessorConfig(),
        NStepProcessorConfig(n_steps=1, gamma=0.99),
        NStepProcessorConfig(n_steps=4, gamma=0.99),
    ],
    ids=str,
)
def test_the_processors_keep_their_contract(config: Any, n_envs: int):
    obs_space = spaces.Dict(a=spaces.Box(-1, 1, (3,)), b=spaces.Dict(c=spaces.Discrete(4)))
    check_step_processor_config(config, EnvSpec("test", obs_space, spaces.Box(-2, 2, (2,))), n_envs)
    stacked = spaces.Box(0, 255, (4, 5, 5), np.uint8)
    frames = EnvSpec("test", stacked, spaces.Discrete(3), frame_stack=4)
    check_step_processor_config(FrameStreamProcessorConfig(), frames, n_envs)


def test_layouts_do_not_depend_on_the_number_of_environments():
    spec = GymEnvConfig(id="CartPole-v1").spec()
    layout = transition_layout(spec)
    assert isinstance(layout, Layout)
    assert [str(f) for f in layout.fields] == [
        "obs [4] float32",
        "act [] int64",
        "reward [] float32",
        "next_obs [4] float32",
        "terminated [] bool",
        "truncated [] bool",
        "n_steps [] int32",
        "model_version [] int64",
    ]
