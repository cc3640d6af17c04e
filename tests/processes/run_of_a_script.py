"""A script as a user might write it: no main guard, torch used before, environments from whatever is at hand."""

import functools
import multiprocessing
import sys

import gymnasium
import numpy as np
import torch

import outrider

print("the script runs", flush=True)
multiprocessing.set_start_method("fork")  # a user's choice for processes of his own
square = torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # a parallel region: OpenMP has its threads now


class Anything(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=20):
        self.length = length
        self.weights = torch.ones(200, 200)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self.t += 1
        (self.weights @ self.weights).sum().item()
        return np.zeros(4, np.float32), 1.0, False, self.t == self.length, {}


class Factory:
    def __call__(self):
        return Anything()


def closure(length):
    class Local(Anything):
        pass

    def make():
        return Local(length)

    return make, Local


Anything().step  # noqa: B018  as scripts do
make, local_class = closure(20)
kinds = {
    "class": Anything,
    "local class": local_class,
    "closure": make,
    "lambda": lambda: Anything(20),
    "partial": functools.partial(Anything, 20),
    "object": Factory(),
}
for kind, env in kinds.items():
    result = outrider.train(
        env=env,
        n_actors=2,
        run_dir=f"{sys.argv[1]}/{kind}",
        trainer={"max_opts": 20, "warmup_period": 100, "eval_interval": 10},
        evaluator={"n_episodes": 1},
        recorder={"console": "off"},
    )
    assert result.stats.best_score == 20.0
    print(kind, result.stats.opt_steps, flush=True)
