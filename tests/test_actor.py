from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from outrider.actor import Actor, ActorBoard, ActorStat, ActorState, actor_stats_fmt
from outrider.channel import ItemReceiver, ItemSender, ReplayBufferProxyConfig, item_channel
from outrider.data import Array
from outrider.envs.gymnasium import GymEnvConfig
from outrider.errors import LayoutMismatch
from outrider.flags import InitGuard, StopFlag
from outrider.model_sync import ModelReceiver, ModelSender, model_channel
from outrider.sampling import NStepProcessorConfig, SimpleStepProcessorConfig
from outrider.seeding import spread
from outrider.testing import FakeAgentConfig, TagEnv

ENV = GymEnvConfig(id=TagEnv, kwargs={"lengths": (3, 5)})


class World:
    """Both channels, bound as the manager and the trainer bind them, and one message of room in the ring."""

    def __init__(self, n_weights: int = 10) -> None:
        self.stop, self.guard = StopFlag(), InitGuard()
        self.item_sender: ItemSender
        self.item_receiver: ItemReceiver
        self.model_sender: ModelSender
        self.model_receiver: ModelReceiver
        self.item_sender, self.item_receiver = item_channel()
        self.model_sender, self.model_receiver = model_channel()
        spec = ENV.spec()
        layout = SimpleStepProcessorConfig().layout(spec)
        self.item_sender.bind(layout, n_actors=1, n_buffer=4, n_slots=100, backend="threads")
        self.agent = FakeAgentConfig(n_weights=n_weights).build(spec)
        self.model_sender.bind(self.agent.model_info()[1], backend="threads")

    def actor(self, n_weights: int = 10, **options: Any) -> Actor:
        agent, proxy = FakeAgentConfig(n_weights=n_weights), ReplayBufferProxyConfig(n_buffer=4)
        return Actor.build(0, agent, ENV, SimpleStepProcessorConfig(), proxy, self.stop, 7, **options)

    def run(self, actor: Actor) -> ActorStat:
        return actor.run(self.item_sender, self.model_receiver, self.guard)

    def publish(self) -> None:
        n_opts, info = self.agent.model_info()
        self.model_sender.publish(n_opts, info, env_steps=0)

    def rows(self) -> Array:
        messages: list[Array] = []
        self.item_receiver.drain(lambda message: messages.append(message.items.copy()))
        return np.concatenate(messages)


def test_an_actor_runs_in_the_thread_that_calls_it() -> None:
    world, board = World(), ActorBoard(1, shared=False)
    world.publish()
    actor = world.actor(stats=board, n_envs=2)
    step, steps = actor.policy.sample, 0

    def sample(obs: Any) -> Any:  # the stop flag may come from anywhere, here from within
        nonlocal steps
        steps += 1
        if steps == 15:
            world.stop.set()
        return step(obs)

    actor.policy.sample = sample  # type: ignore[method-assign]
    stat = world.run(actor)
    rows = world.rows()
    assert steps == 15
    assert len(rows) == stat.samples == stat.env_steps == 30, "the rows of the unfinished message came, too"
    assert stat.episodes == 6
    assert stat.state is ActorState.FINISHED
    assert board.stats() == [stat]
    assert set(rows["obs"][:, 0].tolist()) == set(spread(7, 2)), "each environment has a seed of its own"


def test_the_wait_for_the_first_model_is_no_part_of_an_actors_duration() -> None:
    world, board = World(), ActorBoard(1, shared=False)
    actor = world.actor(stats=board)
    acting = threading.Thread(target=world.run, args=(actor,))
    acting.start()
    while board.stats()[0].state is not ActorState.WAITING_FOR_MODEL:
        time.sleep(0.001)
    assert board.stats()[0].duration_s == 0.0
    world.publish()
    while board.stats()[0].duration_s == 0.0:
        time.sleep(0.001)
    world.stop.set()
    acting.join()
    assert board.stats()[0].duration_s > 0.0


def test_an_actor_does_not_act_before_the_first_publication_whatever_its_version() -> None:
    world = World()
    world.agent.n_opts = 41
    actor = world.actor()
    acted: list[int] = []
    sample = actor.policy.sample

    def spy(obs: Any) -> Any:
        acted.append(len(acted))
        if len(acted) == 4:
            world.stop.set()
        return sample(obs)

    actor.policy.sample = spy  # type: ignore[method-assign]
    thread = threading.Thread(target=world.run, args=(actor,))
    thread.start()
    while actor.cell.stat(0).state < ActorState.WAITING_FOR_MODEL:
        world.stop.wait(0.01)
    world.stop.wait(0.1)
    assert acted == []
    world.publish()
    thread.join(10.0)
    assert world.rows()["model_version"].tolist() == [41] * 4


def test_a_policy_with_other_parameters_than_the_learners_is_refused_before_its_first_action() -> None:
    world = World(n_weights=10)
    world.publish()
    with pytest.raises(LayoutMismatch, match=r"model array 'weights': .*10.* actor 0 has .*11"):
        world.run(world.actor(n_weights=11))


def test_items_of_another_layout_than_the_rings_are_refused_before_its_first_action() -> None:
    world = World()
    world.publish()
    actor = world.actor()
    other = GymEnvConfig(id="CartPole-v1")
    actor.env_config, actor.env_spec = other, other.spec()
    actor.policy.sample = lambda obs: pytest.fail("it acted")  # type: ignore[method-assign]
    with pytest.raises(LayoutMismatch, match="column 'obs'"):
        world.run(actor)


def test_an_actor_that_is_stopped_before_there_are_parameters_ends_without_a_row() -> None:
    world = World()
    world.stop.set()
    assert world.run(world.actor()).samples == 0


def test_steps_that_brought_no_row_are_counted() -> None:
    world = World()
    world.publish()
    actor = world.actor()
    actor.step_proc_config = NStepProcessorConfig(n_steps=3, gamma=0.9)  # the first row is there after three steps
    sample, steps = actor.policy.sample, 0

    def spy(obs: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 2:
            world.stop.set()
        return sample(obs)

    actor.policy.sample = spy  # type: ignore[method-assign]
    stat = world.run(actor)
    assert (stat.env_steps, stat.samples) == (2, 0)


def test_the_table_has_a_header_and_one_line_per_actor() -> None:
    stat = ActorStat(0, samples=1234, env_steps=1234, episodes=3, duration_s=8.0, wait_s=0.0, state=ActorState.FINISHED)
    assert actor_stats_fmt([stat]) == "actor_id, samples, samples/sec, duration\n0, 1234, 154.2, 8.0"
