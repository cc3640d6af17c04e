from collections.abc import Callable

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from outrider.agents.acting import NumpyActing, TorchActing, acting_network
from outrider.agents.flat import PARAMS, FlatParameters
from outrider.agents.networks import Encoder, VectorEncoder, encoder, mlp, q_network
from outrider.agents.numpy_policy import NumpyNetwork, runs_in_numpy

INPUTS = VectorEncoder(spaces.Box(-1, 1, (5,)))

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: mlp(5, (64, 64), 3, "relu"),
    "tanh": lambda: mlp(5, (32, 16), 3, "tanh"),
    "silu": lambda: mlp(5, (32,), 3, "silu"),
    "elu": lambda: mlp(5, (32,), 3, "elu"),
    "linear": lambda: nn.Linear(5, 2, bias=False),
    "sigmoid": lambda: nn.Sequential(nn.Flatten(), nn.Sigmoid(), nn.Identity(), nn.Linear(5, 2), nn.Sigmoid()),
    "layer norm": lambda: nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.ReLU(), nn.LayerNorm(8, eps=1e-3)),
    "bare layer norm": lambda: nn.Sequential(nn.LayerNorm(5, elementwise_affine=False), nn.Linear(5, 2)),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(5, 8), nn.ELU(alpha=0.5)), nn.Linear(8, 1)),
    "duelling": lambda: q_network(INPUTS, 4, (16, 16), "relu", dueling=True),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("n", [1, 4, 16])
def test_numpy_gives_what_torch_gives(name: str, n: int) -> None:
    module = NETWORKS[name]()
    params = FlatParameters(module)
    network = NumpyNetwork(module, 5)
    network.bind(params.vector.numpy())
    for scale in (0.0, 1.0, 100.0):
        x = (np.random.default_rng(n).standard_normal((n, 5)) * scale).astype(np.float32)
        untouched = x.copy()
        with torch.no_grad():
            expected = module(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(network(x), expected, rtol=1e-5, atol=1e-5 * max(scale, 1.0))
        np.testing.assert_array_equal(x, untouched)


@pytest.mark.parametrize("name", NETWORKS)
def test_such_networks_are_chosen_to_act_in_numpy(name: str) -> None:
    assert isinstance(acting_network(FlatParameters(NETWORKS[name]()), INPUTS), NumpyActing)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


OTHERS: dict[str, tuple[Callable[[], nn.Module], Encoder]] = {
    "an unknown layer": (lambda: nn.Sequential(nn.Linear(5, 4), nn.GELU()), INPUTS),
    "a subclass of a known layer": (lambda: nn.Sequential(Doubled(5, 4)), INPUTS),
    "buffers": (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), INPUTS),
    "a CNN": (
        lambda: q_network(encoder(spaces.Box(0, 255, (1, 36, 36), np.uint8), "cnn"), 3, (8,), "relu"),
        encoder(spaces.Box(0, 255, (1, 36, 36), np.uint8), "cnn"),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_act_in_torch_on_the_arrays_they_are_given(name: str) -> None:
    build, inputs = OTHERS[name]
    module, learner = build(), FlatParameters(build())
    network = acting_network(FlatParameters(module), inputs)
    assert isinstance(network, TorchActing)
    info = {key: array.copy() for key, array in learner.model_info().items()}
    network.bind(info)
    x = np.random.default_rng(0).integers(0, 9, (2, *inputs.shape)).astype(inputs.dtype)
    learner.module.eval()
    with torch.no_grad():
        np.testing.assert_allclose(network(x), learner.module(torch.from_numpy(x)), rtol=1e-5, atol=1e-6)
        info[PARAMS] *= 2.0  # the receiver overwrites its snapshot in place
        learner.vector.mul_(2.0)
        np.testing.assert_allclose(network(x), learner.module(torch.from_numpy(x)), rtol=1e-5, atol=1e-6)


def test_a_table_that_disagrees_with_torch_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NumpyNetwork, "__call__", lambda self, x: np.zeros((len(x), 3), np.float32))
    network = acting_network(FlatParameters(mlp(5, (8,), 3)), INPUTS)
    assert isinstance(network, TorchActing)


@pytest.mark.parametrize("writeable", [True, False])
@pytest.mark.parametrize("kind", [NumpyActing, TorchActing])
def test_bound_arrays_are_views_not_copies(kind: type, writeable: bool) -> None:
    params = FlatParameters(mlp(5, (8,), 3))
    in_numpy = kind is NumpyActing
    network = NumpyActing(NumpyNetwork(params.module, 5)) if in_numpy else TorchActing(params)
    snapshot = np.ones_like(params.vector.numpy())
    view = snapshot[:]
    view.flags.writeable = writeable
    network.bind({PARAMS: view})
    x = np.ones((1, 5), np.float32)
    assert (network(x) == 49.0).all()
    snapshot[:] = 0.0
    network.bind({PARAMS: view})
    assert (network(x) == 0.0).all()


def test_a_frozen_parameter_is_not_in_the_vector_and_so_acts_in_torch() -> None:
    module = mlp(5, (8,), 3)
    module[0].requires_grad_(False)
    assert not runs_in_numpy(module)
    assert isinstance(acting_network(FlatParameters(module), INPUTS), TorchActing)
