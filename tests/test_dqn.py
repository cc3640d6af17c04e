import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from outrider.agents.acting import NumpyActing, TorchActing
from outrider.agents.batches import Transitions
from outrider.agents.dqn import Dqn, DqnConfig, dqn_loss
from outrider.agents.exploration import ApexEpsilonConfig, EpsilonGreedyConfig, SoftmaxConfig
from outrider.core import Agent, EnvSpec
from outrider.data import ENV_STEPS, Batch
from outrider.errors import ConfigError, UnsupportedSpace

SPEC = EnvSpec("Toy", spaces.Box(-1, 1, (3,)), spaces.Discrete(2, start=5))
SMALL: dict[str, Any] = {"hidden": (16,), "batch_size": 8, "target_update_interval": 3}


def rows(n: int, seed: int = 0, **columns: Any) -> np.ndarray:
    dtype = [("obs", "f4", (3,)), ("act", "i8"), ("reward", "f4"), ("next_obs", "f4", (3,)), ("terminated", "?")]
    out = np.zeros(n, np.dtype([*dtype, ("truncated", "?"), ("n_steps", "i4"), ("model_version", "i8")], align=True))
    rng = np.random.default_rng(seed)
    out["obs"], out["next_obs"] = rng.standard_normal((2, n, 3))
    out["reward"], out["act"], out["n_steps"] = rng.standard_normal(n), rng.integers(2, size=n), 1
    for name, values in columns.items():
        out[name] = values
    return out


def batch(n: int = 8, seed: int = 0, weights: Any = None, **columns: Any) -> Batch:
    return Batch(rows(n, seed, **columns), np.arange(n), weights)


class Buffer:
    """Draws batches of fixed rows and remembers the priorities it is told."""

    def __init__(self, seed: int = 0) -> None:
        self.rows, self.rng, self.told = rows(64, seed), np.random.default_rng(seed), []

    def batch(self, size: int) -> Batch:
        ixs = self.rng.integers(64, size=size)
        return Batch(self.rows[ixs], ixs)

    def update_priority(self, ixs: np.ndarray, td_errors: Any) -> None:
        self.told.append((ixs, np.asarray(td_errors)))


def vector(agent: Dqn) -> np.ndarray:
    return agent.model_info()[1]["params"].copy()


class Table(nn.Module):
    """Q(s, .) = s: the observation holds the values."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        self.order = list(order)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, self.order]


def transition(**changes: Any) -> Transitions:
    made = Transitions(
        obs=torch.tensor([[1.0, 2.0, 3.0]]),
        act=torch.tensor([1]),
        reward=torch.tensor([10.0]),
        next_obs=torch.tensor([[4.0, 6.0, 5.0]]),
        discount=torch.tensor([0.5]),
        weights=None,
    )
    return made._replace(**changes)


def test_the_target_is_the_reward_and_the_discounted_best_value() -> None:
    out = dqn_loss(Table(), Table(), transition(), double=False, huber=False)
    assert out.td_errors.tolist() == [10 + 0.5 * 6 - 2]
    assert out.q.tolist() == [2.0]
    assert out.loss == 11.0**2


def test_double_dqn_values_the_online_choice_by_the_target_network() -> None:
    online, target = Table(), Table(order=(2, 0, 1))  # online prefers action 1, which the target values 4
    assert dqn_loss(online, target, transition(), double=True, huber=False).td_errors.item() == 10 + 0.5 * 4 - 2
    assert dqn_loss(online, target, transition(), double=False, huber=False).td_errors.item() == 10 + 0.5 * 6 - 2


def test_huber_is_linear_beyond_one() -> None:
    assert dqn_loss(Table(), Table(), transition(), double=False, huber=True).loss.item() == 11.0 - 0.5


def test_weights_multiply_the_loss_of_each_row_once() -> None:
    doubled = transition(weights=torch.tensor([2.0]))
    assert dqn_loss(Table(), Table(), doubled, double=False, huber=False).loss.item() == 2 * 11.0**2


@pytest.mark.parametrize(
    ("terminated", "truncated", "n_steps", "discount"),
    [
        (False, False, 1, 0.9),
        (False, True, 1, 0.9),
        (True, False, 1, 0.0),
        (True, True, 1, 0.0),
        (False, True, 3, 0.729),
    ],
)
def test_termination_masks_the_bootstrap_and_truncation_never(
    terminated: bool, truncated: bool, n_steps: int, discount: float
) -> None:
    agent = DqnConfig(gamma=0.9, **SMALL).build(SPEC)
    data = batch(1, terminated=terminated, truncated=truncated, n_steps=n_steps)
    td = agent.update(data).td_errors
    fresh = DqnConfig(gamma=0.9, **SMALL).build(SPEC)
    q = fresh.policy._network(data["obs"].copy()).copy()[0, data["act"][0]]
    next_q = fresh.policy._network(data["next_obs"].copy()).max()
    assert td.item() == pytest.approx(data["reward"][0] + discount * next_q - q, abs=1e-5)


def test_values_of_a_task_cut_by_a_time_limit_reach_those_of_the_endless_task() -> None:
    spec = EnvSpec("Constant", spaces.Box(1, 1, (1,)), spaces.Discrete(1))
    agent = DqnConfig(hidden=(16,), gamma=0.9, lr=1e-2, tau=0.2, target_update_interval=1, loss="mse").build(spec)
    ends = np.arange(40) % 10 == 9
    ones = np.ones((40, 1), np.float32)
    columns = {"obs": ones, "act": np.zeros(40, int), "reward": ones[:, 0], "next_obs": ones, "truncated": ends}
    data = Batch({**columns, "terminated": np.zeros(40, bool), "n_steps": np.ones(40, int)}, np.arange(40))
    for _ in range(600):
        agent.update(data)
    assert agent.update(data, with_record=True).record["train/q_mean"] == pytest.approx(10.0, abs=0.1)


def test_equal_seeds_give_equal_parameters() -> None:
    agents = [DqnConfig(**SMALL).build(SPEC, seed=seed) for seed in (1, 1, 2)]
    for agent in agents:
        buffer = Buffer()
        for _ in range(10):
            agent.opt(buffer)
    np.testing.assert_array_equal(vector(agents[0]), vector(agents[1]))
    assert not np.array_equal(vector(agents[0]), vector(agents[2]))


def test_a_hard_target_is_copied_every_interval() -> None:
    agent = DqnConfig(**SMALL).build(SPEC)
    targets = []
    for i in range(6):
        agent.update(batch(seed=i))
        targets.append(agent.state_dict()["target"]["params"].numpy())
    np.testing.assert_array_equal(targets[0], targets[1])
    assert not np.array_equal(targets[1], targets[2])
    np.testing.assert_array_equal(targets[5], vector(agent))


def test_a_soft_target_moves_the_share_tau() -> None:
    agent = DqnConfig(hidden=(16,), target_update_interval=1, tau=0.1).build(SPEC)
    before = vector(agent)
    agent.update(batch())
    expected = 0.9 * before + 0.1 * vector(agent)
    np.testing.assert_allclose(agent.state_dict()["target"]["params"], expected, atol=1e-7)


def test_an_opt_step_is_sample_update_and_update_priority_as_often_as_asked() -> None:
    agent = DqnConfig(updates_per_opt=3, **SMALL).build(SPEC)
    buffer = Buffer()
    agent.opt(buffer)
    record = agent.opt_with_record(buffer)
    assert (agent.opt_steps, agent.updates) == (2, 6)
    assert agent.model_info()[0] == 2
    assert len(buffer.told) == 6
    ixs, td_errors = buffer.told[0]
    assert ixs.shape == td_errors.shape == (8,)
    assert td_errors.dtype == np.float32
    assert record["train/n_updates"] == 6
    assert record["train/learning_rate"] == 1e-3
    assert {"train/loss", "train/q_mean", "train/grad_norm"} < set(record)


def test_a_reward_that_is_not_finite_changes_nothing_and_is_counted() -> None:
    agent = DqnConfig(**SMALL).build(SPEC)
    before = vector(agent)
    record = agent.update(batch(reward=np.inf), with_record=True).record
    np.testing.assert_array_equal(vector(agent), before)
    assert record["train/skipped_updates"] == 1


def test_the_state_goes_through_a_file_and_training_continues_bit_for_bit(tmp_path: Path) -> None:
    config = DqnConfig(explorer=EpsilonGreedyConfig(decay_env_steps=0, final=0.5), **SMALL)
    agent, resumed, buffer = config.build(SPEC), config.build(SPEC, seed=9), Buffer()
    for _ in range(4):
        agent.opt(buffer)
    agent.sample(np.zeros((5, 3), np.float32))
    file = io.BytesIO()
    torch.save(agent.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert (resumed.opt_steps, resumed.updates) == (4, 4)
    for i in range(5):
        agent.update(batch(seed=i))
        resumed.update(batch(seed=i))
    np.testing.assert_array_equal(vector(agent), vector(resumed))
    np.testing.assert_array_equal(agent.state_dict()["target"]["params"], resumed.state_dict()["target"]["params"])
    obs = np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32)
    np.testing.assert_array_equal(agent.sample(obs).copy(), resumed.sample(obs))


def test_a_state_is_a_copy() -> None:
    agent = DqnConfig(**SMALL).build(SPEC)
    state = agent.state_dict()
    before = state["online"]["params"].clone()
    agent.update(batch())
    assert torch.equal(state["online"]["params"], before)


def test_saved_parameters_act_alike_in_agent_and_policy(tmp_path: Path) -> None:
    agent = DqnConfig(**SMALL).build(SPEC)
    agent.update(batch())
    agent.save_params(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    other, policy = DqnConfig(**SMALL).build(SPEC, seed=1), DqnConfig(**SMALL).build_actor(SPEC, seed=2)
    other.load_params(tmp_path)
    policy.load_params(tmp_path)
    np.testing.assert_array_equal(vector(other), vector(agent))
    np.testing.assert_array_equal(other.state_dict()["target"]["params"], vector(agent))
    obs = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
    for each in (agent, other, policy):
        each.eval()
    np.testing.assert_array_equal(agent.sample(obs).copy(), other.sample(obs).copy())
    np.testing.assert_array_equal(agent.sample(obs).copy(), policy.sample(obs))


def test_a_policy_acts_on_the_arrays_it_was_given() -> None:
    agent, policy = DqnConfig(**SMALL).build(SPEC), DqnConfig(**SMALL).build_actor(SPEC, seed=1)
    assert policy.model_info()[1].keys() == agent.model_info()[1].keys()
    snapshot = {name: array.copy() for name, array in agent.model_info()[1].items()}
    policy.sync_model({**snapshot, ENV_STEPS: np.array(0)})
    policy.eval()
    agent.eval()
    obs = np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32)
    np.testing.assert_array_equal(policy.sample(obs).copy(), agent.sample(obs).copy())
    snapshot["params"] *= -1.0
    assert not np.array_equal(policy.sample(obs), agent.sample(obs))


def test_the_learners_agent_copies_what_it_is_given() -> None:
    source, agent = DqnConfig(**SMALL).build(SPEC), DqnConfig(**SMALL).build(SPEC, seed=1)
    agent.sync_model({**source.model_info()[1], ENV_STEPS: np.array(3)})
    np.testing.assert_array_equal(vector(agent), vector(source))
    source.update(batch())
    assert not np.array_equal(vector(agent), vector(source))


def test_the_agent_acts_with_its_present_parameters() -> None:
    agent = DqnConfig(lr=0.1, **SMALL).build(SPEC)
    agent.eval()
    obs = np.random.default_rng(0).standard_normal((200, 3)).astype(np.float32)
    before = agent.sample(obs).copy()
    for i in range(20):
        agent.update(batch(seed=i))
    assert not np.array_equal(agent.sample(obs), before)


def test_evaluation_is_greedy_up_to_its_epsilon() -> None:
    obs = np.zeros((4000, 3), np.float32)
    greedy = DqnConfig(**SMALL).build_actor(SPEC)
    greedy.eval()
    best = greedy.sample(obs)[0]
    assert (greedy.sample(obs) == best).all()
    noisy = DqnConfig(eval_epsilon=0.5, explorer=SoftmaxConfig(temperature=9.0), **SMALL).build_actor(SPEC)
    noisy.eval()
    assert np.mean(noisy.sample(obs) == best) == pytest.approx(0.75, abs=0.03)


def test_exploration_follows_the_published_env_steps() -> None:
    config = DqnConfig(explorer=EpsilonGreedyConfig(start=1.0, final=0.0, decay_env_steps=10), **SMALL)
    policy = config.build_actor(SPEC)
    obs = np.zeros((1000, 3), np.float32)
    assert 0.4 < policy.sample(obs).mean() < 0.6
    policy.sync_model({**policy.model_info()[1], ENV_STEPS: np.array(10, np.int64)})
    assert len(set(policy.sample(obs).tolist())) == 1
    policy.sync_model({**policy.model_info()[1], ENV_STEPS: np.array(0, np.int64)})
    policy.eval()
    assert len(set(policy.sample(obs).tolist())) == 1
    policy.train()
    assert len(set(policy.sample(obs).tolist())) == 2


def test_every_actor_may_have_an_epsilon_of_its_own() -> None:
    config = DqnConfig(explorer=ApexEpsilonConfig(base=0.4, alpha=7.0), **SMALL)
    explorers = [config.for_actor(i, 2).explorer for i in range(2)]
    assert [e.epsilon(0) for e in explorers] == pytest.approx([0.4, 0.4**8])


def test_actions_are_counted_from_zero_whatever_the_start_of_the_space() -> None:
    policy = DqnConfig(**SMALL).build_actor(SPEC)
    act = policy.sample(np.zeros((100, 3), np.float32))
    assert act.dtype == np.int64
    assert set(act.tolist()) == {0, 1}


@pytest.mark.parametrize("space", [spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 2]), spaces.MultiBinary(2)])
def test_actions_that_are_not_discrete_are_refused(space: spaces.Space) -> None:
    spec = EnvSpec("Toy", SPEC.observation_space, space)
    for build in (DqnConfig().build, DqnConfig().build_actor):
        with pytest.raises(UnsupportedSpace) as error:
            build(spec)
        assert error.value.key == "agent"


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(4, start=2),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary(3),
        spaces.Box(-1, 1, ()),
        spaces.Box(0, 9, (2, 2), np.int64),
        spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float64), "b": spaces.Dict({"c": spaces.Discrete(2)})}),
        spaces.Box(0, 255, (1, 36, 36), np.uint8),
    ],
    ids=str,
)
def test_every_supported_observation_is_learned_from_and_acted_on(space: spaces.Space) -> None:
    config = DqnConfig(**SMALL)
    spec = EnvSpec("Toy", space, SPEC.action_space)
    agent, policy = config.build(spec), config.build_actor(spec)
    space.seed(0)
    obs, columns = [space.sample() for _ in range(8)], {}
    if isinstance(space, spaces.Dict):
        columns = {"obs.a": np.stack([o["a"] for o in obs]), "obs.b.c": np.array([o["b"]["c"] for o in obs])}
        act_on: Any = {"a": columns["obs.a"], "b": {"c": columns["obs.b.c"]}}
    else:
        columns = {"obs": np.stack(obs)}
        act_on = columns["obs"]
    base = rows(8)
    columns |= {f"next_{name}": value for name, value in columns.items()}
    columns |= {name: base[name] for name in ("act", "reward", "terminated", "truncated", "n_steps")}
    before = vector(agent)
    agent.update(Batch(columns, np.arange(8)))
    assert not np.array_equal(vector(agent), before)
    assert policy.sample(act_on).shape == (8,)
    assert isinstance(policy._network, TorchActing if len(space.shape or ()) == 3 else NumpyActing)


class OwnNetwork(DqnConfig):
    def network_module(self, env_spec: EnvSpec) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.BatchNorm1d(8), nn.Linear(8, 2))


def test_a_network_of_ones_own_trains_and_publishes_its_buffers() -> None:
    agent = OwnNetwork(**SMALL).build(SPEC)
    policy = OwnNetwork(**SMALL).build_actor(SPEC, seed=1)
    for i in range(3):
        agent.update(batch(seed=i))
    info = {name: array.copy() for name, array in agent.model_info()[1].items()}
    assert "rest.2.running_mean" in info
    policy.sync_model(info)
    policy.eval()
    agent.eval()
    obs = np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32)
    np.testing.assert_array_equal(policy.sample(obs).copy(), agent.sample(obs))


def test_it_is_an_agent() -> None:
    assert isinstance(DqnConfig(**SMALL).build(SPEC), Agent)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gamma", 1.5),
        ("lr", 0.0),
        ("hidden", (8, 0)),
        ("adam_eps", 0.0),
        ("batch_size", 0),
        ("max_grad_norm", -1.0),
        ("target_update_interval", 0),
        ("tau", 0.0),
        ("updates_per_opt", 0),
        ("eval_epsilon", 2.0),
    ],
)
def test_impossible_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        DqnConfig(**{field: value})
    assert error.value.key == field
