import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from outrider.agents.acting import NumpyActing
from outrider.agents.batches import Transitions
from outrider.agents.sac import (
    ActionScale,
    Sac,
    SacConfig,
    Temperature,
    actor_loss,
    critic_loss,
    squashed_gaussian,
    temperature_loss,
)
from outrider.core import Agent, EnvSpec
from outrider.data import ENV_STEPS, Batch
from outrider.errors import ConfigError, UnsupportedSpace

BOX = spaces.Box(np.array([0.0, -0.785], np.float32), np.array([5.0, 0.785], np.float32))
SPEC = EnvSpec("Toy", spaces.Box(-1, 1, (3,)), BOX)
SMALL: dict[str, Any] = {"hidden": (16, 16), "batch_size": 8, "random_steps": 0}


def batch(n: int = 8, seed: int = 0, weights: Any = None, **columns: Any) -> Batch:
    dtype = [("obs", "f4", (3,)), ("act", "f4", (2,)), ("reward", "f4"), ("next_obs", "f4", (3,)), ("terminated", "?")]
    out = np.zeros(n, np.dtype([*dtype, ("truncated", "?"), ("n_steps", "i4"), ("model_version", "i8")], align=True))
    rng = np.random.default_rng(seed)
    out["obs"], out["next_obs"] = rng.standard_normal((2, n, 3))
    out["reward"], out["act"], out["n_steps"] = rng.standard_normal(n), rng.uniform(BOX.low, BOX.high, (n, 2)), 1
    for name, values in columns.items():
        out[name] = values
    return Batch(out, np.arange(n), weights)


def state(agent: Sac) -> dict[str, np.ndarray]:
    parts = agent.state_dict()
    return {name: parts[name]["params"].numpy() for name in ("actor", "critic", "target", "log_alpha")}


def test_log_probabilities_equal_those_of_torch_distributions() -> None:
    torch.manual_seed(0)
    out, noise = torch.randn(64, 6) * 0.5, torch.randn(64, 3)
    act, log_prob = squashed_gaussian(out, noise)
    mean, log_std = out.chunk(2, 1)
    normal = Independent(Normal(mean, log_std.exp()), 1)
    squashed = TransformedDistribution(normal, [TanhTransform(cache_size=1)])
    torch.testing.assert_close(act, torch.tanh(mean + log_std.exp() * noise))
    torch.testing.assert_close(log_prob, squashed.log_prob(act), rtol=1e-4, atol=1e-4)


def test_log_probabilities_stay_finite_where_tanh_is_flat() -> None:
    out = torch.tensor([[40.0, 0.0], [-40.0, 9.0]])
    act, log_prob = squashed_gaussian(out, torch.ones(2, 1))
    assert log_prob.isfinite().all()
    assert act.abs().max() <= 1.0
    # log N(1) - 2 (log 2 - u - softplus(-2 u)), u = 41
    assert log_prob[0].item() == pytest.approx(-0.5 - 0.5 * math.log(2 * math.pi) - 2 * (math.log(2) - 41), rel=1e-5)


class Constant(nn.Module):
    def __init__(self, *values: float) -> None:
        super().__init__()
        self.values = torch.tensor(values)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return (
            self.values[:, None].expand(-1, len(inputs[0]))
            if len(inputs) == 2
            else self.values.expand(len(inputs[0]), -1)
        )


def transitions(discount: float = 0.5, weights: torch.Tensor | None = None) -> Transitions:
    one = torch.ones(1, 1)
    return Transitions(one, one, torch.tensor([10.0]), one, torch.tensor([discount]), weights)


@pytest.mark.parametrize("discount", [0.5, 0.0])
def test_the_critics_target_is_the_smaller_target_value_less_the_weighted_log_probability(discount: float) -> None:
    actor, noise, alpha = Constant(0.3, -1.0), torch.tensor([[0.7]]), torch.tensor(0.2)
    _, log_prob = squashed_gaussian(actor(torch.ones(1, 1)), noise)
    out = critic_loss(actor, Constant(1.0, 2.0), Constant(5.0, 4.0), alpha, transitions(discount), noise)
    y = 10 + discount * (4.0 - 0.2 * log_prob.item())
    assert out.loss.item() == pytest.approx(0.5 * ((1 - y) ** 2 + (2 - y) ** 2), rel=1e-5)
    assert out.td_errors.item() == pytest.approx((abs(1 - y) + abs(2 - y)) / 2, rel=1e-5)
    weighted = transitions(discount, torch.tensor([3.0]))
    assert critic_loss(
        actor, Constant(1.0, 2.0), Constant(5.0, 4.0), alpha, weighted, noise
    ).loss.item() == pytest.approx(3 * out.loss.item())


def test_the_actors_loss_is_the_weighted_log_probability_less_the_smaller_value() -> None:
    actor, noise = Constant(0.3, -1.0), torch.tensor([[0.7]])
    out = actor_loss(actor, Constant(1.0, 2.0), torch.tensor(0.2), transitions(), noise)
    assert out.loss.item() == pytest.approx(0.2 * out.log_prob.item() - 1.0)


def test_the_temperature_rises_while_entropy_is_below_its_target() -> None:
    temperature = Temperature(1.0)
    for log_prob, sign in ((3.0, -1), (-3.0, 1)):  # entropy -3 is below -2: the gradient is negative, alpha grows
        loss = temperature_loss(temperature(), torch.full((4,), log_prob), -2.0)
        (grad,) = torch.autograd.grad(loss, [temperature.log_alpha])
        assert np.sign(grad.item()) == sign


def test_actions_are_scaled_affinely_in_each_dimension() -> None:
    scale = ActionScale(BOX)
    unit = np.array([[-1.0, -1.0], [1.0, 1.0], [0.0, 0.0], [-0.5, 0.5]], np.float32)
    env = scale.to_env(unit)
    assert env.dtype == BOX.dtype
    np.testing.assert_allclose(env, [[0, -0.785], [5, 0.785], [2.5, 0], [1.25, 0.3925]], atol=1e-6)
    assert all(BOX.contains(row) for row in env)
    np.testing.assert_allclose(scale.to_unit(env), unit, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_actions_have_shape_and_dtype_of_the_space_and_are_inside(dtype: type, shape: tuple[int, ...]) -> None:
    space = spaces.Box(np.full(shape, -0.1, dtype), np.full(shape, 0.7, dtype), dtype=dtype)
    spec = EnvSpec("Toy", SPEC.observation_space, space)
    for random_steps in (0, 100):
        policy = SacConfig(hidden=(8,), random_steps=random_steps).build_actor(spec)
        act = policy.sample(np.random.default_rng(0).standard_normal((200, 3)).astype(np.float32) * 100)
        assert act.shape == (200, *shape)
        assert act.dtype == dtype
        assert all(space.contains(np.asarray(a, dtype)) for a in act)


@pytest.mark.parametrize(
    ("space", "key"),
    [
        (spaces.Box(-np.inf, np.inf, (2,)), "env.action_space"),
        (spaces.Box(np.array([-1, -1], "f4"), np.array([1, np.inf], "f4")), "env.action_space"),
        (spaces.Box(np.array([-1, 1], "f4"), np.array([1, 1], "f4")), "env.action_space"),
        (spaces.Box(0, 5, (2,), np.int64), "agent"),
        (spaces.Discrete(3), "agent"),
    ],
    ids=str,
)
def test_actions_that_cannot_be_squashed_are_refused_by_name(space: spaces.Space, key: str) -> None:
    spec = EnvSpec("Toy", SPEC.observation_space, space)
    for build in (SacConfig().build, SacConfig().build_actor):
        with pytest.raises(UnsupportedSpace) as error:
            build(spec)
        assert error.value.key == key


def test_images_are_refused_by_name() -> None:
    spec = EnvSpec("Toy", spaces.Box(0, 255, (4, 84, 84), np.uint8), BOX)
    with pytest.raises(UnsupportedSpace, match=r"^env\.observation_space"):
        SacConfig().build(spec)


def test_the_batch_is_read_in_units_of_the_environment() -> None:
    agent = SacConfig(**SMALL).build(SPEC)
    act = agent._batches(batch(2, act=[BOX.low, BOX.high])).act
    torch.testing.assert_close(act, torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))


def test_actions_are_uniform_until_the_run_has_made_its_random_steps() -> None:
    policy = SacConfig(hidden=(8,), random_steps=100).build_actor(SPEC)
    obs = np.zeros((4000, 3), np.float32)
    with torch.no_grad():
        policy._network.bind({"params": np.full_like(policy.model_info()[1]["params"], 0.5)})
    act = policy.sample(obs)
    for dim in range(2):
        counts = np.histogram(act[:, dim], bins=4, range=(BOX.low[dim], BOX.high[dim]))[0]
        np.testing.assert_allclose(counts / 4000, 0.25, atol=0.04)
    policy.eval()
    assert len(np.unique(policy.sample(obs), axis=0)) == 1
    policy.train()
    policy.sync_model({**policy.model_info()[1], ENV_STEPS: np.array(100, np.int64)})
    assert abs(np.mean(policy.sample(obs)[:, 0]) - 2.5) > 0.2 or np.std(policy.sample(obs)[:, 0]) < 1.3


def test_evaluation_acts_by_the_mean_and_training_by_the_distribution() -> None:
    policy = SacConfig(**SMALL).build_actor(SPEC)
    obs = np.random.default_rng(0).standard_normal((1, 3)).astype(np.float32)
    out = policy._network(obs).copy()
    policy.eval()
    expected = ActionScale(BOX).to_env(np.tanh(out[:, :2]))
    np.testing.assert_array_equal(policy.sample(obs), expected)
    policy.train()
    many = ActionScale(BOX).to_unit(policy.sample(np.repeat(obs, 20_000, 0)))
    u = np.arctanh(many.astype(np.float64))
    np.testing.assert_allclose(u.mean(0), out[0, :2], atol=0.05)
    np.testing.assert_allclose(np.log(u.std(0)), out[0, 2:], atol=0.05)


def test_mlp_policies_act_in_numpy() -> None:
    assert isinstance(SacConfig().build_actor(SPEC)._network, NumpyActing)


def test_only_the_acting_network_is_published() -> None:
    agent, policy = SacConfig(**SMALL).build(SPEC), SacConfig(**SMALL).build_actor(SPEC, seed=1)
    info = agent.model_info()[1]
    assert list(info) == ["params"]
    assert info["params"].shape == policy.model_info()[1]["params"].shape == (3 * 16 + 16 + 16 * 16 + 16 + 16 * 4 + 4,)
    policy.sync_model(info)
    policy.eval()
    agent.eval()
    obs = np.random.default_rng(0).standard_normal((9, 3)).astype(np.float32)
    np.testing.assert_array_equal(policy.sample(obs), agent.sample(obs))


def test_an_update_moves_each_part_by_its_own_loss() -> None:
    agent = SacConfig(**SMALL).build(SPEC)
    before = state(agent)
    np.testing.assert_array_equal(before["critic"], before["target"])
    agent.update(batch())
    after = state(agent)
    assert all(not np.array_equal(before[name], after[name]) for name in before)
    np.testing.assert_allclose(after["target"], 0.995 * before["target"] + 0.005 * after["critic"], atol=1e-7)


def test_the_actors_loss_leaves_the_critics_alone() -> None:
    agent = SacConfig(critic_lr=1e-30, **SMALL).build(SPEC)
    before = state(agent)
    agent.update(batch())
    np.testing.assert_array_equal(state(agent)["critic"], before["critic"])
    assert not np.array_equal(state(agent)["actor"], before["actor"])


def test_a_fixed_temperature_stays() -> None:
    agent = SacConfig(alpha=0.25, **SMALL).build(SPEC)
    for i in range(3):
        record = agent.update(batch(seed=i), with_record=True).record
    assert record["train/ent_coef"] == 0.25
    np.testing.assert_array_equal(state(agent)["log_alpha"], 0.0)


def test_values_of_a_task_cut_by_a_time_limit_reach_those_of_the_endless_task() -> None:
    config = SacConfig(hidden=(16,), gamma=0.9, tau=0.2, critic_lr=1e-2, alpha=0.0, batch_size=40)
    agent = config.build(SPEC)
    data = batch(40, reward=1.0, truncated=np.arange(40) % 10 == 9, obs=1.0, next_obs=1.0)
    for _ in range(600):
        agent.update(data)
    assert agent.update(data, with_record=True).record["train/q_mean"] == pytest.approx(10.0, abs=0.2)


def test_a_record_has_the_names_of_stable_baselines() -> None:
    record = SacConfig(**SMALL).build(SPEC).update(batch(), with_record=True).record
    names = {"actor_loss", "critic_loss", "ent_coef", "loss", "q_mean", "n_updates", "learning_rate", "grad_norm"}
    assert {f"train/{name}" for name in names} < set(record)


def test_equal_seeds_give_equal_parameters() -> None:
    agents = [SacConfig(**SMALL).build(SPEC, seed=seed) for seed in (1, 1, 2)]
    for agent in agents:
        for i in range(5):
            agent.update(batch(seed=i))
    first, second, third = map(state, agents)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not np.array_equal(first["actor"], third["actor"])


def test_an_update_that_is_not_finite_changes_no_network_and_is_counted() -> None:
    agent = SacConfig(**SMALL).build(SPEC)
    before = state(agent)
    record = agent.update(batch(obs=np.nan), with_record=True).record
    after = state(agent)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert record["train/skipped_updates"] == 3


def test_the_state_goes_through_a_file_and_training_continues_bit_for_bit() -> None:
    agent, resumed = SacConfig(**SMALL).build(SPEC), SacConfig(**SMALL).build(SPEC, seed=9)
    for i in range(4):
        agent.update(batch(seed=i))
    obs = np.zeros((4, 3), np.float32)
    agent.sample(obs)
    file = io.BytesIO()
    torch.save(agent.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for i in range(5):
        agent.update(batch(seed=i))
        resumed.update(batch(seed=i))
    first, second = state(agent), state(resumed)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    np.testing.assert_array_equal(agent.sample(obs), resumed.sample(obs))


def test_saved_parameters_act_alike_in_agent_and_policy(tmp_path: Path) -> None:
    agent = SacConfig(**SMALL).build(SPEC)
    agent.update(batch())
    agent.save_params(tmp_path)
    policy = SacConfig(**SMALL).build_actor(SPEC, seed=2)
    policy.load_params(tmp_path)
    obs = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
    agent.eval()
    policy.eval()
    np.testing.assert_array_equal(agent.sample(obs), policy.sample(obs))


def test_it_is_an_agent() -> None:
    assert isinstance(SacConfig(**SMALL).build(SPEC), Agent)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden", (0,)),
        ("gamma", -0.1),
        ("tau", 1.5),
        ("actor_lr", 0.0),
        ("critic_lr", -1.0),
        ("alpha_lr", 0.0),
        ("adam_eps", 0.0),
        ("initial_alpha", 0.0),
        ("batch_size", 0),
        ("alpha", -0.1),
        ("max_grad_norm", 0.0),
        ("random_steps", -1),
        ("updates_per_opt", 0),
    ],
)
def test_impossible_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        SacConfig(**{field: value})
    assert error.value.key == field
