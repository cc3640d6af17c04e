"""Trains with Stable-Baselines3 and says when it was where.

Request: `algorithm` (`dqn` or `sac`), `env`, `arguments` of the algorithm, `hidden`, `seed`, `steps`; optionally
`seconds` of training after which it ends, and `eval_every` env steps or `eval_every_updates`, `episodes` and `target`,
the score that ends it.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import torch
from answering import Marks, answer
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor


class Watch(BaseCallback):
    """Notes a mark before each collection; evaluates when it is due, which the clock leaves out."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__()
        self.limit = request.get("seconds", float("inf"))
        self.every = request.get("eval_every", 0)
        self.every_updates = request.get("eval_every_updates", 0)
        self.target = request.get("target", float("inf"))
        self.episodes = request.get("episodes", 20)
        self.env = Monitor(gymnasium.make(request["env"])) if self.every or self.every_updates else None
        self.marks: Marks = []
        self.scores: list[tuple[float, int, int, float]] = []
        self.first: float | None = None
        self.evaluating_s = 0.0

    def mark(self) -> tuple[float, int, int]:
        now = time.perf_counter()
        if self.first is None:
            self.first = now
        return now - self.first - self.evaluating_s, self.model._n_updates, self.num_timesteps

    def evaluate(self) -> bool:
        """Whether to go on."""
        reached = self.mark()
        started = time.perf_counter()
        score, _ = evaluate_policy(self.model, self.env, self.episodes)
        self.evaluating_s += time.perf_counter() - started
        self.scores.append((*reached, float(score)))
        return score < self.target

    def _on_rollout_start(self) -> None:
        self.marks.append(self.mark())
        if self.every_updates and self.model._n_updates and self.model._n_updates % self.every_updates == 0:
            self.evaluate()

    def _on_step(self) -> bool:
        due = self.every and self.num_timesteps % self.every == 0
        return self.mark()[0] < self.limit and (not due or self.evaluate())

    def _on_training_end(self) -> None:
        self.marks.append(self.mark())


def run(request: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    watch = Watch(request)
    model = {"dqn": DQN, "sac": SAC}[request["algorithm"]](
        "MlpPolicy",
        Monitor(gymnasium.make(request["env"])),
        policy_kwargs={"net_arch": request["hidden"]},
        seed=request["seed"],
        device="cpu",
        **{key: tuple(value) if isinstance(value, list) else value for key, value in request["arguments"].items()},
    )
    model.learn(request["steps"], callback=watch)
    return {"marks": watch.marks, "scores": watch.scores}


if __name__ == "__main__":
    answer(run, "stable-baselines3", "torch", "gymnasium", "numpy")
