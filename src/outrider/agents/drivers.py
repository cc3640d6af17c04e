"""One update, two drivers: run as it is written, or compiled as a whole; both on the same tensors.

State lives in the tensors of the agent's parts alone, so the drivers may change places between any two updates, and
checkpoints know nothing of them.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from outrider.agents.capture import CapturedUpdate, restore
from outrider.agents.compilation import CannotCompile, Compilation, CompiledUpdate, Traceable, compiler
from outrider.agents.flat import FlatAdam, FlatParameters
from outrider.agents.tracing import Parts, StepFunction, eager, like, state_tensors
from outrider.announcing import announce
from outrider.errors import ConfigError

log = logging.getLogger(__name__)

CompileMode: TypeAlias = Literal["off", "on", "auto"]
"""Whether the update is compiled: never; before the first opt step; or beside training, if that is faster."""

TOLERANCE = 1e-3
"""Largest difference between the drivers after one update, relative to the largest value of a tensor. Rounding differs
by some 1e-6; whatever is wrong differs by far more."""

LOOKS_EVERY = 32  # updates between two looks at the compilation
TRIED = 48  # updates by each driver before one of them is kept
POLL_S = 0.2

Inputs: TypeAlias = tuple[Tensor | None, ...]
Outputs: TypeAlias = tuple[Tensor, ...]


class Choice(NamedTuple):
    """Which driver is in use.

    Attributes:
        compiled: Whether it is the compiled one.
        ratio: Its time as a part of the eager one's, None if that was not measured.
    """

    compiled: bool
    ratio: float | None


class Drivers:
    """Makes an agent's updates by the better driver.

    **Process**: the learner. **Owns**: the compilation, while it is under way. **Blocks**: in :meth:`prepare`, where
    compiling is not left to chance. **Closes**: the compilation.

    Args:
        mode: Whether to compile.
        parts: What the agent trains.
        step: The agent's update.
        twin: Makes what is traced, in another process; pickled by cloudpickle.
        example: A batch with noise, of the shapes and dtypes that are compiled; what a batch lacks is taken from it.
        device: Where the agent computes.

    Attributes:
        choice: Which driver is in use.
    """

    def __init__(
        self,
        mode: CompileMode,
        parts: Parts,
        step: StepFunction,
        twin: Callable[[], Traceable],
        example: tuple[Tensor, ...],
        device: torch.device,
    ) -> None:
        if mode == "on" and device.type not in ("cpu", "cuda"):
            raise ConfigError("agent.compile", "off or auto for updates on this device", f"on, {device}")
        self.choice = Choice(compiled=False, ratio=None)
        self._mode = mode if device.type in ("cpu", "cuda") else "off"
        self._on_cpu = device.type == "cpu"
        self._parts = parts
        self._eager: Callable[[Inputs], Outputs] = eager(parts, step)
        self._twin = twin
        self._example = example
        self._rows = example[0].shape[0]
        self._compilation: Compilation | None = None
        self._compiled: CompiledUpdate | CapturedUpdate | None = None
        self._times: tuple[list[float], list[float]] = ([], [])  # of eager and compiled updates, while both are tried
        self._n = 0
        self._run = self._eager

    def __call__(self, inputs: Inputs) -> Outputs:
        """One update."""
        return self._run(inputs)

    def prepare(self, stopping: Callable[[], bool]) -> None:
        """Begin to compile, and wait for it where that is asked for.

        Args:
            stopping: Asked again and again; to be given up as soon as it says so.

        Raises:
            ConfigError: It is asked for, and not possible.
        """
        if self._mode == "off" or self._compilation is not None or self._compiled is not None:
            return
        if not self._on_cpu:
            self._run = self._capture
            return
        try:
            self._compilation = Compilation(self._twin)
            if self._mode == "auto":
                self._run = self._wait
                return
            self._compile_now(self._compilation, stopping)
        except (CannotCompile, OSError) as error:
            if self._mode == "on":
                raise ConfigError("agent.compile", "an update that can be compiled", str(error)) from error
            self._give_up(str(error))

    def _compile_now(self, compilation: Compilation, stopping: Callable[[], bool]) -> None:
        """Wait for the compiled update, and say so if that takes long."""
        began: float | None = None
        while not self._load(POLL_S):
            if stopping():
                return
            if began is None and compilation.building:
                began = time.monotonic()
                told = f"the update is being compiled with {compiler()}, which usually takes half a minute"
                announce(f"agent.compile: {told}; it is kept for the next run", logging.INFO)
        if began is not None:
            announce(f"agent.compile: compiled in {time.monotonic() - began:.0f} s", logging.INFO)

    def close(self) -> None:
        """End the compilation, if one is under way."""
        if self._compilation is not None:
            self._compilation.close()
            self._compilation = None
        if self._compiled is None:
            self._run = self._eager

    def _load(self, timeout_s: float) -> bool:
        """Take over the compiled update, once it is there."""
        assert self._compilation is not None
        made = self._compilation.poll(timeout_s)
        if made is None:
            return False
        self._compilation = None
        self._compiled = CompiledUpdate(made, state_tensors(self._parts))
        self._run = self._compare
        return True

    def _give_up(self, reason: str) -> None:
        log.warning("the update runs as it is written, not compiled (agent.compile: auto): %s", reason)
        self._compilation = self._compiled = None
        self._run = self._eager

    def _wait(self, inputs: Inputs) -> Outputs:
        """One update while it is being compiled."""
        self._n += 1
        if self._n % LOOKS_EVERY == 0:
            try:
                self._load(0.0)
            except CannotCompile as error:
                self._give_up(str(error))
        return self._eager(inputs)

    def _fitting(self, inputs: Inputs) -> tuple[Tensor, ...] | None:
        """What the compiled update takes, None if this batch has another number of rows."""
        if inputs[0] is None or inputs[0].shape[0] != self._rows:
            return None
        return tuple([_fitting(t, mine) for t, mine in zip(inputs, self._example, strict=True)])

    def _capture(self, inputs: Inputs) -> Outputs:
        """The first update on a GPU: as it is written, then recorded and replayed on the same state."""
        given = self._fitting(inputs)
        if given is None:
            return self._eager(inputs)
        live = state_tensors(self._parts)
        before = [t.clone() for t in live]
        outputs = tuple([t.clone() for t in self._eager(inputs)])
        after = [t.clone() for t in live]
        if _skipped(self._parts) != _skipped(self._parts, before):
            return outputs  # nothing was changed that could be compared
        restore(live, before)
        try:
            captured = CapturedUpdate(self._eager, given, live)
            results = captured(given)
            wrong = difference(self._parts, before, after, live) or _outputs_differ(outputs, results)
        except RuntimeError as error:
            wrong = str(error).splitlines()[0]
        if wrong:
            restore(live, after)
            self._refuse(f"it cannot be a CUDA graph: {wrong}")
            return outputs
        self._compiled = captured
        self._keep(compiled=True, ratio=None)
        return results

    def _refuse(self, reason: str) -> None:
        """The update will run as it is written, or not at all."""
        if self._mode == "on":
            raise ConfigError("agent.compile", "a compiled update that does what the agent's own does", reason)
        self._give_up(reason)

    def _compare(self, inputs: Inputs) -> Outputs:
        """One update by both drivers, the compiled one on copies."""
        given = self._fitting(inputs)
        if given is None:
            return self._eager(inputs)
        for i, (t, mine) in enumerate(zip(given, self._example, strict=True)):
            assert t.shape == mine.shape and t.dtype == mine.dtype, f"input {i}: {t.shape} {t.dtype}"  # noqa: PT018
        assert isinstance(self._compiled, CompiledUpdate)
        live = state_tensors(self._parts)
        before, copies = [t.clone() for t in live], [t.clone() for t in live]
        generator = torch.get_rng_state()
        outputs = self._eager(inputs)
        torch.set_rng_state(generator)  # both draw the same numbers
        compiled_outputs = tuple(self._compiled.on(copies, given))
        if _skipped(self._parts) != _skipped(self._parts, before):
            return outputs  # nothing was changed that could be compared
        wrong = difference(self._parts, before, live, copies) or _outputs_differ(outputs, compiled_outputs)
        if wrong:
            self._refuse(f"compiled, it does something else: {wrong}")
            return outputs
        if self._mode == "auto":
            self._run = self._try
            return outputs
        restore(live, copies)  # a run that is resumed here goes on bit for bit
        self._keep(compiled=True, ratio=None)
        return compiled_outputs

    def _try(self, inputs: Inputs) -> Outputs:
        """One update by the driver whose turn it is, timed."""
        turn = len(self._times[0]) > len(self._times[1])
        started = time.perf_counter()
        outputs = self._run_compiled(inputs) if turn else self._eager(inputs)
        self._times[turn].append(time.perf_counter() - started)
        if len(self._times[1]) == TRIED:
            usual, compiled = (statistics.median(times) for times in self._times)
            self._keep(compiled=compiled < usual, ratio=compiled / usual)
        return outputs

    def _keep(self, *, compiled: bool, ratio: float | None) -> None:
        self.choice = Choice(compiled, ratio)
        self._run = self._run_compiled if compiled else self._eager
        if not compiled:
            self._compiled = None
        if ratio is not None:
            told = "the compiled update is in use" if compiled else "the update runs as it is written"
            announce(f"agent.compile: {told}; compiled it takes {ratio:.2f} of the eager time", logging.INFO)

    def _run_compiled(self, inputs: Inputs) -> Outputs:
        """One update by the compiled driver."""
        given = self._fitting(inputs)
        if given is None:
            return self._eager(inputs)
        assert self._compiled is not None
        return tuple(self._compiled(given))


def _fitting(given: Tensor | None, example: Tensor) -> Tensor:
    """What is given, with the strides of the example; the example itself in place of nothing."""
    if given is None:
        return example
    return given if given.stride() == example.stride() else like(example, given)


def _skipped(parts: Parts, state: list[Tensor] | None = None) -> float:
    """Updates left out so far."""
    tensors = dict(zip(map(id, state_tensors(parts)), state or state_tensors(parts), strict=True))
    return sum(float(tensors[id(part.skipped)]) for part in parts.values() if isinstance(part, FlatAdam))


def difference(parts: Parts, before: list[Tensor], run: list[Tensor], compiled: list[Tensor]) -> str | None:
    """What the drivers disagree on after an update of the same state by each.

    Adam turns gradients that are rounding noise into steps of full length, so parameters are compared by the length
    of the difference between both steps, everything else value by value.

    Args:
        parts: What the agent trains.
        before: The state before, in the order of :func:`~outrider.agents.tracing.state_tensors`.
        run: The state after the eager update.
        compiled: The state after the compiled one.

    Returns:
        One line, None if they agree.
    """
    at = 0
    for name, part in parts.items():
        for i in range(len(part.tensors())):
            old, a, b = before[at].double(), run[at].double(), compiled[at].double()
            at += 1
            if isinstance(part, FlatParameters) and i == 0:
                far, scale, tolerance = (a - b).norm(), (a - old).norm(), 0.05
            else:
                far, scale, tolerance = (a - b).abs().max(), a.abs().max(), TOLERANCE
            if not far <= tolerance * scale + 1e-12:
                return f"{name}, tensor {i}: off by {float(far):.2g} where it is {float(scale):.2g}"
    return None


def _outputs_differ(run: Outputs, compiled: Outputs) -> str | None:
    for i, (a, b) in enumerate(zip(run, compiled, strict=True)):
        far, scale = float((a - b).abs().max()), float(a.abs().max())
        if not far <= TOLERANCE * scale + 1e-6:
            return f"result {i}: off by {far:.2g} where it is {scale:.2g}"
    return None
