"""The whole actor loop against a bare loop of environment and policy: CartPole, MLP 64-64, one thread.

OMP_NUM_THREADS=1 python benchmarks/actor_loop.py [--rounds 9]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from rounds import interleaved, table

from outrider.agents.dqn import DqnConfig
from outrider.agents.exploration import EpsilonGreedyConfig
from outrider.channel import ReplayBufferProxy, item_channel
from outrider.core import StepProcessorConfig
from outrider.envs.gymnasium import GymEnvConfig
from outrider.flags import StopFlag
from outrider.sampling import NStepProcessorConfig, Sampler, SimpleStepProcessorConfig

STEPS = 20_000  # env steps of a round
CONFIG = DqnConfig(hidden=(64, 64), explorer=EpsilonGreedyConfig(start=0.05, final=0.05, decay_env_steps=1))
ENV = GymEnvConfig(id="CartPole-v1")


def new_policy() -> Any:
    """A policy whose values differ by a line that keeps the pole up for some 100 steps, as halfway through training."""
    policy = CONFIG.build_actor(ENV.spec())
    _, info = policy.model_info()
    weights = {name: np.zeros_like(array) for name, array in info.items()}
    flat = weights["params"]
    first, second, last = flat[: 64 * 5], flat[64 * 5 : 64 * 5 + 64 * 65], flat[64 * 5 + 64 * 65 :]
    first[:8] = 0.0, 0.1, 1.0, 0.6, 0.0, -0.1, -1.0, -0.6
    second[0] = second[64 + 1] = 1.0
    last[64:66] = 1.0, -1.0
    policy.sync_model(weights)
    return policy


def bare(n_envs: int) -> Callable[[], int]:
    """Step the environments with the policy, and nothing else."""
    policy = new_policy()
    if n_envs == 1:
        env: Any = gymnasium.make("CartPole-v1")

        def run() -> int:
            obs, _ = env.reset(seed=0)
            for _ in range(STEPS):
                act = policy.sample(obs[None])
                obs, _, terminated, truncated, _ = env.step(act[0])
                if terminated or truncated:
                    obs, _ = env.reset()
            return STEPS

        return run
    envs: Any = gymnasium.make_vec("CartPole-v1", num_envs=n_envs, vectorization_mode="vector_entry_point")

    def run_vector() -> int:
        obs, _ = envs.reset(seed=0)
        for _ in range(STEPS // n_envs):
            obs, *_ = envs.step(policy.sample(obs))
        return STEPS

    return run_vector


def whole(n_envs: int, processor: StepProcessorConfig) -> Callable[[], int]:
    """Policy, environments, step processor, proxy and ring; the ring has room for a round and is emptied after it."""
    spec, stop = ENV.spec(), StopFlag()
    layout = processor.layout(spec)
    sender, receiver = item_channel()
    sender.bind(layout, n_actors=1, n_buffer=64, n_slots=2 * STEPS // 64, backend="threads")
    proxy = ReplayBufferProxy.build(sender.proxy_config, sender, 0, 0, stop)
    env = ENV.build(0, n_envs)
    sampler = Sampler(env, new_policy(), processor.build(spec, n_envs), layout)
    sampler.reset()

    def run() -> int:
        receiver.drain(lambda message: None)
        return act(sampler, proxy, STEPS)

    return run


def act(sampler: Sampler, proxy: ReplayBufferProxy, steps: int) -> int:
    """At least so many env steps as an actor makes them; returns how many."""
    before = sampler.env_steps
    while sampler.env_steps - before < steps:
        items, episodes = sampler.sample(0)
        proxy.env_steps = sampler.env_steps
        if episodes:
            proxy.report(episodes)
        if items is not None:
            proxy.push(items)
        proxy.tick()
    return sampler.env_steps - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    for n_envs in (1, 16):
        candidates = {
            "bare loop": bare(n_envs),
            "actor, 1-step": whole(n_envs, SimpleStepProcessorConfig()),
            "actor, 3-step": whole(n_envs, NStepProcessorConfig(n_steps=3, gamma=0.99)),
        }
        table(f"CartPole, {n_envs} environments, per env step", interleaved(candidates, rounds), "bare loop")


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    main()
