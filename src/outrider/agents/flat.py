"""Parameters as views of one vector: one Adam kernel, one norm, one interpolation and one copy for a whole network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from outrider.data import ModelInfo

PARAMS = "params"
"""Name in a :data:`~outrider.data.ModelInfo`: the vector of trainable parameters, float32 ``[N]``."""

BETA1, BETA2 = 0.9, 0.999
"""Decay of Adam's means of the gradient and of its square."""


class FlatParameters:
    """The trainable parameters of a module as views of :attr:`vector`, in the order of ``named_parameters``.

    The module stays an ordinary one: ``state_dict``, ``load_state_dict``, ties and hooks work, and a deep copy has
    storage of its own. Moving or casting it afterwards would break the views; :meth:`check` finds that.

    Args:
        module: Its trainable parameters must be float32.
        device: Where the module is moved first.

    Attributes:
        vector: All parameters, float32 ``[N]``.
        grad: Their gradient, filled by :meth:`gradient`.
        rest: Buffers and frozen parameters by name. They are not part of the vector.

    Raises:
        TypeError: A trainable parameter of another dtype; it would not be trained.
    """

    def __init__(self, module: nn.Module, device: str = "cpu") -> None:
        self.module = module.to(device)
        trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        for name, p in trainable:
            if p.dtype != torch.float32:
                raise TypeError(f"parameter {name!r}: expected float32, got {p.dtype}")
        self.parameters = [p for _, p in trainable]
        self.rest: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        self.rest |= dict(module.named_buffers())
        self.vector = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        self.grad = torch.zeros_like(self.vector)
        self.rebase(self.vector)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """What the module gives."""
        out: Tensor = self.module(*inputs)
        return out

    def tensors(self) -> list[Tensor]:
        """Everything an update may change: the vector, and what is not in it."""
        return [self.vector, *self.rest.values()]

    def rebase(self, vector: Tensor) -> None:
        """Make the parameters views of this vector, whose values they take."""
        self.vector = vector
        parts = torch.split(vector, [p.numel() for p in self.parameters])
        for p, part in zip(self.parameters, parts, strict=True):
            p.data = part.view_as(p)

    def unshare(self) -> None:
        """Move everything to storage of its own, away from arrays that belong to somebody else."""
        self.rebase(self.vector.clone())
        for value in self.rest.values():
            value.data = value.data.clone()

    def check(self) -> None:
        """Make sure that the parameters still are views of the vector.

        Raises:
            RuntimeError: The module was moved or cast.
        """
        address = self.vector.data_ptr()
        for p in self.parameters:
            if p.data_ptr() != address:
                raise RuntimeError("the parameters are no longer views of their vector: was the module moved or cast?")
            address += p.numel() * p.element_size()

    def gradient(self, loss: Tensor) -> Tensor:
        """Gradient of a loss by these parameters alone; zero for those it does not depend on.

        Returns:
            :attr:`grad`, overwritten.
        """
        parts = torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)
        torch.cat([g.reshape(-1) for g in parts], out=self.grad)
        return self.grad

    def approach(self, other: FlatParameters, tau: float) -> None:
        """Polyak average: move the share `tau` of the way to `other`; 1 copies it. Buffers are copied."""
        self.vector.lerp_(other.vector, tau)
        for name, value in self.rest.items():
            value.copy_(other.rest[name])

    def model_info(self) -> ModelInfo:
        """The vector, buffers and frozen parameters as arrays; on the CPU they alias the live ones."""
        rest = {f"rest.{name}": value.cpu().numpy() for name, value in self.rest.items()}
        return {PARAMS: self.vector.cpu().numpy(), **rest}

    def copy_from(self, info: ModelInfo) -> None:
        """Take over the values that :meth:`model_info` of an equal network gave."""
        self.vector.copy_(torch.from_numpy(info[PARAMS].copy()))
        for name, value in self.rest.items():
            value.copy_(torch.from_numpy(info[f"rest.{name}"].copy()))

    def state_dict(self) -> dict[str, Any]:
        """Copies of the vector and of what is not in it."""
        return {PARAMS: self.vector.clone(), "rest": {name: value.clone() for name, value in self.rest.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.vector.copy_(state[PARAMS])
        for name, value in self.rest.items():
            value.copy_(state["rest"][name])


class FlatAdam:
    """Adam (Kingma & Ba 2015) on flat parameters, with clipping and protection from values that are not finite.

    An update whose loss or gradient norm is not finite is left out inside the kernel, without asking the device,
    and counted in :attr:`skipped`. Clipping scales the gradient inside the kernel, as ``clip_grad_norm_`` would.

    Args:
        params: What is trained.
        lr: Learning rate.
        eps: Added to the denominator.
        max_grad_norm: Largest norm of the gradient, None for any.

    Attributes:
        lr: Learning rate, a scalar on the device; it may be filled with another value at any time.
        skipped: Updates left out so far, a scalar on the device.
    """

    def __init__(self, params: FlatParameters, lr: float, *, eps: float, max_grad_norm: float | None = None) -> None:
        self.params = params
        self.lr = params.vector.new_tensor(lr)
        self.eps = eps
        self.max_grad_norm = max_grad_norm
        self._mean = torch.zeros_like(params.vector)
        self._square = torch.zeros_like(params.vector)
        self._step = params.vector.new_zeros(())
        self._scale = params.vector.new_ones(())
        self._bad = params.vector.new_zeros(())
        self.skipped = params.vector.new_zeros(())

    @torch.no_grad()
    def _prepare(self, loss: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(self.params.grad)
        if self.max_grad_norm is not None:
            # the kernel divides by it; clip_grad_norm_ multiplies by min(1, max / (norm + 1e-6))
            torch.clamp((norm + 1e-6) / self.max_grad_norm, min=1.0, out=self._scale)
        torch.ne((loss.detach() + norm) * 0.0, 0.0, out=self._bad)  # inf * 0 and nan * 0 are nan, which differs from 0
        self.skipped += self._bad
        return norm

    def tensors(self) -> list[Tensor]:
        """Everything an update may change, and the learning rate."""
        return [self._mean, self._square, self._step, self.skipped, self.lr]

    def step(self, loss: Tensor) -> Tensor:
        """One update by the gradient of this scalar loss.

        Returns:
            Norm of the gradient before clipping, a scalar on the device.
        """
        grad = self.params.gradient(loss)
        norm = self._prepare(loss)
        adam(
            [self.params.vector],
            [grad],
            [self._mean],
            [self._square],
            [],
            [self._step],
            fused=True,
            grad_scale=self._scale,
            found_inf=self._bad,
            amsgrad=False,
            beta1=BETA1,
            beta2=BETA2,
            lr=self.lr,
            weight_decay=0.0,
            eps=self.eps,
            maximize=False,
        )
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Copies of the moments and counters."""
        return {name: value.clone() for name, value in self._state().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        for name, value in self._state().items():
            value.copy_(state[name])

    def _state(self) -> dict[str, Tensor]:
        return {"mean": self._mean, "square": self._square, "step": self._step, "skipped": self.skipped}
