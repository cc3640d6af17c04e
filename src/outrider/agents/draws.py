"""Random numbers that networks draw in their forward pass, taken out of a graph: they become arguments of it.

The same calls are then made outside, in the same order, of the same generator of torch. So a compiled update sees the
numbers that the written one would have drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx


class DrawsInside(Exception):
    """Numbers that only the graph can draw: by the values of tensors, or into memory that was looked at before."""


@dataclass(frozen=True)
class Draw:
    """One call that draws numbers.

    Attributes:
        op: Name of the operator, such as ``aten.randn_like.default``.
        shape: Of the tensor that it takes for its kind alone, or fills; None if it takes none.
        stride: Of that tensor: numbers come in the order in which they lie in memory.
        dtype: Of that tensor.
        args: What else it is given.
        kwargs: And by name.
    """

    op: str
    shape: tuple[int, ...] | None
    stride: tuple[int, ...]
    dtype: torch.dtype | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Tensor:
        """The next numbers of torch's generator."""
        op: Any = reduce(getattr, self.op.split("."), torch.ops)
        first = () if self.shape is None else (torch.empty_strided(self.shape, self.stride, dtype=self.dtype),)
        drawn: Tensor = op(*first, *self.args, **self.kwargs)
        return drawn


def take_out(graph: fx.GraphModule) -> tuple[Draw, ...]:
    """Make an argument of all numbers that this graph draws, in their order, behind its other arguments.

    Returns:
        What gives those arguments.

    Raises:
        DrawsInside: Names the operator. The graph is of no use any more.
    """
    draws = []
    arguments = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node in list(graph.graph.nodes):
        if not _is_random(node):
            continue
        draws.append(_draw(node))
        with graph.graph.inserting_after(arguments[-1]):
            argument = graph.graph.placeholder(f"draw_{len(draws)}")
        argument.meta = dict(node.meta)
        arguments.append(argument)
        node.replace_all_uses_with(argument)
        graph.graph.erase_node(node)
    graph.recompile()
    return tuple(draws)


def _is_random(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _draw(node: fx.Node) -> Draw:
    op, args = str(node.target), node.args
    if not node.all_input_nodes:
        return Draw(op, None, (), None, args, dict(node.kwargs))
    first = node.all_input_nodes[0]
    filled = str(first.target).startswith("aten.empty") and len(first.users) == 1  # no view of it was taken before
    for_its_kind = op.split(".")[1].endswith("_like") or filled
    if len(node.all_input_nodes) > 1 or first is not args[0] or not for_its_kind:
        raise DrawsInside(op)
    kind = first.meta["val"]
    return Draw(op, tuple(kind.shape), kind.stride(), kind.dtype, args[1:], dict(node.kwargs))
