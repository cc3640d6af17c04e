"""Throughput of 1 to 64 actors, from the costs of the parts measured here, and the model checked against real runs.

OMP_NUM_THREADS=1 python benchmarks/scale.py [--seconds 6] [--gpu-ms 0.25]

The model has three costs, all in CPU time of one core:

    t_act    an env step of an actor: policy, environment, step processor, ring
    t_take   a row that the learner takes from the rings and puts into its buffer
    t_opt    an opt step on a full buffer: batch and update; on a GPU the time that the update takes there

With E env steps and O opt steps a second, N actors, C cores and batches of B rows:

    actors     E <= N / t_act                              each makes no more
    learner    O t_opt + E t_take <= 1                     it does one thing at a time
    cores      E t_act + O t_opt + E t_take <= C           who waits needs none
    limiter    B O = spi E

Where samples_per_insert is null nobody waits: all share the cores alike, and the learner opts in the time that taking
leaves it. "Who limits" is the first of the three that holds with equality.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from actor_loop import act
from rounds import interleaved

from outrider import (
    ActorManagerConfig,
    AsyncTrainerConfig,
    DefaultEvaluator,
    DqnConfig,
    GymEnvConfig,
    NullRecorder,
    ReplayBufferProxy,
    SimpleReplayBufferConfig,
    SimpleStepProcessorConfig,
    StopFlag,
    item_channel,
    train_async,
)
from outrider.sampling import Sampler

ENV = GymEnvConfig(id="CartPole-v1")
AGENT = DqnConfig(hidden=(128, 128), batch_size=128)
PROCESSOR = SimpleStepProcessorConfig()
REPLAY = SimpleReplayBufferConfig(capacity=100_000)
N_ENVS = 16
N_BUFFER = 64
ROWS = 16_384
COUNTS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Costs:
    """Seconds of CPU time: of an env step, of a row taken, of an opt step."""

    act: float
    take: float
    opt: float


@dataclass(frozen=True)
class Rates:
    """Env steps and opt steps a second, and who limits them."""

    env: float
    opt: float
    limit: str


def predict(costs: Costs, n_actors: int, spi: float | None, batch_size: int, cores: float = float("inf")) -> Rates:
    """The model, see above."""
    if spi is None:
        share = min(1.0, cores / (n_actors + 1))
        possible = n_actors * share / costs.act
        env = min(possible, share / costs.take)
        return Rates(env, max(0.0, share - env * costs.take) / costs.opt, "nobody" if env == possible else "channel")
    rows = batch_size / spi  # of each opt step
    learner = costs.opt + rows * costs.take
    limits = {
        "actors": n_actors / (rows * costs.act),
        "learner": 1.0 / learner,
        "cores": cores / (rows * costs.act + learner),
    }
    limit = min(limits, key=lambda name: limits[name])
    return Rates(limits[limit] * rows, limits[limit], limit)


def parts() -> dict[str, Callable[[], int]]:
    """What costs are measured of: an actor's loop, the learner's taking, its opt steps."""
    spec, layout = ENV.spec(), PROCESSOR.layout(ENV.spec())
    sender, receiver = item_channel()
    sender.bind(layout, n_actors=1, n_buffer=N_BUFFER, n_slots=2 * ROWS // N_BUFFER, backend="threads")
    proxy = ReplayBufferProxy.build(sender.proxy_config, sender, 0, 0, StopFlag())
    sampler = Sampler(ENV.build(0, N_ENVS), AGENT.build_actor(spec), PROCESSOR.build(spec, N_ENVS), layout)
    sampler.reset()
    buffer, agent = REPLAY.build(layout), AGENT.build(spec)

    def take() -> int:
        before = buffer.inserted
        receiver.drain(lambda message: buffer.push(message.items))
        return max(1, buffer.inserted - before)

    def opt() -> int:
        for _ in range(200):
            agent.opt(buffer)
        return 200

    return {"act": lambda: act(sampler, proxy, ROWS), "take": take, "opt": opt}


def measured(n_actors: int, spi: float | None, seconds: float) -> Rates:
    """A real run of processes."""
    start = time.perf_counter()
    result = train_async(
        AGENT,
        [AGENT] * n_actors,
        ENV,
        ENV.eval(),
        PROCESSOR,
        REPLAY,
        ActorManagerConfig(n_actors=n_actors, n_envs=N_ENVS, n_buffer=N_BUFFER),
        AsyncTrainerConfig(max_opts=None, max_time_s=seconds, samples_per_insert=spi, eval_interval=0),
        NullRecorder(),
        DefaultEvaluator(ENV.eval()),
    ).stats
    assert time.perf_counter() - start >= seconds
    return Rates(result.env_steps / result.duration_s, result.opt_steps_per_s, "")


def show_predictions(title: str, costs: Costs) -> None:
    print(f"\n{title}\n")
    print("| actors | spi null: env steps/s, opt steps/s | spi 8 | who limits | spi 0.5 | who limits |")
    print("|---|---|---|---|---|---|")
    for n in COUNTS:
        free, eight, half = (predict(costs, n, spi, AGENT.batch_size) for spi in (None, 8.0, 0.5))
        cells = [f"{r.env:,.0f}, {r.opt:,.0f}" for r in (free, eight, half)]
        print(f"| {n} | {cells[0]} | {cells[1]} | {eight.limit} | {cells[2]} | {half.limit} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each real run")
    parser.add_argument("--gpu-ms", type=float, default=0.25, help="an opt step on the GPU that is assumed, in ms")
    options = parser.parse_args()
    torch.set_num_threads(1)
    times = interleaved(parts(), options.rounds)
    costs = Costs(*(sorted(times[name])[options.rounds // 2] * 1e-6 for name in ("act", "take", "opt")))
    print(f"CartPole, {N_ENVS} environments an actor, MLP 128-128, batches of 128, {N_BUFFER} rows a message")
    print(f"t_act {costs.act * 1e6:.2f} µs, t_take {costs.take * 1e6:.3f} µs, t_opt {costs.opt * 1e6:.0f} µs")

    cores = len(os.sched_getaffinity(0))
    print(f"\nThe model against real runs on {cores} cores\n")
    print("| actors | spi | env steps/s: model | measured | opt steps/s: model | measured |")
    print("|---|---|---|---|---|---|")
    for n in (1, 2):
        for spi in (None, 8.0, 0.5):
            model, real = predict(costs, n, spi, AGENT.batch_size, cores), measured(n, spi, options.seconds)
            print(
                f"| {n} | {spi or 'null'} | {model.env:,.0f} | {real.env:,.0f} | {model.opt:,.0f} | {real.opt:,.0f} |"
            )

    show_predictions("A core for each actor and one for the learner, which computes on it", costs)
    gpu = Costs(costs.act, costs.take, options.gpu_ms * 1e-3)
    show_predictions(f"The same, with opt steps that take {options.gpu_ms} ms on a GPU (assumed)", gpu)


if __name__ == "__main__":
    main()
