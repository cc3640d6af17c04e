import sys
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from outrider.envs.atari import AtariEnv, AtariEnvConfig
from outrider.errors import ConfigError
from outrider.frame_stream import FrameStreamProcessorConfig
from outrider.sampling import Sampler, SimpleStepProcessorConfig
from outrider.testing import FakePolicy, ListBuffer, check_env_config, check_step_processor_config

pytest.importorskip("ale_py")


def play(env: AtariEnv, n_steps: int, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    obs = np.array(env.reset())
    steps = []
    for _ in range(n_steps):
        step = env.step(rng.integers(0, env.action_space.n, env.n_envs))  # type: ignore[attr-defined]
        steps.append((obs, step))
        obs = np.array(step.init_obs)
        step.obs, step.init_obs = np.array(step.obs), obs
    env.close()
    return steps


def test_real_pong_keeps_the_contract():
    check_env_config(AtariEnvConfig(), n_envs=2, n_steps=20)


def test_pong_is_described():
    config = AtariEnvConfig(id="ALE/Pong-v5")
    spec = config.spec()
    assert spec.observation_space == spaces.Box(0, 255, (4, 84, 84), np.uint8)
    assert spec.action_space == spaces.Discrete(6)
    assert (spec.id, spec.frame_stack, spec.max_episode_steps) == ("ALE/Pong-v5", 4, 27_000)
    assert AtariEnvConfig(full_action_space=True).spec().action_space == spaces.Discrete(18)
    assert AtariEnvConfig(size=42, frame_stack=2).spec().observation_space.shape == (2, 42, 42)


@pytest.mark.parametrize("game", ["ms_pacman", "MsPacman", "ALE/MsPacman-v5", "ms_pacman-v5"])
def test_a_game_has_several_spellings(game: str):
    assert AtariEnvConfig(id=game).spec().action_space == spaces.Discrete(9)


def test_a_first_observation_is_padded_with_zero_frames():
    env = AtariEnvConfig().build(0, 2)
    obs = np.asarray(env.reset())
    assert obs.dtype == np.uint8
    assert not obs[:, :3].any()
    assert all(len(np.unique(frame)) > 2 for frame in obs[:, 3])
    step = env.step(np.zeros(2, np.int64))
    assert not np.asarray(step.obs)[:, :2].any()
    assert np.array_equal(np.asarray(step.obs)[:, 2], obs[:, 3])
    env.close()


def test_the_frame_cap_is_a_truncation_and_the_next_observation_is_the_true_one():
    env = AtariEnvConfig(max_frames=80, noop_max=1).build([5, 6], 2)
    steps = play(env, 50)
    ends = [t for t, (_, step) in enumerate(steps) if step.truncated.any()]
    assert len(ends) >= 2
    assert ends[0] in (19, 20)
    for t in ends:
        before, step = steps[t]
        assert step.truncated.all()
        assert not step.terminated.any()
        assert np.array_equal(step.obs[:, :3], before[:, 1:])
        assert not step.init_obs[:, :3].any()
        assert not np.array_equal(step.obs[:, 3], step.init_obs[:, 3])
    assert all(step.valid.all() for _, step in steps)


def test_a_lost_game_is_terminated():
    steps = play(AtariEnvConfig(id="breakout").build([1, 2], 2), 400)
    assert any(step.terminated.any() for _, step in steps)
    assert not any(step.truncated.any() for _, step in steps)


def test_rewards_are_clipped_to_their_sign_and_scores_are_not():
    steps = play(AtariEnvConfig(id="ms_pacman").build([1, 2], 2), 150)
    scores = np.array([step.raw_reward for _, step in steps])
    assert scores.max() >= 10
    assert np.array_equal([step.reward for _, step in steps], np.sign(scores))
    whole = AtariEnvConfig(id="ms_pacman", episodic_life=True).eval()
    assert (whole.clip_reward, whole.episodic_life) == (False, False)
    assert np.array_equal([step.reward for _, step in play(whole.build([1, 2], 2), 150)], scores)


def test_episodes_report_unclipped_scores():
    config = AtariEnvConfig(id="ms_pacman", max_frames=400)
    spec, processor, buffer = config.spec(), SimpleStepProcessorConfig(), ListBuffer()
    env = config.build(0, 1)
    sampler = Sampler(env, FakePolicy(spec.action_space), processor.build(spec, 1), processor.layout(spec))
    sampler.reset()
    episodes: list[Any] = []
    while not episodes:
        items, ended = sampler.sample(0)
        assert items is not None
        buffer.push(items)
        episodes += ended
    env.close()
    rows = buffer.columns()
    assert rows["obs"].dtype == rows["next_obs"].dtype == np.uint8
    assert set(np.unique(rows["reward"])) <= {0.0, 1.0}
    assert episodes[0].ret >= 10 * rows["reward"].sum() > 0
    assert np.array_equal(rows["obs"][1:], rows["next_obs"][:-1])


def test_a_lost_life_ends_an_episode_but_not_the_game():
    steps = play(AtariEnvConfig(id="breakout", episodic_life=True).build(0, 1), 600)
    ends = [t for t, (_, step) in enumerate(steps) if step.terminated[0]]
    whole = play(AtariEnvConfig(id="breakout").build(0, 1), 600)
    games = [t for t, (_, step) in enumerate(whole) if step.terminated[0]]
    assert len(ends) >= 4 * len(games) > 0
    score = sum(step.raw_reward[0] for _, step in steps)
    assert score > 0
    age = 0
    for before, step in steps:
        age += 1
        unseen = max(0, 3 - age)
        assert not step.obs[0, :unseen].any()
        assert np.array_equal(step.obs[0, unseen:3], before[0, unseen + 1 :])
        if step.terminated[0]:
            age = 0
            assert not step.init_obs[0, :3].any()
            assert step.init_obs[0, 3].any()


def test_bricks_stay_broken_after_a_lost_life():
    """ale_py's own episodic_life starts a new game; its first frame then shows the whole wall."""
    steps = play(AtariEnvConfig(id="breakout", episodic_life=True).build(3, 1), 1500, seed=4)
    wall = slice(25, 45)
    full = (steps[0][0][0, 3, wall] > 50).sum()
    left = [(step.init_obs[0, 3, wall] > 50).sum() for _, step in steps if step.terminated[0]]
    assert min(left) < full - 10


def test_equal_seeds_give_equal_games_and_each_environment_has_its_own():
    first = [np.array(AtariEnvConfig().build(seeds, 3).reset()) for seeds in ([1, 2, 3], [3, 2, 1], 9, 9)]
    assert np.array_equal(first[0], first[1][::-1])
    assert np.array_equal(first[2], first[3])
    runs = [play(AtariEnvConfig(id="breakout").build(4, 2), 60) for _ in range(2)]
    assert all(np.array_equal(a[1].obs, b[1].obs) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("episodic_life", [False, True])
def test_a_frame_stream_of_a_real_game_gives_back_its_stacks(episodic_life: bool):
    config = AtariEnvConfig(id="breakout", max_frames=300, episodic_life=episodic_life)
    spec, processor = config.spec(), FrameStreamProcessorConfig()
    env, made, buffer = config.build(0, 2), processor.build(spec, 2), ListBuffer()
    policy, obs = FakePolicy(spec.action_space), np.array(env.reset())
    made.reset(obs)
    stacks: list[Any] = [[], []]
    for _ in range(200):
        step = env.step(policy.sample(obs))
        items = made.process(step)
        assert items is not None
        buffer.push(items)
        for i in range(2):
            stacks[i].append(obs[i])
            if step.terminated[i] or step.truncated[i]:
                stacks[i].append(np.array(np.asarray(step.obs)[i]))
        obs = np.array(step.init_obs)
    env.close()
    rows = buffer.columns()
    for i in range(2):
        mine = {name: column[rows["env"] == i] for name, column in rows.items()}
        ends = mine["terminated"] | mine["truncated"]
        assert ends.sum() >= 2
        first = 0
        for at, stack in enumerate(stacks[i]):
            first = at if mine["t"][at] == 0 else first
            inside = mine["frame"][max(first, at - 3) : at + 1]
            assert np.array_equal(stack[4 - len(inside) :], inside)
            assert not stack[: 4 - len(inside)].any()
            assert (mine["t"][at] == 0) == (at == 0 or ends[at - 1])
            assert mine["t"][at] == at - first


def test_the_frame_processor_keeps_its_contract_with_atari():
    check_step_processor_config(FrameStreamProcessorConfig(), AtariEnvConfig().spec())


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"id": "pongg"}, r"^env\.id: expected an Atari game .* got 'pongg' \(did you mean pong\?\)$"),
        ({"id": "CartPole-v1"}, r"^env\.id: expected an Atari game"),
    ],
)
def test_unknown_games_are_refused(kwargs: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        AtariEnvConfig(**kwargs).spec()


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"frame_skip": 0}, "frame_skip: expected a positive number, got 0"),
        ({"noop_max": -1}, "noop_max: expected 0 or more frames, got -1"),
        ({"repeat_action_probability": 1.5}, r"repeat_action_probability: expected a number in \[0, 1\], got 1.5"),
    ],
)
def test_impossible_values_are_refused(kwargs: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        AtariEnvConfig(**kwargs)


def test_without_ale_py_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(ConfigError, match=r"env\.id: expected installed Atari games .*pip install ale-py"):
        AtariEnvConfig().build(0, 1)


def test_a_session_closes_its_games_twice_without_harm():
    env = AtariEnvConfig().build(0, 1)
    env.close()
    env.close()


@pytest.mark.parametrize("game", ["pong", "seaquest"])
def test_gray_is_the_luma_of_the_colours_in_their_right_order(game: str) -> None:
    """Weights of ITU-R BT.601; with those of red and blue swapped, the mean of either game is off by more than 10."""
    from ale_py import ALEInterface, roms

    emulator = ALEInterface()
    emulator.loadROM(roms.get_rom_path(game))
    emulator.reset_game()
    luma = emulator.getScreenRGB() @ np.array([0.299, 0.587, 0.114])
    env = AtariEnvConfig(id=game, noop_max=0).build(0, 1)
    with closing(env):
        newest = np.asarray(env.reset())[0, -1]
    assert newest.mean() == pytest.approx(luma.mean(), abs=1.0)
