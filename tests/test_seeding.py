import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.envs.gymnasium import GymEnvConfig
from outrider.seeding import Role, derive, env_seeds, spread


def test_no_two_environments_of_some_runs_share_a_seed():
    seeds = [
        seed
        for run in (0, 1, 2)
        for actor in range(8)
        for incarnation in range(3)
        for seed in env_seeds(run, actor, incarnation, 4)
    ]
    assert len(set(seeds)) == len(seeds) == 3 * 8 * 3 * 4


def test_eight_actors_of_three_runs_have_24_first_observations_and_the_same_ones_again():
    def first(run: int, actor: int) -> bytes:
        env = GymEnvConfig(id="CartPole-v1").build(env_seeds(run, actor, 0, 1), 1)
        obs = np.asarray(env.reset()).tobytes()
        env.close()
        return obs

    once = [first(run, actor) for run in range(3) for actor in range(8)]
    assert len(set(once)) == 24
    assert once == [first(run, actor) for run in range(3) for actor in range(8)]


def test_roles_draw_different_numbers():
    assert len({derive(0, role) for role in Role}) == len(Role)


def test_seeds_do_not_change_between_versions():
    assert derive(0, Role.ACTOR_ENV) == 440445143
    assert env_seeds(1, 2, 0, 2) == [derive(1, Role.ACTOR_ENV, 2, env) for env in range(2)]


@given(seed=st.integers(0, 2**63), actor=st.integers(0, 1000), env=st.integers(0, 1000), incarnation=st.integers(0, 99))
def test_seeds_fit_31_bits(seed: int, actor: int, env: int, incarnation: int):
    assert 0 <= derive(seed, Role.ACTOR_ENV, actor, env, incarnation) < 2**31


def test_a_seed_is_spread_and_a_list_is_taken_as_it_is():
    assert len(set(spread(3, 5))) == 5
    assert spread(3, 5)[:2] == spread(3, 2)
    assert spread(np.int64(3), 2) == spread(3, 2)
    assert spread(np.array([4, 5]), 2) == [4, 5]
    assert all(type(seed) is int for seed in spread(np.array([4, 5]), 2))
    with pytest.raises(ValueError, match="expected 2 seeds, one per environment, got 1"):
        spread([1], 2)
