import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Iterable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess

import numpy as np
import pytest
from children_transport import watch_models

from outrider.data import Field, ModelInfo
from outrider.errors import ChannelClosed, ChannelError, LayoutMismatch, Unbound
from outrider.flags import StopFlag
from outrider.model_sync import ModelReceiver, ModelSender, model_channel


def model(value: float = 0) -> dict[str, np.ndarray]:
    return {
        "net.weight": np.full((3, 5), value, "f4"),
        "net.bias": np.full(5, value, "f8"),
        "norm.count": np.array(int(value), "i8"),
        "norm.frozen": np.array([value > 0]),
        "image.mean": np.full((1, 2, 2), int(value) % 256, "u1"),
        "empty": np.zeros((0, 4), "f4"),
    }


def channel(info: ModelInfo) -> tuple[ModelSender, ModelReceiver]:
    sender, receiver = model_channel()
    sender.bind(info, backend="threads")
    return sender, receiver


def test_an_unbound_end_names_the_missing_call() -> None:
    sender, receiver = model_channel()
    assert not sender.bound
    assert not receiver.bound
    assert sender.published is None
    for use in (
        lambda: sender.publish(0, model(), 0),
        receiver.open,
        lambda: receiver.fields,
        lambda: receiver.require_equal(model(), "me"),
        lambda: pickle.dumps(receiver),
    ):
        with pytest.raises(Unbound, match=r"call AsyncTrainer\.build first"):
            use()


def test_binding_one_end_binds_the_other_and_only_once() -> None:
    sender, receiver = channel(model())
    assert sender.bound
    assert receiver.bound
    assert receiver.fields[0] == Field("net.weight", (3, 5), np.dtype("f4"))
    with pytest.raises(ChannelError, match="second bind"):
        sender.bind(model())


def test_a_closed_end_says_so() -> None:
    sender, receiver = channel(model())
    snapshot = receiver.open()
    sender.publish(1, model(1), 0)
    sender.close()
    with pytest.raises(ChannelClosed, match="its sender was closed"):
        sender.publish(2, model(2), 0)
    receiver.close()
    receiver.close()
    with pytest.raises(ChannelClosed, match="its receiver was closed"):
        receiver.open()
    assert snapshot.fetch()
    assert snapshot.model_version == 1


def test_the_sender_stays_in_its_process() -> None:
    with pytest.raises(TypeError, match="belongs to the learner"):
        pickle.dumps(channel(model())[0])


def test_a_fetch_brings_the_latest_model_once() -> None:
    sender, receiver = channel(model())
    snapshot = receiver.open()
    assert not snapshot.fetch()
    assert snapshot.model_version == -1
    for version in (3, 4, 9):
        sender.publish(version, model(version), 100 * version)
        assert sender.published == version
    assert snapshot.fetch()
    assert not snapshot.fetch()
    assert snapshot.model_version == 9
    assert snapshot.info["env_steps"] == 900
    assert snapshot.info["env_steps"].shape == ()
    assert snapshot.info["env_steps"].dtype == np.int64
    for name, values in model(9).items():
        got = snapshot.info[name]
        assert (got.dtype, got.shape) == (values.dtype, values.shape)
        assert (got == values).all()


def test_the_views_of_a_snapshot_stay_where_they_are_and_are_aligned() -> None:
    sender, receiver = channel(model())
    snapshot, other = receiver.open(), receiver.open()
    kept = dict(snapshot.info)
    addresses = {name: a.ctypes.data for name, a in kept.items()}
    sender.publish(1, model(1), 5)
    assert (kept["net.bias"] == 0).all()  # nothing changes before the fetch
    assert snapshot.fetch()
    assert (kept["net.bias"] == 1).all()
    assert {name: a.ctypes.data for name, a in snapshot.info.items()} == addresses
    assert all(at % 64 == 0 for name, at in addresses.items() if name != "env_steps")
    assert (other.info["net.bias"] == 0).all()  # each has its own
    snapshot.info["net.bias"][:] = 7  # and may write to it
    assert other.fetch()
    assert (other.info["net.bias"] == 1).all()


def test_publishing_copies_the_arrays() -> None:
    sender, receiver = channel(model())
    info = model(1)
    sender.publish(1, info, 0)
    info["net.bias"][:] = 5
    snapshot = receiver.open()
    snapshot.fetch()
    assert (snapshot.info["net.bias"] == 1).all()


def test_plain_numbers_and_strided_arrays_are_arrays() -> None:
    sender, receiver = channel({"scale": 0.0, "count": 0, "w": np.zeros((2, 3), "f4")})
    sender.publish(1, {"count": np.int64(7), "w": np.arange(6, dtype="f4").reshape(3, 2).T, "scale": 0.5}, 0)
    snapshot = receiver.open()
    assert snapshot.fetch()
    assert snapshot.info["scale"] == 0.5
    assert snapshot.info["count"] == 7
    assert snapshot.info["w"].tolist() == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"net.bias": np.zeros(6)}, r"'net.bias'.* net.bias \[5\] float64, .* has net.bias \[6\] float64"),
        ({"net.bias": np.zeros(5, "f4")}, r"'net.bias'.*float64, .* has net.bias \[5\] float32"),
        ({"more": np.zeros(5)}, r"'more': the channel was bound with no such array, .* has more \[5\] float64"),
        ({"net.bias": None}, r"'net.bias'.*has no such array"),
        ({"env_steps": np.array(0)}, "'env_steps' is reserved"),
    ],
)
def test_a_model_of_another_form_is_refused_by_name(change: dict[str, np.ndarray], message: str) -> None:
    sender, receiver = channel(model())
    info = {name: a for name, a in (model() | change).items() if a is not None}
    with pytest.raises(LayoutMismatch, match=message):
        sender.publish(1, info, 0)
    with pytest.raises(LayoutMismatch, match=message):
        receiver.require_equal(info, "actor 3")
    assert sender.published is None
    assert not receiver.open().fetch()
    receiver.require_equal(dict(reversed(model().items())), "actor 3")
    sender.publish(1, dict(reversed(model(1).items())), 0)


def test_a_renamed_array_is_refused() -> None:
    sender, _ = channel({"a": np.zeros(3), "b": np.zeros(3)})
    with pytest.raises(LayoutMismatch, match="'b'"):
        sender.publish(1, {"a": np.zeros(3), "c": np.zeros(3)}, 0)


@pytest.mark.parametrize("bad", [{"env_steps": np.array(0)}, {"name": np.array("text")}, {"any": np.array([None])}])
def test_what_cannot_be_published_is_refused_at_bind(bad: dict[str, np.ndarray]) -> None:
    sender, receiver = model_channel()
    with pytest.raises(LayoutMismatch, match=r"env_steps|array of numbers"):
        sender.bind(bad)
    assert not receiver.bound


def test_the_first_publication_wakes_whatever_its_version_and_the_same_version_may_come_again() -> None:
    sender, receiver = channel(model())
    snapshot, stop = receiver.open(), StopFlag()
    assert not snapshot.wait_first(stop, 0.02)
    thread = threading.Timer(0.02, sender.publish, [0, model(0), 0])
    thread.start()
    assert snapshot.wait_first(stop, 20)
    thread.join()
    assert snapshot.model_version == 0
    assert snapshot.wait_first(stop, 0)  # it has one
    sender.publish(0, model(5), 30)
    assert snapshot.fetch()
    assert snapshot.model_version == 0
    assert snapshot.info["env_steps"] == 30
    assert (snapshot.info["net.bias"] == 5).all()


def test_a_stop_ends_waiting_for_the_first_publication() -> None:
    _, receiver = channel(model())
    stop = StopFlag()
    thread = threading.Timer(0.02, stop.set)
    thread.start()
    assert not receiver.open().wait_first(stop, 20)
    thread.join()


def test_a_copy_that_was_overtaken_is_made_again() -> None:
    sender, receiver = channel(model())
    snapshot = receiver.open()
    newer_during_copy = iter([2, 3, 1])
    fence = snapshot._fence
    fences = [0]

    def publish_next() -> None:
        version = (sender.published or 0) + 1
        sender.publish(version, model(version), version)

    def overtaken() -> None:
        fences[0] += 1
        if fences[0] % 2 == 0:  # the fence behind a copy
            for _ in range(next(newer_during_copy, 0)):
                publish_next()
        fence()

    publish_next()
    snapshot._fence = overtaken  # type: ignore[assignment]
    assert snapshot.fetch()
    # Twice it was overtaken by enough to be torn; one newer model does not touch the slot it copied.
    assert snapshot.model_version == 6
    assert sender.published == 7
    assert (snapshot.info["net.bias"] == 6).all()
    assert snapshot.fetch()
    assert snapshot.model_version == 7


def test_a_publication_that_was_interrupted_is_not_seen_and_the_next_one_is_whole() -> None:
    sender, receiver = channel(model())
    snapshot, late = receiver.open(), receiver.open()
    for version in (1, 2):
        sender.publish(version, model(version), version)
    assert sender._writer is not None
    fence, fences = sender._writer._fence, [0]

    def interrupted() -> None:
        fences[0] += 1
        if fences[0] == 3:  # the slot is full, the version is not out
            raise KeyboardInterrupt
        fence()

    sender._writer._fence = interrupted  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        sender.publish(3, model(3), 3)
    assert sender.published == 2
    assert snapshot.fetch()
    assert not snapshot.fetch()
    assert (snapshot.info["net.bias"] == 2).all()
    sender.publish(4, model(4), 4)
    for reader in (snapshot, late):
        assert reader.fetch()
        assert reader.model_version == 4
        assert (reader.info["net.bias"] == 4).all()


def slots(sender: ModelSender, versions: Iterable[int]) -> list[int]:
    """Publish, and say in which slots."""
    found = []
    for version in versions:
        sender.publish(version, model(version), version)
        assert sender._writer is not None
        found.append(sender._writer._words[0] % 2)
    return found


def test_a_model_is_written_over_once_every_reader_has_a_copy_of_it() -> None:
    sender, receiver = model_channel()
    sender.bind(model(), backend="threads", n_readers=3)  # the third does not come
    readers = [receiver.open(0), receiver.open(1)]
    first, second = slots(sender, [1, 2])
    assert first != second
    for version in range(3, 6):
        for reader in readers:
            assert reader.fetch()
        assert slots(sender, [version]) == [second]
        for reader in readers:
            assert (reader.info["net.bias"] == version - 1).all()
    assert readers[0].fetch()
    assert slots(sender, [6, 7, 8]) == [first, second, first]  # one of them lags behind
    for reader in readers:
        assert reader.fetch()
    receiver.open(1)  # another one in its place, which has nothing
    assert slots(sender, [9]) == [second]


@pytest.mark.parametrize("number", [None, 2])
def test_no_model_is_written_over_where_it_lies_if_there_is_a_reader_without_a_number(number: int | None) -> None:
    sender, receiver = model_channel()
    sender.bind(model(), backend="threads", n_readers=2)
    readers = [receiver.open(0), receiver.open(number)]
    found = []
    for version in range(1, 5):
        found += slots(sender, [version])
        for reader in readers:
            assert reader.fetch()
            assert (reader.info["net.bias"] == version).all()
    assert found in ([0, 1, 0, 1], [1, 0, 1, 0])


def test_whoever_comes_while_the_only_model_is_written_over_gets_the_one_that_follows() -> None:
    sender, receiver = model_channel()
    sender.bind(model(), backend="threads", n_readers=2)
    old = receiver.open(0)
    sender.publish(1, model(1), 1)
    assert old.fetch()
    writer = sender._writer
    assert writer is not None
    fence, fences, new = writer._fence, [0], []

    def interrupted() -> None:
        fences[0] += 1
        if fences[0] == 3:
            new.append(receiver.open(1))
            assert not new[0].fetch()
            assert not old.fetch()
            raise KeyboardInterrupt
        fence()

    writer._fence = interrupted  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        sender.publish(2, model(2), 2)
    assert not new[0].fetch()
    assert new[0].model_version == -1
    assert not old.fetch()
    assert (old.info["net.bias"] == 1).all()
    sender.publish(3, model(3), 3)
    for reader in (old, *new):
        assert reader.fetch()
        assert reader.model_version == 3
        assert (reader.info["net.bias"] == 3).all()


def test_a_killed_reader_holds_nobody_up_and_another_one_takes_its_number() -> None:
    n, rng, version = 50_000, random.Random(0), 0
    sender, receiver = model_channel()
    weights = np.zeros(n, "f4")
    sender.bind({"w": weights}, n_readers=2)
    stop, torn = StopFlag(), StopFlag()
    context = get_context("forkserver")

    def start(reader: int) -> tuple[BaseProcess, StopFlag]:
        ready = StopFlag()
        process = context.Process(target=watch_models, args=(receiver, stop, ready, torn, reader))
        process.start()
        return process, ready

    def publish_until(ready: StopFlag, more: int) -> None:
        nonlocal version
        deadline = time.monotonic() + 20
        while more > 0:
            assert time.monotonic() < deadline
            more -= ready.is_set()
            weights[:] = version
            sender.publish(version, {"w": weights}, version)
            version += 1

    survivor, _ = start(1)
    for _ in range(6):
        victim, ready = start(0)
        publish_until(ready, rng.randrange(1, 200))
        victim.kill()
        victim.join(20)
        assert victim.exitcode == -signal.SIGKILL
    last, ready = start(0)
    publish_until(ready, 100)
    stop.set()
    for process in (survivor, last):
        process.join(20)
        assert process.exitcode == 0
    assert not torn.is_set()


@pytest.mark.parametrize(("method", "number"), [("forkserver", None), ("forkserver", 0), ("spawn", 0)])
def test_no_reader_sees_a_mixed_model_even_if_it_is_stopped_in_the_middle(method: str, number: int | None) -> None:
    n = 200_000  # 0.8 MB: copying takes long enough to be interrupted
    sender, receiver = model_channel()
    weights = np.zeros(n, "f4")
    sender.bind({"w": weights}, n_readers=1)
    stop, ready, torn = StopFlag(), StopFlag(), StopFlag()
    reader = get_context(method).Process(target=watch_models, args=(receiver, stop, ready, torn, number))
    reader.start()
    rng, version = random.Random(0), 0
    deadline = time.monotonic() + 20
    end = None
    while end is None or time.monotonic() < end:
        assert time.monotonic() < deadline
        weights[:] = version
        sender.publish(version, {"w": weights}, version)
        version += 1
        if end is None and ready.is_set():
            end = time.monotonic() + 1.5
        if version % 40 == 0:
            os.kill(reader.pid or 0, signal.SIGSTOP)
            for _ in range(rng.randrange(6)):
                weights[:] = version
                sender.publish(version, {"w": weights}, version)
                version += 1
            os.kill(reader.pid or 0, signal.SIGCONT)
    stop.set()
    reader.join(20)
    assert reader.exitcode == 0
    assert version > 100
    assert not torn.is_set()
