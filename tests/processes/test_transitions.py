"""Every transition that reaches the learner is right: real actor processes, real rings, the real trainer."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from runs_with_faults import worker_pids

from outrider.actor import ActorState
from outrider.actor_manager import ActorManager, ActorManagerConfig
from outrider.async_trainer import AsyncTrainer, AsyncTrainerConfig
from outrider.channel import item_channel
from outrider.core import StepProcessorConfig
from outrider.data import Array, Batch, Episode, Items, Layout
from outrider.envs.gymnasium import GymEnvConfig
from outrider.flags import InitGuard, StopFlag
from outrider.model_sync import model_channel
from outrider.recording import NullRecorder
from outrider.sampling import NStepProcessorConfig, SimpleStepProcessorConfig
from outrider.seeding import env_seeds
from outrider.testing import CountEnv, FakeAgentConfig, TagEnv, vector_tag_env

LENGTHS = (7, 1, 4, 5, 23)  # of successive episodes, an episode of a single step among them
GAMMA = 0.5  # sums of a few rewards stay exact in float32
SEED = 11


@dataclass(frozen=True)
class KeepAllConfig:
    """A replay buffer that keeps every row as it came, and lets batches be drawn from the last of them."""

    def build(self, layout: Layout) -> KeepAll:
        return KeepAll()


class KeepAll:
    def __init__(self) -> None:
        self.messages: list[Array] = []
        self.inserted = self.sampled = 0

    def push(self, items: Items) -> None:
        assert isinstance(items, np.ndarray)
        self.messages.append(items.copy())
        self.inserted += len(items)

    def __len__(self) -> int:
        return self.inserted

    def accepts(self, layout: Layout) -> bool:
        return True

    def batch(self, size: int) -> Batch:
        self.sampled += size
        rows = np.resize(self.messages[-1], size)
        return Batch(rows, np.arange(size))

    def update_priority(self, ixs: Array, td_errors: Any) -> None:
        pass


class NoEvaluator:
    def evaluate(self, agent: Any) -> tuple[float, dict[str, Any]]:
        raise AssertionError("evaluation is off")

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Run:
    rows: Array
    sent: int
    heads: list[int]
    received: list[int]
    episodes: int
    received_episodes: list[tuple[int, Episode]]


def run(
    env: GymEnvConfig,
    processor: StepProcessorConfig,
    *,
    n_actors: int,
    n_envs: int,
    n_buffer: int,
    n_rows: int,
    backend: Any = "processes",
    meanwhile: Callable[[ActorManager], object] = lambda actors: None,
) -> Run:
    """Train a fake agent until `n_rows` rows came, stop, and take what is left in the rings.

    `meanwhile` is called in a thread when the training begins.
    """
    stop, guard = StopFlag(), InitGuard()
    item_sender, item_receiver = item_channel()
    model_sender, model_receiver = model_channel()
    agents = [FakeAgentConfig(n_weights=10)] * n_actors
    manager = ActorManagerConfig(n_envs=n_envs, n_buffer=n_buffer, backend=backend)
    with ActorManager.build(manager, agents, env, processor, item_sender, model_receiver, stop, seed=SEED) as actors:
        config = AsyncTrainerConfig(
            max_opts=None, max_env_steps=n_rows, samples_per_insert=None, warmup_period=100, eval_interval=0
        )
        trainer = AsyncTrainer.build(
            config, agents[0], env, KeepAllConfig(), item_receiver, model_sender, stop, seed=SEED
        )
        received: list[tuple[int, Episode]] = []
        messages = [0] * n_actors
        insert = trainer.learner.source._insert  # type: ignore[attr-defined]

        def spy(message: Any) -> None:
            messages[message.actor] += 1
            received.extend((message.actor, e) for e in message.episodes)
            insert(message)

        trainer.learner.source._insert = spy  # type: ignore[attr-defined]
        actors.run(guard)
        while {s.state for s in actors.stats()} != {ActorState.WAITING_FOR_MODEL}:
            time.sleep(0.01)  # else the quick ones might send all the rows before the last one is there
        disturber = threading.Thread(target=meanwhile, args=(actors,))
        disturber.start()
        trainer.train(NullRecorder(), NoEvaluator(), guard)
        disturber.join()
        stats = actors.stop_and_join()
        item_receiver.drain(spy)
        heads = item_sender.rings.heads().tolist()
    item_receiver.close()
    model_sender.close()
    buffer: Any = trainer.buffer
    rows, sent, episodes = (
        np.concatenate(buffer.messages),
        sum(s.samples for s in stats),
        sum(s.episodes for s in stats),
    )
    return Run(rows, sent, heads, messages, episodes, received)


def expected_rows(rows: Array, n_steps: int) -> dict[str, Array]:
    """What the rows of one environment must be, from the definition of TagEnv and the actions in the rows.

    Rows come in the order of their first step, so row i starts at global step i.
    """
    m = len(rows)
    lengths = np.resize(LENGTHS, m + len(LENGTHS))
    ends = np.cumsum(lengths)
    step = np.arange(m)
    episode = np.searchsorted(ends, step, side="right")
    t = step - np.where(episode > 0, ends[episode - 1], 0)
    k = np.minimum(n_steps, lengths[episode] - t)
    act = np.concatenate([rows["act"], np.zeros(n_steps, np.int64)])
    reward = np.zeros(m)
    for i in range(n_steps):
        reward += np.where(i < k, GAMMA**i * (4.0 * (step + i) + act[step + i]), 0.0)
    at_end = t + k == lengths[episode]
    terminates = episode % 2 == 0
    stream = rows["obs"][:, 0]
    return {
        "obs": np.stack([stream, episode, t, step], 1),
        "next_obs": np.stack([stream, episode, t + k, step + k], 1),
        "reward": reward.astype(np.float32),
        "terminated": at_end & terminates,
        "truncated": at_end & ~terminates,
        "n_steps": k.astype(np.int32),
    }


def check(result: Run, n_steps: int, n_actors: int, n_envs: int) -> None:
    rows = result.rows
    assert len(rows) == result.sent, "every committed row was received, none twice"
    assert rows.dtype["obs"].base == np.int64
    assert rows.dtype["next_obs"].base == np.int64
    assert rows.dtype["act"] == np.int64
    assert rows.dtype["reward"] == np.float32
    seeds = {s for actor in range(n_actors) for s in env_seeds(SEED, actor, 0, n_envs)}
    streams = {int(s) for s in np.unique(rows["obs"][:, 0])}
    assert streams == seeds, "every environment of every actor contributed, each under its own seed"
    for stream in streams:
        own = rows[rows["obs"][:, 0] == stream]
        # Actions of the last rows of an n-step window are not known: those rows are left out of the comparison.
        m = len(own) - n_steps + 1
        assert m > 0
        for name, values in expected_rows(own, n_steps).items():
            np.testing.assert_array_equal(own[name][:m], values[:m], err_msg=f"{name} of environment {stream}")


def test_transitions_are_right_and_none_is_lost_when_actors_are_killed() -> None:
    """Each actor is killed twice, at any moment; every incarnation's rows are a beginning of its environment's."""
    n_actors, n_envs, kills = 3, 2, 2

    def kill(actors: ActorManager) -> None:
        for k in range(kills):
            for i in range(n_actors):
                before = actors.stats()[i]
                while actors.stats()[i].samples < before.samples + 500 or actors.stats()[i].restarts < k:
                    time.sleep(0.005)
                os.kill(worker_pids()[f"actor {i}"], signal.SIGKILL)
        while min(s.restarts for s in actors.stats()) < kills or ActorState.RESTARTING in (
            s.state for s in actors.stats()
        ):
            time.sleep(0.01)
        last = [s.samples for s in actors.stats()]
        while any(s.samples < samples + 200 for s, samples in zip(actors.stats(), last, strict=True)):
            time.sleep(0.01)
        actors.stop.set()

    result = run(
        env_config("serial"),
        processor_config(1),
        n_actors=n_actors,
        n_envs=n_envs,
        n_buffer=7,
        n_rows=10**7,
        meanwhile=kill,
    )
    rows = result.rows
    seeds = {s for i in range(n_actors) for k in range(kills + 1) for s in env_seeds(SEED, i, k, n_envs)}
    assert {int(s) for s in np.unique(rows["obs"][:, 0])} == seeds, "each incarnation had its own seeds"
    for stream in seeds:
        own = rows[rows["obs"][:, 0] == stream]
        for name, values in expected_rows(own, 1).items():
            np.testing.assert_array_equal(own[name], values, err_msg=f"{name} of environment {stream}")
    # An actor that is killed between a message and its note of it has sent one more than it could say.
    assert 0 <= len(rows) - result.sent <= 7 * n_actors * kills
    assert result.heads == result.received, "every committed message was received, none twice"


def env_config(mode: str) -> GymEnvConfig:
    kwargs = {"lengths": LENGTHS, "terminates": None, "reuse": True}
    if mode == "serial":
        return GymEnvConfig(id=TagEnv, kwargs=kwargs)
    return GymEnvConfig(id=vector_tag_env, kwargs={"mode": mode, **kwargs})


def processor_config(n_steps: int) -> StepProcessorConfig:
    return SimpleStepProcessorConfig() if n_steps == 1 else NStepProcessorConfig(n_steps=n_steps, gamma=GAMMA)


MODES = ("serial", "NextStep", "SameStep", "Disabled")
ALL = list(itertools.product(MODES, (1, 3), (1, 3, 7, 64), (1, 5)))
SOME = [  # each value of each factor, each mode with one and several environments, 10^5 rows together
    ("serial", 1, 64, 5),
    ("serial", 3, 7, 1),
    ("NextStep", 3, 7, 5),
    ("NextStep", 1, 3, 1),
    ("SameStep", 3, 64, 1),
    ("SameStep", 1, 1, 5),
    ("Disabled", 3, 1, 1),
    ("Disabled", 1, 7, 5),
]


@pytest.mark.parametrize(("mode", "n_envs", "n_buffer", "n_steps"), SOME)
def test_every_transition_of_four_actors_is_right(mode: str, n_envs: int, n_buffer: int, n_steps: int) -> None:
    result = run(
        env_config(mode), processor_config(n_steps), n_actors=4, n_envs=n_envs, n_buffer=n_buffer, n_rows=12_500
    )
    check(result, n_steps, n_actors=4, n_envs=n_envs)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "n_envs", "n_buffer", "n_steps"), ALL)
def test_a_hundred_thousand_transitions_are_right(mode: str, n_envs: int, n_buffer: int, n_steps: int) -> None:
    result = run(
        env_config(mode), processor_config(n_steps), n_actors=4, n_envs=n_envs, n_buffer=n_buffer, n_rows=100_000
    )
    check(result, n_steps, n_actors=4, n_envs=n_envs)


def test_threads_send_the_same_transitions_as_processes() -> None:
    result = run(
        env_config("serial"),
        processor_config(5),
        n_actors=3,
        n_envs=2,
        n_buffer=7,
        n_rows=5_000,
        backend="threads",
    )
    check(result, 5, n_actors=3, n_envs=2)


def test_finished_episodes_arrive_with_their_lengths() -> None:
    n_actors, n_envs = 2, 2
    result = run(env_config("serial"), processor_config(1), n_actors=n_actors, n_envs=n_envs, n_buffer=7, n_rows=3_000)
    # An actor that is stopped while its ring is full never sends its last step, nor the episodes that ended in it.
    assert 0 <= result.episodes - len(result.received_episodes) <= n_actors * n_envs
    for actor, env in itertools.product(range(2), range(2)):
        lengths = [e.length for a, e in result.received_episodes if a == actor and e.env == env]
        assert lengths == np.resize(LENGTHS, len(lengths)).tolist()
        assert lengths


def test_a_message_is_sent_when_it_gets_old_though_it_is_not_full() -> None:
    class SlowEnv(CountEnv):  # a full message of it would take a quarter of an hour
        def step(self, action: Any) -> Any:
            time.sleep(0.01)
            return super().step(action)

    env = GymEnvConfig(id=SlowEnv)
    result = run(env, SimpleStepProcessorConfig(), n_actors=1, n_envs=1, n_buffer=100_000, n_rows=110)
    assert result.sent >= 110
