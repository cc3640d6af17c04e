"""DQN (Mnih et al. 2015) with the options of Double DQN, duelling networks, n-step returns and soft targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.agents.acting import ActingPolicy
from outrider.agents.batches import Batches, Transitions
from outrider.agents.drivers import CompileMode
from outrider.agents.exploration import EpsilonGreedyConfig, ExplorerConfig, epsilon_greedy
from outrider.agents.flat import FlatAdam, FlatParameters
from outrider.agents.networks import (
    Activation,
    Encoder,
    ImageEncoder,
    NetworkKind,
    encoder,
    initial_values,
    q_network,
)
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


@dataclass(frozen=True, kw_only=True)
class DqnConfig(Config):
    """Deep Q-learning for discrete actions.

    For a network of your own, override :meth:`network_module` in a subclass.

    Attributes:
        network: ``auto`` takes a CNN for a single uint8 image and an MLP for everything else.
        hidden: Widths of the hidden layers, behind the convolutions if there are any; None: 512 there, else 256-256.
        activation: Behind each hidden layer.
        dueling: Value and advantage instead of one output (Wang et al. 2016).
        gamma: Discount of one step.
        lr: Learning rate of Adam.
        adam_eps: Epsilon of Adam.
        batch_size: Rows of one update.
        double: The online network chooses the action of the target (van Hasselt et al. 2016).
        loss: Of the TD error; ``huber`` is quadratic up to 1.
        max_grad_norm: Gradients are scaled down to this norm; None: never.
        target_update_interval: Updates between two updates of the target network.
        tau: Share of the way the target network then moves; 1 copies.
        updates_per_opt: Updates in one opt step.
        bad_updates: What to do when a loss or gradient is NaN or infinite. Such an update is left out and counted in
            any case; ``raise`` ends the run at the next record of the agent, ``skip`` says so once and goes on.
        explorer: How actors explore.
        eval_epsilon: Probability of a random action in evaluation.
        compile: Whether the whole update is compiled, which needs a C++ compiler once. ``on``: before the first opt
            step, or the run ends; ``auto``: beside training, in a process of low priority, and kept if it is faster.
            On a GPU either records a CUDA graph. In the synchronous trainer ``auto`` is ``off``: it depends on time.
        device: Where the learner computes: ``cpu``, ``cuda``, ``cuda:1``, ...; actors always act on the CPU.
    """

    network: NetworkKind = "auto"
    hidden: tuple[int, ...] | None = None
    activation: Activation = "relu"
    dueling: bool = False
    gamma: float = 0.99
    lr: float = 1e-3
    adam_eps: float = 1e-8
    batch_size: int = 64
    double: bool = True
    loss: Literal["huber", "mse"] = "huber"
    max_grad_norm: float | None = 10.0
    target_update_interval: int = 250
    tau: float = 1.0
    updates_per_opt: int = 1
    bad_updates: BadUpdatePolicy = "raise"
    explorer: ExplorerConfig = field(default_factory=EpsilonGreedyConfig)
    eval_epsilon: float = 0.0
    compile: CompileMode = "off"
    device: str = "cpu"

    def __post_init__(self) -> None:
        require(all(n >= 1 for n in self.hidden or ()), "hidden", "widths of at least 1", self.hidden)
        require(0.0 <= self.gamma <= 1.0, "gamma", "a number from 0 to 1", self.gamma)
        require(self.lr > 0.0, "lr", "above 0", self.lr)
        require(self.adam_eps > 0.0, "adam_eps", "above 0", self.adam_eps)
        require(self.batch_size >= 1, "batch_size", "at least 1", self.batch_size)
        if self.max_grad_norm is not None:
            require(self.max_grad_norm > 0.0, "max_grad_norm", "above 0, or null", self.max_grad_norm)
        interval = self.target_update_interval
        require(interval >= 1, "target_update_interval", "at least 1", interval)
        require(0.0 < self.tau <= 1.0, "tau", "above 0 and at most 1", self.tau)
        require(self.updates_per_opt >= 1, "updates_per_opt", "at least 1", self.updates_per_opt)
        require(0.0 <= self.eval_epsilon <= 1.0, "eval_epsilon", "a probability", self.eval_epsilon)

    def require_usable(self) -> None:
        """Refuse a device that this machine does not have.

        Raises:
            ConfigError: It is not there, or torch does not know it.
        """
        usable_device(self.device)

    def build(self, env_spec: EnvSpec, *, device: str = "cpu", seed: int = 0) -> Dqn:
        """Build the learner's agent.

        Raises:
            UnsupportedSpace: The actions are not Discrete, or an observation does not suit the network.
        """
        return Dqn(self, env_spec, device=usable_device(device), seed=seed)

    def build_actor(self, env_spec: EnvSpec, *, seed: int = 0) -> DqnPolicy:
        """Build an actor's policy.

        Raises:
            UnsupportedSpace: As in :meth:`build`.
        """
        return DqnPolicy(self, env_spec, seed=seed)

    def for_actor(self, actor: int, n_actors: int) -> DqnConfig:
        """The config of one actor; explorers may give each its own epsilon."""
        return replace(self, explorer=self.explorer.for_actor(actor, n_actors))

    def encoder(self, env_spec: EnvSpec) -> Encoder:
        """What turns observations into the input of the network."""
        return encoder(env_spec.observation_space, self.network)

    def network_module(self, env_spec: EnvSpec) -> nn.Module:
        """A new Q(s, .): from encoded observations ``[n, *encoder.shape]`` to values ``[n, n_actions]``."""
        inputs = self.encoder(env_spec)
        hidden = self.hidden
        if hidden is None:
            hidden = (512,) if isinstance(inputs, ImageEncoder) else (256, 256)
        return q_network(inputs, n_actions(env_spec), hidden, self.activation, dueling=self.dueling)


def n_actions(env_spec: EnvSpec) -> int:
    """Number of discrete actions.

    Raises:
        UnsupportedSpace: The action space is not Discrete.
    """
    if not isinstance(env_spec.action_space, spaces.Discrete):
        raise UnsupportedSpace("agent", "a Discrete action space for DQN", env_spec.action_space)
    return int(env_spec.action_space.n)


def build_seeded(config: DqnConfig, env_spec: EnvSpec, seed: int) -> nn.Module:
    """The network with initial values that depend on the seed alone."""
    n_actions(env_spec)
    with initial_values(seed):
        return config.network_module(env_spec)


class DqnPolicy(ActingPolicy):
    """Acts by Q(s, .): explores in training, and is greedy up to ``eval_epsilon`` in evaluation."""

    def __init__(self, config: DqnConfig, env_spec: EnvSpec, *, seed: int) -> None:
        super().__init__(build_seeded(config, env_spec, seed), config.encoder(env_spec), seed)
        self._explorer = config.explorer
        self._eval_epsilon = config.eval_epsilon

    def sample(self, obs: Obs) -> Array:
        """Actions ``[n]`` int64, counted from 0, for observations ``[n, ...]``."""
        q = self._network(self._encode(obs))
        if self._exploring:
            return self._explorer.choose(q, self._env_steps, self._rng)
        return epsilon_greedy(q, self._eval_epsilon, self._eval_rng)


class DqnLoss(NamedTuple):
    """What :func:`dqn_loss` gives.

    Attributes:
        loss: Scalar.
        td_errors: Target minus value ``[B]``.
        q: Values of the actions taken ``[B]``.
    """

    loss: Tensor
    td_errors: Tensor
    q: Tensor


def dqn_loss(
    online: Callable[[Tensor], Tensor],
    target: Callable[[Tensor], Tensor],
    batch: Transitions,
    *,
    double: bool,
    huber: bool,
) -> DqnLoss:
    """Mean loss of the TD errors, each times its importance weight; a function of its arguments alone.

    y = r + discount * Q'(s', a*), where a* maximises Q' (Mnih et al. 2015, algorithm 1) or, with `double`, Q
    (van Hasselt et al. 2016, eq. 4); the discount is gamma ** n, and 0 at a terminal state.
    """
    with torch.no_grad():
        next_q = target(batch.next_obs)
        best = (online(batch.next_obs) if double else next_q).argmax(1, keepdim=True)
        y = torch.addcmul(batch.reward, batch.discount, next_q.gather(1, best).squeeze(1))
    q = online(batch.obs).gather(1, batch.act.unsqueeze(1)).squeeze(1)
    error = (F.smooth_l1_loss if huber else F.mse_loss)(q, y, reduction="none")
    loss = error.mean() if batch.weights is None else (batch.weights * error).mean()
    return DqnLoss(loss, y - q.detach(), q.detach())


class Dqn(UpdatingAgent):
    """The learner's DQN agent.

    **Process**: the learner. **Owns**: online and target network, the optimiser. **Blocks**: see
    :class:`~outrider.agents.updating.UpdatingAgent`. **Closes**: nothing.
    """

    def __init__(self, config: DqnConfig, env_spec: EnvSpec, *, device: str, seed: int) -> None:
        self.config = config
        self._online = FlatParameters(build_seeded(config, env_spec, seed), device)
        self._target = FlatParameters(build_seeded(config, env_spec, seed), device)
        self._target.module.requires_grad_(False)
        self._adam = FlatAdam(self._online, config.lr, eps=config.adam_eps, max_grad_norm=config.max_grad_norm)
        super().__init__(
            self._online,
            DqnPolicy(config, env_spec, seed=seed),
            batch_size=config.batch_size,
            updates_per_opt=config.updates_per_opt,
            seed=seed,
            bad_updates=config.bad_updates,
            compile=config.compile,
            batches=Batches(env_spec, config.encoder(env_spec), _as_index, config.gamma, torch.device(device)),
            twin=partial(type(self), config, env_spec, device="cpu", seed=0),
        )

    def step(
        self,
        net: Mapping[str, Network],
        adam: Mapping[str, Optimizer],
        data: Transitions,
        noise: tuple[Tensor, ...],
    ) -> Results:
        """One gradient update of the online network."""
        config = self.config
        out = dqn_loss(net["online"], net["target"], data, double=config.double, huber=config.loss == "huber")
        grad_norm = adam["adam"].step(out.loss)
        return Results(out.td_errors, {"loss": out.loss.detach(), "q": out.q, "grad_norm": grad_norm})

    def _updated(self) -> None:
        if self.updates % self.config.target_update_interval == 0:
            self._target.approach(self._online, self.config.tau)

    def _record(self, results: Results) -> Record:
        metrics = results.metrics
        return {
            "train/loss": float(metrics["loss"]),
            "train/q_mean": float(metrics["q"].mean()),
            "train/grad_norm": float(metrics["grad_norm"]),
            "train/learning_rate": self.config.lr,
            "train/n_updates": self.updates,
            SKIPPED: int(self._adam.skipped),
        }

    def _replaced(self) -> None:
        super()._replaced()
        self._target.approach(self._online, 1.0)

    def _parts(self) -> dict[str, FlatParameters | FlatAdam]:
        return {"online": self._online, "target": self._target, "adam": self._adam}


def _as_index(act: Array) -> Array:
    return act.astype(np.int64, copy=False)
