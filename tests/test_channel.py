import gc
import os
import pickle
import threading
import time
from multiprocessing import get_context

import numpy as np
import psutil
import pytest
from children_transport import LAYOUT, faults, numbered_rows, send_rows, use_unbound
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.channel import (
    ItemReceiver,
    ItemSender,
    PushedItemMessage,
    ReplayBufferProxy,
    ReplayBufferProxyConfig,
    item_channel,
)
from outrider.data import Episode, Field, Layout
from outrider.errors import ActorFailed, ChannelClosed, ChannelError, ConfigError, LayoutMismatch, Unbound
from outrider.flags import StopFlag

Copied = tuple[np.ndarray, PushedItemMessage]


def channel(
    n_actors: int = 1, *, layout: Layout = LAYOUT, n_buffer: int = 4, n_slots: int = 3, age_s: float = 100.0
) -> tuple[ItemSender, ItemReceiver, StopFlag]:
    sender, receiver = item_channel()
    sender.bind(
        layout, n_actors=n_actors, n_buffer=n_buffer, n_slots=n_slots, max_message_age_s=age_s, backend="threads"
    )
    return sender, receiver, StopFlag()


def proxy(sender: ItemSender, stop: StopFlag, actor: int = 0, incarnation: int = 0) -> ReplayBufferProxy:
    return ReplayBufferProxy.build(sender.proxy_config, sender, actor, incarnation, stop)


def drained(receiver: ItemReceiver, max_rows: int | None = None) -> list[Copied]:
    messages: list[Copied] = []
    rows = receiver.drain(lambda m: messages.append((m.items.copy(), m)), max_rows)
    assert rows == sum(len(items) for items, _ in messages)
    return messages


# binding


def test_an_unbound_end_names_the_missing_call() -> None:
    sender, receiver = item_channel()
    assert not sender.bound
    assert not receiver.bound
    for use in (
        lambda: sender.layout,
        lambda: sender.n_actors,
        lambda: sender.proxy_config,
        lambda: pickle.dumps(sender),
        lambda: ReplayBufferProxy.build(ReplayBufferProxyConfig(), sender, 0, 0, StopFlag()),
        lambda: receiver.layout,
        lambda: receiver.message_rows,
        lambda: receiver.drain(lambda message: None),
        lambda: receiver.wait(0),
        receiver.pending,
        receiver.fill,
    ):
        with pytest.raises(Unbound, match=r"call ActorManager\.build first"):
            use()
    with pytest.raises(Unbound):
        get_context("spawn").Process(target=use_unbound, args=(sender,)).start()


def test_binding_one_end_binds_the_other_and_only_once() -> None:
    sender, receiver, _ = channel(2, n_buffer=5)
    assert sender.bound
    assert receiver.bound
    assert sender.layout == receiver.layout == LAYOUT
    assert sender.n_actors == receiver.n_actors == 2
    assert receiver.message_rows == 5
    with pytest.raises(ChannelError, match="second bind"):
        sender.bind(LAYOUT, n_actors=2)


@pytest.mark.parametrize(
    "numbers", [{"n_actors": 0}, {"n_buffer": 0}, {"n_slots": 0}, {"max_message_age_s": 0}], ids=lambda n: next(iter(n))
)
def test_impossible_numbers_are_refused_by_name(numbers: dict[str, int]) -> None:
    sender, receiver = item_channel()
    name = next(iter(numbers))
    with pytest.raises(ConfigError, match=rf"^actors\.{name}: expected"):
        sender.bind(LAYOUT, **{"n_actors": 1, **numbers})
    assert not receiver.bound
    if name in ("n_buffer", "max_message_age_s"):
        with pytest.raises(ConfigError, match=rf"^{name}: expected"):
            ReplayBufferProxyConfig(**numbers)


def test_a_proxy_that_does_not_fit_its_ring_is_refused() -> None:
    sender, _, stop = channel(2, n_buffer=4)
    with pytest.raises(LayoutMismatch, match=r"actor in \[0, 2\), got 2"):
        proxy(sender, stop, actor=2)
    with pytest.raises(LayoutMismatch, match="n_buffer 4 as bound, got 64"):
        ReplayBufferProxy.build(ReplayBufferProxyConfig(), sender, 0, 0, stop)


def test_a_closed_end_says_so_and_the_other_goes_on() -> None:
    sender, receiver, stop = channel()
    p = proxy(sender, stop)
    p.push(numbered_rows(0, 4))
    sender.close()
    sender.close()
    with pytest.raises(ChannelClosed, match="its sender was closed"):
        _ = sender.layout
    assert len(drained(receiver)) == 1
    receiver.close()
    with pytest.raises(ChannelClosed, match="its receiver was closed"):
        receiver.pending()
    p.push(numbered_rows(4, 4))  # the memory is there as long as somebody uses it


def test_the_receiver_stays_in_its_process() -> None:
    _, receiver, _ = channel()
    with pytest.raises(TypeError, match="belongs to the learner"):
        pickle.dumps(receiver)


# messages


@pytest.mark.parametrize("block", [1, 2, 3, 4, 5, 11])
def test_messages_hold_exactly_n_buffer_rows_whatever_the_blocks(block: int) -> None:
    sender, receiver, stop = channel(n_buffer=4, n_slots=4)
    p = proxy(sender, stop)
    sent = taken = 0
    for _ in range(30):
        p.push(numbered_rows(sent, block))
        sent += block
        for items, message in drained(receiver):
            assert len(items) == 4
            assert faults(items, taken) == 0
            assert message.model_versions == (taken // 10, (taken + 3) // 10)
            taken += 4
        assert taken == sent // 4 * 4
    p.flush()
    for items, _ in drained(receiver):
        assert faults(items, taken) == 0
        taken += len(items)
    assert taken == sent


def test_records_and_columns_may_alternate() -> None:
    sender, receiver, stop = channel(n_buffer=8)
    p = proxy(sender, stop)
    records = np.zeros(3, LAYOUT.record_dtype())
    for name, values in numbered_rows(2, 3).items():
        records[name] = values
    sparse = np.zeros(6, LAYOUT.record_dtype())
    for name, values in numbered_rows(5, 3).items():
        sparse[name][::2] = values
    p.push(numbered_rows(0, 2))
    p.push(records)
    p.push(sparse[::2])
    [(items, _)] = drained(receiver)
    assert faults(items, 0) == 0


def test_records_with_their_fields_elsewhere_are_copied_by_name() -> None:
    sender, receiver, stop = channel(n_buffer=4)
    p = proxy(sender, stop)
    rows = numbered_rows(0, 4)
    packed = np.zeros(4, [(name, a.dtype, a.shape[1:]) for name, a in reversed(rows.items())])
    for name, values in rows.items():
        packed[name] = values
    p.push(packed[:1])
    p.push(packed[1:])
    [(items, _)] = drained(receiver)
    assert faults(items, 0) == 0


def test_pushed_arrays_may_be_reused_at_once() -> None:
    sender, receiver, stop = channel(n_buffer=4)
    p = proxy(sender, stop)
    for block in (1, 3):
        rows = numbered_rows(0, block) if block == 1 else numbered_rows(1, block)
        p.push(rows)
        for values in rows.values():
            values[...] = 0
    [(items, _)] = drained(receiver)
    assert faults(items, 0) == 0


def test_no_rows_are_no_message() -> None:
    sender, receiver, stop = channel()
    p = proxy(sender, stop)
    p.push(numbered_rows(0, 0))
    p.flush()
    assert drained(receiver) == []


def test_a_message_is_sent_incomplete_only_when_it_is_old() -> None:
    sender, receiver, stop = channel(n_buffer=64, age_s=0.05)
    p = proxy(sender, stop)
    p.tick()
    p.push(numbered_rows(0, 1))
    p.tick()
    assert not receiver.pending()
    time.sleep(0.06)
    p.tick()
    assert [len(items) for items, _ in drained(receiver)] == [1]
    p.push(numbered_rows(1, 2))
    assert not receiver.pending()
    time.sleep(0.06)
    p.push(numbered_rows(3, 1))
    p.push(numbered_rows(4, 1))
    time.sleep(0.06)
    p.push(numbered_rows(5, 2))  # a block, too, looks at the clock
    p.push(numbered_rows(7, 1))
    p.flush()
    taken = 1
    lengths = []
    for items, _ in drained(receiver):
        assert faults(items, taken) == 0
        taken += len(items)
        lengths.append(len(items))
    assert lengths == [3, 3, 1]


def test_a_header_says_who_sent_it_and_how_far_it_is() -> None:
    sender, receiver, stop = channel(3, n_buffer=2)
    p = proxy(sender, stop, actor=1, incarnation=4)
    p.env_steps = 7
    rows = numbered_rows(0, 2)
    rows["model_version"][:] = 9, 5
    p.push(rows)
    [(_, message)] = drained(receiver)
    assert (message.actor, message.incarnation, message.env_steps) == (1, 4, 7)
    assert message.model_versions == (5, 9)
    assert message.episodes == []


def test_without_a_version_column_the_header_has_the_version_the_actor_set() -> None:
    layout = Layout("frames", (Field("frame", (2, 2), np.dtype("u1")),))
    sender, receiver, stop = channel(layout=layout, n_buffer=1)
    p = proxy(sender, stop)
    p.model_version = 12
    p.push({"frame": np.full((1, 2, 2), 200, "u1")})
    [(items, message)] = drained(receiver)
    assert message.model_versions == (12, 12)
    assert (items["frame"] == 200).all()


def test_episodes_travel_with_the_next_message_and_the_rest_with_the_following() -> None:
    sender, receiver, stop = channel(n_buffer=2, n_slots=8)
    p = proxy(sender, stop)
    episodes = [Episode(i + 0.5, 10 * i, i % 3) for i in range(5)]
    p.report(episodes)
    p.push(numbered_rows(0, 4))
    assert [m.episodes for _, m in drained(receiver)] == [episodes[:2], episodes[2:4]]
    p.report(episodes[:1])
    p.push(numbered_rows(4, 1))
    p.flush()
    messages = drained(receiver)
    assert [(len(items), m.episodes) for items, m in messages] == [(1, [episodes[4], episodes[0]])]


def test_a_flush_sends_episodes_that_have_no_rows_left_and_never_blocks() -> None:
    sender, receiver, stop = channel(n_buffer=2, n_slots=1)
    p = proxy(sender, stop)
    p.push(numbered_rows(0, 2))
    episodes = [Episode(1.0, 1, 0)] * 3
    p.report(episodes)
    p.flush()  # the ring is full
    assert [m.episodes for _, m in drained(receiver)] == [[]]
    p.flush()
    assert [(len(items), m.episodes) for items, m in drained(receiver)] == [(0, episodes[:2])]
    p.flush()
    assert [(len(items), m.episodes) for items, m in drained(receiver)] == [(0, episodes[2:])]
    p.flush()
    assert drained(receiver) == []


def test_items_are_read_only_views() -> None:
    sender, receiver, stop = channel(n_buffer=1)
    proxy(sender, stop).push(numbered_rows(0, 1))
    seen = []

    def push(message: PushedItemMessage) -> None:
        seen.append(message.items.base is not None)
        message.items["act"][0] = 1

    with pytest.raises(ValueError, match="read-only"):
        receiver.drain(push)
    assert seen == [True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"obs": np.zeros((1, 4), "f4")}, r"obs \[1, 3\] float32, got \[1, 4\] float32"),
        ({"obs": np.zeros((1, 3), "f8")}, r"obs \[1, 3\] float32, got \[1, 3\] float64"),
        ({"act": np.zeros((1, 1), "i8")}, r"act \[1\] int64, got \[1, 1\]"),
        ({"act": np.zeros(2, "i8")}, r"act \[1\] int64, got \[2\]"),
        ({"extra": np.zeros(1)}, "'extra'"),
    ],
)
def test_rows_of_another_layout_are_refused(change: dict[str, np.ndarray], message: str) -> None:
    sender, receiver, stop = channel()
    p = proxy(sender, stop, actor=0)
    with pytest.raises(LayoutMismatch, match=f"^actor 0: expected items with .*{message}"):
        p.push(numbered_rows(0, 1) | change)
    p.flush()
    assert drained(receiver) == []


def test_a_dtype_that_changes_later_is_cast_and_not_reinterpreted() -> None:
    sender, receiver, stop = channel(n_buffer=3)
    p = proxy(sender, stop)
    p.push(numbered_rows(0, 1))
    p.push(numbered_rows(1, 1) | {"obs": np.full((1, 3), 1, "i4"), "reward": np.array([1.0])})
    p.push(numbered_rows(2, 1))
    [(items, _)] = drained(receiver)
    assert faults(items, 0) == 0


# back-pressure


def test_a_full_ring_holds_the_writer_until_a_slot_is_free() -> None:
    sender, receiver, stop = channel(n_buffer=2, n_slots=2)
    p = proxy(sender, stop)
    waits: list[bool] = []
    p.on_wait = waits.append
    p.push(numbered_rows(0, 4))  # fills both slots, and does not wait for a third
    assert receiver.fills() == [1.0]
    assert waits == []
    thread = threading.Thread(target=lambda: p.push(numbered_rows(4, 1)))
    thread.start()
    deadline = time.monotonic() + 20
    while not waits and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert waits == [True]
    assert thread.is_alive()
    assert len(drained(receiver, max_rows=1)) == 1
    thread.join(20)
    assert waits == [True, False]
    assert p.wait_s > 0
    p.flush()
    taken = 2
    for items, _ in drained(receiver):
        assert faults(items, taken) == 0
        taken += len(items)
    assert taken == 5


def test_a_stop_ends_waiting_for_a_full_ring_and_nothing_committed_is_lost() -> None:
    sender, receiver, stop = channel(n_buffer=2, n_slots=1)
    p = proxy(sender, stop)
    p.push(numbered_rows(0, 2))
    waits: list[bool] = []
    p.on_wait = waits.append
    stop.set()
    with pytest.raises(ChannelClosed, match="actor 0: the run was stopped while its ring was full"):
        p.push(numbered_rows(2, 1))
    assert waits == [True, False]
    assert p.wait_s > 0
    p.flush()
    [(items, _)] = drained(receiver)
    assert faults(items, 0) == 0
    p.push(numbered_rows(2, 2))  # a stop does not refuse what has room
    assert len(drained(receiver)) == 1


def test_a_learner_slower_than_its_actor_keeps_memory_flat_and_loses_nothing() -> None:
    n_messages = 3000
    sender, receiver = item_channel()
    sender.bind(LAYOUT, n_actors=1, n_buffer=16, n_slots=4, max_message_age_s=100)
    args = (sender, StopFlag(), 0, 0, [1, 7], 16 * n_messages)
    process = get_context("forkserver").Process(target=send_rows, args=args)
    process.start()
    taken, resident = 0, []
    deadline = time.monotonic() + 60

    def take(message: PushedItemMessage) -> None:
        nonlocal taken
        assert len(message.items) == 16
        assert faults(message.items, 16 * taken) == 0
        taken += 1

    for i in range(n_messages):
        while receiver.fill() < min(1, (n_messages - i) / 4):  # not before the ring is full
            assert time.monotonic() < deadline
            time.sleep(1e-4)
        assert receiver.drain(take, max_rows=1) == 16
        if i in (n_messages // 4, n_messages - 10):
            resident.append(psutil.Process().memory_info().rss + psutil.Process(process.pid).memory_info().rss)
    assert not receiver.pending()
    assert resident[1] - resident[0] < 1e6
    process.join(20)
    assert process.exitcode == 0


# draining


def test_drain_takes_whole_messages_and_stops_at_max_rows() -> None:
    sender, receiver, stop = channel(n_buffer=4, n_slots=8)
    proxy(sender, stop).push(numbered_rows(0, 32))
    assert drained(receiver, max_rows=0) == []
    assert [len(items) for items, _ in drained(receiver, max_rows=5)] == [4, 4]
    assert receiver.fill() == 6 / 8
    assert len(drained(receiver)) == 6
    assert receiver.fill() == 0


def test_a_busy_actor_does_not_starve_the_others() -> None:
    sender, receiver, stop = channel(3, n_buffer=1, n_slots=64)
    busy, slow = proxy(sender, stop, 0), proxy(sender, stop, 2)
    busy.push(numbered_rows(0, 60))
    slow.push(numbered_rows(0, 2))
    order = [m.actor for _ in range(6) for _, m in drained(receiver, max_rows=1)]
    assert order == [0, 2, 0, 2, 0, 0]
    assert receiver.fills() == [56 / 64, 0, 0]


def test_a_message_whose_push_fails_is_not_taken() -> None:
    sender, receiver, stop = channel(n_buffer=2)
    proxy(sender, stop).push(numbered_rows(0, 4))

    def fail(message: PushedItemMessage) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        receiver.drain(fail)
    messages = drained(receiver)
    assert [faults(items, 2 * i) for i, (items, _) in enumerate(messages)] == [0, 0]


def test_waiting_for_items_ends_with_a_message_a_stop_or_the_time_out() -> None:
    sender, receiver, stop = channel(n_buffer=1)
    start = time.monotonic()
    assert not receiver.wait(0.05)
    assert time.monotonic() - start >= 0.05
    thread = threading.Timer(0.05, stop.set)
    thread.start()
    assert not receiver.wait(20, stop)
    thread.join()
    proxy(sender, StopFlag()).push(numbered_rows(0, 1))
    assert receiver.wait(20, stop)


def test_a_failure_is_raised_by_every_later_drain_and_wait_and_wakes_a_sleeper() -> None:
    sender, receiver, stop = channel(n_buffer=1)
    proxy(sender, stop).push(numbered_rows(0, 1))
    drained(receiver)
    failure = ActorFailed(0, "Traceback ...\nValueError: gone")
    thread = threading.Timer(0.05, receiver.fail, [failure])
    thread.start()
    with pytest.raises(ActorFailed, match="gone"):
        receiver.wait(20)
    thread.join()
    receiver.fail(ActorFailed(1, "Traceback ...\nValueError: a consequence"))
    for _ in range(2):
        with pytest.raises(ActorFailed, match="gone"):
            receiver.drain(lambda message: pytest.fail("drained"))


# restarts and processes


def test_a_new_incarnation_goes_on_at_the_committed_head() -> None:
    sender, receiver, stop = channel(n_buffer=4)
    first = proxy(sender, stop)
    first.push(numbered_rows(0, 6))  # two rows are lost with it
    second = proxy(sender, stop, incarnation=1)
    second.push(numbered_rows(4, 5))
    second.flush()
    messages = drained(receiver)
    assert [m.incarnation for _, m in messages] == [0, 1, 1]
    assert [faults(items, first) for (items, _), first in zip(messages, (0, 4, 8), strict=True)] == [0, 0, 0]


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_actors_in_processes_send_every_row_once_and_leave_nothing(method: str) -> None:
    names = set(os.listdir("/dev/shm"))
    n_actors, n = 2, 3001
    sender, receiver = item_channel()
    sender.bind(LAYOUT, n_actors=n_actors, n_buffer=7, n_slots=4, max_message_age_s=100)
    stop = StopFlag()
    processes = [
        get_context(method).Process(target=send_rows, args=(sender, stop, i, i, [1, 3, 16], n)) for i in range(n_actors)
    ]
    for p in processes:
        p.start()
    taken = [0] * n_actors
    episodes: list[list[float]] = [[] for _ in range(n_actors)]

    def take(message: PushedItemMessage) -> None:
        i = message.actor
        assert message.incarnation == i
        assert faults(message.items, taken[i]) == 0
        taken[i] += len(message.items)
        assert taken[i] <= message.env_steps < taken[i] + 16 + 7
        episodes[i] += [e.ret for e in message.episodes]

    while sum(taken) < n_actors * n and receiver.wait(20):
        receiver.drain(take, max_rows=20)
    assert taken == [n] * n_actors
    assert episodes == [[float(e) for e in range(9, n, 10)]] * n_actors
    for p in processes:
        p.join(20)
        assert p.exitcode == 0
    sender.close()
    receiver.close()
    del sender, receiver
    gc.collect()
    assert set(os.listdir("/dev/shm")) <= names


# every dtype

DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "g", ">f4", ">i2"]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
    columns = draw(st.lists(st.tuples(st.sampled_from(DTYPES), st.one_of(st.just(()), shapes)), min_size=1, max_size=6))
    return Layout("frames", tuple(Field(f"c{i}", shape, np.dtype(d)) for i, (d, shape) in enumerate(columns)))


@settings(deadline=None, max_examples=150)
@given(
    layout=layouts(),
    n_buffer=st.integers(1, 9),
    n_slots=st.integers(1, 3),
    blocks=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    as_records=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_in_are_rows_out_for_every_dtype_shape_and_size(
    layout: Layout, n_buffer: int, n_slots: int, blocks: list[int], as_records: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    n = sum(blocks)
    sent = np.zeros(n, layout.record_dtype())
    for f in layout.fields:
        bits = rng.integers(-200, 200, (n, *f.shape))
        sent[f.name] = bits % 2 if f.dtype.kind == "b" else bits % 120 if f.dtype.kind == "u" else bits / 2
    sender, receiver, stop = channel(layout=layout, n_buffer=n_buffer, n_slots=n_slots)
    p = proxy(sender, stop)
    came: list[np.ndarray] = []

    def make_room(waiting: bool) -> None:
        if waiting:
            came.extend(items for items, _ in drained(receiver))

    p.on_wait = make_room
    done = 0
    for block in blocks:
        rows = sent[done : done + block]
        p.push(rows if as_records else {f.name: np.ascontiguousarray(rows[f.name]) for f in layout.fields})
        done += block
    p.flush()
    came += [items for items, _ in drained(receiver)]
    assert [len(items) for items in came] == [n_buffer] * (n // n_buffer) + [n % n_buffer] * (n % n_buffer > 0)
    first = 0
    for items in came:
        for f in layout.fields:
            assert items[f.name].dtype == f.dtype
            assert items[f.name].shape == (len(items), *f.shape)
            assert (items[f.name] == sent[f.name][first : first + len(items)]).all()
        first += len(items)


def test_extreme_numbers_arrive_unchanged() -> None:
    columns = {
        "f4": [1e-38, 1e-45, -1e-45, -3.4028235e38, 3.4028235e38, -0.0],
        "f8": [1e-300, 5e-324, -5e-324, -1.7976931348623157e308, 1.7976931348623157e308, -0.0],
        "f2": [1e-4, 6e-8, -6e-8, -65504, 65504, -0.0],
        "i8": [2**63 - 1, -(2**63), -1, 0, 1, 2],
        "u8": [2**64 - 1, 2**63, 0, 1, 2, 3],
        "u1": [255, 0, 1, 2, 3, 4],
        "b1": [True, False, True, False, True, False],
    }
    layout = Layout("frames", tuple(Field(d, (), np.dtype(d)) for d in columns))
    sender, receiver, stop = channel(layout=layout, n_buffer=6)
    p = proxy(sender, stop)
    arrays = {d: np.array(values, d) for d, values in columns.items()}
    for i in range(6):
        p.push({d: values[i : i + 1] for d, values in arrays.items()})
    [(items, _)] = drained(receiver)
    for d, values in arrays.items():
        assert np.ascontiguousarray(items[d]).tobytes() == values.tobytes(), d
