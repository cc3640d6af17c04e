"""The learner: its whole loop against bare updates on one batch, and compiled updates against those of plain PyTorch.

OMP_NUM_THREADS=1 python benchmarks/learner.py [--rounds 9] [--no-compile]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from gymnasium import spaces
from rounds import interleaved, table
from torch import Tensor, nn

from outrider import processes
from outrider.actor_manager import ActorManager, ActorManagerConfig
from outrider.agents.dqn import DqnConfig, dqn_loss
from outrider.agents.sac import SacConfig, actor_loss, critic_loss
from outrider.agents.updating import UpdatingAgent
from outrider.async_trainer import AsyncTrainer, AsyncTrainerConfig
from outrider.channel import item_channel
from outrider.core import EnvSpec
from outrider.data import Batch, Record
from outrider.envs.gymnasium import GymEnvConfig
from outrider.flags import InitGuard, StopFlag
from outrider.model_sync import model_channel
from outrider.recording import NullRecorder
from outrider.replay.uniform import SimpleReplayBufferConfig
from outrider.sampling import SimpleStepProcessorConfig, transition_layout
from outrider.scoring import InlineScorer
from outrider.testing import random_rows

OPTS = 400  # opt steps of a round
CARTPOLE = GymEnvConfig(id="CartPole-v1")
CONTROL = EnvSpec("17 observations, 6 actions", spaces.Box(-1, 1, (17,)), spaces.Box(-1, 1, (6,)))
DQN = DqnConfig(hidden=(128, 128), batch_size=128)
SAC = SacConfig(hidden=(256, 256), batch_size=256)


class NoEvaluation:
    """Scores nothing."""

    def evaluate(self, agent: Any) -> tuple[float, Record]:
        return 0.0, {}


def built(config: DqnConfig | SacConfig, spec: EnvSpec, compile: str) -> UpdatingAgent:
    """An agent whose updates run compiled, if that is asked for."""
    agent = dataclasses.replace(config, compile=compile).build(spec)
    agent.prepare(lambda: False)
    return agent


def random_batch(spec: EnvSpec, size: int) -> Batch:
    buffer = SimpleReplayBufferConfig(capacity=size).build(transition_layout(spec))
    buffer.push(random_rows(buffer.layout, size, env_spec=spec))
    return buffer.batch(size)


def bare(agent: UpdatingAgent, batch: Batch) -> Callable[[], int]:
    """Updates on one batch that is there as tensors."""
    noise = [torch.randn(shape) for shape in agent._noise_shapes(len(batch))]
    inputs = (*agent._batches(batch), *noise)

    def run() -> int:
        for _ in range(OPTS):
            agent._drivers(inputs)
        return OPTS

    return run


class Loop:
    """The whole learner: balance, draining, opt steps, publication, statistics. Actors run beside it, or none."""

    def __init__(self, compile: str, n_actors: int) -> None:
        agent = dataclasses.replace(DQN, compile=compile)
        items, models, self.stop = item_channel(), model_channel(), StopFlag()
        config = AsyncTrainerConfig(
            max_opts=1, eval_interval=0, samples_per_insert=None, warmup_period=1_000, stall_timeout_s=0.0
        )
        self.actors = ActorManager.build(
            ActorManagerConfig(n_actors=1),
            [agent],
            CARTPOLE,
            SimpleStepProcessorConfig(),
            items[0],
            models[1],
            self.stop,
        )
        self.trainer = AsyncTrainer.build(
            config, agent, CARTPOLE, SimpleReplayBufferConfig(capacity=100_000), items[1], models[0], self.stop
        )
        self.learner = self.trainer.learner
        self.learner.buffer.push(random_rows(transition_layout(CARTPOLE.spec()), 100_000, env_spec=CARTPOLE.spec()))
        self.learner.agent.prepare(lambda: False)
        if n_actors:
            self.actors.run(InitGuard())

    def __call__(self) -> int:
        learner = self.learner
        learner.config = dataclasses.replace(learner.config, max_opts=learner.opt_steps + OPTS)
        learner._run(NullRecorder(), InlineScorer(NoEvaluation(), learner.agent))
        return OPTS


class PlainDqn:
    """The update as one writes it in PyTorch."""

    def __init__(self, batch: Batch, *, fused: bool) -> None:
        agent = DQN.build(CARTPOLE.spec())
        self.data = agent._batches.transitions(agent._batches(batch))
        self.online, self.target = (DQN.network_module(CARTPOLE.spec()) for _ in range(2))
        self.adam = torch.optim.Adam(self.online.parameters(), lr=DQN.lr, fused=fused)

    def __call__(self) -> int:
        for _ in range(OPTS):
            loss = dqn_loss(self.online, self.target, self.data, double=True, huber=True).loss
            self.adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.online.parameters(), 10.0)
            self.adam.step()
        return OPTS


class TwoCritics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(
            nn.Sequential(nn.Linear(23, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
            for _ in range(2)
        )

    def forward(self, obs: Tensor, act: Tensor) -> Tensor:
        x = torch.cat((obs, act), 1)
        return torch.cat([member(x) for member in self.members], 1).T


class PlainSac:
    """The update as one writes it in PyTorch, with two separate critics."""

    def __init__(self, batch: Batch, *, fused: bool) -> None:
        agent = SAC.build(CONTROL)
        self.data = agent._batches.transitions(agent._batches(batch))
        self.noise = torch.randn(2, 256, 6)
        self.actor = SAC.actor_module(17, 6)
        self.critic, self.target = TwoCritics(), TwoCritics()
        self.log_alpha = torch.zeros(1, requires_grad=True)
        networks = (list(self.critic.parameters()), list(self.actor.parameters()), [self.log_alpha])
        self.adams = [torch.optim.Adam(p, lr=3e-4, fused=fused) for p in networks]

    def __call__(self) -> int:
        n = OPTS // 10
        for _ in range(n):
            alpha = self.log_alpha.detach().exp()[0]
            self.step(0, critic_loss(self.actor, self.critic, self.target, alpha, self.data, self.noise[0]).loss)
            acted = actor_loss(self.actor, self.critic, alpha, self.data, self.noise[1])
            self.step(1, acted.loss)
            self.step(2, -(self.log_alpha * (acted.log_prob - 6.0)).mean())
            with torch.no_grad():
                for mine, theirs in zip(self.target.parameters(), self.critic.parameters(), strict=True):
                    mine.lerp_(theirs, 0.005)
        return n

    def step(self, which: int, loss: Tensor) -> None:
        self.adams[which].zero_grad()
        loss.backward()
        self.adams[which].step()


def whole_loop(rounds: int, modes: list[str]) -> None:
    spec = CARTPOLE.spec()
    for mode in modes:
        candidates: dict[str, Callable[[], int]] = {
            "bare": bare(built(DQN, spec, mode), random_batch(spec, 128)),
            "learner alone": Loop(mode, 0),
            "learner, 1 actor": Loop(mode, 1),
        }
        try:
            title = f"DQN 128-128, batch of 128, {'compiled' if mode == 'on' else 'eager'}, per opt step"
            table(title, interleaved(candidates, rounds), "bare")
        finally:
            for loop in list(candidates.values())[1:]:
                assert isinstance(loop, Loop)
                loop.stop.set()
                loop.actors.stop_and_join()


def drivers(rounds: int, modes: list[str]) -> None:
    spec, batch = CARTPOLE.spec(), random_batch(CARTPOLE.spec(), 128)
    named = {"off": "eager driver", "on": "compiled driver"}
    plain = {"torch.optim.Adam": PlainDqn(batch, fused=False), "torch.optim.Adam, fused": PlainDqn(batch, fused=True)}
    ours = {named[mode]: bare(built(DQN, spec, mode), batch) for mode in modes}
    title = "DQN 128-128, batch of 128, on one batch, per update"
    table(title, interleaved({**plain, **ours}, rounds), "torch.optim.Adam")
    batch = random_batch(CONTROL, 256)
    sac: dict[str, Callable[[], int]] = {
        "torch.optim.Adam": PlainSac(batch, fused=False),
        "torch.optim.Adam, fused": PlainSac(batch, fused=True),
    }
    for mode in modes:
        agent = built(SAC, CONTROL, mode)
        sac[named[mode]] = with_targets(agent, batch)
    table("SAC 256-256, batch of 256, on one batch, per update", interleaved(sac, rounds), "torch.optim.Adam")


def with_targets(agent: UpdatingAgent, batch: Batch) -> Callable[[], int]:
    inputs = (*agent._batches(batch), *(torch.randn(shape) for shape in agent._noise_shapes(len(batch))))

    def run() -> int:
        n = OPTS // 10
        for _ in range(n):
            agent._drivers(inputs)
            agent._updated()
        return n

    return run


def beside_training() -> None:
    """What a compilation beside it costs the learner; into an empty cache, so it takes a while."""
    spec, batch = CARTPOLE.spec(), random_batch(CARTPOLE.spec(), 128)
    agent = dataclasses.replace(DQN, compile="auto").build(spec)

    def updates(seconds: float) -> list[float]:
        spent, until = [], time.perf_counter() + seconds
        while time.perf_counter() < until:
            started = time.thread_time()
            agent.update(batch)
            spent.append(time.thread_time() - started)
        return spent

    before = updates(5.0)
    agent.prepare(lambda: False)
    started = time.perf_counter()
    during: list[float] = []
    while agent._drivers._compilation is not None:
        during += updates(0.2)
    took = time.perf_counter() - started
    switching = updates(3.0)
    usual = statistics.median(before)
    choice = agent._drivers.choice
    agent.close()
    print("\nDQN 128-128, batch of 128, compiled beside training\n")
    print(f"- {took:.0f} s, at {usual / statistics.median(during):.2f} of the rate before (CPU time of the learner)")
    worst = max([*during[-1000:], *switching])
    print(f"- longest update while it was loaded, compared and tried: {worst * 1e3:.1f} ms")
    print(f"- kept: {'compiled' if choice.compiled else 'eager'}, {choice.ratio:.2f} of the eager time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-compile", action="store_true", help="leave out all that needs a C++ compiler")
    options = parser.parse_args()
    torch.set_num_threads(1)
    processes.ensure_server()
    modes = ["off"] if options.no_compile else ["off", "on"]
    whole_loop(options.rounds, modes)
    drivers(options.rounds, modes)
    if not options.no_compile:
        with tempfile.TemporaryDirectory() as empty:
            os.environ["XDG_CACHE_HOME"] = empty
            beside_training()


if __name__ == "__main__":
    main()
