"""APPO with Sample Factory: one rollout worker, and the policy and the learner in their own processes.

Request: `hidden`, `batch` of an update, `n_envs`, `seconds`, `seed`.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from typing import Any

import gymnasium
from answering import Marks, answer
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

ROLLOUT = 16


def environment(name: str, cfg: Any = None, env_config: Any = None, render_mode: Any = None) -> gymnasium.Env[Any, Any]:
    return gymnasium.make(name, render_mode=render_mode)


class Watch(AlgoObserver):
    """Notes a mark now and then, and ends the run when it was long enough."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.marks: Marks = []
        self.first: float | None = None

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
        env_steps = runner.total_env_steps_since_resume or 0
        if not env_steps:
            return
        now = time.perf_counter()
        self.first = self.first or now
        self.marks.append((now - self.first, training_iteration_since_resume, env_steps))
        if now - self.first > self.limit:
            runner.cfg.train_for_env_steps = 0  # so that it finds that it has made them


def run(request: dict[str, Any]) -> dict[str, Any]:
    folder = tempfile.mkdtemp()
    arguments = [
        "--algo=APPO",
        "--env=CartPole-v1",
        "--experiment=cartpole",
        f"--train_dir={folder}",
        f"--seed={request['seed']}",
        "--device=cpu",
        "--async_rl=True",
        "--serial_mode=False",
        "--num_workers=1",
        "--worker_num_splits=2",
        f"--num_envs_per_worker={request['n_envs']}",
        "--policy_workers_per_policy=1",
        f"--rollout={ROLLOUT}",
        "--use_rnn=False",
        "--recurrence=1",
        f"--batch_size={request['batch']}",
        "--num_batches_per_epoch=1",
        "--num_epochs=1",
        "--encoder_mlp_layers",
        *map(str, request["hidden"]),
        "--nonlinearity=relu",
        "--normalize_input=False",
        "--normalize_returns=False",
        "--with_vtrace=False",
        "--train_for_env_steps=1000000000",
        "--save_every_sec=1000000",
        "--with_wandb=False",
    ]
    try:
        register_env("CartPole-v1", environment)
        parser, _ = parse_sf_args(argv=arguments)
        _, runner = make_runner(parse_full_cfg(parser, arguments))
        watch = Watch(request["seconds"])
        runner.register_observer(watch)
        runner.init()
        runner.run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"marks": watch.marks}


if __name__ == "__main__":
    answer(run, "sample-factory", "torch", "gymnasium", "numpy")
