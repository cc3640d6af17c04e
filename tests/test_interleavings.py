"""Every order in which the memory operations of ring and slab can happen, tried one after the other.

Each side is a list of loads and stores, cut into epochs by its fences. Within an epoch they happen in any order
that respects the dependencies named (an address computed from a load, a store behind a check), as on ARM; epochs
keep their order. The sides interleave freely, and the writer of a ring may be killed anywhere, and be replaced.
Stress seldom shows an error by one, and x86 no missing fence; this shows each of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import pytest

from outrider.model_sync import N_SLOTS

State = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Op:
    """One load or store.

    `act` changes the state; False: it has to wait, as in a loop that naps. `after`: indices of ops it depends on.
    """

    epoch: int
    after: tuple[int, ...]
    act: Callable[[State], bool]


class TornError(Exception):
    """Something mixed, stale or doubled was taken for a whole message or model."""


class StuckError(Exception):
    """Nothing can happen any more, and the reader is not through."""


def explore(
    writer: list[Op], reader: list[Op], state: State, restart: Callable[[State], int | None] = lambda state: None
) -> int:
    """Visit every reachable state; returns their number.

    `restart` kills the writer: it changes the state and says how many of the writer's ops its successor finds
    done, or None if no kill is left.
    """
    start = (0, 0, tuple(state.items()))
    seen, stack = {start}, [start]
    while stack:
        done_w, done_r, items = stack.pop()
        successors = []
        for side, (ops, done) in enumerate(((writer, done_w), (reader, done_r))):
            for i in possible(ops, done):
                after = dict(items)
                if ops[i].act(after):
                    masks = (done_w | 1 << i, done_r) if side == 0 else (done_w, done_r | 1 << i)
                    successors.append((*masks, tuple(after.items())))
        if not successors and done_r != (1 << len(reader)) - 1:
            raise StuckError(items)
        after = dict(items)
        if (n_done := restart(after)) is not None:
            successors.append(((1 << n_done) - 1, done_r, tuple(after.items())))
        for s in successors:
            if s not in seen:
                seen.add(s)
                stack.append(s)
    return len(seen)


def possible(ops: list[Op], done: int) -> list[int]:
    left = [i for i in range(len(ops)) if not done >> i & 1]
    epoch = min((ops[i].epoch for i in left), default=0)
    return [i for i in left if ops[i].epoch == epoch and all(done >> a & 1 for a in ops[i].after)]


def store(name: str, i: int, value: Callable[[State], int]) -> Callable[[State], bool]:
    def act(s: State) -> bool:
        s[name] = (*s[name][:i], value(s), *s[name][i + 1 :])
        return True

    return act


# The ring: two data words stand for rows and header. A message is 10 * number + incarnation in both words.


def ring_writer(n: int, n_slots: int, *, fence: bool) -> list[Op]:
    """``ReplayBufferProxy``: claim, write, fence, head; always four ops a message, which is how a successor counts."""
    ops: list[Op] = []
    for m in range(n):
        claim = len(ops)
        ops.append(Op(m, (), lambda s, m=m: m - s["tail"][0] < n_slots))
        content = partial(lambda m, s: 10 * m + s["incarnation"][0], m)
        ops += [Op(m, (claim,), store(word, m % n_slots, content)) for word in ("d0", "d1")]
        # Nothing orders the head against the claim and the rows of the next message, up to its fence.
        ops.append(Op(m + 1 if fence else m, (), store("head", 0, lambda s, m=m: m + 1)))
    return ops


def ring_reader(batches: list[int], n_slots: int, *, look_fence: bool, tail_fence: bool) -> list[Op]:
    """``ItemReceiver.drain``: look at the heads, fence, then for each message read, fence, tail."""
    ops: list[Op] = []
    tails: tuple[int, ...] = ()
    m = epoch = 0
    for batch in batches:
        ops.append(Op(epoch, (), lambda s, end=m + batch: s["head"][0] >= end))
        epoch += look_fence
        for _ in range(batch):
            ops += [Op(epoch, (), read(word, register, m, n_slots)) for word, register in (("d0", "r0"), ("d1", "r1"))]
            epoch += tail_fence
            ops.append(Op(epoch, tails, store("tail", 0, lambda s, m=m: m + 1)))
            tails = (len(ops) - 1,)  # stores to one place keep their order
            m += 1
    return ops


def read(word: str, register: str, m: int, n_slots: int) -> Callable[[State], bool]:
    def act(s: State) -> bool:
        store(register, m, lambda s: s[word][m % n_slots])(s)
        r0, r1 = s["r0"][m], s["r1"][m]
        if -1 not in (r0, r1):
            if r0 != r1 or r0 // 10 != m:
                raise TornError(f"message {m}: {r0} {r1}")
            for r in ("r0", "r1"):  # forgotten, for fewer different states
                store(r, m, lambda s: -1)(s)
        return True

    return act


def explore_ring(
    n: int, n_slots: int, kills: int, *, fence: bool = True, look_fence: bool = True, tail_fence: bool = True
) -> int:
    def restart(s: State) -> int | None:
        if s["incarnation"][0] == kills:
            return None
        s["incarnation"] = (s["incarnation"][0] + 1,)
        return 4 * s["head"][0]

    visited = 0
    for cuts in product((False, True), repeat=n - 1):  # all ways to drain n messages in batches
        batches = [1]
        for cut in cuts:
            batches = [*batches, 1] if cut else [*batches[:-1], batches[-1] + 1]
        if max(batches) > n_slots:
            continue
        state: State = {"head": (0,), "tail": (0,), "incarnation": (0,)}
        state |= dict.fromkeys(("d0", "d1"), (-1,) * n_slots) | dict.fromkeys(("r0", "r1"), (-1,) * n)
        reader = ring_reader(batches, n_slots, look_fence=look_fence, tail_fence=tail_fence)
        visited += explore(ring_writer(n, n_slots, fence=fence), reader, state, restart)
    return visited


@pytest.mark.parametrize("n_slots", [1, 2, 3])
def test_no_interleaving_of_a_ring_tears_loses_doubles_or_sticks(n_slots: int) -> None:
    assert explore_ring(4, n_slots, kills=2) > 100


@pytest.mark.parametrize("n_slots", [1, 2])
@pytest.mark.parametrize("missing", ["fence", "look_fence", "tail_fence"])
def test_a_ring_without_one_of_its_fences_tears(n_slots: int, missing: str) -> None:
    with pytest.raises(TornError):
        explore_ring(4, n_slots, kills=0, **{missing: False})


# The slab: two data words stand for the model; version v has v in both.


def slab_writer(n: int, n_slots: int, *, lead_fence: bool, fence: bool) -> list[Op]:
    """``ModelSender.publish``: begun, fence, fill the slot, fence, version word."""
    ops: list[Op] = []
    for v in range(1, n + 1):
        epoch = 2 * v if lead_fence else 2 * v - 1
        ops.append(Op(2 * v - 1, (), store("begun", 0, lambda s, v=v: v)))
        ops += [Op(epoch, (), store(word, v % n_slots, lambda s, v=v: v)) for word in ("d0", "d1")]
        ops.append(Op(2 * v + 1 if fence else 2 * v, (), store("word", 0, lambda s, v=v: v)))
    return ops


def slab_reader(tries: int, n_slots: int, *, recheck_fence: bool, accept_below: int) -> list[Op]:
    """``ModelSnapshot.fetch``: version, fence, copy, fence, begun; accept, or go on with the newest version."""

    def first(s: State) -> bool:
        return s["word"][0] != 0 and store("v", 0, lambda s: s["word"][0])(s)

    def decide(s: State) -> bool:
        v, begun, again = s["v"][0], s["b"][0], s["again"][0]
        if v and begun - v < accept_below:
            if (s["r0"][0], s["r1"][0]) != (v, v):
                raise TornError(f"version {v}: {s['r0'][0]} {s['r1'][0]}")
            return store("v", 0, lambda s: 0)(s)  # through: the tries that are left do nothing
        return not v or store("v", 0, lambda s: again)(s)

    ops, epoch, before = [Op(0, (), first)], 1, 0
    for _ in range(tries):
        at = len(ops)
        words = (("d0", "r0"), ("d1", "r1"))
        ops += [Op(epoch, (before,), copy_word(word, register, n_slots)) for word, register in words]
        epoch += recheck_fence
        for word, register in (("begun", "b"), ("word", "again")):
            ops.append(Op(epoch, (), store(register, 0, lambda s, word=word: s[word][0] if s["v"][0] else 0)))
        ops.append(Op(epoch, (at, at + 1, at + 2, at + 3), decide))
        epoch += 1
        before = at + 4
    return ops


def copy_word(word: str, register: str, n_slots: int) -> Callable[[State], bool]:
    return store(register, 0, lambda s: s[word][s["v"][0] % n_slots] if s["v"][0] else 0)


def explore_slab(
    n_slots: int,
    *,
    n: int = 7,
    lead_fence: bool = True,
    fence: bool = True,
    recheck_fence: bool = True,
    accept_below: int | None = None,
) -> int:
    state: State = dict.fromkeys(("word", "begun", "v", "b", "again", "r0", "r1"), (0,))
    state |= dict.fromkeys(("d0", "d1"), (0,) * n_slots)
    limit = n_slots if accept_below is None else accept_below
    reader = slab_reader(n, n_slots, recheck_fence=recheck_fence, accept_below=limit)
    return explore(slab_writer(n, n_slots, lead_fence=lead_fence, fence=fence), reader, state)


@pytest.mark.parametrize("n_slots", [N_SLOTS, 3, 4])
def test_no_interleaving_of_a_slab_gives_a_mixed_model(n_slots: int) -> None:
    assert explore_slab(n_slots) > 100


@pytest.mark.parametrize("n_slots", [N_SLOTS, 3, 4])
@pytest.mark.parametrize(
    "fault",
    [{"lead_fence": False}, {"fence": False}, {"recheck_fence": False}, {"accept": 1}],
    ids=lambda f: next(iter(f)),
)
def test_a_slab_without_one_of_its_fences_or_off_by_one_gives_a_mixed_model(
    n_slots: int, fault: dict[str, int]
) -> None:
    if "accept" in fault:
        fault = {"accept_below": n_slots + 1}
    with pytest.raises(TornError):
        explore_slab(n_slots, **fault)
