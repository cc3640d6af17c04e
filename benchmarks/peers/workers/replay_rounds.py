"""Draws batches from a replay buffer full of rows of CartPole's shape, and says what one took in CPU time.

Its argument is the library. Request: `kind` (`uniform`, `tensors`, `prioritised`), `capacity`, `batch`, `batches`.
`prioritised` also writes priorities back. `tensors` is outrider's `uniform` with what its agents then make of a batch;
the others give tensors, or arrays, by themselves.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from answering import answer

Round = Callable[[int], None]  # of so many batches
ALPHA, BETA = 0.6, 0.4


def rows(n: int) -> dict[str, Any]:
    """Columns of `n` transitions."""
    rng = np.random.default_rng(0)
    return {
        "obs": rng.standard_normal((n, 4), np.float32),
        "act": rng.integers(0, 2, n),
        "reward": np.ones(n, np.float32),
        "next_obs": rng.standard_normal((n, 4), np.float32),
        "terminated": rng.random(n) < 0.01,
        "truncated": rng.random(n) < 0.005,
    }


def errors(batch: int) -> Any:
    """TD errors of a batch."""
    return np.abs(np.random.default_rng(1).standard_normal(batch)) + 1e-3


def sb3(kind: str, capacity: int, batch: int) -> Round:
    import torch
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    torch.set_num_threads(1)
    buffer = ReplayBuffer(capacity, spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2), "cpu")
    columns = rows(capacity)
    buffer.observations[:, 0], buffer.next_observations[:, 0] = columns["obs"], columns["next_obs"]
    buffer.actions[:, 0, 0], buffer.rewards[:, 0] = columns["act"], columns["reward"]
    buffer.dones[:, 0], buffer.timeouts[:, 0] = columns["terminated"] | columns["truncated"], columns["truncated"]
    buffer.full = True
    return repeat(lambda: buffer.sample(batch))


def torchrl(kind: str, capacity: int, batch: int) -> Round:
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    torch.set_num_threads(1)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=batch)
    buffer.extend(TensorDict({name: torch.from_numpy(c) for name, c in rows(capacity).items()}, [capacity]))
    return repeat(buffer.sample)


def tianshou(kind: str, capacity: int, batch: int) -> Round:
    from tianshou.data import Batch, PrioritizedReplayBuffer, ReplayBuffer

    buffer = (
        PrioritizedReplayBuffer(capacity, ALPHA, BETA, ignore_obs_next=False)
        if kind == "prioritised"
        else ReplayBuffer(capacity)
    )
    names = {"obs": "obs", "act": "act", "rew": "reward", "obs_next": "next_obs"}
    columns = rows(capacity)
    columns["terminated"][-1] = True

    def row(i: int) -> Any:
        return Batch(
            {theirs: columns[ours][i] for theirs, ours in names.items()}
            | {"terminated": columns["terminated"][i], "truncated": columns["truncated"][i], "info": {}}
        )

    buffer.add(row(0))  # makes the columns; one by one all of them take half a minute
    for theirs, ours in [*names.items(), ("terminated", "terminated"), ("truncated", "truncated")]:
        getattr(buffer, theirs)[:] = columns[ours]
    buffer.done[:] = columns["terminated"] | columns["truncated"]
    buffer._size, buffer._insertion_idx = capacity, 0
    if kind != "prioritised":
        return repeat(lambda: buffer.sample(batch))
    buffer.update_weight(np.arange(capacity), errors(capacity))
    td_errors = errors(batch)

    def draw_and_update() -> None:
        _, ixs = buffer.sample(batch)
        buffer.update_weight(ixs, td_errors)

    return repeat(draw_and_update)


def cpprb(kind: str, capacity: int, batch: int) -> Round:
    from cpprb import PrioritizedReplayBuffer, ReplayBuffer

    fields = {name: {"shape": column.shape[1:] or 1, "dtype": column.dtype} for name, column in rows(1).items()}
    if kind != "prioritised":
        buffer = ReplayBuffer(capacity, fields)
        buffer.add(**rows(capacity))
        return repeat(lambda: buffer.sample(batch))
    prioritised = PrioritizedReplayBuffer(capacity, fields, alpha=ALPHA)
    prioritised.add(**rows(capacity), priorities=errors(capacity))
    td_errors = errors(batch)

    def draw_and_update() -> None:
        drawn = prioritised.sample(batch, BETA)
        prioritised.update_priorities(drawn["indexes"], td_errors)

    return repeat(draw_and_update)


def outrider(kind: str, capacity: int, batch: int) -> Round:
    import torch

    from outrider.agents.batches import Batches
    from outrider.agents.dqn import DqnConfig
    from outrider.envs.gymnasium import GymEnvConfig
    from outrider.replay.uniform import SimpleReplayBufferConfig
    from outrider.sampling import transition_layout

    spec = GymEnvConfig(id="CartPole-v1").spec()
    layout = transition_layout(spec)
    columns = rows(capacity) | {"n_steps": np.ones(capacity), "model_version": np.zeros(capacity)}
    items = {field.name: columns[field.name].astype(field.dtype) for field in layout.fields}
    if kind != "prioritised":
        uniform = SimpleReplayBufferConfig(capacity=capacity).build(layout)
        uniform.push(items)
        tensors = Batches(spec, DqnConfig().encoder(spec), lambda act: act, 0.99, torch.device("cpu"))
        return repeat(lambda: tensors(uniform.batch(batch)) if kind == "tensors" else uniform.batch(batch))
    from outrider.replay.prioritized import PrioritizedReplayBufferConfig

    buffer = PrioritizedReplayBufferConfig(capacity=capacity, alpha=ALPHA, beta=BETA).build(layout)
    buffer.push(items)
    buffer.update_priority(np.arange(capacity), errors(capacity))
    td_errors = errors(batch)

    def draw_and_update() -> None:
        buffer.update_priority(buffer.batch(batch).ixs, td_errors)

    return repeat(draw_and_update)


def repeat(once: Callable[[], object]) -> Round:
    def run(n: int) -> None:
        for _ in range(n):
            once()

    return run


LIBRARIES: dict[str, tuple[Callable[[str, int, int], Round], tuple[str, ...]]] = {
    "sb3": (sb3, ("stable-baselines3", "torch", "numpy")),
    "torchrl": (torchrl, ("torchrl", "tensordict", "torch", "numpy")),
    "tianshou": (tianshou, ("tianshou", "numba", "numpy")),
    "cpprb": (cpprb, ("cpprb", "numpy")),
    "outrider": (outrider, ("torch", "numba", "numpy")),
}

build, packages = LIBRARIES[sys.argv[1]]
build = cache(build)


def work(request: dict[str, Any]) -> dict[str, Any]:
    run = build(request["kind"], request["capacity"], request["batch"])
    started = time.process_time()
    run(request["batches"])
    return {"us": (time.process_time() - started) / request["batches"] * 1e6}


if __name__ == "__main__":
    answer(work, *packages)
