"""Samples per insert: what is asked for is what happens, and everybody goes on."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from outrider.actor_manager import ActorManagerConfig
from outrider.async_trainer import AsyncTrainerConfig, AsyncTrainStat
from outrider.envs.gymnasium import GymEnvConfig
from outrider.evaluation import DefaultEvaluator
from outrider.recording import MemoryRecorder, NullRecorder
from outrider.replay.uniform import SimpleReplayBufferConfig
from outrider.sampling import NStepProcessorConfig, SimpleStepProcessorConfig
from outrider.testing import CountEnv, FakeAgentConfig
from outrider.wiring import train_async, train_sync


def run(
    spi: float | None, n_actors: int, *, n_envs: int = 1, n_buffer: int = 16, mode: str = "async", max_opts: int = 0
) -> tuple[AsyncTrainStat, MemoryRecorder]:
    agents = [FakeAgentConfig(n_weights=100, batch_size=32)] * n_actors
    env = GymEnvConfig(id=CountEnv, kwargs={"length": 20})
    max_opts = max_opts or max(300, int(spi or 1) * 200)
    trainer = AsyncTrainerConfig(
        max_opts=max_opts, warmup_period=200, samples_per_insert=spi, eval_interval=0, flush_record_interval=100
    )
    recorder = MemoryRecorder()
    parts = (agents[0], agents, env, env, SimpleStepProcessorConfig(), SimpleReplayBufferConfig(capacity=5_000))
    actors = ActorManagerConfig(n_envs=n_envs, n_buffer=n_buffer)
    train = train_sync if mode == "sync" else train_async
    return train(*parts, actors, trainer, recorder, DefaultEvaluator(env)).stats, recorder


def some_numbers(seed: int) -> dict[str, float]:
    """Batch, message, ratio, warm-up and the like over their whole ranges, small and large ones equally often."""
    rng = np.random.default_rng(seed)

    def one(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    batch, spi = round(one(1, 512)), one(0.1, 64)
    warmup = max(batch, round(one(1, 2_000)))
    return {
        "batch": batch,
        "message": round(one(1, 64)),
        "spi": spi,
        "warmup": warmup,
        "capacity": max(warmup, round(one(1, 4_000))),
        "n_actors": int(rng.integers(1, 5)),
        "n_envs": int(rng.integers(1, 4)),
        "n_slots": int(rng.integers(2, 9)),
        "n_steps": int(rng.choice([1, 5])),
        "sync_interval": int(rng.choice([1, 10])),
        "max_opts": round(np.clip(5_000 * spi / batch, 2, 500)),
    }


def check_progress(seed: int) -> None:
    numbers = some_numbers(seed)
    n = {name: int(value) for name, value in numbers.items()}
    spi = numbers["spi"]
    agents = [FakeAgentConfig(n_weights=100, batch_size=n["batch"])] * n["n_actors"]
    env = GymEnvConfig(id=CountEnv, kwargs={"length": 7})
    stats = train_async(
        agents[0],
        agents,
        env,
        env,
        NStepProcessorConfig(n_steps=n["n_steps"], gamma=0.9),
        SimpleReplayBufferConfig(capacity=n["capacity"]),
        ActorManagerConfig(n_envs=n["n_envs"], n_buffer=n["message"], n_slots=n["n_slots"]),
        AsyncTrainerConfig(
            max_opts=n["max_opts"],
            max_time_s=60,
            warmup_period=n["warmup"],
            samples_per_insert=spi,
            eval_interval=0,
            sync_interval=n["sync_interval"],
        ),
        NullRecorder(),
        DefaultEvaluator(env),
    ).stats
    assert stats.stopped_by == "max_opts", f"who waits for whom? {numbers} {stats}"
    assert stats.sampled == stats.opt_steps * n["batch"]
    after = stats.samples - n["warmup"]
    assert stats.sampled < spi * after + n["batch"], f"drawn too much: {numbers} {stats}"
    assert after <= stats.sampled / spi + 2 * n["message"], f"inserted too much: {numbers} {stats}"


@pytest.mark.parametrize("seed", range(24))
def test_whatever_the_numbers_both_sides_go_on_and_keep_the_ratio(seed: int) -> None:
    check_progress(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24, 300))
def test_whatever_the_numbers_both_sides_go_on_and_keep_the_ratio_hundreds_of_times(seed: int) -> None:
    check_progress(seed)


@pytest.mark.parametrize("n_actors", [1, 4])
@pytest.mark.parametrize("spi", [0.5, 8.0, 32.0])
def test_the_measured_ratio_is_the_one_asked_for(spi: float, n_actors: int) -> None:
    stats, recorder = run(spi, n_actors)
    assert stats.samples_per_insert == pytest.approx(spi, rel=0.05)
    assert stats.sampled / (stats.samples - 200) == pytest.approx(spi, rel=0.05), "and it is no invention of its own"
    assert recorder.lines[-1]["async/samples_per_insert"] == pytest.approx(spi, rel=0.05)


@pytest.mark.parametrize("n_envs", [1, 4, 16])
def test_the_ratio_counts_transitions_whatever_the_number_of_environments(n_envs: int) -> None:
    stats, _ = run(0.5, 2, n_envs=n_envs)
    assert stats.samples_per_insert == pytest.approx(0.5, rel=0.05)
    assert stats.env_steps == stats.samples


@pytest.mark.parametrize("spi", [0.5, 8.0])
def test_the_synchronous_trainer_keeps_the_same_ratio(spi: float) -> None:
    stats, _ = run(spi, 2, n_envs=3, mode="sync")
    assert stats.samples_per_insert == pytest.approx(spi, rel=0.05)


def test_without_a_ratio_both_sides_run_free_and_it_is_still_reported() -> None:
    stats, recorder = run(None, 2, max_opts=2_000)
    assert stats.opt_steps == 2_000
    assert recorder.lines[-1]["async/samples_per_insert"] == pytest.approx(stats.samples_per_insert)


def test_a_message_larger_than_a_batch_holds_nobody_up() -> None:
    stats, _ = run(64.0, 3, n_buffer=512, max_opts=1_000)
    assert stats.opt_steps == 1_000


def test_waiting_for_the_warm_up_burns_no_time() -> None:
    class SlowEnv(CountEnv):
        def step(self, action: Any) -> Any:
            time.sleep(0.01)
            return super().step(action)

    agents = [FakeAgentConfig(batch_size=32)]
    env = GymEnvConfig(id=SlowEnv)
    env.spec()
    trainer = AsyncTrainerConfig(max_opts=1, warmup_period=200, eval_interval=0)
    parts = (SimpleStepProcessorConfig(), SimpleReplayBufferConfig(capacity=500), ActorManagerConfig(), trainer)
    busy_s, started = time.process_time(), time.monotonic()
    train_async(agents[0], agents, env, env, *parts, NullRecorder(), DefaultEvaluator(env))
    assert time.process_time() - busy_s < 0.4 * (time.monotonic() - started), "a loop that polls takes all of it"
