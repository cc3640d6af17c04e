"""Asynchronous training, every part by hand: DQN on CartPole-v1 with two actor processes.

    python examples/async_training.py [MODEL_DIR] [--short]

MODEL_DIR (default: a new directory below runs/) gets TensorBoard events, metrics.jsonl and the models. Put a
`trainer.yaml` or a `replay_buffer.yaml` into it beforehand to change what this script would write there.
"""

import sys
import time
from pathlib import Path

import torch

from outrider import (
    ActorManager,
    ActorManagerConfig,
    AsyncTrainer,
    AsyncTrainerConfig,
    DefaultEvaluator,
    DqnConfig,
    GymEnvConfig,
    InitGuard,
    SimpleReplayBufferConfig,
    SimpleStepProcessorConfig,
    StopFlag,
    TensorboardRecorder,
    actor_stats_fmt,
    item_channel,
    model_channel,
)


def agent_config() -> DqnConfig:
    return DqnConfig(hidden=(64, 64), batch_size=64)


def write_missing_configs(model_dir: Path, max_opts: int) -> None:
    model_dir.mkdir(parents=True, exist_ok=True)
    defaults = {
        "replay_buffer.yaml": SimpleReplayBufferConfig(capacity=50_000),
        "trainer.yaml": AsyncTrainerConfig(max_opts=max_opts, eval_interval=max_opts // 5, samples_per_insert=8.0),
    }
    for name, config in defaults.items():
        if not (model_dir / name).exists():
            config.save(model_dir / name)


def train(model_dir: Path) -> None:
    agent_configs = [agent_config() for _ in range(2)]  # one per actor; may differ in exploration and device
    env_config_train = GymEnvConfig(id="CartPole-v1")
    env_config_eval = env_config_train.eval()
    replay_buffer_config = SimpleReplayBufferConfig.load(model_dir / "replay_buffer.yaml")
    step_proc_config = SimpleStepProcessorConfig()
    actor_man_config = ActorManagerConfig()
    async_trainer_config = AsyncTrainerConfig.load(model_dir / "trainer.yaml")
    recorder = TensorboardRecorder(model_dir)
    evaluator = DefaultEvaluator(env_config_eval, seed=0, n_episodes=1)

    stop = StopFlag()  # shared flag that stops the actors
    item_sender, item_receiver = item_channel()  # transitions: actors -> trainer
    model_sender, model_receiver = model_channel()  # model info: trainer -> actors
    guard_init_env = InitGuard()  # one environment is constructed at a time

    actors = ActorManager.build(
        actor_man_config, agent_configs, env_config_train, step_proc_config, item_sender, model_receiver, stop
    )
    trainer = AsyncTrainer.build(
        async_trainer_config,
        agent_config(),
        env_config_eval,
        replay_buffer_config,
        item_receiver,
        model_sender,
        stop,
    )
    torch.set_num_threads(1)  # a count the user set is never overridden

    actors.run(guard_init_env)
    stats = trainer.train(recorder, evaluator, guard_init_env)
    print("Stats of async trainer")
    print(stats.fmt())

    stats = actors.stop_and_join()
    print("Stats of generated samples in actors")
    print(actor_stats_fmt(stats))


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--short"]
    directory = Path(arguments[0] if arguments else f"runs/async-training-{time.strftime('%Y%m%d-%H%M%S')}")
    write_missing_configs(directory, max_opts=500 if "--short" in sys.argv else 5_000)
    train(directory)
