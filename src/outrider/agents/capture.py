"""An update on a GPU as one CUDA graph: recorded once, replayed as a single launch.

Not yet run on a GPU; without one, only what is around the recording is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Record: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs a function once or more, and gives what repeats all that it did to tensors."""

WARM_UPS = 3
"""Updates before the recording: libraries choose and allocate what they need in the first ones."""


def cuda_graph(function: Callable[[], None]) -> Callable[[], None]:
    """Record what a function launches on the present device."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


class CapturedUpdate:
    """An update that reads and writes at fixed addresses.

    **Process**: the learner. **Owns**: copies of a batch with noise, and the results. **Blocks**: never.
    **Closes**: nothing; the graph goes with the object.

    Args:
        update: The update as it is written.
        inputs: A batch with noise, of the shapes and dtypes of all others.
        state: Everything that the update changes. It is left as it is.
        record: Records the update.

    Raises:
        RuntimeError: The update does something that cannot be recorded, such as to look at values.
    """

    def __init__(
        self,
        update: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]],
        inputs: tuple[Tensor, ...],
        state: list[Tensor],
        record: Record = cuda_graph,
    ) -> None:
        self._inputs = tuple([t.clone(memory_format=torch.contiguous_format) for t in inputs])
        self._outputs: tuple[Tensor, ...] = ()
        before = [t.clone() for t in state]

        def run() -> None:
            self._outputs = update(self._inputs)

        try:
            self._replay = record(run)
        finally:
            restore(state, before)

    def __call__(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """One update; the results hold until the next."""
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given, non_blocking=True)
        self._replay()
        return self._outputs


def restore(state: list[Tensor], values: list[Tensor]) -> None:
    """Write these values into the state."""
    for tensor, value in zip(state, values, strict=True):
        tensor.copy_(value)
