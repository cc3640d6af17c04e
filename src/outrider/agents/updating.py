"""What the built-in agents have in common: opt steps made of updates, batches as tensors, saved parameters."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from outrider.agents.acting import ActingPolicy, load_module, save_module
from outrider.agents.batches import Batches, Columns, Transitions
from outrider.agents.compilation import Traceable
from outrider.agents.drivers import CompileMode, Drivers, Outputs
from outrider.agents.flat import FlatAdam, FlatParameters
from outrider.agents.tracing import Network, Optimizer
from outrider.core import ReplayBuffer
from outrider.data import ENV_STEPS, Array, Batch, ModelInfo, Obs, Record, UpdateResult
from outrider.errors import BadUpdate, ConfigError

log = logging.getLogger(__name__)

BadUpdatePolicy: TypeAlias = Literal["raise", "skip"]
"""What to do about updates whose loss or gradient is not finite, which are left out and counted in any case: end the
run at the next record of the agent, or say so once and go on."""

SKIPPED = "train/skipped_updates"
"""Metric of the built-in agents: updates left out so far because their loss or gradient was not finite."""


def usable_device(name: str) -> str:
    """The device, if torch knows it and it is there.

    Raises:
        ConfigError: It is not.
    """
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # the second: torch was built without CUDA
        got = f"{name!r} (torch here is {torch.__version__})"
        raise ConfigError("agent.device", "a device of this machine, such as cpu", got) from error
    return name


class Results(NamedTuple):
    """What an update gives, all on the device and without gradients.

    Attributes:
        td_errors: ``[B]``.
        metrics: By name, whatever :meth:`UpdatingAgent._record` makes metrics of.
    """

    td_errors: Tensor
    metrics: dict[str, Tensor]


class UpdatingAgent(ABC):
    """An agent whose opt step is: draw a batch, update, write priorities back, a number of times.

    **Process**: the learner. **Owns**: networks, optimisers, random states. **Blocks**: only in the buffer, and
    where it reads values for a record. **Closes**: nothing.

    Args:
        acting: Parameters of the network that acts.
        policy: Acts on the CPU; it is bound to the live parameters there, else to a snapshot.
        batch_size: Rows of a batch.
        updates_per_opt: Updates of an opt step.
        seed: Of the noise drawn for updates.
        bad_updates: What to do about updates that are not finite.
        compile: Whether the update is compiled.
        batches: Makes tensors of batches.
        twin: Builds an equal agent on the CPU, for tracing; pickled by cloudpickle.

    Attributes:
        opt_steps: Calls of :meth:`opt` and :meth:`opt_with_record` so far.
        updates: Gradient updates so far.
    """

    def __init__(
        self,
        acting: FlatParameters,
        policy: ActingPolicy,
        *,
        batch_size: int,
        updates_per_opt: int,
        seed: int,
        bad_updates: BadUpdatePolicy,
        compile: CompileMode,
        batches: Batches,
        twin: Callable[[], UpdatingAgent],
    ) -> None:
        self.opt_steps = 0
        self.updates = 0
        self.policy = policy
        self._acting = acting
        self._batch_size = batch_size
        self._updates_per_opt = updates_per_opt
        self._bad_updates = bad_updates
        self._skipped = 0  # updates left out, up to the last record
        self._device = acting.vector.device
        self._noise = torch.Generator(self._device).manual_seed(seed)
        self._snapshot: ModelInfo = acting.model_info()
        self._snapshot_updates = 0
        self.policy.sync_model(self._snapshot)
        parts = self._parts()
        self._adams = [part for part in parts.values() if isinstance(part, FlatAdam)]
        networks = [part for part in parts.values() if isinstance(part, FlatParameters)]
        self._statistics = [t for network in networks for t in network.rest.values()]
        self._batches = batches
        self._compile = compile
        self._metrics: tuple[str, ...] = ()
        self._drivers = Drivers(
            compile,
            parts,
            self._whole,
            partial(_traceable, twin),
            self._example(),
            self._device,
        )

    @abstractmethod
    def step(
        self,
        net: Mapping[str, Network],
        adam: Mapping[str, Optimizer],
        data: Transitions,
        noise: tuple[Tensor, ...],
    ) -> Results:
        """One gradient update, without target networks: a function of its arguments and of the config alone.

        It is run as it stands, or traced once with stand-ins and compiled (:mod:`outrider.agents.tracing`). So it may
        not look at values, nor draw random numbers.

        Args:
            net: The networks, by the names of :meth:`_parts`.
            adam: The optimisers, by the names of :meth:`_parts`.
            data: The batch.
            noise: Standard normal numbers, of the shapes that :meth:`_noise_shapes` says.
        """

    @abstractmethod
    def _parts(self) -> dict[str, FlatParameters | FlatAdam]:
        """Everything trained, by its name in the state; each optimiser behind its network."""

    @abstractmethod
    def _record(self, results: Results) -> Record:
        """Metrics of an update."""

    def _noise_shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the standard normal numbers of an update on a batch of so many rows. Default: none."""
        return ()

    @abstractmethod
    def _updated(self) -> None:
        """An update was made: the place for target networks."""

    def update(self, batch: Batch, *, with_record: bool = False) -> UpdateResult:
        """One gradient update on this batch; only with a record does it wait for the device."""
        noise = [
            torch.randn(shape, generator=self._noise, device=self._device) for shape in self._noise_shapes(len(batch))
        ]
        inputs = (*self._batches(batch), *noise)
        td_errors, *metrics = self._without_bad_statistics(inputs) if self._statistics else self._drivers(inputs)
        self.updates += 1
        self._updated()
        if not with_record:
            return UpdateResult(td_errors)
        record = self._record(Results(td_errors, dict(zip(self._metrics, metrics, strict=True))))
        if self._compile != "off":
            choice = self._drivers.choice
            record["train/compiled"] = int(choice.compiled)
            if choice.ratio is not None:
                record["train/compiled_time_ratio"] = choice.ratio
        return UpdateResult(td_errors, record)

    def _without_bad_statistics(self, inputs: tuple[Tensor | None, ...]) -> Outputs:
        """One update; if it is left out, so is what the networks' buffers have seen of it, such as NaN."""
        before, skipped = [t.clone() for t in self._statistics], self._left_out()
        outputs = self._drivers(inputs)
        bad = self._left_out() != skipped
        for t, old in zip(self._statistics, before, strict=True):
            t.copy_(torch.where(bad, old, t))
        return outputs

    def _left_out(self) -> Tensor:
        return torch.stack([adam.skipped for adam in self._adams]).sum()

    def _whole(self, net: Mapping[str, Network], adam: Mapping[str, Optimizer], inputs: tuple[Any, ...]) -> Outputs:
        """One update from tensors to tensors."""
        n = len(Columns._fields)
        results = self.step(net, adam, self._batches.transitions(Columns(*inputs[:n])), inputs[n:])
        self._metrics = tuple(results.metrics)
        return results.td_errors, *results.metrics.values()

    def _example(self) -> tuple[Tensor, ...]:
        """A batch with noise of the shapes and dtypes of every batch, with weights of 1."""
        n = self._batch_size
        noise = (torch.ones(shape, device=self._device) for shape in self._noise_shapes(n))
        return *self._batches.example(n), *noise

    def traceable(self) -> Traceable:
        """What is compiled of this agent."""
        return Traceable(self._parts(), self._whole, self._example())

    def prepare(self, stopping: Callable[[], bool]) -> None:
        """Begin to compile the update, if that is wanted; wait for it where it has to be there.

        Args:
            stopping: Asked again and again; it is given up as soon as this says so.

        Raises:
            ConfigError: It has to be compiled, and cannot be.
        """
        self._drivers.prepare(stopping)

    def close(self) -> None:
        """End whatever runs beside training."""
        self._drivers.close()

    def _replaced(self) -> None:
        """The parameters of the acting network were replaced from outside."""
        self._take_snapshot()

    def opt(self, buffer: ReplayBuffer) -> None:
        """One opt step."""
        for _ in range(self._updates_per_opt):
            self._draw_and_update(buffer, with_record=False)
        self.opt_steps += 1

    def opt_with_record(self, buffer: ReplayBuffer) -> Record:
        """One opt step with the metrics of its last update.

        Raises:
            BadUpdate: Updates were left out since the last record, and the policy is ``raise``.
        """
        for _ in range(self._updates_per_opt - 1):
            self._draw_and_update(buffer, with_record=False)
        record = self._draw_and_update(buffer, with_record=True)
        self._judge(int(record.get(SKIPPED, self._skipped)))
        self.opt_steps += 1
        return record

    def _draw_and_update(self, buffer: ReplayBuffer, *, with_record: bool) -> Record:
        batch = buffer.batch(self._batch_size)
        result = self.update(batch, with_record=with_record)
        buffer.update_priority(batch.ixs, result.td_errors)
        return result.record

    def _judge(self, skipped: int) -> None:
        """Raise, or say once, that updates were left out."""
        new, before, self._skipped = skipped - self._skipped, self._skipped, skipped
        if new <= 0:
            return
        found = BadUpdate(type(self).__name__, self.opt_steps + 1, new)
        if self._bad_updates == "raise":
            raise found
        if not before:
            log.warning("%s", found)

    def sample(self, obs: Obs) -> Array:
        """Act with the present parameters."""
        if self._device.type != "cpu" and self._snapshot_updates != self.updates:
            self._take_snapshot()
        return self.policy.sample(obs)

    def _take_snapshot(self) -> None:
        for name, array in self._acting.model_info().items():
            np.copyto(self._snapshot[name], array)
        self._snapshot_updates = self.updates

    def train(self) -> None:
        """Explore from now on."""
        self.policy.train()

    def eval(self) -> None:
        """Act for evaluation from now on."""
        self.policy.eval()

    def model_info(self) -> tuple[int, ModelInfo]:
        """Opt steps so far and the acting network's parameters; on the CPU the arrays alias the live ones."""
        return self.opt_steps, self._acting.model_info()

    def sync_model(self, info: ModelInfo) -> None:
        """Take over published parameters, by copying them."""
        self._acting.copy_from(info)
        steps = {ENV_STEPS: info[ENV_STEPS]} if ENV_STEPS in info else {}
        self.policy.sync_model({**self._snapshot, **steps})
        self._replaced()

    def save_params(self, path: Path) -> None:
        """Write the acting network to ``path/model.safetensors``."""
        save_module(self._acting, path)

    def load_params(self, path: Path) -> None:
        """Read what :meth:`save_params` wrote."""
        load_module(self._acting, path)
        self._replaced()

    def state_dict(self) -> dict[str, Any]:
        """Parameters, targets, moments, counters and random states; plain values and tensors only."""
        return {
            "opt_steps": self.opt_steps,
            "updates": self.updates,
            "skipped": self._skipped,
            "noise": self._noise.get_state(),
            "policy": self.policy.state_dict(),
            **{name: part.state_dict() for name, part in self._parts().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.opt_steps = state["opt_steps"]
        self.updates = state["updates"]
        self._skipped = state["skipped"]
        self._noise.set_state(state["noise"].cpu())
        self._take_snapshot()
        self.policy.load_state_dict(state["policy"])


def _traceable(twin: Callable[[], UpdatingAgent]) -> Traceable:
    return twin().traceable()
