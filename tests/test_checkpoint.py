"""Checkpoints are whole or absent, hold any state, run no code, and share the rows of the replay buffer."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import pickle
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from outrider.checkpoint import CheckpointConfig, Checkpoints
from outrider.checkpoint_files import (
    MANIFEST,
    Checkpoint,
    Manifest,
    Moment,
    newest_checkpoint,
    opt_steps_of_checkpoints,
    read_checkpoint,
)
from outrider.data import Field, Layout
from outrider.errors import CheckpointError, ConfigError, RunDirError
from outrider.replay.uniform import SimpleReplayBuffer
from outrider.replay_segments import ReplayJournal, Segment
from outrider.run_state import capture, restore
from outrider.state_files import ARRAYS, STATE, STATE_FILES, TENSORS, PackedState, read_state, write_npy
from outrider.statistics import Counters
from outrider.testing.fakes import RowsBuffer, random_rows

LAYOUT = Layout("transitions", (Field("obs", (3,), np.dtype(np.float32)), Field("act", (), np.dtype(np.int64))))
STATE_OF_RUN = {"agent": {"w": torch.arange(4.0)}, "x": 1}


def moment(opt_steps: int, score: float | None = None, env_steps: int = 0) -> Moment:
    return Moment(opt_steps, env_steps, 1.5, score, "interval")


def buffer_of(rows: int, capacity: int = 1000) -> SimpleReplayBuffer:
    buffer = SimpleReplayBuffer(LAYOUT, capacity)
    push(buffer, rows)
    return buffer


def push(buffer: SimpleReplayBuffer, rows: int) -> None:
    if rows:
        new = random_rows(LAYOUT, rows)
        buffer.push({**new, "act": np.arange(buffer.inserted, buffer.inserted + rows)})


def ids(checkpoint: Checkpoint) -> list[int]:
    oldest = checkpoint.state["replay"]["inserted"] - 1000
    rows = [i for _, rows in checkpoint.blocks() for i in rows["act"].tolist()]
    return [i for i in rows if i >= oldest]


# State as files


def equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        return same and a.contiguous().view(-1).numpy().tobytes() == b.contiguous().view(-1).numpy().tobytes()
    if isinstance(a, float):
        return repr(a) == repr(b)
    return bool(a == b)


DTYPES = hnp.scalar_dtypes() | hnp.array_dtypes() | hnp.byte_string_dtypes() | hnp.unicode_string_dtypes()
ARRAYS_OF_ALL_KINDS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, min_side=0, max_side=3))
TENSORS_OF_ALL_KINDS = hnp.arrays(
    st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.bool_, np.complex64]),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=3),
).map(lambda array: torch.from_numpy(np.array(array)))
PLAIN = st.none() | st.booleans() | st.integers() | st.integers(0, 2**130) | st.floats() | st.text() | st.binary()
KEYS = st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)) | st.sampled_from(["$int"])
VALUES = st.recursive(
    PLAIN
    | ARRAYS_OF_ALL_KINDS
    | TENSORS_OF_ALL_KINDS
    | ARRAYS_OF_ALL_KINDS.filter(lambda a: a.ndim == 0).map(lambda a: a[()]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=8,
)


@given(state=st.dictionaries(st.text(max_size=5), VALUES, max_size=4))
@settings(deadline=None, max_examples=150)
def test_any_state_comes_back_as_it_was(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("state")
    PackedState(state).write(folder)
    assert equal(read_state(folder), state)


def test_random_generators_and_optimisers_come_back(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    adam = torch.optim.Adam(layer.parameters())
    layer(torch.ones(3)).sum().backward()
    adam.step()
    rng, python, noise = np.random.default_rng(1), random.Random(1), torch.Generator().manual_seed(1)
    state = {
        "module": layer.state_dict(),
        "adam": adam.state_dict(),
        "numpy": rng.bit_generator.state,
        "legacy": np.random.RandomState(3).get_state(legacy=False),
        "python": python.getstate(),
        "torch": noise.get_state(),
    }
    PackedState(state).write(tmp_path)
    back = read_state(tmp_path)
    others = np.random.default_rng(2), random.Random(2), torch.Generator().manual_seed(2)
    others[0].bit_generator.state = back["numpy"]
    others[1].setstate(back["python"])
    others[2].set_state(back["torch"])
    assert (rng.random(), python.random()) == (others[0].random(), others[1].random())
    assert torch.rand(2, generator=noise).tolist() == torch.rand(2, generator=others[2]).tolist()
    adam.load_state_dict(back["adam"])
    layer.load_state_dict(back["module"])
    assert equal(dict(back["module"]), {name: value.detach() for name, value in layer.state_dict().items()})


def test_a_packed_state_is_a_copy() -> None:
    array, tensor = np.zeros(3), torch.zeros(3)
    packed = PackedState({"a": array, "t": tensor})
    array += 1
    tensor += 1
    assert packed._arrays[0].sum() == 0
    assert packed._tensors[0].sum() == 0


class Own:
    pass


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (Own(), "Own"),
        (threading.Lock(), "lock"),
        ({1, 2}, "set"),
        (collections.Counter("a"), "Counter"),
        (np.array([Own()], object), "object"),
        (np.ma.masked_array([1.0]), "MaskedArray"),
        (torch.eye(2).to_sparse(), "sparse"),
        (lambda: 0, "function"),
        (collections.namedtuple("Pair", "a b")(1, 2), "Pair"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_stored_is_refused_by_name(value: Any, got: str) -> None:
    with pytest.raises(CheckpointError, match=rf"state agent\.parts\[1\]\.x: expected .*{got}"):
        PackedState({"agent": {"parts": [0, {"x": value}]}})


def test_a_state_that_contains_itself_is_refused() -> None:
    circle: dict[str, Any] = {}
    circle["again"] = circle
    with pytest.raises(CheckpointError, match="at most 100 levels"):
        PackedState(circle)


class Exploit:
    executed = False

    def __reduce__(self) -> Any:
        return setattr, (Exploit, "executed", True)


def test_a_strangers_checkpoint_runs_no_code(tmp_path: Path) -> None:
    evil = pickle.dumps(Exploit())
    for name in STATE_FILES:
        PackedState({"x": 1}).write(tmp_path)
        (tmp_path / name).write_bytes(evil)
        with pytest.raises(CheckpointError, match="expected a stored state"):
            read_state(tmp_path)
    PackedState({"x": np.zeros(1)}).write(tmp_path)
    with (tmp_path / ARRAYS).open("wb") as file:
        np.savez(file, **{"0": np.array([Exploit()], object)})
    with pytest.raises(CheckpointError, match="expected a stored state"):
        read_state(tmp_path)
    np.save(tmp_path / "rows.npy", np.array([Exploit()], object), allow_pickle=True)
    with pytest.raises(CheckpointError, match="expected rows of a replay buffer"):
        Segment("rows.npy", 0, 1, "").read(tmp_path)
    assert not Exploit.executed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "7",
        '{"a": {"$array": 5}}',
        '{"a": {"$what": 5}}',
        '{"a": {"$int": 5}}',
        '{"a": {"$tuple": 5}}',
        "{" * 9,
    ],
)
def test_a_tree_that_no_state_has_is_refused(text: str, tmp_path: Path) -> None:
    PackedState({"a": 1}).write(tmp_path)
    (tmp_path / STATE).write_text(text)
    with pytest.raises(CheckpointError, match="expected a stored state"):
        read_state(tmp_path)


# Checkpoints


def take(folder: Path, *moments: Moment, buffer: SimpleReplayBuffer | None = None, **config: Any) -> None:
    with Checkpoints(folder, CheckpointConfig(**config)) as checkpoints:
        checkpoints.start(buffer)
        for at in moments:
            state = STATE_OF_RUN | ({"replay": buffer.state_without_rows()} if buffer else {})
            checkpoints.take(at, state, ("open episodes",))
        assert checkpoints.failures == 0 or checkpoints._writing is not None


def test_a_checkpoint_says_what_it_holds_and_what_not(tmp_path: Path) -> None:
    take(tmp_path, moment(7, 3.5), buffer=buffer_of(50))
    checkpoint, damages = newest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert damages == []
    assert checkpoint.moment == moment(7, 3.5)
    assert equal(checkpoint.state["agent"], STATE_OF_RUN["agent"])
    assert ids(checkpoint) == list(range(50))
    values = json.loads((tmp_path / "7" / MANIFEST).read_text())
    assert values["not_contained"] == ["open episodes"]
    assert set(values["files"]) == set(STATE_FILES)
    assert values["format_version"] == 1


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    scores = [1.0, 9.0, None, 2.0, 9.0, 3.0, 4.0]
    buffer = buffer_of(50)
    take(tmp_path, *(moment(i, score) for i, score in enumerate(scores[:4])), keep=2, buffer=buffer)
    assert opt_steps_of_checkpoints(tmp_path) == [3, 2, 1]
    best = read_checkpoint(tmp_path / "1")
    assert best.manifest.segments == (), "it is not among the newest"
    assert "the replay buffer, too old to be kept" in best.manifest.not_contained
    take(tmp_path, *(moment(i, score) for i, score in enumerate(scores) if i > 3), keep=2, buffer=buffer)
    assert opt_steps_of_checkpoints(tmp_path) == [6, 5, 4]


def test_rows_are_written_once_and_shared(tmp_path: Path) -> None:
    buffer = buffer_of(0)
    with Checkpoints(tmp_path, CheckpointConfig(keep=3, interval=1)) as checkpoints:
        checkpoints.start(buffer)
        assert checkpoints._journal is not None
        checkpoints._journal.segment_rows = 100
        for n in range(1, 31):
            for _ in range(10):
                push(buffer, 17)
                checkpoints.due(n - 1)
            checkpoints.take(moment(n), {"replay": buffer.state_without_rows()})
    for n in (28, 29, 30):
        checkpoint = read_checkpoint(tmp_path / str(n))
        assert ids(checkpoint) == list(range(170 * n))[-1000:]
    files = {path.name: path.stat().st_size for path in (tmp_path / "replay").iterdir()}
    referred = {s.file for n in (28, 29, 30) for s in read_checkpoint(tmp_path / str(n)).manifest.segments}
    assert set(files) == referred
    rows = sum(files.values()) / buffer.row_dtype.itemsize
    assert rows < 1000 + 2 * 170 + 3 * 100 + 100 + 30 * len(files), "a buffer, what came since, and tails"


def test_rows_that_are_overwritten_between_two_checkpoints_are_deleted_meanwhile(tmp_path: Path) -> None:
    buffer = buffer_of(0)
    with Checkpoints(tmp_path, CheckpointConfig(keep=3)) as checkpoints:
        checkpoints.start(buffer)
        assert checkpoints._journal is not None
        checkpoints._journal.segment_rows = 100
        for _ in range(200):
            push(buffer, 50)
            checkpoints._thread.submit(int).result()  # the disk keeps up
            checkpoints.due(0)
        checkpoints._thread.submit(int).result()
        assert len(list((tmp_path / "replay").iterdir())) <= 12


@given(
    pushes=st.lists(st.integers(0, 150), max_size=25),
    takes=st.sets(st.integers(0, 24)),
    capacity=st.integers(1, 300),
    room=st.integers(0, 4),
)
@settings(deadline=None, max_examples=60)
def test_a_snapshot_has_every_row_however_slow_the_disk_is(
    pushes: list[int],
    takes: set[int],
    capacity: int,
    room: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder, buffer = tmp_path_factory.mktemp("rows"), buffer_of(0, capacity)

    def submit(do: Any) -> Any:
        from concurrent.futures import Future

        future: Any = Future()
        future.set_result(do())
        return future

    journal = ReplayJournal(folder, buffer, submit, segment_rows=40)
    journal._has_room = lambda: room > 0 or taking  # type: ignore[method-assign]
    taking = False
    for i, rows in enumerate(pushes):
        push(buffer, rows)
        journal.offer()
        if i in takes:
            taking = True
            segments = [file.result() for file in journal.snapshot()]
            taking = False
            got = [row for segment in segments for row in segment.read(folder)["act"].tolist()]
            assert [row for row in got if row >= buffer.oldest] == list(range(buffer.oldest, buffer.inserted))
            assert got == sorted(set(got))


def test_a_run_that_goes_on_does_not_write_whole_segments_again(tmp_path: Path) -> None:
    buffer = buffer_of(950)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.start(buffer)
        assert checkpoints._journal is not None
        checkpoints._journal.segment_rows = 100
        checkpoints.take(moment(1), {"replay": buffer.state_without_rows()})
    found, _ = newest_checkpoint(tmp_path)
    assert found is not None
    restored = buffer_of(0)
    restored.load_rows(found.state["replay"], found.blocks())
    journal = ReplayJournal(tmp_path / "replay", restored, lambda do: pytest.fail("written again"), segment_rows=100)
    journal.adopt(found.manifest.segments)
    assert journal._next == 900
    assert [file.result() for _, file in journal._handed] == list(found.manifest.segments[:-1])


@pytest.mark.parametrize("harm", ["truncate", "flip", "delete", "empty"])
@pytest.mark.parametrize("name", [MANIFEST, *STATE_FILES, "rows"])
def test_damage_of_any_file_is_found_and_the_previous_checkpoint_taken(name: str, harm: str, tmp_path: Path) -> None:
    buffer = buffer_of(50)
    take(tmp_path, moment(1), buffer=buffer)
    push(buffer, 50)
    take(tmp_path, moment(2), buffer=buffer)
    path = tmp_path / "2" / name
    if name == "rows":
        (file,) = (s.file for s in read_checkpoint(tmp_path / "2").manifest.segments)
        path = tmp_path / "replay" / file
    data = bytearray(path.read_bytes())
    if harm == "flip":
        data[len(data) // 2] ^= 4
    if harm == "delete":
        path.unlink()
    else:
        path.write_bytes({"truncate": data[:-3], "flip": data, "empty": b""}[harm])
    checkpoint, damages = newest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.moment.opt_steps == 1
    assert ids(checkpoint) == list(range(50))
    gone = name == MANIFEST and harm == "delete"  # then it claims nothing
    assert len(damages) == (0 if gone else 1)
    assert gone or str(path) in damages[0]


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(deadline=None, max_examples=100)
def test_a_single_flipped_bit_of_the_manifest_is_found(
    where: float, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("manifest")
    manifest = Manifest(moment(3), dict.fromkeys(STATE_FILES, "0" * 64))
    data = bytearray(manifest.to_json().encode())
    (folder / MANIFEST).write_bytes(data)
    assert Manifest.read(folder) == manifest
    data[int(where * len(data))] ^= 1 << bit
    (folder / MANIFEST).write_bytes(data)
    with contextlib.suppress(CheckpointError):
        assert Manifest.read(folder) == manifest, "it may only have hit the layout of the text"


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    take(tmp_path, moment(1))
    values = json.loads((tmp_path / "1" / MANIFEST).read_text())
    values["format_version"] = 2
    (tmp_path / "1" / MANIFEST).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="checksum"):
        read_checkpoint(tmp_path / "1")


def test_if_all_are_damaged_it_is_said_of_each(tmp_path: Path) -> None:
    take(tmp_path, moment(1), moment(2))
    for n in (1, 2):
        (tmp_path / str(n) / TENSORS).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"expected a checkpoint that is whole, got\n(.|\n)*2/ten(.|\n)*1/ten"):
        newest_checkpoint(tmp_path)


def test_what_a_killed_run_left_half_written_is_removed(tmp_path: Path) -> None:
    take(tmp_path, moment(1), buffer=buffer_of(10))
    (tmp_path / ".5.new").mkdir()
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / STATE).write_text("{}")
    (tmp_path / "replay" / "0-10-ffff.npy").write_bytes(b"x")
    (tmp_path / "replay" / ".new").write_bytes(b"x")
    (tmp_path / "9.set-aside").mkdir()
    shutil.copytree(tmp_path / "1", tmp_path / ".1.old")
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.start(buffer_of(0))
    assert {path.name for path in tmp_path.iterdir()} == {"1", "replay", "9.set-aside"}
    assert len(list((tmp_path / "replay").iterdir())) == 1
    read_checkpoint(tmp_path / "1")


def test_a_checkpoint_that_was_being_replaced_is_the_old_one(tmp_path: Path) -> None:
    take(tmp_path, moment(0))
    (tmp_path / "0").rename(tmp_path / ".0.old")  # and then the machine stopped
    found, damages = newest_checkpoint(tmp_path)
    assert (found is not None, damages) == (True, [])
    take(tmp_path, moment(0, env_steps=9))
    found, _ = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.moment.env_steps == 9
    assert not (tmp_path / ".0.old").exists()


def test_a_failure_is_said_once_and_the_last_good_checkpoint_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, full = buffer_of(50), [False]

    def write_if_there_is_room(*args: Any) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        write_npy(*args)

    monkeypatch.setattr("outrider.replay_segments.write_npy", write_if_there_is_room)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.start(buffer)
        for n, there_is_room in enumerate([True, False, False, True], 1):
            full[0] = not there_is_room
            push(buffer, 10)
            checkpoints.take(moment(n), {"replay": buffer.state_without_rows()})
            assert checkpoints._writing is not None
            checkpoints._writing.result()
            if n == 3:
                assert opt_steps_of_checkpoints(tmp_path) == [1]
        assert checkpoints.statistics()["async/checkpoint_failures"] == 2
    said = capsys.readouterr().err
    assert said.count("could not be written, training goes on: OSError: [Errno 28]") == 1
    assert said.count("checkpoint 4: written, after 2 that could not be") == 1
    found, _ = newest_checkpoint(tmp_path)
    assert found is not None
    assert ids(found) == list(range(90))


def test_state_that_cannot_be_stored_is_a_failure_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.start(None)
        checkpoints.take(moment(1), {"agent": {"x": Own()}})
    assert "training goes on: CheckpointError: state agent.x" in capsys.readouterr().err
    assert opt_steps_of_checkpoints(tmp_path) == []


def test_a_directory_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Checkpoints(tmp_path / "file" / "checkpoints", CheckpointConfig()) as checkpoints, pytest.raises(RunDirError):
        checkpoints.start(None)


def test_checkpoints_are_due_at_opt_steps_and_after_minutes(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, CheckpointConfig(interval=10, interval_min=None)) as checkpoints:
        checkpoints.start(None)
        due = []
        for n in range(35):
            if checkpoints.due(n):
                due.append(n)
                checkpoints.take(moment(n), {})
                assert checkpoints._writing is not None
                checkpoints._writing.result()
        assert due == [10, 20, 30]
    with Checkpoints(tmp_path, CheckpointConfig(interval_min=1e-12)) as checkpoints:
        checkpoints.start(None)
        assert checkpoints.due(0)
        checkpoints.start(None, exact=True)
        assert not checkpoints.due(0)
    with Checkpoints(tmp_path, CheckpointConfig(interval=1, keep=0)) as checkpoints:
        checkpoints.start(None)
        assert not checkpoints.due(5)
        assert not checkpoints.wanted(5, 5)


@pytest.mark.parametrize("values", [{"interval": -1}, {"interval_min": 0.0}, {"keep": -1}])
def test_impossible_intervals_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        CheckpointConfig(**values)


# What is in them


class Anything:
    """An agent and a source with a state."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"x": 1}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any], *rest: Any) -> None:
        self.state = state


def saved(folder: Path, buffer: Any) -> Checkpoint:
    counters, anything = Counters(1), Anything()
    with Checkpoints(folder, CheckpointConfig()) as checkpoints:
        checkpoints.start(buffer)
        agent: Any = anything
        state, missing = capture(agent, buffer, anything, counters, replay=True, shares_rows=checkpoints.shares_rows)
        checkpoints.take(moment(4), state, missing)
    found, _ = newest_checkpoint(folder)
    assert found is not None
    return found


def test_a_buffer_that_only_has_a_state_is_saved_whole(tmp_path: Path) -> None:
    buffer = RowsBuffer()
    buffer.push(random_rows(LAYOUT, 20))
    buffer.batch(4)
    found = saved(tmp_path, buffer)
    other, agent = RowsBuffer(), Anything()
    assert restore(found, agent, other, agent, Counters(1)) == []  # type: ignore[arg-type]
    assert (other.inserted, other.sampled) == (20, 4)
    assert other.batch(9).ixs.tolist() == buffer.batch(9).ixs.tolist()


def test_rows_of_another_layout_are_not_restored_and_it_is_said(tmp_path: Path) -> None:
    found = saved(tmp_path, buffer_of(20))
    other, agent = SimpleReplayBuffer(Layout("transitions", LAYOUT.fields[:1]), 30), Anything()
    (note,) = restore(found, agent, other, agent, Counters(1))  # type: ignore[arg-type]
    assert "the replay buffer is not restored: rows: the replay buffer stores" in note
    assert "both counters of the balance start at 0" in note
    assert (len(other), other.inserted, other.sampled) == (0, 0, 0)


def test_global_random_states_are_restored(tmp_path: Path) -> None:
    found, agent = saved(tmp_path, buffer_of(1)), Anything()
    draws = []
    for _ in range(2):
        restore(found, agent, buffer_of(0), agent, Counters(1))  # type: ignore[arg-type]
        draws.append((random.random(), np.random.random(), torch.rand(1).item()))
    assert draws[0] == draws[1]
    assert not math.isclose(draws[0][0], random.random())


def test_counters_of_actors_go_on_with_new_incarnations() -> None:
    counters = Counters(2)
    counters.arrived(0, 2, 100, ())
    counters.arrived(1, 0, 30, ())
    resumed = Counters(3)
    resumed.load_state_dict(counters.state_dict())
    assert [a.incarnation for a in resumed.actors] == [3, 1, 0]
    resumed.arrived(0, 3, 5, ())
    resumed.arrived(1, 1, 6, ())
    resumed.arrived(2, 0, 7, ())
    assert resumed.env_steps == 148
    assert [a.past_env_steps + a.env_steps for a in resumed.actors] == [105, 36, 7]
