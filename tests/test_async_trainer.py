from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from outrider.actor_manager import ActorManager, ActorManagerConfig
from outrider.agents.dqn import DqnConfig
from outrider.async_trainer import AsyncTrainer, AsyncTrainerConfig
from outrider.channel import item_channel
from outrider.envs.gymnasium import GymEnvConfig
from outrider.errors import ConfigError
from outrider.flags import StopFlag
from outrider.model_sync import model_channel
from outrider.replay.uniform import SimpleReplayBufferConfig
from outrider.sampling import NStepProcessorConfig, SimpleStepProcessorConfig
from outrider.testing import FakeAgentConfig, SpacesEnv
from outrider.trainer import Trainer


def env_config(size: int = 2, n_actions: int = 2) -> GymEnvConfig:
    observations, actions = spaces.Box(-1, 1, (size,), np.float32), spaces.Discrete(n_actions)
    return GymEnvConfig(id=SpacesEnv, kwargs={"observation_space": observations, "action_space": actions})


def build(kind: str, env_eval: GymEnvConfig, trainer: dict[str, Any], capacity: int = 1000) -> None:
    agent, config = FakeAgentConfig(batch_size=32), AsyncTrainerConfig(**trainer)
    replay, processor = SimpleReplayBufferConfig(capacity=capacity), SimpleStepProcessorConfig()
    if kind == "sync":
        Trainer.build(config, agent, [agent], env_config(), env_eval, processor, replay)
        return
    stop, (item_sender, item_receiver), (model_sender, model_receiver) = StopFlag(), item_channel(), model_channel()
    ActorManager.build(
        ActorManagerConfig(), [agent], env_config(), processor, item_sender, model_receiver, stop
    )  # nothing is started, so there is nothing to stop
    AsyncTrainer.build(config, agent, env_eval, replay, item_receiver, model_sender, stop)


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize(("other", "name"), [({"size": 3}, "observation_space"), ({"n_actions": 3}, "action_space")])
def test_an_environment_for_evaluation_with_other_spaces_is_refused_by_name(
    kind: str, other: dict[str, int], name: str
) -> None:
    with pytest.raises(ConfigError, match=rf"env_config_eval\.{name}: expected the actors' .*, got "):
        build(kind, env_config(**other), {"warmup_period": 100})
    build(kind, env_config(), {"warmup_period": 100})


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize(
    ("warmup", "key"), [(31, "agent.batch_size: expected at most"), (1001, "trainer.warmup_period: expected at most")]
)
def test_a_warm_up_that_suits_neither_batch_nor_buffer_is_refused(kind: str, warmup: int, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        build(kind, env_config(), {"warmup_period": warmup})


def threads_after(before_import: str = "", then: str = "", **environment: str) -> list[int]:
    """Torch's threads before and after the choice for one actor, in a process of its own."""
    code = f"""
import os, torch
{before_import}
from outrider.async_trainer import choose_threads
{then}
before = torch.get_num_threads()
choose_threads(1, len(os.sched_getaffinity(0)))
print(before, torch.get_num_threads())
"""
    inherited = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [int(word) for word in done.stdout.split()]


def test_the_learner_leaves_cores_to_the_actors() -> None:
    before, after = threads_after()
    assert after == min(before, max(1, len(os.sched_getaffinity(0)) - 1))


@pytest.mark.parametrize("when", ["before_import", "then"])
def test_a_number_of_threads_that_the_user_set_stays(when: str) -> None:
    mine = 2 * (os.cpu_count() or 1) + 1
    assert threads_after(**{when: f"torch.set_num_threads({mine})"}) == [mine, mine]
    assert threads_after(OMP_NUM_THREADS=str(os.cpu_count())) == [os.cpu_count()] * 2


def test_rewards_summed_with_another_discount_than_the_agents_are_refused() -> None:
    env, agent = GymEnvConfig(id="CartPole-v1"), DqnConfig(gamma=0.9)
    processor = NStepProcessorConfig(n_steps=3, gamma=0.99)
    sender, _ = item_channel()
    _, receiver = model_channel()
    with pytest.raises(ConfigError, match=r"step_processor.gamma: expected agent.gamma \(0.9\), got 0.99"):
        ActorManager.build(ActorManagerConfig(), [agent], env, processor, sender, receiver, StopFlag())
    with pytest.raises(ConfigError, match=r"step_processor\.gamma"):
        Trainer.build(AsyncTrainerConfig(), agent, [agent], env, env, processor, SimpleReplayBufferConfig())
