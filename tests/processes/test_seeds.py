"""No two environments of some runs begin alike, and the same command begins alike again."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.actor_manager import ActorManager, ActorManagerConfig
from outrider.agents.dqn import DqnConfig
from outrider.async_trainer import AsyncTrainer, AsyncTrainerConfig
from outrider.channel import item_channel
from outrider.envs.gymnasium import GymEnvConfig
from outrider.evaluation import DefaultEvaluator
from outrider.flags import InitGuard, StopFlag
from outrider.model_sync import model_channel
from outrider.recording import NullRecorder
from outrider.replay.uniform import SimpleReplayBufferConfig
from outrider.sampling import SimpleStepProcessorConfig

AGENT = DqnConfig(hidden=(8,), batch_size=8)
ENV = GymEnvConfig(id="CartPole-v1")


def beginnings(seed: int, n_actors: int, n_envs: int) -> dict[tuple[int, int, int], tuple[bytes, bytes]]:
    """What each environment of each actor of a run begins with: its first observation, and its first 20 actions."""
    seen: dict[tuple[int, int, int], tuple[bytes, bytes]] = {}
    stop, guard = StopFlag(), InitGuard()
    item_sender, item_receiver = item_channel()
    model_sender, model_receiver = model_channel()
    manager = ActorManagerConfig(n_envs=n_envs, n_buffer=20 * n_envs)
    agents, processor = [AGENT] * n_actors, SimpleStepProcessorConfig()
    with ActorManager.build(manager, agents, ENV, processor, item_sender, model_receiver, stop, seed=seed) as actors:
        config = AsyncTrainerConfig(eval_interval=0)
        replay = SimpleReplayBufferConfig(capacity=1_000)
        trainer = AsyncTrainer.build(config, AGENT, ENV, replay, item_receiver, model_sender, stop, seed=seed)

        def look(message: Any) -> None:  # nothing is inserted, so nothing is learnt, and all actors explore alike
            for e in range(n_envs):
                rows = message.items[e::n_envs]
                seen.setdefault((seed, message.actor, e), (rows["obs"][0].tobytes(), rows["act"].tobytes()))
            if len(seen) == n_actors * n_envs:
                trainer.request_stop()

        source: Any = trainer.learner.source
        source._insert = look
        actors.run(guard)
        trainer.train(NullRecorder(), DefaultEvaluator(ENV), guard)
    item_receiver.close()
    model_sender.close()
    return seen


@pytest.mark.parametrize(("n_actors", "n_envs"), [(8, 1), (4, 3)])
def test_all_environments_of_three_runs_begin_differently_and_the_same_run_begins_alike(
    n_actors: int, n_envs: int
) -> None:
    runs = [beginnings(seed, n_actors, n_envs) for seed in (0, 1, 2)]
    once = runs[0] | runs[1] | runs[2]
    n = 3 * n_actors * n_envs
    assert len({obs for obs, _ in once.values()}) == n
    assert len({act for _, act in once.values()}) >= n - 1, "random actions are drawn for each environment by itself"
    again = beginnings(1, n_actors, n_envs)
    assert again == runs[1]
