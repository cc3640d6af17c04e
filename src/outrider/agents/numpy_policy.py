"""Feed-forward networks in plain numpy over views of a flat parameter vector.

At batch 1 a 64-64 network takes 5 µs here and 55 µs in torch, nearly all of it call overhead. Activations are kept
as columns ``[width, n]``: BLAS multiplies ``W @ x`` up to four times as fast as ``x.T @ W.T`` for a few columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from torch import nn

from outrider.agents.networks import Dueling, Mlp
from outrider.data import Array

Step: TypeAlias = Callable[[Array], Array]
"""Maps float32 columns ``[width, n]`` to a buffer of its own, reused at the next call."""


class NumpyNetwork:
    """The forward pass of a module whose layers are all in the table below.

    Args:
        module: Describes the layers; its values are not used.
        width: Width of the input.

    Raises:
        TypeError: Names the layer that has no numpy form.
    """

    def __init__(self, module: nn.Module, width: int) -> None:
        self._module = module
        self._width = width
        self._views: dict[int, Array] = {}
        self._steps: dict[int, Step] = {}
        trainable = [p for p in module.parameters() if p.requires_grad]
        self.bind(np.zeros(sum(p.numel() for p in trainable), np.float32))
        self._build(1)

    def bind(self, params: Array) -> None:
        """Act with the values of this vector float32 ``[N]`` from now on, changes included: it is not copied."""
        views, at = {}, 0
        for p in self._module.parameters():
            views[id(p)] = params[at : at + p.numel()].reshape(p.shape)
            at += p.numel()
        self._views = views
        self._steps.clear()

    def __call__(self, x: Array) -> Array:
        """Map float32 ``[n, width]`` to ``[n, outputs]``; valid until the next call."""
        step = self._steps.get(len(x)) or self._build(len(x))
        return step(x.T).T

    def _build(self, n: int) -> Step:
        step, _ = _LAYERS[type(self._module)](self._module, self._width, n, self._views)
        self._steps[n] = step
        return step


def runs_in_numpy(module: nn.Module) -> bool:
    """Whether every layer is in the table, and nothing but trainable parameters is needed."""
    known = all(type(part) in _LAYERS for part in module.modules())
    return known and not any(True for _ in module.buffers()) and all(p.requires_grad for p in module.parameters())


_Views: TypeAlias = dict[int, Array]
_Built: TypeAlias = tuple[Step, int]


def _buffer(n: int, width: int) -> Array:
    return np.empty((width, n), np.float32)


def _column(vector: Array) -> Array:
    return vector[:, None]


def _linear(layer: nn.Linear, width: int, n: int, views: _Views) -> _Built:
    weight = views[id(layer.weight)]
    bias = _column(views[id(layer.bias)]) if layer.bias is not None else np.float32(0.0)
    out = _buffer(n, layer.out_features)

    def step(x: Array) -> Array:
        np.dot(weight, x, out=out)
        return np.add(out, bias, out=out)

    return step, layer.out_features


def _relu(layer: nn.ReLU, width: int, n: int, views: _Views) -> _Built:
    out = _buffer(n, width)
    return lambda x: np.maximum(x, 0.0, out=out), width


def _tanh(layer: nn.Tanh, width: int, n: int, views: _Views) -> _Built:
    out = _buffer(n, width)
    return lambda x: np.tanh(x, out=out), width


def _sigmoid_into(x: Array, out: Array) -> Array:
    np.tanh(np.multiply(x, 0.5, out=out), out=out)  # overflows nowhere, unlike exp(-x)
    return np.multiply(np.add(out, 1.0, out=out), 0.5, out=out)


def _sigmoid(layer: nn.Sigmoid, width: int, n: int, views: _Views) -> _Built:
    out = _buffer(n, width)
    return lambda x: _sigmoid_into(x, out), width


def _silu(layer: nn.SiLU, width: int, n: int, views: _Views) -> _Built:
    out = _buffer(n, width)
    return lambda x: np.multiply(_sigmoid_into(x, out), x, out=out), width


def _elu(layer: nn.ELU, width: int, n: int, views: _Views) -> _Built:
    out, alpha = _buffer(n, width), layer.alpha

    def step(x: Array) -> Array:
        np.multiply(np.expm1(np.minimum(x, 0.0, out=out), out=out), alpha, out=out)
        np.add(out, np.maximum(x, 0.0), out=out)
        return out

    return step, width


def _layer_norm(layer: nn.LayerNorm, width: int, n: int, views: _Views) -> _Built:
    if layer.normalized_shape != (width,):
        raise TypeError(f"LayerNorm over {layer.normalized_shape} of inputs [n, {width}]")
    gain = _column(views[id(layer.weight)]) if layer.weight is not None else np.float32(1.0)
    bias = _column(views[id(layer.bias)]) if layer.bias is not None else np.float32(0.0)
    out, eps = _buffer(n, width), layer.eps

    def step(x: Array) -> Array:
        np.subtract(x, x.mean(0), out=out)
        np.divide(out, np.sqrt(np.einsum("ij,ij->j", out, out) / width + eps), out=out)
        return np.add(np.multiply(out, gain, out=out), bias, out=out)

    return step, width


def _identity(layer: nn.Module, width: int, n: int, views: _Views) -> _Built:
    return lambda x: x, width


def _sequence(layer: nn.Sequential, width: int, n: int, views: _Views) -> _Built:
    steps = []
    for part in layer:
        step, width = _LAYERS[type(part)](part, width, n, views)
        steps.append(step)

    def run(x: Array) -> Array:
        for step in steps:
            x = step(x)
        return x

    return run, width


def _dueling(layer: Dueling, width: int, n: int, views: _Views) -> _Built:
    torso, width = _LAYERS[type(layer.torso)](layer.torso, width, n, views)
    value, _ = _linear(layer.value, width, n, views)
    advantage, n_actions = _linear(layer.advantage, width, n, views)

    def step(x: Array) -> Array:
        x = torso(x)
        out = advantage(x)
        out += value(x) - out.mean(0)
        return out

    return step, n_actions


_LAYERS: dict[type[nn.Module], Callable[[Any, int, int, _Views], _Built]] = {
    nn.Linear: _linear,
    nn.ReLU: _relu,
    nn.Tanh: _tanh,
    nn.Sigmoid: _sigmoid,
    nn.SiLU: _silu,
    nn.ELU: _elu,
    nn.LayerNorm: _layer_norm,
    nn.Flatten: _identity,
    nn.Identity: _identity,
    nn.Sequential: _sequence,
    Mlp: _sequence,
    Dueling: _dueling,
}
