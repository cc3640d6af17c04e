"""What the processes of the transport tests run; imported by them under this plain name."""

import os
import signal
import time
from multiprocessing.connection import Connection

import numpy as np

from outrider.channel import ItemSender, ReplayBufferProxy
from outrider.data import Episode, Field, Layout
from outrider.flags import InitGuard, StopFlag
from outrider.model_sync import ModelReceiver

LAYOUT = Layout(
    "transitions",
    (
        Field("obs", (3,), np.dtype("f4")),
        Field("act", (), np.dtype("i8")),
        Field("reward", (), np.dtype("f4")),
        Field("terminated", (), np.dtype("?")),
        Field("model_version", (), np.dtype("i8")),
    ),
)


def numbered_rows(first: int, n: int) -> dict[str, np.ndarray]:
    """Rows whose every column says which one it is; whole in float32 below 2**24."""
    number = np.arange(first, first + n)
    return {
        "obs": np.repeat(number[:, None], 3, axis=1).astype("f4"),
        "act": number,
        "reward": number.astype("f4"),
        "terminated": number % 3 == 0,
        "model_version": number // 10,
    }


def faults(items: np.ndarray, first: int) -> int:
    """Number of rows that are not the next ones, or not whole."""
    expected = numbered_rows(first, len(items))
    wrong = np.zeros(len(items), bool)
    for name, values in expected.items():
        wrong |= (items[name] != values).reshape(len(items), -1).any(axis=1)
    return int(wrong.sum())


def send_rows(sender: ItemSender, stop: StopFlag, actor: int, incarnation: int, sizes: list[int], n: int) -> None:
    """Push `n` numbered rows in blocks of these sizes, with an episode that ends at every tenth, then the rest."""
    proxy = ReplayBufferProxy.build(sender.proxy_config, sender, actor, incarnation, stop)
    done = 0
    while done < n:
        for size in sizes:
            size = min(size, n - done)
            ended = [i for i in range(done, done + size) if i % 10 == 9]
            proxy.report([Episode(float(i), 10, actor) for i in ended])
            proxy.env_steps = done + size
            proxy.push(numbered_rows(done, size))
            done += size
    proxy.flush()


class _Killer:
    """Kills its process at the n-th call, before or after what it stands for."""

    def __init__(self, inner, n: int, *, after: bool) -> None:
        self.inner, self.left, self.after = inner, n, after

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self, *args):
        if not self.after:
            self._count()
        result = self.inner(*args)
        if self.after:
            self._count()
        return result


class _KillingHeads:
    """The heads; kills the process after the n-th one was stored."""

    def __init__(self, heads: memoryview, n: int) -> None:
        self.heads, self.left = heads, n

    def __getitem__(self, i: int) -> int:
        return self.heads[i]

    def __setitem__(self, i: int, value: int) -> None:
        self.heads[i] = value
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


POINTS = ("in a row block", "before the fence", "after the fence", "after the head", "after the claim", "too early")


def send_rows_and_die(
    sender: ItemSender, stop: StopFlag, actor: int, incarnation: int, first: int, point: str | None, n: int, block: int
) -> None:
    """Push numbered rows for ever; die at the n-th pass of a point, or, with None, when somebody else says so.

    "too early" is the negative control: the head is advanced before the last row of the message is written.
    """
    proxy = ReplayBufferProxy.build(sender.proxy_config, sender, actor, incarnation, stop)
    if point == "before the fence":
        proxy._fence = _Killer(proxy._fence, n, after=False)
    elif point == "after the fence":
        proxy._fence = _Killer(proxy._fence, n, after=True)
    elif point == "after the head":
        proxy._heads = _KillingHeads(proxy._heads, n)
    elif point == "after the claim":
        proxy._open = _Killer(proxy._open, n, after=True)
    elif point == "in a row block":
        proxy._pack = _Killer(proxy._pack, n, after=True)
    sent = 0
    while not stop.is_set():
        if point == "too early" and sent == n * proxy._n_buffer:
            proxy.push(numbered_rows(first, proxy._n_buffer - 1))
            proxy._row += 1
            proxy._commit()
            os.kill(os.getpid(), signal.SIGKILL)
        proxy.push(numbered_rows(first, block))
        first += block
        sent += block


def nursery(sender: ItemSender, stop: StopFlag, orders: Connection) -> None:
    """Fork one actor after the other, which takes 5 ms where starting a process takes 50; says pid, then status."""
    while (order := orders.recv()) is not None:
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)  # nobody is left behind, whatever becomes of the test
            try:
                send_rows_and_die(sender, stop, *order)
            finally:
                os._exit(1)
        orders.send(pid)
        orders.send(os.waitpid(pid, 0)[1])


def set_and_wait(flag: StopFlag, answer: StopFlag) -> None:
    """Wait for one flag, then set the other."""
    if flag.wait(20):
        answer.set()


def enter_together(guard: InitGuard, stop: StopFlag, inside: StopFlag, torn: StopFlag, n: int) -> None:
    """Enter the guard n times; `inside` says whether somebody is in."""
    for _ in range(n):
        with guard.hold(timeout_s=20, stop=stop):
            if inside.is_set():
                torn.set()
            inside.set()
            time.sleep(1e-3)
            inside._word[0] = 0


def hold_for_ever(guard: InitGuard, held: StopFlag) -> None:
    """Take the guard and keep it."""
    with guard:
        held.set()
        time.sleep(60)


def watch_models(
    receiver: ModelReceiver, stop: StopFlag, ready: StopFlag, torn: StopFlag, reader: int | None = None
) -> None:
    """Fetch for ever; whole models have all their numbers equal to the version and never go back."""
    snapshot = receiver.open(reader)
    if not snapshot.wait_first(stop, 20):
        return
    ready.set()
    last = -1
    while not stop.is_set():
        if snapshot.fetch():
            version = snapshot.model_version
            numbers = [snapshot.info["w"].min(), snapshot.info["w"].max(), snapshot.info["env_steps"]]
            if version <= last or any(x != version for x in numbers):
                torn.set()
            last = version


def use_unbound(sender: ItemSender) -> None:
    """Never gets there."""


def refuse_inheritable(shared: list[object]) -> None:
    """Fail if a descriptor that came along would be seen by a program that this process executes."""
    for fd in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{fd}"
        if os.path.lexists(path) and "memfd:outrider" in os.readlink(path):
            assert not os.get_inheritable(int(fd))
    assert len(shared) == 3
