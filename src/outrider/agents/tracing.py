"""The whole update of an agent as one graph of tensors: what the compiled driver is made of.

The agent's own step function is run once with stand-ins: networks that compute with views of one vector that is given
to them, and Adam as plain arithmetic. Everything that the update reads or changes is an argument of the graph, so the
compiled update works on the very tensors of the eager one, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from outrider.agents.draws import Draw, DrawsInside, take_out
from outrider.agents.flat import BETA1, BETA2, FlatAdam, FlatParameters


class CannotTrace(Exception):
    """Why an update cannot be made a graph, in one line."""


Parts: TypeAlias = Mapping[str, FlatParameters | FlatAdam]
"""Everything that an agent trains, by name."""


class Network(Protocol):
    """A network as a step function sees it."""

    def __call__(self, *inputs: Tensor) -> Tensor:
        """What the module gives."""
        ...


class Optimizer(Protocol):
    """An optimiser as a step function sees it."""

    def step(self, loss: Tensor) -> Tensor:
        """One update by the gradient of this scalar.

        Returns:
            Norm of the gradient before clipping.
        """
        ...


StepFunction: TypeAlias = Callable[
    [Mapping[str, Network], Mapping[str, Optimizer], tuple[Any, ...]], tuple[Tensor, ...]
]
"""The update of an agent: networks and optimisers by the names of its parts, a batch with the noise; gives tensors."""


class TracedParameters:
    """Stands in for :class:`~outrider.agents.flat.FlatParameters`: the same module, with tensors that are arguments."""

    def __init__(self, params: FlatParameters, module: nn.Module, tensors: Iterator[Tensor]) -> None:
        self._module = module
        self._shapes = [(name, p.shape) for name, p in params.module.named_parameters() if name not in params.rest]
        self.vector = next(tensors)
        self._rest = {name: next(tensors) for name in params.rest}
        self.renew()

    def renew(self) -> None:
        """Compute with the present values from now on."""
        self.leaf = self.vector.detach().requires_grad_()
        parts = torch.split(self.leaf, [shape.numel() for _, shape in self._shapes])
        self._views = {name: part.view(shape) for (name, shape), part in zip(self._shapes, parts, strict=True)}

    def __call__(self, *inputs: Tensor) -> Tensor:
        """What the module gives."""
        out: Tensor = functional_call(self._module, {**self._views, **self._rest}, inputs)
        return out


class TracedAdam:
    """Stands in for :class:`~outrider.agents.flat.FlatAdam`: the same rule and the same state, as plain arithmetic."""

    def __init__(self, adam: FlatAdam, params: TracedParameters, tensors: Iterator[Tensor]) -> None:
        self._params = params
        self._eps, self._max_grad_norm = adam.eps, adam.max_grad_norm
        self._mean, self._square, self._step, self._skipped, self._lr = (next(tensors) for _ in range(5))

    def step(self, loss: Tensor) -> Tensor:
        """One update by the gradient of this scalar loss; see :meth:`outrider.agents.flat.FlatAdam.step`."""
        params = self._params
        (grad,) = torch.autograd.grad(loss, [params.leaf], allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            norm: Tensor = torch.linalg.vector_norm(grad)
            bad = (loss.detach() + norm) * 0.0 != 0.0
            step = self._step + 1.0
            # in double precision, as the kernel does: in float32 little would be left of 1 - 0.999
            correction1, correction2 = (1.0 - torch.pow(beta, step.double()) for beta in (BETA1, BETA2))
            limit = self._max_grad_norm
            clip = torch.ones_like(norm) if limit is None else 1.0 / torch.clamp((norm + 1e-6) / limit, min=1.0)
            # stacked, for that makes them a tensor in memory: else every few parameters they are computed anew
            factors = torch.stack((clip, (self._lr / correction1).float(), correction2.rsqrt().float()))
            clip, rate, scale = factors.unbind()
            grad = grad * clip
            mean = torch.lerp(self._mean, grad, 1.0 - BETA1)
            square = self._square * BETA2 + (1.0 - BETA2) * grad * grad
            vector = params.vector - rate * mean / (square.sqrt() * scale + self._eps)
            for old, new in (
                (self._mean, mean),
                (self._square, square),
                (self._step, step),
                (params.vector, vector),
            ):
                old.copy_(torch.where(bad, old, new))
            self._skipped += bad
        params.renew()
        return norm


def state_tensors(parts: Parts) -> list[Tensor]:
    """All tensors that an update may change, and the learning rates, in the order in which the graph takes them."""
    found: list[Tensor] = []
    for part in parts.values():
        found += part.tensors()
    return found


def copies(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Copies with the same strides, which those of a column of records keep no other way."""
    return tuple([like(t, t) for t in tensors])


def like(model: Tensor, values: Tensor) -> Tensor:
    """A new tensor with the shape, dtype and strides of `model`, and these values."""
    return torch.empty_strided(model.shape, model.stride(), dtype=model.dtype).copy_(values.detach())


def eager(parts: Parts, step: StepFunction) -> Callable[[tuple[Any, ...]], tuple[Tensor, ...]]:
    """The update as it is written: a function of a batch with noise, changing the parts."""
    nets = {name: part for name, part in parts.items() if isinstance(part, FlatParameters)}
    adams = {name: part for name, part in parts.items() if isinstance(part, FlatAdam)}
    return lambda inputs: step(nets, adams, inputs)


class Traced(NamedTuple):
    """An update as a graph.

    Attributes:
        graph: A function of :func:`state_tensors`, the inputs and what is drawn, changing the first in place.
        draws: Random numbers that networks draw.
    """

    graph: fx.GraphModule
    draws: tuple[Draw, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """One update."""
        results: tuple[Tensor, ...] = self.graph(*tensors, *[draw() for draw in self.draws])
        return results


def trace(parts: Parts, step: StepFunction, inputs: tuple[Tensor, ...]) -> Traced:
    """The update as a graph.

    Args:
        parts: What the agent trains. It is left as it is.
        step: The agent's update.
        inputs: A batch with the noise; shapes and dtypes are those of the graph.

    Raises:
        CannotTrace: A network is no function of its arguments and of random numbers.
    """
    state = state_tensors(parts)
    # copies: functional_call does not restore a module that has a layer twice
    modules = {name: deepcopy(part.module) for name, part in parts.items() if isinstance(part, FlatParameters)}

    def whole(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors[: len(state)])
        nets: dict[str, TracedParameters] = {}
        adams: dict[str, Optimizer] = {}
        of = {id(part): name for name, part in parts.items()}
        for name, part in parts.items():
            if isinstance(part, FlatParameters):
                nets[name] = TracedParameters(part, modules[name], given)
            else:
                adams[name] = TracedAdam(part, nets[of[id(part.params)]], given)
        return step(nets, adams, tensors[len(state) :])

    graph = make_fx(whole)(*copies((*state, *inputs)))
    try:
        draws = take_out(graph)
    except DrawsInside as error:
        raise CannotTrace(f"a network draws random numbers that cannot be drawn outside of it ({error})") from error
    _require_no_change(graph)
    return Traced(graph, draws)


def _require_no_change(graph: fx.GraphModule) -> None:
    """Make sure that the graph changes nothing but its arguments."""
    for node in graph.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        for argument, given in zip(node.target._schema.arguments, node.args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(given, fx.Node) and given.op == "get_attr":
                raise CannotTrace("a network changes a tensor that is neither a parameter nor a buffer")
