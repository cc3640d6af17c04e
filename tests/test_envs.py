import sys
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TimeLimit

from outrider.core import Env
from outrider.data import leaves
from outrider.envs import describe
from outrider.envs.gymnasium import GymEnvConfig
from outrider.envs.serial import SerialEnv
from outrider.envs.vector import VectorEnvAdapter
from outrider.errors import ConfigError, EnvFailed, UnsupportedSpace
from outrider.processes import dumps, loads
from outrider.testing import (
    CountEnv,
    FailingEnv,
    FakePolicy,
    SpacesEnv,
    TagEnv,
    TermEnv,
    check_env_config,
    vector_count_env,
    vector_tag_env,
)

# The child that describes an environment cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def drive(env: Env, n_steps: int, n_actions: int = 2) -> list[Any]:
    env.reset()
    rng = np.random.default_rng(0)
    steps = []
    for _ in range(n_steps):
        step = env.step(rng.integers(0, n_actions, env.n_envs))
        steps.append((dict(leaves(step.obs, "obs"))["obs"].copy(), step.terminated.copy(), step.truncated.copy()))
    env.close()
    return steps


@pytest.mark.parametrize(
    ("config", "n_envs"),
    [
        (GymEnvConfig(id="CartPole-v1"), 1),
        (GymEnvConfig(id="CartPole-v1"), 3),
        (GymEnvConfig(id="CartPole-v1", vectorization="serial", max_episode_steps=5), 2),
        (GymEnvConfig(id="Pendulum-v1", max_episode_steps=7), 2),
        (GymEnvConfig(id="gymnasium:Acrobot-v1"), 2),
        (GymEnvConfig(id="outrider.testing:CountEnv", kwargs={"length": 3}), 2),
        (GymEnvConfig(id="gymnasium.envs.classic_control.cartpole:CartPoleEnv", max_episode_steps=10), 2),
        (GymEnvConfig(id=TermEnv), 2),
        (GymEnvConfig.of(TagEnv, lengths=(2, 3), reuse=True), 2),
        (GymEnvConfig(id=lambda: CountEnv(4)), 2),
        (GymEnvConfig(id="outrider.testing:vector_tag_env"), 2),
        (GymEnvConfig(id=vector_count_env, kwargs={"mode": "SameStep"}), 2),
        (GymEnvConfig(id=vector_count_env, kwargs={"mode": "Disabled", "terminates": True}), 2),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_every_kind_of_id_keeps_the_contract(config: GymEnvConfig, n_envs: int):
    if "vector_" in config.name:
        config.build(0, 1).close()
    check_env_config(config, n_envs)


def test_a_spec_says_what_is_registered():
    spec = GymEnvConfig(id="CartPole-v1").spec()
    assert (spec.id, spec.max_episode_steps, spec.reward_threshold, spec.frame_stack) == ("CartPole-v1", 500, 475.0, 0)
    assert spec.observation_space == gymnasium.make("CartPole-v1").observation_space
    assert GymEnvConfig(id="CartPole-v1", max_episode_steps=20).spec().max_episode_steps == 20
    assert GymEnvConfig(id=CountEnv, max_episode_steps=20).spec().max_episode_steps == 20
    assert GymEnvConfig(id=CountEnv).spec().max_episode_steps is None
    assert GymEnvConfig(id=lambda: gymnasium.make("CartPole-v1")).spec().reward_threshold == 475.0


def test_a_spec_is_described_once_and_not_in_this_process(monkeypatch: pytest.MonkeyPatch):
    config = GymEnvConfig(id="outrider.testing:CountEnv", kwargs={"length": 77})
    config.spec()
    monkeypatch.setattr(describe, "start_process", None)
    equal = GymEnvConfig(id="outrider.testing:CountEnv", kwargs={"length": 77})
    assert equal.spec() == config.spec()
    with pytest.raises(TypeError, match="NoneType"):
        GymEnvConfig(id="outrider.testing:CountEnv", kwargs={"length": 78}).spec()


def test_an_id_that_this_process_registered_travels_along():
    gymnasium.register("OutriderTest/Local-v3", entry_point=lambda length: CountEnv(length), max_episode_steps=9)
    config = GymEnvConfig(id="OutriderTest/Local-v3", kwargs={"length": 30})
    try:
        assert config.spec().max_episode_steps == 9
        data = dumps(config)
    finally:
        registered = gymnasium.registry.pop("OutriderTest/Local-v3")
    steps = drive(loads(data).build(0, 1), 18)
    assert [t for t, (_, _, truncated) in enumerate(steps) if truncated.any()] == [8, 17]
    assert gymnasium.registry.pop("OutriderTest/Local-v3").id == registered.id


def test_packages_are_imported_because_they_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "registers_envs.py").write_text(
        "import gymnasium\nfrom outrider.testing import CountEnv\n"
        "gymnasium.register('FromPackage-v0', entry_point=CountEnv, max_episode_steps=3)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = GymEnvConfig(id="FromPackage-v0", gym_packages=("registers_envs",))
    assert config.spec().max_episode_steps == 3
    assert GymEnvConfig(id="registers_envs:FromPackage-v0").spec().max_episode_steps == 3
    assert "registers_envs" not in sys.modules
    config.build(0, 2).close()


def test_evaluation_may_have_other_arguments():
    config = GymEnvConfig(id=TermEnv, kwargs={"length": 5}, eval_kwargs={"length": 9})
    assert config.eval().kwargs == {"length": 9}
    assert config.eval().eval() == config.eval()
    plain = GymEnvConfig(id="CartPole-v1")
    assert plain.eval() is plain


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            GymEnvConfig(id="CartPol-v1"),
            r"env\.id: expected a registered .* got 'CartPol-v1' .*Did you mean: `CartPole`",
        ),
        (GymEnvConfig(id="CartPole-v7"), r"env\.id: .*provides versioned environments: \[ `v0`, `v1` \]"),
        (GymEnvConfig(id="no_such_module:Foo-v0"), r"env\.id: expected a module .* 'no_such_module'"),
        (GymEnvConfig(id="outrider.testing:NoEnv"), r"env\.id: expected the name of a class or callable in outrider"),
        (GymEnvConfig(id="CartPole-v1", gym_packages=("nope",)), r"env\.gym_packages: expected a module .* 'nope'"),
        (GymEnvConfig(id=dict), r"env\.id: expected what makes a gymnasium.Env or a VectorEnv, got builtins:dict"),
        (GymEnvConfig(id="Humanoid-v5"), r"env\.id: expected an environment whose packages are installed"),
        (
            GymEnvConfig(id=vector_count_env, max_episode_steps=4),
            r"env\.max_episode_steps: expected none for a vector environment",
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_does_not_exist_is_refused_in_one_line(config: GymEnvConfig, words: str):
    with pytest.raises(ConfigError, match=words) as caught:
        config.spec()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"id": ""}, "id: expected a Gymnasium id"),
        ({"id": 3}, "id: expected a text or a callable, got 3"),
        ({"id": "CartPole-v1", "max_episode_steps": 0}, "max_episode_steps: expected a positive number or none, got 0"),
    ],
)
def test_impossible_values_are_refused(kwargs: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        GymEnvConfig(**kwargs)


TEXT = spaces.Text(5)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Tuple([spaces.Discrete(2)]), r"^env\.observation_space: expected a Box.* got Tuple"),
        (spaces.Sequence(spaces.Discrete(2)), r"^env\.observation_space: .* got Sequence"),
        (TEXT, r"^env\.observation_space: .* got Text"),
        (spaces.Graph(spaces.Box(0, 1, (1,)), None), r"^env\.observation_space: .* got Graph"),
        (spaces.OneOf([spaces.Discrete(2)]), r"^env\.observation_space: .* got OneOf"),
        (spaces.Dict(a=spaces.Dict(b=TEXT)), r"^env\.observation_space\.a\.b: .* got Text"),
        (spaces.Dict({"a.b": spaces.Discrete(2)}), r"^env\.observation_space: expected Dict keys .* without a dot"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_spaces_that_cannot_be_stored_are_refused_by_name(space: spaces.Space[Any], words: str):
    with pytest.raises(UnsupportedSpace, match=words):
        GymEnvConfig.of(SpacesEnv, observation_space=space, action_space=spaces.Discrete(2)).spec()
    key = words.replace("observation", "action")
    if not isinstance(space, spaces.Dict):
        with pytest.raises(UnsupportedSpace, match=key):
            GymEnvConfig.of(SpacesEnv, observation_space=spaces.Discrete(2), action_space=space).spec()


def test_a_dict_of_actions_is_refused():
    actions = spaces.Dict(a=spaces.Discrete(2))
    with pytest.raises(UnsupportedSpace, match=r"^env\.action_space: "):
        GymEnvConfig.of(SpacesEnv, observation_space=spaces.Discrete(2), action_space=actions).spec()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "environment outrider.*FailingEnv: ValueError: as asked\nTraceback"),
        ("exit", "environment outrider.*FailingEnv: SystemExit: 0\nTraceback"),
        ("segfault", "environment outrider.*FailingEnv: the process that built it was killed by SIGSEGV"),
        ("kill", "environment outrider.*FailingEnv: the process that built it was killed by SIGKILL"),
    ],
)
def test_a_failure_while_it_is_described_is_an_error_and_nobodys_death(how: str, words: str):
    with pytest.raises(EnvFailed, match=words):
        GymEnvConfig.of(FailingEnv, where="init", how=how).spec()


def test_a_hang_while_it_is_described_is_an_error():
    config = GymEnvConfig.of(FailingEnv, where="init", how="hang")
    with pytest.raises(EnvFailed, match=r"^it: was not built within 0\.5 s$"):
        describe.describe_in_child(config, "it", timeout_s=0.5)


def test_a_crash_while_it_is_closed_does_not_matter_for_the_description():
    assert GymEnvConfig.of(FailingEnv, where="close", how="segfault").spec().action_space == spaces.Discrete(2)


def test_a_failed_description_is_tried_again():
    config = GymEnvConfig.of(FailingEnv, where="init", how="raise", length=3)
    for _ in range(2):
        with pytest.raises(EnvFailed):
            config.spec()


def test_the_exception_of_a_step_passes_unchanged():
    env = GymEnvConfig.of(FailingEnv, where="step", at=2).build(0, 1)
    env.reset()
    act = np.zeros(1, np.int64)
    env.step(act)
    env.step(act)
    with pytest.raises(ValueError, match=r"^as asked$"):
        env.step(act)
    env.close()


def test_environments_that_were_built_are_closed_when_a_later_one_fails():
    closed, made = [], []

    class Third(CountEnv):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)
            if len(made) == 3:
                raise ValueError("no third")

        def close(self) -> None:
            closed.append(self)

    gymnasium.register("OutriderTest/Third-v0", entry_point=Third)
    try:
        with pytest.raises(ValueError, match="no third"):
            GymEnvConfig(id="OutriderTest/Third-v0").build(0, 4)
    finally:
        del gymnasium.registry["OutriderTest/Third-v0"]
    assert closed == made[1::-1]


@pytest.mark.parametrize("n_envs", [1, 2])
def test_several_cartpoles_are_vectorised_and_have_the_same_limit_and_dynamics(n_envs: int):
    config = GymEnvConfig(id="CartPole-v1", max_episode_steps=12)
    env = config.build(3, n_envs)
    assert isinstance(env, SerialEnv if n_envs == 1 else VectorEnvAdapter)
    for obs, terminated, truncated in drive(env, 40):
        assert obs.shape == (n_envs, 4)
        assert obs.dtype == np.float32
        assert terminated.shape == truncated.shape == (n_envs,)
    ages = np.zeros(n_envs, int)
    env = config.build(3, n_envs)
    env.reset()
    for t in range(60):
        step = env.step(np.full(n_envs, t % 2))
        ages += step.valid
        assert np.array_equal(step.truncated, ages == 12)
        ages[step.terminated | step.truncated] = 0
    env.close()


def test_registered_time_limits_hold_for_vectorised_environments():
    env = GymEnvConfig(id="CartPole-v0").build(0, 2)
    assert isinstance(env, VectorEnvAdapter)
    assert env._env.max_episode_steps == 200  # type: ignore[attr-defined]
    env.close()


def test_a_vectorised_implementation_with_other_spaces_is_not_used():
    pytest.importorskip("ale_py")
    env = GymEnvConfig(id="ALE/Pong-v5").build(0, 2)
    assert isinstance(env, SerialEnv)
    assert np.shape(env.reset()) == (2, 210, 160, 3)
    env.close()


def test_a_vector_environment_of_another_size_is_refused():
    config = GymEnvConfig(id=lambda: vector_count_env(3))
    config.build(0, 3).close()
    config.spec()
    with pytest.raises(ConfigError, match=r"actors\.n_envs: expected 3, as many as .* has, got 2"):
        config.build(0, 2)


def test_each_environment_gets_its_own_seed_once():
    seeds: list[Any] = []

    class Seeded(CountEnv):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            seeds.append(seed)
            return super().reset(seed=seed)

    env = SerialEnv([Seeded(1), Seeded(2)], [5, 6])
    env.reset()
    env.step(np.zeros(2, np.int64))
    env.reset()
    env.reset([8, 9])
    assert seeds == [5, 6, None, None, None, 8, 9]
    sampled = [e.action_space.sample() for e in env._envs]
    expected = []
    for seed in (8, 9):
        space = spaces.Discrete(2, seed=seed)
        expected.append(space.sample())
    assert sampled == expected


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_a_vector_environment_gets_all_seeds_where_it_takes_them(mode: Any):
    env = VectorEnvAdapter(vector_tag_env(3, mode), [50, 7, 900])
    assert np.asarray(env.reset())[:, 0].tolist() == [50, 7, 900]
    assert np.asarray(env.reset([1, 2, 3]))[:, 0].tolist() == [1, 2, 3]
    env.close()


def test_equal_seeds_give_equal_vectorised_cartpoles_and_other_seeds_other_ones():
    first = [np.array(GymEnvConfig(id="CartPole-v1").build(seed, 2).reset()) for seed in (3, 3, 4)]
    assert np.array_equal(first[0], first[1])
    assert not np.array_equal(first[0], first[2])
    assert not np.array_equal(first[0][0], first[0][1])


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_vector_environments_with_processes_of_their_own_work(mode: AutoresetMode):
    vector = AsyncVectorEnv([lambda: TagEnv((3,), terminates=False)] * 2, autoreset_mode=mode, context="spawn")
    env = VectorEnvAdapter(vector, [4, 5])
    env.reset()
    for _ in range(12):
        step = env.step(np.array([1, 2]))
        obs, valid = np.asarray(step.obs), step.valid
        assert np.array_equal((obs[:, 2] == 3)[valid], step.truncated[valid])
        assert ((obs[:, 2] == 0) == ~valid).all()
        assert np.array_equal(step.reward[valid], (4 * (obs[:, 3] - 1) + [1, 2])[valid])
    env.close()


def test_dict_observations_keep_their_final_values_in_every_mode():
    space = spaces.Dict(b=spaces.Box(0, 1, (2,)), a=spaces.Dict(c=spaces.Discrete(9)))

    class Plain(SyncVectorEnv):
        pass

    ends = []
    for kind in (SyncVectorEnv, Plain):
        for mode in AutoresetMode:
            vector = kind([lambda: SpacesEnv(space, spaces.Discrete(2), 4)] * 2, autoreset_mode=mode)
            env = VectorEnvAdapter(vector, [1, 2])
            env.reset()
            steps = []
            while len(steps) < 8:
                step = env.step(np.zeros(2, np.int64))
                if step.valid.all():
                    steps.append([np.array(part) for _, part in leaves(step.obs, "obs")])
            ends.append(steps)
    serial = SerialEnv([SpacesEnv(space, spaces.Discrete(2), 4) for _ in range(2)], [1, 2])
    serial.reset()
    expected = [[np.array(part) for _, part in leaves(serial.step(np.zeros(2, np.int64)).obs, "obs")] for _ in range(8)]
    for steps in ends:
        for got, right in zip(steps, expected, strict=True):
            assert all(np.array_equal(g, r) for g, r in zip(got, right, strict=True))


class DenseFinal(VectorEnv[Any, Any, Any]):
    """Counts to 3 in two environments; what it does at the end is up to the test."""

    def __init__(self, mode: Any = AutoresetMode.SAME_STEP, with_final: bool = True, honours_mask: bool = True) -> None:
        self.num_envs = 2
        self.metadata = {} if mode is None else {"autoreset_mode": mode}
        self.single_observation_space = spaces.Box(0, 9, (1,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = spaces.Box(0, 9, (2, 1), np.float32)
        self.action_space = spaces.MultiDiscrete([2, 2])
        self.with_final, self.honours_mask = with_final, honours_mask
        self.t = np.zeros((2, 1), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        assert seed is None or isinstance(seed, int)
        mask = (options or {}).get("reset_mask", np.ones(2, np.bool_))
        self.t[mask if self.honours_mask else ...] = 0
        if options is None:
            self.t[:] = [[0], [1]]
        return self.t, {}

    def step(self, actions: Any) -> Any:
        actions[:] = -1
        self.t += 1
        ended = self.t[:, 0] == 3
        info: dict[str, Any] = {}
        if ended.any() and self.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP:
            info = {"final_obs": self.t.copy()} if self.with_final else {}
            self.t[ended] = 0
        return self.t, np.ones(2, np.float32), ended, np.zeros(2, np.bool_), info


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_vector_environments_that_reuse_one_array_and_change_their_actions_do_no_harm(mode: AutoresetMode):
    env = VectorEnvAdapter(DenseFinal(mode), [1, 2])
    assert np.asarray(env.reset())[:, 0].tolist() == [0, 1]
    seen = []
    for _ in range(4):
        act = np.array([0, 1])
        step = env.step(act)
        assert step.act.tolist() == [0, 1]
        assert step.reward.dtype == np.float64
        seen.append((np.asarray(step.obs)[:, 0].tolist(), np.asarray(step.init_obs)[:, 0].tolist()))
    assert seen == [([1, 2], [1, 2]), ([2, 3], [2, 0]), ([3, 1], [0, 1]), ([1, 2], [1, 2])]


def test_vector_environments_that_break_their_mode_are_told_so():
    act = np.zeros(2, np.int64)
    with pytest.raises(EnvFailed, match="expected its autoreset mode in metadata"):
        VectorEnvAdapter(DenseFinal(None), [1, 2])
    for env, words in (
        (DenseFinal(with_final=False), "expected 'final_obs' in the info of an ended episode"),
        (DenseFinal(AutoresetMode.DISABLED, honours_mask=False), "expected reset_mask to leave the other environments"),
    ):
        adapter = VectorEnvAdapter(env, [1, 2])
        adapter.reset()
        adapter.step(act)
        with pytest.raises(EnvFailed, match=words):
            adapter.step(act)


def test_rows_that_were_only_a_reset_carry_nothing():
    class Careless(DenseFinal):
        def step(self, actions: Any) -> Any:
            return self.t, np.ones(2), np.ones(2, np.bool_), np.zeros(2, np.bool_), {}

    env = VectorEnvAdapter(Careless(AutoresetMode.NEXT_STEP), [1, 2])
    env.reset()
    assert env.step(np.zeros(2, np.int64)).terminated.all()
    step = env.step(np.zeros(2, np.int64))
    assert not step.valid.any()
    assert not step.reward.any()
    assert not step.terminated.any()


@pytest.mark.parametrize("vector", [False, True])
def test_observations_are_cast_to_the_dtype_of_the_space(vector: bool):
    class Wide(CountEnv):
        def reset(self, **kwargs: Any) -> Any:
            return super().reset(**kwargs)[0].astype(np.float64), {}

        def step(self, action: Any) -> Any:
            obs, *rest = super().step(action)
            return obs.astype(np.float64), *rest

    class WideVector(DenseFinal):
        def step(self, actions: Any) -> Any:
            obs, *rest = super().step(actions)
            return obs.astype(np.float64), *rest

    env: Any = VectorEnvAdapter(WideVector(), [0, 1]) if vector else SerialEnv([Wide(3), Wide(2)], [0, 1])
    assert env.reset().dtype == np.float32
    for _ in range(5):
        step = env.step(np.zeros(2, np.int64))
        assert step.obs.dtype == step.init_obs.dtype == np.float32


def test_an_environment_that_changes_its_action_or_keeps_its_array_does_no_harm():
    class Greedy(SpacesEnv):
        def step(self, action: Any) -> Any:
            result = super().step(action)
            action[...] = 7
            return result

    space = spaces.Box(-1, 1, (2,), np.float32)
    env = SerialEnv([Greedy(space, space) for _ in range(2)], [0, 1])
    env.reset()
    act = np.full((2, 2), 0.5, np.float32)
    assert (env.step(act).act == 0.5).all()
    assert (act == 0.5).all()


@pytest.mark.parametrize("n_envs", [1, 2])
@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=-1),
        spaces.Discrete(2, start=10),
        spaces.Discrete(4, dtype=np.int32),
        spaces.MultiDiscrete([3, 4], start=[5, -5]),
        spaces.MultiDiscrete([[2, 3], [4, 5]]),
        spaces.MultiBinary(4),
        spaces.Box(-1, 1, ()),
        spaces.Box(0, 5, (2, 2), np.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize("vector", [False, True])
def test_actions_reach_the_environment_in_its_own_numbers(space: spaces.Space[Any], n_envs: int, vector: bool):
    def make() -> SpacesEnv:
        return SpacesEnv(spaces.Discrete(2), space)

    if vector and space.shape == () and isinstance(space, spaces.Box):
        pytest.skip("Gymnasium's SyncVectorEnv makes a number of it")
    seeds = list(range(n_envs))
    env: Any = (
        VectorEnvAdapter(SyncVectorEnv([make] * n_envs), seeds)
        if vector
        else SerialEnv([make() for _ in range(n_envs)], seeds)
    )
    policy, obs = FakePolicy(space), env.reset()
    start = np.asarray(getattr(space, "start", 0))
    for _ in range(200):
        act = policy.sample(obs)
        obs = env.step(act).init_obs
        assert all(np.asarray(a + start, space.dtype) in space for a in act)
    env.close()


def test_observations_of_another_shape_than_the_space_are_refused():
    class Wrong(CountEnv):
        def reset(self, **kwargs: Any) -> Any:
            return np.float32(0.0), {}

    with pytest.raises(ValueError, match=r"obs: expected shape \(1,\) of the observation space, got \(\)"):
        SerialEnv([Wrong()], [0]).reset()


def test_environments_of_one_config_have_equal_spaces():
    with pytest.raises(ConfigError, match=r"env\.id: expected environments with equal spaces"):
        SerialEnv([CountEnv(), TagEnv()], [0, 1])


def test_the_limit_of_a_class_is_a_truncation():
    steps = drive(GymEnvConfig(id=TermEnv, kwargs={"length": 9}, max_episode_steps=4).build(0, 1), 8)
    assert [t for t, (_, _, truncated) in enumerate(steps) if truncated[0]] == [3, 7]
    assert not any(terminated.any() for _, terminated, _ in steps)
    assert isinstance(GymEnvConfig(id=TermEnv, max_episode_steps=4).build(0, 1)._envs[0], TimeLimit)  # type: ignore


def test_seeds_must_be_as_many_as_environments():
    with pytest.raises(ValueError, match="seed: expected 2 seeds, one per environment, got 3"):
        GymEnvConfig(id=CountEnv).build([1, 2, 3], 2)
