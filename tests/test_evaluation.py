from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from outrider.agents.dqn import DqnConfig
from outrider.agents.sac import SacConfig
from outrider.core import EnvSpec
from outrider.data import Array, Obs, Step
from outrider.envs.gymnasium import GymEnvConfig
from outrider.errors import ConfigError
from outrider.evaluation import DefaultEvaluator, DefaultEvaluatorConfig
from outrider.processes import dumps, loads


class CountEnv:
    """n environments whose episodes have the given lengths in turn; the reward of a step is 1, clipped to 0.5.

    With `reset_rows`, the step after an end is only a reset (Gymnasium's NEXT_STEP) and brings reward 99.
    """

    def __init__(self, lengths: Sequence[Sequence[int]], reset_rows: bool) -> None:
        self.n_envs = len(lengths)
        self.lengths, self.reset_rows = lengths, reset_rows
        self.seeds: list[list[int]] = []
        self.closed = 0
        self.steps = 0

    def reset(self, seed: Sequence[int] | None = None) -> Obs:
        assert seed is not None
        assert len(seed) == self.n_envs
        self.seeds.append(list(seed))
        self.t, self.played = [0] * self.n_envs, [0] * self.n_envs
        self.ended = [False] * self.n_envs
        return np.zeros((self.n_envs, 1), np.float32)

    def step(self, act: Array) -> Step:
        self.steps += 1
        n = self.n_envs
        terminated, truncated, valid = (np.zeros(n, np.bool_) for _ in range(3))
        raw, reward = np.full(n, 99.0), np.full(n, 99.0)
        for i in range(n):
            if self.ended[i]:
                self.ended[i] = False
                if self.reset_rows:
                    continue
            valid[i], raw[i], reward[i] = True, act[i], 0.5
            self.t[i] += 1
            if self.t[i] == self.lengths[i][self.played[i] % len(self.lengths[i])]:
                self.t[i], self.ended[i] = 0, True
                self.played[i] += 1
                terminated[i], truncated[i] = self.played[i] % 2 == 1, self.played[i] % 2 == 0
        obs = np.zeros((n, 1), np.float32)
        return Step(act, obs, obs, reward, terminated, truncated, valid, raw_reward=raw)

    def close(self) -> None:
        self.closed += 1


class CountEnvConfig:
    def __init__(self, lengths: Sequence[Sequence[int]], reset_rows: bool = False) -> None:
        self.lengths, self.reset_rows = lengths, reset_rows
        self.built: list[CountEnv] = []

    def build(self, seed: int | Sequence[int], n_envs: int) -> CountEnv:
        assert n_envs == len(self.lengths)
        self.built.append(CountEnv(self.lengths, self.reset_rows))
        return self.built[-1]

    def eval(self) -> CountEnvConfig:
        return self

    def spec(self) -> EnvSpec:
        return EnvSpec("Count-v0", spaces.Box(0, 1, (1,)), spaces.Discrete(2))


class OnePolicy:
    """Always acts 1; remembers its mode at each call."""

    def __init__(self) -> None:
        self.mode = "train"
        self.modes: list[str] = []

    def sample(self, obs: Obs) -> Array:
        self.modes.append(self.mode)
        return np.ones(len(obs))

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"


@pytest.mark.parametrize("reset_rows", [False, True])
def test_short_episodes_count_no_more_often_than_long_ones(reset_rows):
    config = CountEnvConfig([[1], [100], [3]], reset_rows)
    evaluator = DefaultEvaluator(config, n_episodes=5, n_envs=3)
    score, record = evaluator.evaluate(OnePolicy())
    played = sorted((episode.env, episode.length, episode.ret) for episode in evaluator.episodes)
    assert played == [(0, 1, 1.0), (0, 1, 1.0), (1, 100, 100.0), (1, 100, 100.0), (2, 3, 3.0)]
    assert score == pytest.approx(205 / 5)
    returns = [1, 1, 100, 100, 3]
    assert record == {
        "eval/mean_reward": score,
        "eval/std_reward": pytest.approx(np.std(returns)),
        "eval/min_reward": 1.0,
        "eval/max_reward": 100.0,
        "eval/mean_ep_length": 41.0,
        "eval/n_episodes": 5,
    }


def test_each_episode_is_told_when_it_has_ended():
    evaluator = DefaultEvaluator(CountEnvConfig([[1], [100], [3]], False), n_episodes=5, n_envs=3)
    told = []
    evaluator.on_episode = told.append
    evaluator.evaluate(OnePolicy())
    assert [episode.length for episode in told] == [1, 1, 3, 100, 100]
    assert told == evaluator.episodes


def test_every_evaluation_starts_from_the_same_seeds_in_the_same_environment():
    config = CountEnvConfig([[2, 5], [3, 4]])
    evaluator = DefaultEvaluatorConfig(n_episodes=4, n_envs=2, seed=7).build(config)
    assert not config.built
    first, _ = evaluator.evaluate(OnePolicy())
    second, _ = evaluator.evaluate(OnePolicy())
    assert first == second
    assert len(config.built) == 1
    seeds = config.built[0].seeds
    assert len(seeds) == 2
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 2
    other = CountEnvConfig([[2, 5], [3, 4]])
    DefaultEvaluator(other, seed=8, n_episodes=2).evaluate(OnePolicy())
    assert not set(other.built[0].seeds[0]) & set(seeds[0])


def test_the_agent_acts_for_evaluation_and_then_trains_again():
    policy = OnePolicy()
    DefaultEvaluator(CountEnvConfig([[4]])).evaluate(policy)
    assert policy.modes == ["eval"] * 4
    assert policy.mode == "train"


def test_the_agent_trains_again_when_the_environment_fails():
    class Broken(CountEnv):
        def step(self, act: Array) -> Step:
            raise OSError("simulator gone")

    class BrokenConfig(CountEnvConfig):
        def build(self, seed: int | Sequence[int], n_envs: int) -> CountEnv:
            return Broken(self.lengths, False)

    policy = OnePolicy()
    with pytest.raises(OSError, match="simulator gone"):
        DefaultEvaluator(BrokenConfig([[4]])).evaluate(policy)
    assert policy.mode == "train"


def test_an_evaluation_that_is_told_to_stop_has_no_score():
    config = CountEnvConfig([[10]])
    evaluator = DefaultEvaluator(config, n_episodes=3, n_envs=1)
    evaluator.stop = lambda: config.built[0].steps >= 25
    policy = OnePolicy()
    score, record = evaluator.evaluate(policy)
    assert math.isnan(score)
    assert record == {}
    assert len(evaluator.episodes) == 2
    assert config.built[0].steps == 25
    assert policy.mode == "train"


def test_as_many_environments_as_episodes_play_but_at_most_eight():
    assert DefaultEvaluator(CountEnvConfig([]), n_episodes=1).n_envs == 1
    assert DefaultEvaluator(CountEnvConfig([]), n_episodes=5).n_envs == 5
    assert DefaultEvaluator(CountEnvConfig([]), n_episodes=20).n_envs == 8


def test_closing_closes_the_environment_once_and_a_later_evaluation_builds_a_new_one():
    config = CountEnvConfig([[1]])
    evaluator = DefaultEvaluator(config)
    evaluator.close()
    evaluator.evaluate(OnePolicy())
    evaluator.close()
    evaluator.close()
    assert config.built[0].closed == 1
    evaluator.evaluate(OnePolicy())
    evaluator.close()
    assert [env.closed for env in config.built] == [1, 1]


def test_a_copy_that_travels_builds_environments_of_its_own():
    evaluator = DefaultEvaluator(GymEnvConfig(id="CartPole-v1"), n_episodes=2)
    with closing(evaluator), closing(loads(dumps(evaluator))) as unused:
        policy = DqnConfig(hidden=(8,)).build(GymEnvConfig(id="CartPole-v1").spec())
        score, _ = evaluator.evaluate(policy)
        with closing(loads(dumps(evaluator))) as used:
            assert used.evaluate(policy)[0] == unused.evaluate(policy)[0] == score
            assert used._env is not evaluator._env


@pytest.mark.parametrize(
    ("values", "key"),
    [({"n_episodes": 0}, "n_episodes"), ({"n_episodes": 2, "n_envs": 3}, "n_envs"), ({"n_envs": 0}, "n_envs")],
)
def test_impossible_values_are_refused_by_name(values, key):
    for build in (DefaultEvaluatorConfig, lambda **kwargs: DefaultEvaluator(CountEnvConfig([]), **kwargs)):
        with pytest.raises(ConfigError) as caught:
            build(**values)
        assert caught.value.key == key


@pytest.mark.parametrize(
    "agent", [DqnConfig(hidden=(8,), eval_epsilon=0.3), SacConfig(hidden=(8,))], ids=["dqn", "sac"]
)
def test_equal_policies_get_equal_scores_whatever_they_did_in_between(agent: Any) -> None:
    """Even if a share of the actions in evaluation is random."""
    discrete = isinstance(agent, DqnConfig)
    env = GymEnvConfig(id="CartPole-v1" if discrete else "Pendulum-v1", max_episode_steps=50)
    policy = agent.build(env.spec(), seed=3)
    obs = np.zeros((5, 4 if discrete else 3), np.float32)
    with closing(DefaultEvaluator(env, seed=0, n_episodes=3)) as evaluator:
        first, _ = evaluator.evaluate(policy)
        assert len({episode.ret for episode in evaluator.episodes}) > 1
        for _ in range(3):
            policy.sample(obs)
        assert evaluator.evaluate(policy)[0] == first
    with closing(DefaultEvaluator(env, seed=0, n_episodes=3)) as another:
        assert another.evaluate(agent.build(env.spec(), seed=3))[0] == first


def test_an_evaluation_whose_episodes_do_not_end_says_what_would_end_them(caplog, monkeypatch):
    monkeypatch.setattr("outrider.evaluation.ENDLESS_S", -1.0)
    evaluator = DefaultEvaluator(CountEnvConfig([[5, 5]]), n_episodes=2, n_envs=1)
    evaluator.evaluate(OnePolicy())
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, "once, and once more after an episode has ended"
    assert said[0].startswith("evaluation: no episode has ended for")
    assert "(0 of 2 have); the longest has 0 steps so far" in said[0]
    assert "env.max_episode_steps" in said[0]
