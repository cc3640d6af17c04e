"""Soft actor-critic for bounded Box actions.

Haarnoja et al. 2018b: Soft Actor-Critic Algorithms and Applications, arXiv 1812.05905.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.agents.acting import ActingPolicy
from outrider.agents.batches import Batches, Transitions
from outrider.agents.drivers import CompileMode
from outrider.agents.flat import FlatAdam, FlatParameters
from outrider.agents.networks import Activation, TwinQ, VectorEncoder, initial_values, mlp
from outrider.agents.tracing import Network, Optimizer
from outrider.agents.updating import (
    SKIPPED,
    BadUpdatePolicy,
    Results,
    UpdatingAgent,
    usable_device,
)
from outrider.config import Config, require
from outrider.core import EnvSpec
from outrider.data import Array, Obs, Record
from outrider.errors import UnsupportedSpace

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0
"""Range of the logarithm of the standard deviation before squashing, as in the authors' code."""


@dataclass(frozen=True, kw_only=True)
class SacConfig(Config):
    """Soft actor-critic for Box actions with finite bounds.

    For networks of your own, override :meth:`actor_module` and :meth:`critic_module` in a subclass.

    Attributes:
        hidden: Widths of the hidden layers of actor and critics.
        activation: Behind each hidden layer.
        gamma: Discount of one step.
        tau: Share of the way the target critics move at each update.
        actor_lr: Learning rate of the actor.
        critic_lr: Learning rate of the critics.
        alpha_lr: Learning rate of the temperature.
        adam_eps: Epsilon of Adam.
        batch_size: Rows of one update.
        alpha: Temperature: the weight of entropy; ``auto`` holds the entropy at `target_entropy`.
        initial_alpha: Where an automatic temperature begins.
        target_entropy: In nats, of actions scaled to [-1, 1]; None: minus the number of action dimensions.
        max_grad_norm: Gradients of actor and critics are scaled down to this norm; None: never.
        random_steps: Actions are uniform until the run has made this many env steps.
        updates_per_opt: Updates in one opt step.
        bad_updates: What to do when a loss or gradient is NaN or infinite. Such an update is left out and counted in
            any case; ``raise`` ends the run at the next record of the agent, ``skip`` says so once and goes on.
        compile: Whether the whole update is compiled, which needs a C++ compiler once. ``on``: before the first opt
            step, or the run ends; ``auto``: beside training, in a process of low priority, and kept if it is faster.
            On a GPU either records a CUDA graph. In the synchronous trainer ``auto`` is ``off``: it depends on time.
        device: Where the learner computes: ``cpu``, ``cuda``, ``cuda:1``, ...; actors always act on the CPU.
    """

    hidden: tuple[int, ...] = (256, 256)
    activation: Activation = "relu"
    gamma: float = 0.99
    tau: float = 0.005
    actor_lr: float = 3e-4
    critic_lr: float = 1e-3
    alpha_lr: float = 3e-4
    adam_eps: float = 1e-8
    batch_size: int = 256
    alpha: float | Literal["auto"] = "auto"
    initial_alpha: float = 1.0
    target_entropy: float | None = None
    max_grad_norm: float | None = None
    random_steps: int = 1_000
    updates_per_opt: int = 1
    bad_updates: BadUpdatePolicy = "raise"
    compile: CompileMode = "off"
    device: str = "cpu"

    def __post_init__(self) -> None:
        require(all(n >= 1 for n in self.hidden), "hidden", "widths of at least 1", self.hidden)
        require(0.0 <= self.gamma <= 1.0, "gamma", "a number from 0 to 1", self.gamma)
        require(0.0 < self.tau <= 1.0, "tau", "above 0 and at most 1", self.tau)
        for name in ("actor_lr", "critic_lr", "alpha_lr", "adam_eps", "initial_alpha"):
            require(getattr(self, name) > 0.0, name, "above 0", getattr(self, name))
        require(self.batch_size >= 1, "batch_size", "at least 1", self.batch_size)
        require(self.alpha == "auto" or self.alpha >= 0.0, "alpha", "auto or at least 0", self.alpha)
        if self.max_grad_norm is not None:
            require(self.max_grad_norm > 0.0, "max_grad_norm", "above 0, or null", self.max_grad_norm)
        require(self.random_steps >= 0, "random_steps", "at least 0", self.random_steps)
        require(self.updates_per_opt >= 1, "updates_per_opt", "at least 1", self.updates_per_opt)

    def require_usable(self) -> None:
        """Refuse a device that this machine does not have.

        Raises:
            ConfigError: It is not there, or torch does not know it.
        """
        usable_device(self.device)

    def build(self, env_spec: EnvSpec, *, device: str = "cpu", seed: int = 0) -> Sac:
        """Build the learner's agent.

        Raises:
            UnsupportedSpace: The actions are not a float Box with finite bounds, or an observation is an image.
        """
        return Sac(self, env_spec, device=usable_device(device), seed=seed)

    def build_actor(self, env_spec: EnvSpec, *, seed: int = 0) -> SacPolicy:
        """Build an actor's policy.

        Raises:
            UnsupportedSpace: As in :meth:`build`.
        """
        return SacPolicy(self, env_spec, seed=seed)

    def for_actor(self, actor: int, n_actors: int) -> SacConfig:
        """The same for every actor."""
        return self

    def actor_module(self, obs_dim: int, act_dim: int) -> nn.Module:
        """A new actor: from ``[n, obs_dim]`` to ``[n, 2 * act_dim]``, the mean and the log of the deviation."""
        return mlp(obs_dim, self.hidden, 2 * act_dim, self.activation)

    def critic_module(self, obs_dim: int, act_dim: int) -> nn.Module:
        """New critics: from ``[n, obs_dim]`` and ``[n, act_dim]`` to values ``[n_critics, n]``."""
        return TwinQ(obs_dim, act_dim, self.hidden, self.activation)


class ActionScale:
    """The affine map between actions of the environment and [-1, 1], for each dimension by itself.

    Everything outside the agent is in units of the environment.

    Args:
        space: The action space of a single environment.

    Raises:
        UnsupportedSpace: Not a float Box, or bounds that are infinite or leave no room.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        if not isinstance(space, spaces.Box) or np.dtype(space.dtype).kind != "f":
            raise UnsupportedSpace("agent", "a Box action space of floats for SAC", space)
        if not (np.isfinite(space.low).all() and np.isfinite(space.high).all() and (space.low < space.high).all()):
            raise UnsupportedSpace("env.action_space", "finite bounds, low < high, for a squashed policy", space)
        self._space = space
        self._low, self._high = space.low.reshape(-1), space.high.reshape(-1)
        low, high = self._low.astype(np.float64), self._high.astype(np.float64)
        self._middle = ((high + low) / 2).astype(np.float32)
        self._half = ((high - low) / 2).astype(np.float32)
        self.dim = len(low)

    def to_env(self, act: Array) -> Array:
        """Actions ``[n, dim]`` in [-1, 1] to ``[n, *shape]`` in units and dtype of the space, never outside of it."""
        scaled = (act * self._half + self._middle).astype(self._space.dtype)
        return np.clip(scaled, self._low, self._high, out=scaled).reshape(-1, *self._space.shape)

    def to_unit(self, act: Array) -> Array:
        """Actions ``[n, *shape]`` of the environment to float32 ``[n, dim]`` in [-1, 1]."""
        unit: Array = (act.reshape(len(act), -1) - self._middle) / self._half
        return unit.astype(np.float32, copy=False)


class SacPolicy(ActingPolicy):
    """Acts by the squashed Gaussian; in evaluation by its mean."""

    def __init__(self, config: SacConfig, env_spec: EnvSpec, *, seed: int) -> None:
        scale = ActionScale(env_spec.action_space)
        inputs = VectorEncoder(env_spec.observation_space)
        with initial_values(seed):
            actor = config.actor_module(inputs.shape[0], scale.dim)
        super().__init__(actor, inputs, seed)
        self._scale = scale
        self._random_steps = config.random_steps

    def sample(self, obs: Obs) -> Array:
        """Actions ``[n, *shape]`` in units and dtype of the action space."""
        x = self._encode(obs)
        dim = self._scale.dim
        if self._exploring and self._env_steps < self._random_steps:
            return self._scale.to_env(self._rng.uniform(-1.0, 1.0, (len(x), dim)))
        out = self._network(x)
        if not self._exploring:
            return self._scale.to_env(np.tanh(out[:, :dim]))
        std = np.exp(np.minimum(np.maximum(out[:, dim:], LOG_STD_MIN), LOG_STD_MAX))
        return self._scale.to_env(np.tanh(out[:, :dim] + std * self._rng.standard_normal(std.shape, np.float32)))


def squashed_gaussian(out: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Actions a = tanh(mean + std * noise) and their log-probabilities.

    log pi(a) = sum of log N(u; mean, std) - log(1 - tanh(u) ** 2) over dimensions (Haarnoja et al. 2018b, eq. 26),
    where log(1 - tanh(u) ** 2) = 2 * (log 2 - u - softplus(-2 u)), which keeps its digits for large u.

    Args:
        out: Output of the actor ``[B, 2 * dim]``.
        noise: Standard normal ``[B, dim]``.

    Returns:
        Actions ``[B, dim]`` in (-1, 1) and log-probabilities ``[B]``.
    """
    mean, log_std = out.chunk(2, 1)
    log_std = log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)
    u = torch.addcmul(mean, log_std.exp(), noise)
    log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_slope = 2 * (math.log(2) - u - F.softplus(-2 * u))
    return torch.tanh(u), (log_normal - log_slope).sum(1)


Actor: TypeAlias = Callable[[Tensor], Tensor]
"""Maps observations ``[B, obs_dim]`` to mean and log deviation ``[B, 2 * act_dim]``."""

Critic: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Maps observations and actions in [-1, 1] to values ``[n_critics, B]``."""


class CriticLoss(NamedTuple):
    """What :func:`critic_loss` gives: the scalar, |TD errors| ``[B]`` averaged over critics, values ``[n, B]``."""

    loss: Tensor
    td_errors: Tensor
    q: Tensor


def critic_loss(
    actor: Actor, critic: Critic, target: Critic, alpha: Tensor, batch: Transitions, noise: Tensor
) -> CriticLoss:
    """Half the squared Bellman residual, summed over critics (Haarnoja et al. 2018b, eqs. 5 and 6).

    y = r + discount * (min Q'(s', a') - alpha * log pi(a' | s')), a' ~ pi(. | s').
    """
    with torch.no_grad():
        next_act, log_prob = squashed_gaussian(actor(batch.next_obs), noise)
        next_q = target(batch.next_obs, next_act).amin(0)
        y = torch.addcmul(batch.reward, batch.discount, next_q - alpha * log_prob)
    q = critic(batch.obs, batch.act)
    residual = q - y
    squared = residual.square() if batch.weights is None else residual.square() * batch.weights
    return CriticLoss(0.5 * squared.mean(1).sum(), residual.detach().abs().mean(0), q.detach())


class ActorLoss(NamedTuple):
    """What :func:`actor_loss` gives: the scalar, and log-probabilities ``[B]`` of the actions drawn."""

    loss: Tensor
    log_prob: Tensor


def actor_loss(actor: Actor, critic: Critic, alpha: Tensor, batch: Transitions, noise: Tensor) -> ActorLoss:
    """Mean of alpha * log pi(a | s) - min Q(s, a), a ~ pi(. | s) (Haarnoja et al. 2018b, eq. 9)."""
    act, log_prob = squashed_gaussian(actor(batch.obs), noise)
    loss = (alpha * log_prob - critic(batch.obs, act).amin(0)).mean()
    return ActorLoss(loss, log_prob.detach())


class Temperature(nn.Module):
    """The temperature alpha as the exponential of one parameter."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor([math.log(alpha)]))

    def forward(self) -> Tensor:
        """Its logarithm ``[1]``."""
        return self.log_alpha


def temperature_loss(log_alpha: Tensor, log_prob: Tensor, target_entropy: float) -> Tensor:
    """-log(alpha) * (log pi + target), mean (Haarnoja et al. 2018b, eq. 18, with log(alpha) for alpha)."""
    return -(log_alpha * (log_prob + target_entropy)).mean()


class Sac(UpdatingAgent):
    """The learner's SAC agent.

    **Process**: the learner. **Owns**: actor, critics and their targets, temperature, optimisers. **Blocks**: see
    :class:`~outrider.agents.updating.UpdatingAgent`. **Closes**: nothing.
    """

    def __init__(self, config: SacConfig, env_spec: EnvSpec, *, device: str, seed: int) -> None:
        self.config = config
        scale = ActionScale(env_spec.action_space)
        inputs = VectorEncoder(env_spec.observation_space)
        obs_dim, act_dim = inputs.shape[0], scale.dim
        with initial_values(seed):
            self._actor = FlatParameters(config.actor_module(obs_dim, act_dim), device)
            self._critic = FlatParameters(config.critic_module(obs_dim, act_dim), device)
            self._target = FlatParameters(config.critic_module(obs_dim, act_dim), device)
        self._target.approach(self._critic, 1.0)
        self._target.module.requires_grad_(False)
        eps, limit = config.adam_eps, config.max_grad_norm
        self._actor_adam = FlatAdam(self._actor, config.actor_lr, eps=eps, max_grad_norm=limit)
        self._critic_adam = FlatAdam(self._critic, config.critic_lr, eps=eps, max_grad_norm=limit)
        self._automatic = config.alpha == "auto"
        self._alpha = config.initial_alpha if config.alpha == "auto" else config.alpha
        self._log_alpha = FlatParameters(Temperature(config.initial_alpha), device)
        self._alpha_adam = FlatAdam(self._log_alpha, config.alpha_lr, eps=eps)
        self._target_entropy = float(-act_dim) if config.target_entropy is None else config.target_entropy
        self._act_dim = act_dim
        super().__init__(
            self._actor,
            SacPolicy(config, env_spec, seed=seed),
            batch_size=config.batch_size,
            updates_per_opt=config.updates_per_opt,
            seed=seed,
            bad_updates=config.bad_updates,
            compile=config.compile,
            batches=Batches(env_spec, inputs, scale.to_unit, config.gamma, torch.device(device)),
            twin=partial(type(self), config, env_spec, device="cpu", seed=0),
        )

    def step(
        self,
        net: Mapping[str, Network],
        adam: Mapping[str, Optimizer],
        data: Transitions,
        noise: tuple[Tensor, ...],
    ) -> Results:
        """One gradient update of critics, actor and temperature, each with the parameters that those before it left."""
        log_alpha = net["log_alpha"]
        alpha = log_alpha().detach().exp()[0] if self._automatic else data.reward.new_full((), self._alpha)
        values = critic_loss(net["actor"], net["critic"], net["target"], alpha, data, noise[0][0])
        grad_norm = adam["critic_adam"].step(values.loss)
        acted = actor_loss(net["actor"], net["critic"], alpha, data, noise[0][1])
        adam["actor_adam"].step(acted.loss)
        metrics = {
            "critic_loss": values.loss.detach(),
            "actor_loss": acted.loss.detach(),
            "alpha": alpha,
            "log_prob": acted.log_prob,
            "q": values.q,
            "grad_norm": grad_norm,
        }
        if self._automatic:
            alpha_loss = temperature_loss(log_alpha(), acted.log_prob, self._target_entropy)
            adam["alpha_adam"].step(alpha_loss)
            metrics["alpha_loss"] = alpha_loss.detach()
        return Results(values.td_errors, metrics)

    def _noise_shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        return ((2, rows, self._act_dim),)

    def _updated(self) -> None:
        self._target.approach(self._critic, self.config.tau)

    def _record(self, results: Results) -> Record:
        metrics = results.metrics
        critic_loss = float(metrics["critic_loss"])
        skipped = self._critic_adam.skipped + self._actor_adam.skipped + self._alpha_adam.skipped
        automatic = {"train/ent_coef_loss": float(metrics["alpha_loss"])} if self._automatic else {}
        return {
            **automatic,
            "train/loss": critic_loss,
            "train/critic_loss": critic_loss,
            "train/actor_loss": float(metrics["actor_loss"]),
            "train/ent_coef": float(metrics["alpha"]),
            "train/entropy": -float(metrics["log_prob"].mean()),
            "train/q_mean": float(metrics["q"].mean()),
            "train/grad_norm": float(metrics["grad_norm"]),
            "train/learning_rate": self.config.critic_lr,
            "train/n_updates": self.updates,
            SKIPPED: int(skipped),
        }

    def _parts(self) -> dict[str, FlatParameters | FlatAdam]:
        return {
            "actor": self._actor,
            "critic": self._critic,
            "target": self._target,
            "log_alpha": self._log_alpha,
            "actor_adam": self._actor_adam,
            "critic_adam": self._critic_adam,
            "alpha_adam": self._alpha_adam,
        }
