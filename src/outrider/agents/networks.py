"""Observations to network inputs, and the networks of the built-in agents.

An :class:`Encoder` turns the observations of any supported space into one array per batch, in numpy, in actor and
learner alike. Images stay uint8 until they are inside the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.data import Array, Obs
from outrider.errors import UnsupportedSpace

Activation: TypeAlias = Literal["relu", "tanh", "silu", "elu"]
NetworkKind: TypeAlias = Literal["auto", "mlp", "cnn"]

ACTIVATIONS: dict[Activation, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "silu": nn.SiLU, "elu": nn.ELU}

OBSERVATION_KEY = "env.observation_space"
MIN_IMAGE = 36
"""Height and width below which the three convolutions of :class:`NatureCnn` leave nothing."""


class Encoder(Protocol):
    """Turns observations into the input of a network.

    Attributes:
        shape: Shape of one encoded observation.
        dtype: Its dtype: float32, or uint8 for images.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __call__(self, obs: Obs) -> Array:
        """Encode ``[n, ...]`` to ``[n, *shape]``: a new array each time, or a view of `obs` whatever its values are."""
        ...


class VectorEncoder:
    """Any observation without images as one float32 vector: its leaves side by side, in the order of the space.

    Box and MultiBinary are flattened and cast; Discrete and MultiDiscrete become one-hot, counted from the
    ``start`` of the space.

    Args:
        space: Space of a single environment.

    Raises:
        UnsupportedSpace: Names the leaf that is an image.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        self._leaves: list[tuple[tuple[str, ...], slice, _Write]] = []
        at = 0
        for path, leaf in _leaves(space, ()):
            if is_image(leaf):
                key = ".".join((OBSERVATION_KEY, *path))
                expected = "no image in the observation of an MLP (network: cnn takes one image and nothing else)"
                raise UnsupportedSpace(key, expected, leaf)
            width, write = _leaf_writer(leaf)
            self._leaves.append((path, slice(at, at + width), write))
            at += width
        self.shape: tuple[int, ...] = (at,)
        self.dtype = np.dtype(np.float32)
        self._is_one_box = isinstance(space, spaces.Box | spaces.MultiBinary)

    def __call__(self, obs: Obs) -> Array:
        """Encode ``[n, ...]`` to float32 ``[n, dim]``."""
        if self._is_one_box:
            return np.asarray(obs, np.float32).reshape(-1, *self.shape)
        parts = [(_descend(obs, path), columns, write) for path, columns, write in self._leaves]
        out = np.empty((len(parts[0][0]), *self.shape), np.float32)
        for part, columns, write in parts:
            write(part, out[:, columns])
        return out


class ImageEncoder:
    """One image per observation, untouched: ``[n, ...]`` in the dtype of the space.

    Args:
        space: A Box of three dimensions, at least 36 pixels high and wide.

    Raises:
        UnsupportedSpace: It is something else.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        if not isinstance(space, spaces.Box) or len(space.shape) != 3 or min(image_size(space.shape)) < MIN_IMAGE:
            expected = f"one image of three dimensions and at least {MIN_IMAGE} x {MIN_IMAGE} pixels for network: cnn"
            raise UnsupportedSpace(OBSERVATION_KEY, expected, space)
        self.shape: tuple[int, ...] = space.shape
        self.dtype = np.dtype(space.dtype)

    def __call__(self, obs: Obs) -> Array:
        """The observations themselves."""
        assert not isinstance(obs, dict)
        return obs


def encoder(space: spaces.Space[Any], network: NetworkKind) -> Encoder:
    """The encoder for a space; "auto" takes a single uint8 image to a CNN and everything else to an MLP.

    Raises:
        UnsupportedSpace: Names what this network cannot see.
    """
    if network == "cnn" or (network == "auto" and is_image(space)):
        return ImageEncoder(space)
    return VectorEncoder(space)


def is_image(space: spaces.Space[Any]) -> bool:
    """Whether it is a uint8 Box of three dimensions."""
    return isinstance(space, spaces.Box) and len(space.shape) == 3 and space.dtype == np.uint8


def channels_last(shape: tuple[int, ...]) -> bool:
    """Whether an image of this shape is ``[H, W, C]``: its last axis is its shortest."""
    return shape[2] < min(shape[:2])


def image_size(shape: tuple[int, ...]) -> tuple[int, int]:
    """Height and width of an image ``[C, H, W]`` or ``[H, W, C]``."""
    return (shape[0], shape[1]) if channels_last(shape) else (shape[1], shape[2])


_Write: TypeAlias = Callable[[Array, Array], None]


def _leaves(space: spaces.Space[Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], spaces.Space[Any]]]:
    if isinstance(space, spaces.Dict):
        for key, sub in space.spaces.items():
            yield from _leaves(sub, (*path, key))
    else:
        yield path, space


def _descend(obs: Obs, path: tuple[str, ...]) -> Array:
    for key in path:
        assert isinstance(obs, dict)
        obs = obs[key]
    assert not isinstance(obs, dict)
    return obs


def _leaf_writer(leaf: spaces.Space[Any]) -> tuple[int, _Write]:
    """Width of an encoded leaf, and what writes observations of it ``[n, ...]`` into ``[n, width]``."""
    if isinstance(leaf, spaces.Discrete):
        return _one_hot(np.array([leaf.n]), np.array([leaf.start]))
    if isinstance(leaf, spaces.MultiDiscrete):
        return _one_hot(leaf.nvec.reshape(-1), np.asarray(leaf.start).reshape(-1))
    if isinstance(leaf, spaces.Box | spaces.MultiBinary):

        def write(values: Array, out: Array) -> None:
            out[...] = values.reshape(len(values), -1)

        return int(np.prod(leaf.shape)), write
    raise UnsupportedSpace(OBSERVATION_KEY, "Box, Discrete, MultiDiscrete, MultiBinary or a Dict of these", leaf)


def _one_hot(sizes: Array, starts: Array) -> tuple[int, _Write]:
    shift = np.concatenate([[0], np.cumsum(sizes)[:-1]]) - starts

    def write(values: Array, out: Array) -> None:
        out[...] = 0.0
        np.put_along_axis(out, values.reshape(len(values), -1).astype(np.int64) + shift, 1.0, axis=1)

    return int(sizes.sum()), write


@contextmanager
def initial_values(seed: int) -> Iterator[None]:
    """Modules built inside get initial values that depend on the seed alone; torch's own random state stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class Mlp(nn.Sequential):
    """Layers one after another. They are called directly, which saves 2 µs a layer and skips their forward hooks."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, dim]`` to ``[n, outputs]``."""
        for layer in self:
            x = layer.forward(x)
        return x


def hidden_layers(inputs: int, hidden: tuple[int, ...], activation: Activation) -> tuple[list[nn.Module], int]:
    """Linear layers of these widths, each with its activation, and the width of the last."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), ACTIVATIONS[activation]()]
        inputs = width
    return layers, inputs


def mlp(inputs: int, hidden: tuple[int, ...], outputs: int, activation: Activation = "relu") -> Mlp:
    """A multi-layer perceptron with a linear output."""
    layers, width = hidden_layers(inputs, hidden, activation)
    return Mlp(*layers, nn.Linear(width, outputs))


class Dueling(nn.Module):
    """Q(s, a) = V(s) + A(s, a) - mean over a' of A(s, a') on top of common layers (Wang et al. 2016, eq. 9)."""

    def __init__(self, torso: nn.Module, width: int, n_actions: int) -> None:
        super().__init__()
        self.torso = torso
        self.value = nn.Linear(width, 1)
        self.advantage = nn.Linear(width, n_actions)

    def forward(self, x: Tensor) -> Tensor:
        """Map network inputs ``[n, ...]`` to values ``[n, n_actions]``."""
        x = self.torso(x)
        advantage: Tensor = self.advantage(x)
        value: Tensor = self.value(x)
        return value + advantage - advantage.mean(1, keepdim=True)


class NatureCnn(nn.Module):
    """The three convolutions of Mnih et al. 2015 (Nature 518, "Methods"), flattened.

    Args:
        shape: ``[C, H, W]``, or ``[H, W, C]`` if the last axis is the shortest.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._last = channels_last(shape)
        height, width = image_size(shape)
        self.convolutions = nn.Sequential(
            nn.Conv2d(shape[2] if self._last else shape[0], 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        for kernel, stride in ((8, 4), (4, 2), (3, 1)):
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        self.outputs = 64 * height * width

    def forward(self, x: Tensor) -> Tensor:
        """Map images to features ``[n, outputs]``; integers are divided by 255 here, on the device."""
        if self._last:
            x = x.permute(0, 3, 1, 2)
        scale = 1.0 if x.is_floating_point() else 1 / 255
        # convolutions are a sixth faster over channels that lie together, and bytes are moved faster than floats
        x = x.contiguous(memory_format=torch.channels_last).to(torch.float32) * scale
        features: Tensor = self.convolutions(x)
        return features


def q_network(
    inputs: Encoder, n_actions: int, hidden: tuple[int, ...], activation: Activation, *, dueling: bool = False
) -> nn.Module:
    """Q(s, .) of encoded observations: an MLP, or the Nature CNN with these hidden layers behind it.

    Returns:
        A module from ``[n, *inputs.shape]`` to ``[n, n_actions]``.
    """
    layers: list[nn.Module] = []
    width = inputs.shape[0]
    if isinstance(inputs, ImageEncoder):
        cnn = NatureCnn(inputs.shape)
        layers, width = [cnn], cnn.outputs
    dense, width = hidden_layers(width, hidden, activation)
    layers += dense
    return Dueling(Mlp(*layers), width, n_actions) if dueling else Mlp(*layers, nn.Linear(width, n_actions))


class TwinQ(nn.Module):
    """Several Q(s, a) of equal shape as one stack: a batched product in place of one network after another.

    Each member is initialised as its own ``nn.Linear`` layers would be.

    Args:
        inputs: Width of an encoded observation.
        act_dim: Width of an action.
        hidden: Widths of the hidden layers.
        activation: Behind each hidden layer.
        n: Number of members.
    """

    def __init__(
        self, inputs: int, act_dim: int, hidden: tuple[int, ...], activation: Activation = "relu", n: int = 2
    ) -> None:
        super().__init__()
        self.n = n
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        widths = (inputs + act_dim, *hidden, 1)
        for fan_in, fan_out in pairwise(widths):
            members = [nn.Linear(fan_in, fan_out) for _ in range(n)]
            self.weights.append(nn.Parameter(torch.stack([m.weight.detach().T for m in members])))
            self.biases.append(nn.Parameter(torch.stack([m.bias.detach()[None] for m in members])))
        self._activation: Callable[[Tensor], Tensor] = getattr(F, activation)

    def forward(self, obs: Tensor, act: Tensor) -> Tensor:
        """Values ``[n_members, B]`` of observations ``[B, inputs]`` and actions ``[B, act_dim]``."""
        x = torch.cat((obs, act), 1).expand(self.n, -1, -1)
        last = len(self.weights) - 1
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x, weight)
            if i < last:
                x = self._activation(x)
        return x.squeeze(2)
