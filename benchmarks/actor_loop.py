"""The whole actor loop against a bare loop of environment and policy: CartPole with an MLP, Pong as in its preset.

OMP_NUM_THREADS=1 python benchmarks/actor_loop.py [--rounds 31] [--only cartpole pong]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch
from rounds import interleaved, table

from outrider.agents.dqn import DqnConfig, build_seeded
from outrider.agents.exploration import EpsilonGreedyConfig, epsilon_greedy
from outrider.channel import ReplayBufferProxy, item_channel
from outrider.core import Env, EnvSpec, StepProcessorConfig
from outrider.envs.gymnasium import GymEnvConfig
from outrider.flags import StopFlag
from outrider.run_config import RunConfig
from outrider.sampling import NStepProcessorConfig, Sampler, SimpleStepProcessorConfig

STEPS = 4_000  # env steps of a round
PONG_STEPS = 800
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
    """Policy, environments, step processor, proxy and ring."""
    return actor(ENV.spec(), ENV.build(0, n_envs), new_policy(), processor, 64, STEPS)


def actor(
    spec: EnvSpec, env: Env, policy: Any, processor: StepProcessorConfig, n_buffer: int, steps: int
) -> Callable[[], int]:
    """An actor's loop; the ring has room for a round and is emptied after it."""
    layout, stop = processor.layout(spec), StopFlag()
    sender, receiver = item_channel()
    sender.bind(layout, n_actors=1, n_buffer=n_buffer, n_slots=2 * steps // n_buffer, backend="threads")
    proxy = ReplayBufferProxy.build(sender.proxy_config, sender, 0, 0, stop)
    sampler = Sampler(env, policy, processor.build(spec, env.n_envs), layout)
    sampler.reset()

    def run() -> int:
        receiver.drain(lambda message: None)
        return act(sampler, proxy, steps)

    return run


def pong(n_envs: int) -> dict[str, Callable[[], int]]:
    """`AtariVectorEnv.step` and the network in inference mode alone, and the actor of the preset.

    Both play the same games: the same seeds, values and random actions.
    """
    from ale_py.vector_env import AtariVectorEnv

    config = RunConfig.from_sources("pong-dqn")
    agent = replace(config.agent, explorer=EpsilonGreedyConfig(start=0.05, final=0.05, decay_env_steps=0))
    spec, env = config.env.spec(), config.env.build(range(n_envs), n_envs)
    module = build_seeded(agent, spec, seed=0).eval()
    envs: Any = AtariVectorEnv(
        "pong", n_envs, num_threads=1, autoreset_mode="SameStep", repeat_action_probability=0.0, reward_clipping=False
    )
    rng = np.random.default_rng(0)
    state = {"obs": envs.reset(seed=np.arange(n_envs))[0]}

    @torch.inference_mode()
    def bare_loop() -> int:
        obs = state["obs"]
        for _ in range(PONG_STEPS // n_envs):
            q = module(torch.from_numpy(obs)).numpy()
            obs, *_ = envs.step(epsilon_greedy(q, 0.05, rng))
        state["obs"] = obs
        return PONG_STEPS

    policy = agent.build_actor(spec, seed=0)
    whole_loop = actor(spec, env, policy, config.step_processor, config.actors.n_buffer, PONG_STEPS)
    return {"bare loop": bare_loop, "actor, frames": whole_loop}


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
        else:
            proxy.tick()
    return sampler.env_steps - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--only", nargs="*", default=["cartpole", "pong"])
    options = parser.parse_args()
    for n_envs in (1, 16) if "cartpole" in options.only else ():
        candidates = {
            "bare loop": bare(n_envs),
            "actor, 1-step": whole(n_envs, SimpleStepProcessorConfig()),
            "actor, 3-step": whole(n_envs, NStepProcessorConfig(n_steps=3, gamma=0.99)),
        }
        table(f"CartPole, {n_envs} environments, per env step", interleaved(candidates, options.rounds), "bare loop")
    if "pong" in options.only:
        table("Pong, 8 environments, per env step", interleaved(pong(8), options.rounds), "bare loop")


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    main()
