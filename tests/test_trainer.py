"""The synchronous trainer is the oracle: equal seeds give bit-identical parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.agents.dqn import DqnConfig
from outrider.agents.exploration import EpsilonGreedyConfig
from outrider.agents.sac import SacConfig
from outrider.envs.gymnasium import GymEnvConfig
from outrider.evaluation import DefaultEvaluator
from outrider.recording import MemoryRecorder
from outrider.replay.uniform import SimpleReplayBufferConfig
from outrider.sampling import NStepProcessorConfig, SimpleStepProcessorConfig
from outrider.trainer import Trainer
from outrider.trainer_config import AsyncTrainerConfig

AGENTS: dict[str, tuple[Any, str]] = {
    "dqn": (
        DqnConfig(hidden=(16, 16), batch_size=32, explorer=EpsilonGreedyConfig(decay_env_steps=500)),
        "CartPole-v1",
    ),
    "sac": (SacConfig(hidden=(16, 16), batch_size=32), "Pendulum-v1"),
}


def train(agent: str, seed: int, *, n_actors: int = 2, n_envs: int = 2, n_steps: int = 1) -> tuple[Trainer, Any]:
    config, env_id = AGENTS[agent]
    env = GymEnvConfig(id=env_id)
    processor = SimpleStepProcessorConfig() if n_steps == 1 else NStepProcessorConfig(n_steps=n_steps, gamma=0.99)
    trainer = Trainer.build(
        AsyncTrainerConfig(max_opts=150, warmup_period=200, samples_per_insert=16.0, eval_interval=50, sync_interval=3),
        config,
        [config] * n_actors,
        env,
        env.eval(),
        processor,
        SimpleReplayBufferConfig(capacity=300),
        n_envs=n_envs,
        seed=seed,
    )
    recorder = MemoryRecorder()
    trainer.train(recorder, DefaultEvaluator(env.eval(), n_episodes=2))
    return trainer, recorder


def parameters(trainer: Trainer) -> bytes:
    return b"".join(np.asarray(value).tobytes() for value in trainer.agent.model_info()[1].values())


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("n_steps", [1, 3])
def test_equal_seeds_give_bit_identical_parameters(agent: str, n_steps: int) -> None:
    (one, first), (other, second) = train(agent, 7, n_steps=n_steps), train(agent, 7, n_steps=n_steps)
    assert parameters(one) == parameters(other)
    scores = [[line["eval/mean_reward"] for line in r.lines if "eval/mean_reward" in line] for r in (first, second)]
    assert scores[0] == scores[1]
    assert len(scores[0]) == 3


@pytest.mark.parametrize("agent", AGENTS)
def test_another_seed_gives_other_parameters(agent: str) -> None:
    assert parameters(train(agent, 7)[0]) != parameters(train(agent, 8)[0])


def test_statistics_count_what_every_actor_did() -> None:
    trainer, _ = train("sac", 1, n_actors=3, n_envs=2)
    stats = trainer.actor_stats()
    assert [s.actor_id for s in stats] == [0, 1, 2]
    assert sum(s.samples for s in stats) == trainer.buffer.inserted
    assert max(s.env_steps for s in stats) - min(s.env_steps for s in stats) <= 2, "they take turns"
