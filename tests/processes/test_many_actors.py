"""Thirty-two actors whose learner reads nothing."""

from __future__ import annotations

import time

import psutil
import pytest

from outrider.actor import ActorState
from outrider.actor_manager import ActorManager, ActorManagerConfig
from outrider.channel import item_channel
from outrider.envs.gymnasium import GymEnvConfig
from outrider.flags import InitGuard, StopFlag
from outrider.model_sync import model_channel
from outrider.sampling import SimpleStepProcessorConfig
from outrider.testing import FakeAgentConfig
from outrider.testing.environments import CountEnv

N_ACTORS = 32
CLOSED_S = 5.0


@pytest.mark.slow
def test_thirty_two_actors_that_wait_for_room_are_closed_within_five_seconds() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    config = FakeAgentConfig(n_weights=10)
    item_sender, item_receiver = item_channel()
    model_sender, model_receiver = model_channel()
    actors = ActorManager.build(
        ActorManagerConfig(n_slots=2, n_buffer=4),
        [config] * N_ACTORS,
        GymEnvConfig(id=CountEnv),
        SimpleStepProcessorConfig(),
        item_sender,
        model_receiver,
        StopFlag(),
    )
    agent = config.build(GymEnvConfig(id=CountEnv).spec())
    info = dict(agent.model_info()[1])
    model_sender.bind(info)
    model_sender.publish(0, info, 0)
    with actors:
        actors.run(InitGuard())
        deadline = time.monotonic() + 60
        while {s.state for s in actors.stats()} != {ActorState.WAITING_FOR_ROOM}:
            assert time.monotonic() < deadline, [s.state for s in actors.stats()]
            time.sleep(0.05)
        began = time.monotonic()
        actors.stop_and_join()
        spent = time.monotonic() - began
    print(f"\n{N_ACTORS} actors that waited for room: closed in {spent:.2f} s")
    assert spent < CLOSED_S
    left = [c.name() for c in psutil.Process().children(recursive=True) if c.pid not in before]
    assert not [name for name in left if "actor" in name]
    item_receiver.close()
    model_sender.close()
