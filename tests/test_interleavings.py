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


# The slab: two data words stand for the model, with 10 * version + interruptions of the sender in both. Version v in
# slot s is the number 2 * v + s.


class WaitedError(Exception):
    """A reader that has parameters lost them to a publication that is not out yet: it would wait for the sender."""


def slab_writer(
    others: tuple[bool, ...], *, look_fence: bool, lead_fence: bool, fence: bool, look: bool, go_on: bool
) -> list[Op]:
    """``ModelSender.publish``: fence, choose a slot, begun, fence, fill it, fence, out; five ops a publication.

    `others`: for each publication, whether all other readers have the version before it.
    """
    ops: list[Op] = []
    for i, they_have in enumerate(others, start=1):
        choose, first = len(ops), 3 * i if look_fence else 3 * i - 1
        ops.append(Op(first, (), partial(choose_slot, i, they_have, look, go_on)))
        ops.append(Op(first, (choose,), store("begun", 0, lambda s, i=i: s["numbers"][i])))
        second = 3 * i + 1 if lead_fence else first
        ops += [Op(second, (choose,), partial(fill, word, i)) for word in ("d0", "d1")]
        ops.append(Op(3 * i + 2 if fence else second, (choose,), store("out", 0, lambda s, i=i: s["numbers"][i])))
    return ops


def choose_slot(i: int, they_have: bool, look: bool, go_on: bool, s: State) -> bool:
    out, begun = s["numbers"][i - 1], s["begun"][0]
    free = they_have and (not look or s["have"][0] in (0, out))
    slot = begun & 1 if go_on and begun > out else (out & 1 if free else ~out & 1)
    return store("numbers", i, lambda s: (out | 1) + 1 + slot)(s)


def fill(word: str, i: int, s: State) -> bool:
    number = s["numbers"][i]
    return store(word, number & 1, lambda s: 10 * (number >> 1) + s["interrupted"][0])(s)


def slab_reader(tries: int, *, recheck_fence: bool, accept: int, early: bool) -> list[Op]:
    """``ModelSnapshot``: say that it is there, then ``fetch`` after ``fetch``, of which some copy again.

    `accept`: the newest number begun that leaves a copy of 0 whole. `early`: says what it has before it is sure.
    """

    def look(s: State) -> bool:
        out, own = s["out"][0], s["own"][0]
        if s["v"][0] or out >> 1 == len(s["numbers"]) - 1 + s["first"][0]:
            return bool(s["v"][0]) or out == own or store("v", 0, lambda s: out)(s)
        return out not in (0, own) and store("v", 0, lambda s: out)(s)

    def decide(s: State) -> bool:
        v, begun, own = s["v"][0], s["b"][0], s["own"][0]
        if not v:
            return True
        if begun == v or ((v ^ 1) < begun <= (v ^ 1) + accept and begun & 1 != v & 1):
            r0, r1 = s["r0"][0], s["r1"][0]
            if r0 != r1 or r0 // 10 != v >> 1:
                raise TornError(f"version {v >> 1}: {r0} {r1}")
            return store("own", 0, lambda s: v)(s) and store("v", 0, lambda s: 0)(s)
        if begun == v + 2 and own != 1:
            raise WaitedError(f"version {v >> 1}")
        return store("v", 0, lambda s: 0 if begun == v + 2 else s["again"][0])(s)

    ops, epoch = [Op(0, (), store("have", 0, lambda s: 1)), Op(1, (), look)], 2
    for _ in range(tries):
        at = len(ops)
        ops += [Op(epoch, (at - 1,), copy_word(word, register)) for word, register in (("d0", "r0"), ("d1", "r1"))]
        epoch += recheck_fence
        for word, register in (("begun", "b"), ("out", "again")):
            ops.append(Op(epoch, (), store(register, 0, lambda s, word=word: s[word][0] if s["v"][0] else 0)))
        ops.append(Op(epoch, (at, at + 1, at + 2, at + 3), decide))
        say = store("have", 0, lambda s: s["v" if early and s["v"][0] else "own"][0])
        ops.append(Op(epoch, (at - 1,) if early else (at + 4,), say))
        ops.append(Op(epoch, (at + 4,), look))
        epoch += 1
    return ops


def copy_word(word: str, register: str) -> Callable[[State], bool]:
    return store(register, 0, lambda s: s[word][s["v"][0] & 1] if s["v"][0] else 0)


def explore_slab(
    n: int = 3,
    interruptions: int = 0,
    *,
    look_fence: bool = True,
    lead_fence: bool = True,
    fence: bool = True,
    look: bool = True,
    go_on: bool = True,
    recheck_fence: bool = True,
    accept: int = 2,
    early: bool = False,
) -> int:
    def interrupt(s: State) -> int | None:
        if s["interrupted"][0] == interruptions:
            return None
        s["interrupted"] = (s["interrupted"][0] + 1,)
        return 5 * ((s["out"][0] >> 1) - s["first"][0])

    visited = 0
    for others in product((False, True), repeat=n):
        # Nothing is out; or version 1 is, and there was nobody, or one that had it, or one that did not.
        for first, have in ((0, 0), (1, 0), (1, 2), (1, 1)):
            out, data = (2, (10, 0)) if first else (0, (0, 0))
            state: State = {"first": (first,), "numbers": (out,) + (0,) * n, "out": (out,), "begun": (out,)}
            state |= {"have": (have,), "own": (1,), "d0": data, "d1": data}
            state |= dict.fromkeys(("v", "b", "again", "r0", "r1", "interrupted"), (0,))
            reader = slab_reader(n + 1, recheck_fence=recheck_fence, accept=accept, early=early)
            writer = slab_writer(
                others, look_fence=look_fence, lead_fence=lead_fence, fence=fence, look=look, go_on=go_on
            )
            visited += explore(writer, reader, state, interrupt)
    return visited


@pytest.mark.parametrize(("n", "interruptions"), [(2, 0), pytest.param(3, 0, marks=pytest.mark.slow), (2, 1)])
def test_no_interleaving_of_a_slab_gives_a_mixed_model_or_keeps_a_reader_waiting(n: int, interruptions: int) -> None:
    assert explore_slab(n, interruptions) > 10_000


@pytest.mark.parametrize("fault", [{"lead_fence": False}, {"fence": False}, {"recheck_fence": False}, {"accept": 4}])
def test_a_slab_without_one_of_its_fences_or_off_by_one_gives_a_mixed_model(fault: dict[str, int]) -> None:
    with pytest.raises(TornError):
        explore_slab(**fault)


@pytest.mark.parametrize("fault", [{"look": False}, {"look_fence": False}, {"early": True}])
def test_a_sender_that_writes_over_what_somebody_still_copies_keeps_a_reader_waiting(fault: dict[str, bool]) -> None:
    with pytest.raises(WaitedError):
        explore_slab(**fault)


def test_a_publication_that_was_interrupted_and_is_repeated_in_the_other_slot_gives_a_mixed_model() -> None:
    with pytest.raises(TornError):
        explore_slab(2, 1, go_on=False)
