import numpy as np
import pytest

from outrider.agents.exploration import ApexEpsilonConfig, EpsilonGreedyConfig, SoftmaxConfig, epsilon_greedy
from outrider.errors import ConfigError

Q = np.array([[0.0, 3.0, 1.0], [5.0, 2.0, 4.0]], np.float32)


def test_epsilon_falls_linearly_and_depends_on_env_steps_alone() -> None:
    config = EpsilonGreedyConfig(start=1.0, final=0.2, decay_env_steps=100)
    assert [config.epsilon(n) for n in (0, 50, 100, 10**9)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert config.epsilon(25) == config.epsilon(25) == pytest.approx(0.8)


def test_without_decay_epsilon_is_final_from_the_beginning() -> None:
    assert EpsilonGreedyConfig(start=1.0, final=0.1, decay_env_steps=0).epsilon(0) == 0.1


def test_epsilon_zero_is_greedy_and_draws_nothing() -> None:
    rng = np.random.default_rng(0)
    state = rng.bit_generator.state
    np.testing.assert_array_equal(epsilon_greedy(Q, 0.0, rng), [1, 0])
    assert rng.bit_generator.state == state


def test_a_share_epsilon_of_the_actions_is_uniform() -> None:
    q = np.tile(Q[:1], (60_000, 1))
    counts = np.bincount(epsilon_greedy(q, 0.3, np.random.default_rng(0)), minlength=3) / len(q)
    np.testing.assert_allclose(counts, [0.1, 0.8, 0.1], atol=0.01)


def test_actions_are_int64() -> None:
    for explorer in (EpsilonGreedyConfig(), ApexEpsilonConfig(), SoftmaxConfig()):
        act = explorer.choose(Q, 0, np.random.default_rng(0))
        assert act.dtype == np.int64
        assert act.shape == (2,)


def test_each_actor_has_the_constant_epsilon_of_the_paper() -> None:
    configs = [ApexEpsilonConfig(base=0.4, alpha=7.0).for_actor(i, 8) for i in range(8)]
    expected = [0.4 ** (1 + 7 * i / 7) for i in range(8)]
    assert [c.epsilon(0) for c in configs] == pytest.approx(expected)
    assert [c.epsilon(10**9) for c in configs] == pytest.approx(expected)
    assert ApexEpsilonConfig(base=0.4).for_actor(0, 1).epsilon(5) == 0.4


def test_softmax_draws_in_proportion_to_the_exponentials() -> None:
    q = np.tile(np.log([[0.2, 0.5, 0.3]]) * 2.0, (60_000, 1))
    counts = np.bincount(SoftmaxConfig(temperature=2.0).choose(q, 0, np.random.default_rng(0)), minlength=3) / len(q)
    np.testing.assert_allclose(counts, [0.2, 0.5, 0.3], atol=0.01)


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: EpsilonGreedyConfig(start=1.1), "start"),
        (lambda: EpsilonGreedyConfig(final=-0.1), "final"),
        (lambda: EpsilonGreedyConfig(decay_env_steps=-1), "decay_env_steps"),
        (lambda: ApexEpsilonConfig(base=2.0), "base"),
        (lambda: ApexEpsilonConfig(alpha=-1.0), "alpha"),
        (lambda: SoftmaxConfig(temperature=0.0), "temperature"),
    ],
)
def test_impossible_values_are_refused_by_name(build, key: str) -> None:
    with pytest.raises(ConfigError) as error:
        build()
    assert error.value.key == key
