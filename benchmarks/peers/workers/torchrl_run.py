"""DQN with TorchRL's asynchronous collector: one process collects while this one learns from what it sent before.

Request: `hidden`, `batch`, `n_envs`, `updates_per_batch` of frames, `warmup` rows before the first, `seconds`, `seed`.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import pairwise
from typing import Any

import gymnasium
import torch
from answering import Marks, answer
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.collectors import MultiAsyncCollector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymWrapper
from torchrl.modules import EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, HardUpdate

ID = "CartPole-v1"
FRAMES = 1024  # in a batch from the collector
TARGET_INTERVAL = 250


def environment(n_envs: int) -> GymWrapper:
    if n_envs == 1:
        return GymWrapper(gymnasium.make(ID), categorical_action_encoding=True)
    resets = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}  # TorchRL resets them by itself
    envs = gymnasium.make_vec(ID, num_envs=n_envs, vectorization_mode="sync", vector_kwargs=resets)
    return GymWrapper(envs, categorical_action_encoding=True)


def network(hidden: list[int]) -> nn.Sequential:
    sizes = [4, *hidden]
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 2))


def run(request: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(request["seed"])
    spec = environment(1).action_spec
    actor = QValueActor(network(request["hidden"]), in_keys=["observation"], spec=spec)
    explorer = EGreedyModule(spec, eps_init=0.05, eps_end=0.05, annealing_num_steps=1)
    replay = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=request["batch"])
    collector = MultiAsyncCollector(
        [partial(environment, request["n_envs"])],
        TensorDictSequential(actor, explorer),
        frames_per_batch=FRAMES,
        total_frames=-1,
    )
    loss_module = DQNLoss(actor, action_space=spec, delay_value=True)
    loss_module.make_value_estimator(gamma=0.99)
    target = HardUpdate(loss_module, value_network_update_interval=TARGET_INTERVAL)
    adam = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    marks: Marks = []
    first, updates, env_steps = time.perf_counter(), 0, 0
    for rows in collector:
        replay.extend(rows.reshape(-1).exclude("collector"))
        env_steps += rows.numel()
        if env_steps < request["warmup"]:
            continue
        for _ in range(request["updates_per_batch"]):
            loss = loss_module(replay.sample())["loss"]
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(loss_module.parameters(), 10.0)
            adam.step()
            target.step()
            updates += 1
        collector.update_policy_weights_()
        marks.append((time.perf_counter() - first, updates, env_steps))
        if marks[-1][0] - marks[0][0] > request["seconds"]:
            break
    collector.shutdown()
    return {"marks": marks}


if __name__ == "__main__":
    answer(run, "torchrl", "tensordict", "torch", "gymnasium", "numpy")
