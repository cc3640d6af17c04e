"""Acting with published parameters: without autograd, target network or optimiser, in numpy where it can."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import nn

from outrider.agents.flat import PARAMS, FlatParameters
from outrider.agents.networks import Encoder
from outrider.agents.numpy_policy import NumpyNetwork, runs_in_numpy
from outrider.data import ENV_STEPS, Array, ModelInfo, Obs

TOLERANCE = 1e-5
"""Largest difference from torch, relative to outputs above 1, with which a network acts in numpy."""


MODEL_FILE = "model.safetensors"
"""File of a saved model: the acting network's tensors under their names in the module."""


class ActingNetwork(Protocol):
    """A network that acts with published parameters."""

    def bind(self, info: ModelInfo) -> None:
        """Act with these arrays from now on, changes included: they are not copied."""
        ...

    def __call__(self, x: Array) -> Array:
        """Map encoded observations ``[n, ...]`` to outputs ``[n, ...]`` float32, valid until the next call."""
        ...


class NumpyActing:
    """Acts in numpy. Binding the same array again costs nothing."""

    def __init__(self, network: NumpyNetwork) -> None:
        self._network = network
        self._bound: Array | None = None

    def bind(self, info: ModelInfo) -> None:
        """Act with ``info["params"]``."""
        if not _same(self._bound, info[PARAMS]):
            self._bound = info[PARAMS]
            self._network.bind(info[PARAMS])

    def __call__(self, x: Array) -> Array:
        """Map ``[n, dim]`` to outputs."""
        return self._network(x)


class TorchActing:
    """Acts in torch, in inference mode; the module's parameters and buffers become views of the bound arrays."""

    def __init__(self, params: FlatParameters) -> None:
        self._params = params
        self._module = params.module.eval()
        self._bound: Array | None = None

    def bind(self, info: ModelInfo) -> None:
        """Act with ``info["params"]`` and the buffers beside it."""
        if _same(self._bound, info[PARAMS]):
            return
        self._bound = info[PARAMS]
        self._params.rebase(_tensor(info[PARAMS]))
        for name, value in self._params.rest.items():
            value.data = _tensor(info[f"rest.{name}"])

    @torch.inference_mode()
    def __call__(self, x: Array) -> Array:
        """Map network inputs to outputs."""
        out: Array = self._module(_tensor(x)).numpy()
        return out


def _same(bound: Array | None, array: Array) -> bool:
    """Whether both are the same memory; the bound one is held, so its address is not reused."""
    return bound is not None and bound.__array_interface__["data"] == array.__array_interface__["data"]


def _tensor(array: Array) -> torch.Tensor:
    """A tensor that aliases the array."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():  # torch has no read-only tensors and says so; nobody writes to these
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def acting_network(params: FlatParameters, inputs: Encoder) -> ActingNetwork:
    """The fastest way to act with this network that gives what torch gives.

    Args:
        params: Parameters of the network; its module belongs to the result from now on.
        inputs: The encoder whose outputs the network takes.

    Returns:
        In numpy if every layer has a numpy form and a comparison on random inputs agrees within
        :data:`TOLERANCE`, else in torch. Bound to the module's values.
    """
    in_torch = TorchActing(params)
    info = params.model_info()
    if inputs.dtype == np.float32 and len(inputs.shape) == 1 and runs_in_numpy(params.module):
        in_numpy = NumpyActing(NumpyNetwork(params.module, inputs.shape[0]))
        in_numpy.bind(info)
        x = np.random.default_rng(0).standard_normal((16, *inputs.shape)).astype(np.float32)
        expected = in_torch(x)
        if np.all(np.abs(in_numpy(x) - expected) <= TOLERANCE * np.maximum(np.abs(expected), 1.0)):
            return in_numpy
    in_torch.bind(info)
    return in_torch


class ActingPolicy(ABC):
    """The acting half of an agent: all that an actor builds.

    **Process**: actors, evaluator; inside the learner's agent for evaluation. **Owns**: its random state, and
    parameters until the first :meth:`sync_model`. **Blocks**: never. **Closes**: nothing.

    Args:
        module: The network, on the CPU; belongs to the policy from now on.
        inputs: Encodes observations for it.
        seed: Of exploration.
    """

    def __init__(self, module: nn.Module, inputs: Encoder, seed: int) -> None:
        self._params = FlatParameters(module)
        self._info = self._params.model_info()
        self._encode = inputs
        self._network = acting_network(self._params, inputs)
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self._eval_rng = np.random.default_rng(seed)
        self._env_steps = 0
        self._exploring = True

    @abstractmethod
    def sample(self, obs: Obs) -> Array:
        """Actions ``[n, ...]`` for observations ``[n, ...]``."""

    def train(self) -> None:
        """Explore from now on."""
        self._exploring = True

    def eval(self) -> None:
        """Act for evaluation from now on, with the same random numbers each time: equal policies score alike."""
        self._exploring = False
        self._eval_rng = np.random.default_rng(self._seed)

    def model_info(self) -> tuple[int, ModelInfo]:
        """The parameters it acts with; counts no opt steps."""
        return 0, self._info

    def sync_model(self, info: ModelInfo) -> None:
        """Act with these arrays from now on; they are kept, not copied."""
        self._info = {name: array for name, array in info.items() if name != ENV_STEPS}
        self._network.bind(info)
        if ENV_STEPS in info:
            self._env_steps = int(info[ENV_STEPS])

    def load_params(self, path: Path) -> None:
        """Act with what an agent's ``save_params`` wrote into this directory."""
        self._params.unshare()
        load_module(self._params, path)
        self._info = self._params.model_info()
        self._network.bind(self._info)

    def state_dict(self) -> dict[str, Any]:
        """The random state of exploration."""
        return {"rng": self._rng.bit_generator.state, "env_steps": self._env_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self._rng.bit_generator.state = state["rng"]
        self._env_steps = state["env_steps"]


def save_module(params: FlatParameters, path: Path) -> None:
    """Write a module's tensors under their own names to ``path/model.safetensors``."""
    # safetensors refuses views of one storage: each becomes a tensor of its own
    tensors = {name: value.detach().cpu().clone() for name, value in params.module.state_dict().items()}
    # A file that safetensors writes itself only its owner may read.
    (Path(path) / MODEL_FILE).write_bytes(save(tensors))


def load_module(params: FlatParameters, path: Path) -> None:
    """Read what :func:`save_module` wrote, into the same storage."""
    params.module.load_state_dict(load_file(Path(path) / MODEL_FILE))
