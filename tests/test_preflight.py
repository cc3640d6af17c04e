from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider import machine, preflight
from outrider.core import EnvSpec
from outrider.data import Layout
from outrider.envs.gymnasium import GymEnvConfig
from outrider.errors import ResourceError
from outrider.preflight import Check, processes_check, replay_bytes, require_enough, space_check, warn_if_tight
from outrider.rings import Rings
from outrider.run_config import RunConfig
from outrider.sampling import SimpleStepProcessorConfig

MODEL = {"w": np.zeros((250, 1000), np.float32)}  # 1 MB


@dataclass
class Limits:
    """What the machine leaves, as the tests have it."""

    cores: int = 4
    memory: int = 10**12
    disk: int = 10**12
    descriptors: int = 10_000
    processes: int = 10_000

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine, "usable_cores", lambda: self.cores)
        monkeypatch.setattr(preflight, "available_bytes", lambda: self.memory)
        monkeypatch.setattr(machine, "free_disk", lambda path: self.disk)
        monkeypatch.setattr(machine, "free_descriptors", lambda: self.descriptors)
        monkeypatch.setattr(machine, "free_processes", lambda: self.processes)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    limits = Limits()
    limits.use(monkeypatch)
    monkeypatch.setattr(preflight, "learner_threads", lambda n_actors, cores: max(1, cores - n_actors))
    return limits


@pytest.fixture(scope="module")
def spec() -> EnvSpec:
    return GymEnvConfig(id="CartPole-v1").spec()


def config(**overrides: Any) -> RunConfig:
    return RunConfig.from_sources("cartpole-dqn", {key.replace("__", "."): v for key, v in overrides.items()})


def checks(config: RunConfig, spec: EnvSpec) -> dict[str, Check]:
    found = [*space_check(config, spec, MODEL, Path("nowhere")), *processes_check(config)]
    return {check.name: check for check in found}


def test_everything_of_a_run_is_checked_and_a_small_run_fits(limits: Limits, spec: EnvSpec) -> None:
    found = checks(config(), spec)
    assert list(found) == ["memory", "disk", "descriptors", "processes", "cores"]
    require_enough(found.values())
    assert not any(check.tight for check in found.values())


def test_memory_that_is_certainly_needed_is_replay_channels_and_a_part_of_each_actor(
    limits: Limits, spec: EnvSpec
) -> None:
    layout = SimpleStepProcessorConfig().layout(spec)
    run = config(
        replay__capacity=1_000_000,
        actors__n_actors=3,
        actors__n_buffer=100,
        actors__n_slots=4,
        trainer__evaluation__process=False,
    )
    found = checks(run, spec)["memory"]
    rings = Rings.allocate(layout, 3, 100, 4, 1.0, "threads")
    channels = rings.arena.nbytes + 2 * 1_000_064
    rings.close()
    replay = 1_000_000 * layout.record_dtype().itemsize
    assert abs(found.certain - (replay + channels + 3 * preflight.CERTAIN_ACTOR_BYTES)) < 1000
    assert found.expected - found.certain > preflight.SERVER_BYTES
    limits.memory = found.certain
    again = checks(run, spec)["memory"]
    again.require()
    assert again.tight
    limits.memory -= 1
    with pytest.raises(ResourceError, match=r"memory: needs at least .* MB, .* MB free \(replay .*lower replay"):
        checks(run, spec)["memory"].require()


def test_actors_that_are_threads_and_the_synchronous_trainer_need_no_processes(limits: Limits, spec: EnvSpec) -> None:
    together = checks(config(), spec)
    for run in (
        config(actors__backend="threads", trainer__evaluation__process=False),
        config(trainer__mode="sync", actors__n_envs=1),
    ):
        found = checks(run, spec)
        assert found["memory"].expected < together["memory"].expected - preflight.SERVER_BYTES
        assert found["descriptors"].certain == preflight.CERTAIN_DESCRIPTORS
        assert found["processes"].certain == 1


def test_the_evaluators_process_counts_like_an_actor_where_there_is_one(limits: Limits, spec: EnvSpec) -> None:
    beside = checks(config(), spec)
    for override in ({"trainer__evaluation__process": False}, {"trainer__eval_interval": 0}):
        without = checks(config(**override), spec)
        for what in ("memory", "descriptors", "processes"):
            assert beside[what].certain > without[what].certain
            assert beside[what].expected > without[what].expected
    assert "evaluator" in beside["processes"].detail


@pytest.mark.parametrize("what", ["descriptors", "processes"])
def test_too_few_for_all_actors_is_refused_with_needed_and_free(what: str, limits: Limits, spec: EnvSpec) -> None:
    setattr(limits, what, 7)
    with pytest.raises(ResourceError, match=rf"^{what}: needs at least \d+, 7 free \(.*\); raise `ulimit"):
        require_enough(processes_check(config(actors__n_actors=30)))


def test_a_disk_without_room_for_one_checkpoint_is_refused_and_one_without_room_for_all_is_tight(
    limits: Limits, spec: EnvSpec
) -> None:
    row = config().step_processor.layout(spec).record_dtype().itemsize
    run = config(replay__capacity=1_000_000, trainer__max_opts=None, trainer__warmup_period=500_000)
    limits.disk = 500_000 * row + 6 * 10**6
    found = checks(run, spec)["disk"]
    found.require()
    assert found.tight
    assert found.expected > 5 * 1_000_000 * row
    limits.disk -= 1
    with pytest.raises(ResourceError, match="disk: needs at least"):
        checks(run, spec)["disk"].require()
    for override in ({"trainer__checkpoint__keep": 0}, {"trainer__checkpoint__replay": False}):
        assert not checks(config(replay__capacity=1_000_000, **override), spec)["disk"].tight


def test_a_short_run_needs_no_disk_for_rows_that_it_will_never_have(limits: Limits, spec: EnvSpec) -> None:
    row = config().step_processor.layout(spec).record_dtype().itemsize
    long = checks(config(replay__capacity=10**7, trainer__max_opts=10**9), spec)["disk"].expected
    by_opts = checks(config(replay__capacity=10**7, trainer__max_opts=1000), spec)["disk"].expected
    by_env_steps = checks(config(replay__capacity=10**7, trainer__max_env_steps=2000), spec)["disk"].expected
    assert long > 10**7 * row > 10 * by_opts
    assert by_env_steps < by_opts  # 2000 rows, and 1000 + 1000 * 64 / 4


def test_rows_on_a_disk_are_asked_of_the_disk_and_not_of_memory(
    limits: Limits, spec: EnvSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "is_memory", lambda path: path == Path("/dev/shm"))
    rows = 10**7 * config().step_processor.layout(spec).record_dtype().itemsize
    in_memory = checks(config(replay__capacity=10**7), spec)
    in_what_is_memory = checks(config(replay__capacity=10**7, replay__disk="/dev/shm"), spec)
    assert in_what_is_memory["memory"] == in_memory["memory"]
    for same in (True, False):
        monkeypatch.setattr(machine, "same_disk", lambda one, other, same=same: same)
        run = config(replay__capacity=10**7, replay__disk=str(tmp_path))
        found = checks(run, spec)
        assert in_memory["memory"].certain - found["memory"].certain == rows
        assert in_memory["memory"].expected - found["memory"].expected == rows
        more = rows if same else 0
        assert found["disk"].certain - in_memory["disk"].certain == more
        assert found["disk"].expected - in_memory["disk"].expected == more
        check = found["disk"] if same else found["replay disk"]
        assert ("replay disk" in found) != same
        limits.disk = check.certain - 1
        with pytest.raises(ResourceError, match=rf"^{check.name}: needs at least"):
            require_enough(checks(run, spec).values())
        limits.disk = 10**12


def test_a_directory_for_rows_that_is_not_there_is_refused_before_the_run(limits: Limits, spec: EnvSpec) -> None:
    found = checks(config(replay__disk="/not/there"), spec)
    with pytest.raises(ResourceError, match=r"^replay disk: .*/not/there is no directory that can be written"):
        require_enough(found.values())


@pytest.mark.parametrize(("n_actors", "needed", "tight"), [(1, 4, False), (3, 4, False), (4, 5, True), (9, 10, True)])
def test_cores_are_shared_only_where_there_are_more_actors_than_cores_but_one(
    n_actors: int, needed: int, tight: bool, limits: Limits
) -> None:
    cores = processes_check(config(actors__n_actors=n_actors))[-1]
    assert (cores.name, cores.expected, cores.tight) == ("cores", needed, tight)
    cores.require()  # never a reason to refuse


def test_without_a_number_of_actors_one_core_is_left_to_the_learner(limits: Limits) -> None:
    assert config(actors__n_actors=None).actors.count() == 3
    limits.cores = 1
    assert config(actors__n_actors=None).actors.count() == 1


@dataclass
class Own:
    capacity: Any = "many"


@dataclass
class Told(Own):
    asked: list[Layout] = field(default_factory=list)

    def nbytes(self, layout: Layout) -> int:
        self.asked.append(layout)
        return 77


def test_an_own_replay_buffer_says_its_size_or_is_guessed_by_its_capacity(spec: EnvSpec) -> None:
    layout = SimpleStepProcessorConfig().layout(spec)
    assert replay_bytes(Told(10), layout) == (77, True)
    assert replay_bytes(Own(10), layout) == (10 * layout.record_dtype().itemsize, False)
    assert replay_bytes(Own(), layout) == (0, False)
    assert replay_bytes(config().replay, layout) == (10_000 * layout.record_dtype().itemsize, True)


def test_what_is_tight_is_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    enough = Check("memory", 1, 2, sys.maxsize, "a", "b")
    short = Check("disk", 1, 3 * 10**9, 2 * 10**9, "models", "another run_dir")
    with caplog.at_level(logging.WARNING):
        warn_if_tight([enough, short])
    assert caplog.messages == ["disk: will need 3.00 GB, 2.00 GB free (models): another run_dir"]
