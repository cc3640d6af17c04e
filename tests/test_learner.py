from __future__ import annotations

import math
import threading
import time
from typing import Any

import numpy as np
import pytest

from outrider.errors import ConfigError
from outrider.learner import Learner
from outrider.scoring import InlineScorer, Scored
from outrider.statistics import SHORTEST_S, Counters
from outrider.trainer_config import AsyncTrainerConfig, AsyncTrainStat


class World:
    """Fakes of everything around the loop; each writes what it was asked to do into one list."""

    def __init__(self, *, rows_per_collect: int = 10, scores: tuple[float, ...] = (0.0,), fail_at: int = 0) -> None:
        self.calls: list[str] = []
        self.records: list[dict[str, Any]] = []
        self.counters = Counters(1)
        self.inserted = self.sampled = self.opts = 0
        self.rows_per_collect = rows_per_collect
        self.scores = list(scores)
        self.fail_at = fail_at
        self.published: list[tuple[int, int]] = []
        self.stop_reason: str | None = None

    # source
    def collect(self, max_rows: int) -> int:
        rows = min(self.rows_per_collect, max_rows)
        self.inserted += rows
        self.counters.arrived(0, 0, self.inserted, ())
        self.calls.append("collect")
        return rows

    def wait(self) -> None:
        self.calls.append("wait")

    def statistics(self) -> dict[str, Any]:
        return {}

    # buffer
    def __len__(self) -> int:
        return self.inserted

    # agent
    def opt(self, buffer: Any) -> None:
        self.opts += 1
        if self.opts == self.fail_at:
            raise ZeroDivisionError("in the agent")
        self.sampled += 4
        self.calls.append("opt")

    def opt_with_record(self, buffer: Any) -> dict[str, Any]:
        self.opt(buffer)
        return {"train/loss": 1.0}

    def model_info(self) -> tuple[int, dict[str, Any]]:
        return self.opts, {"w": np.zeros(1)}

    # sender
    def publish(self, n_opts: int, info: Any, env_steps: int) -> None:
        self.published.append((n_opts, env_steps))
        self.calls.append("publish")

    # evaluator
    def evaluate(self, agent: Any) -> tuple[float, dict[str, Any]]:
        self.calls.append("evaluate")
        score = self.scores.pop(0) if self.scores else -1.0
        return score, {"eval/mean_reward": score}

    # recorder
    def store(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        self.calls.append("store")

    def flush(self, step: int) -> None:
        self.calls.append(f"flush {step}")

    def save_model(self, name: str, agent: Any) -> None:
        self.calls.append(f"save {name}")

    def learner(self, **config: Any) -> Learner:
        base = {"max_opts": 4, "warmup_period": 20, "samples_per_insert": None, "sync_interval": 2}
        off = dict.fromkeys(
            (
                "eval_interval",
                "flush_record_interval",
                "record_compute_cost_interval",
                "record_agent_info_interval",
                "save_interval",
            ),
            0,
        )
        fake: Any = self
        return Learner(
            AsyncTrainerConfig(**(off | base | config)),
            fake,
            fake,
            fake,
            fake,
            self.counters,
            slack=10,
            should_stop=lambda: self.stop_reason,
        )

    def run(self, **config: Any) -> AsyncTrainStat:
        fake: Any = self
        return self.learner(**config).run(fake, InlineScorer(fake, fake))


def test_the_order_of_one_opt_step_is_as_documented() -> None:
    world = World()
    world.run(
        max_opts=2,
        eval_interval=2,
        save_interval=2,
        flush_record_interval=2,
        record_agent_info_interval=2,
        warmup_period=1,
        sync_interval=2,
    )
    assert world.calls == [
        "publish",  # the initial parameters, before anything else
        *["collect", "opt"],
        *["collect", "opt", "evaluate", "save best", "save 2", "publish", "store", "store", "flush 2"],
        *["store", "publish", "save last", "flush 2"],
    ]


def test_no_opt_step_happens_before_the_warm_up_is_over() -> None:
    world = World(rows_per_collect=7)
    world.run(warmup_period=50, max_opts=1)
    assert world.calls[: world.calls.index("opt")].count("collect") == 8
    assert world.inserted >= 50


def test_the_learner_waits_only_when_nothing_arrived() -> None:
    world = World(rows_per_collect=0)
    waits = []

    def wait() -> None:
        waits.append(world.inserted)
        world.rows_per_collect = 30

    world.wait = wait  # type: ignore[method-assign]
    world.run(max_opts=1)
    assert waits == [0]


def test_parameters_are_published_before_a_wait_for_data() -> None:
    world = World(rows_per_collect=10)
    original = world.collect

    def collect(max_rows: int) -> int:  # the flow stops for a while after the second opt step
        if world.opts == 1 and "wait" not in world.calls:
            return 0
        return original(max_rows)

    world.collect = collect  # type: ignore[method-assign]
    world.run(samples_per_insert=0.4, sync_interval=1000, max_opts=2, warmup_period=10)
    assert (1, world.published[1][1]) == world.published[1]
    assert world.calls[world.calls.index("wait") - 1] == "publish"


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ((1.0, 3.0, 3.0, 2.0), ["save best"] * 2),
        ((-5.0, -6.0, -7.0, -4.0), ["save best"] * 2),
        ((1.0, math.inf, 2.0, math.nan), ["save best"] * 2),
    ],
)
def test_best_is_saved_only_when_a_score_is_strictly_greater(scores: tuple[float, ...], best: list[str]) -> None:
    world = World(scores=scores)
    stat = world.run(eval_interval=1, max_opts=4)
    assert world.calls.count("save best") == 2
    assert stat.best_score == max(filter(math.isfinite, scores))


def test_intervals_of_zero_switch_evaluation_saves_and_records_off() -> None:
    world = World()
    world.run(max_opts=6)
    assert not {"evaluate", "save 1", "save 2"} & set(world.calls)
    assert [c for c in world.calls if c.startswith("flush")] == ["flush 6"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"max_opts": 3}, "max_opts"),
        ({"max_opts": None, "max_env_steps": 45}, "max_env_steps"),
        ({"max_opts": None, "max_time_s": 0.02}, "max_time_s"),
        ({"max_opts": None, "target_score": 10.0, "eval_interval": 1}, "target_score"),
    ],
)
def test_each_stop_condition_ends_the_run(config: dict[str, Any], reason: str) -> None:
    world = World(scores=(1.0, 2.0, 11.0))
    stat = world.run(**config)
    assert stat.stopped_by == reason
    assert world.calls[-3:-1] == ["publish", "save last"]


class LateScorer:
    """Its scores arrive `late` looks after the evaluation began; 0: never."""

    patience_s = 5.0

    def __init__(self, world: World, late: int) -> None:
        self.world, self.late, self.looks = world, late, 0
        self.begun: list[dict[str, Any]] = []

    def evaluate(self, axes: dict[str, Any]) -> None:
        self.begun.append(axes)
        self.looks = 0

    def arrived(self) -> Scored | None:
        self.looks += 1
        if not self.begun or self.looks != self.late:
            return None
        axes, agent = self.begun.pop(0), f"agent of {self.begun}"
        score = float(axes["opt_steps"])
        return Scored(axes, score, {"eval/mean_reward": score}, lambda: agent)  # type: ignore[arg-type,return-value]

    def open(self) -> list[int]:
        return [axes["opt_steps"] for axes in self.begun]

    def statistics(self) -> dict[str, Any]:
        return {"async/evaluator_failures": 0}


def test_a_late_score_is_recorded_at_the_moment_that_was_evaluated_and_what_was_evaluated_is_saved() -> None:
    world, lines, saved = World(), [], []

    def flush(step: int) -> None:
        lines.append((step, [r for r in world.records if "eval/mean_reward" in r]))
        world.records.clear()

    world.flush = flush  # type: ignore[method-assign]
    world.save_model = lambda name, agent: saved.append((name, agent))  # type: ignore[method-assign]
    scorer: Any = LateScorer(world, late=3)
    world.learner(eval_interval=5, max_opts=9).run(world, scorer)  # type: ignore[arg-type]
    scored = [(step, records) for step, records in lines if records]
    assert [(step, records[0]["opt_steps"], records[0]["eval/mean_reward"]) for step, records in scored] == [
        (5, 5, 5.0)
    ]
    assert scored[0][1][0]["eval/best_mean_reward"] == 5.0
    before = lines[lines.index(scored[0]) - 1]
    assert before[0] > 5, "what was stored until then is written with the steps of then"
    assert saved == [("best", "agent of []"), ("last", world)]


def test_a_late_score_ends_the_run_when_it_arrives() -> None:
    world = World()
    scorer: Any = LateScorer(world, late=4)
    stat = world.learner(max_opts=None, eval_interval=5, target_score=5.0).run(world, scorer)  # type: ignore[arg-type]
    assert stat.stopped_by == "target_score"
    assert stat.opt_steps > 5


@pytest.mark.parametrize("reason", ["max_opts", "request"])
def test_only_a_run_that_has_done_what_it_was_to_do_waits_for_its_last_score(reason: str) -> None:
    world = World()
    scorer: Any = LateScorer(world, late=20)
    original = world.opt

    def opt(buffer: Any) -> None:
        original(buffer)
        world.stop_reason = "request" if reason == "request" and world.opts == 5 else None

    world.opt = opt  # type: ignore[method-assign]
    stat = world.learner(max_opts=5, eval_interval=5).run(world, scorer)  # type: ignore[arg-type]
    assert stat.best_score == (5.0 if reason == "max_opts" else None)


def test_a_request_ends_the_run_in_order() -> None:
    world = World()
    timer = threading.Timer(0.05, lambda: setattr(world, "stop_reason", "request"))
    timer.start()
    stat = world.run(max_opts=None)
    timer.join()
    assert stat.stopped_by == "request"
    assert world.calls[-1].startswith("flush")


def test_a_run_that_fails_still_saves_and_flushes_and_raises_the_original_error() -> None:
    world = World(fail_at=3)
    with pytest.raises(ZeroDivisionError, match="in the agent"):
        world.run(max_opts=10)
    assert world.calls[-4:] == ["store", "publish", "save last", "flush 2"]


def test_the_last_rates_are_those_of_training_and_not_of_the_final_save() -> None:
    world = World()

    def save_model(name: str, agent: Any) -> None:
        time.sleep(3 * SHORTEST_S)

    def opt(buffer: Any) -> None:
        World.opt(world, buffer)
        time.sleep(SHORTEST_S)

    world.save_model, world.opt = save_model, opt  # type: ignore[method-assign]
    world.run(max_opts=4, flush_record_interval=4)
    rates = [record["async/opt_steps_per_s"] for record in world.records if "async/opt_steps_per_s" in record]
    assert rates
    assert min(rates) > 0


def test_an_error_on_the_way_out_does_not_hide_the_first_one() -> None:
    world = World(fail_at=3)

    def save_model(name: str, agent: Any) -> None:
        raise OSError("disk full")

    world.save_model = save_model  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        world.run(max_opts=10)
    assert world.calls[-1] == "flush 2", "what could still be written was written"


def test_every_stored_record_carries_the_three_axes() -> None:
    world = World()
    world.run(eval_interval=2, flush_record_interval=1, record_agent_info_interval=1, record_compute_cost_interval=1)
    for record in world.records:
        assert isinstance(record["opt_steps"], int)
        assert isinstance(record["env_steps"], int)
        assert isinstance(record["time_s"], float)


def test_the_table_of_the_run_has_a_header_and_a_line_of_three_numbers() -> None:
    stat = AsyncTrainStat(
        samples=1000,
        sampled=64000,
        env_steps=1000,
        opt_steps=500,
        updates=500,
        episodes=3,
        samples_per_insert=64.0,
        duration_s=2.0,
        best_score=None,
        stopped_by="max_opts",
    )
    assert stat.fmt() == "samples/sec, opt_steps/sec, duration\n500.0, 250.0, 2.0"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_opts", 0),
        ("max_time_s", -1.0),
        ("sync_interval", 0),
        ("warmup_period", 0),
        ("samples_per_insert", 0.0),
        ("samples_per_insert", float("inf")),
        ("eval_interval", -1),
    ],
)
def test_impossible_values_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        AsyncTrainerConfig(**{key: value})


def test_a_run_that_is_already_beyond_its_last_opt_step_ends_at_once() -> None:
    world = World()
    world.counters.opt_steps = 7
    stats = world.run(max_opts=4)
    assert stats.stopped_by == "max_opts"
    assert "opt" not in world.calls
