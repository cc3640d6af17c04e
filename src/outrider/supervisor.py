"""Watches over the actors: notices those that end or hang, and starts new ones in their place."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from pathlib import Path
from typing import TypeAlias

from outrider.actor import ActorBoard, ActorCell, ActorState
from outrider.channel import ItemSender
from outrider.crew import ActorOrder, Member
from outrider.errors import ActorFailed, ActorHung
from outrider.flags import StopFlag

log = logging.getLogger(__name__)

WATCH_S = 0.2  # it wakes at once when an actor ends; this often it looks for hangs, and whether it is still needed
BACK_OFF_S = 0.5  # before the first restart; doubles with each failure within the window
LONGEST_BACK_OFF_S = 10.0
DUMP_S = 0.5  # a stuck actor has that long to write its stack

STACK_LIMIT_BYTES = 32_000

Limits: TypeAlias = Mapping[ActorState, tuple[str, str, float]]
"""What an actor in a state is busy with, and name and seconds of the time-out; 0: none."""


@dataclass
class _Post:
    """An actor's place: who fills it, what was seen of it, and how it fared."""

    order: ActorOrder
    member: Member | None = None
    failures: deque[tuple[float, ActorFailed]] = field(default_factory=deque)
    restart_at: float = 0.0
    seen: tuple[int, ...] = ()
    still_s: float = 0.0
    kill_at: float | None = None
    dumped_from: int = 0
    over: bool = False


class Supervisor:
    """Restarts actors within their budgets, and ends the run when that does not help.

    An actor is given up, and with it the run, at its `restarts` + 1st failure within `window_s`; at its first if
    another one would fail as well, such as for a wrong layout; and when every actor has failed while none had ever
    sent a message. The failure that is raised is the first of those.

    Process: the learner's; a thread that sleeps until an actor ends.
    Owns: the actors.
    Blocks: in `stop_and_join`, for a second more than it is told.
    Closes: all actors, in `stop_and_join`.

    Args:
        orders: One per actor.
        hire: Starts an actor.
        board: Where actors write what they are doing.
        item_sender: Where the failure that ends the run goes.
        stop: Ends the run.
        restarts: Restarts of an actor within the window; 0: none.
        window_s: The window.
        limits: How long an actor may stay in a state without a sign of life.
    """

    def __init__(
        self,
        orders: Sequence[ActorOrder],
        hire: Callable[[ActorOrder], Member],
        board: ActorBoard,
        item_sender: ItemSender,
        stop: StopFlag,
        *,
        restarts: int,
        window_s: float,
        limits: Limits,
    ) -> None:
        self._posts = [_Post(order) for order in orders]
        self._hire = hire
        self._board = board
        self._item_sender = item_sender
        self._heads, self._tails = item_sender.rings.heads(), item_sender.rings.tails()
        self._n_slots = item_sender.rings.n_slots
        self._stop = stop
        self._restarts, self._window_s, self._limits = restarts, window_s, limits
        self._first_failures: dict[int, ActorFailed] = {}
        self._hiring = threading.Lock()  # nobody is hired once the stop flag is set and this was held
        self._joined = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="outrider-supervisor", daemon=True)

    def start(self) -> None:
        """Start all actors, and watch over them from now on."""
        for post in self._posts:
            post.member = self._hire(post.order)
        self._thread.start()

    def stop_and_join(self, timeout_s: float) -> None:
        """Stop the actors, wait that long for them, and kill those that are left."""
        self._stop.set()
        with self._hiring:
            members = [post.member for post in self._posts if post.member is not None]
        deadline = time.monotonic() + timeout_s
        for member in members:
            member.join(max(0.0, deadline - time.monotonic()))
        for member in members:
            if member.alive():
                log.warning("actor %d did not end within %.1f s: killed", member.id, timeout_s)
                member.kill()
        self._joined.set()
        if self._thread.ident is not None:
            self._thread.join()
        for post in self._posts:
            if post.member is not None:
                post.member.close()
                post.member = None

    # In the thread.

    def _watch(self) -> None:
        looked_at = time.monotonic()
        while not self._joined.is_set():
            working = {post.member.sentinel: post for post in self._posts if post.member and not post.over}
            due = [post.restart_at - time.monotonic() for post in self._posts if post.member is None]
            if not working and (not due or self._stop.is_set()):
                return
            for sentinel in connection.wait(list(working), max(0.0, min([WATCH_S, *due]))):
                self._on_end(working[sentinel])  # type: ignore[index]
            now = time.monotonic()
            # If this process was stopped meanwhile, so were the actors, probably: that is no hang of theirs.
            elapsed_s, looked_at = min(now - looked_at, 5 * WATCH_S), now
            if not self._stop.is_set():
                for post in self._posts:
                    if post.member is None:
                        self._restart_if_due(post)
                    elif not post.over:
                        self._look_at(post, post.member, elapsed_s)

    def _on_end(self, post: _Post) -> None:
        member = post.member
        assert member is not None
        failure = member.failure()
        cell = self._cell(post)
        if cell.state is not ActorState.FINISHED:  # killed: it could not say so itself
            cell.end()
        if failure is not None and self._stop.is_set():
            log.warning("while stopping: %s", _first_line(failure))  # the first failure is the one to read
            log.debug("%s", failure)
        if failure is None or self._stop.is_set():
            post.over = True
        else:
            self._on_failure(post, failure, curable=member.curable)

    def _on_failure(self, post: _Post, failure: ActorFailed, *, curable: bool) -> None:
        """Start another actor in a moment, or end the run."""
        now = time.monotonic()
        while post.failures and now - post.failures[0][0] > self._window_s:
            post.failures.popleft()
        post.failures.append((now, failure))
        self._first_failures.setdefault(post.order.id, failure)
        n, fatal = len(post.failures), None
        if not curable:
            fatal = failure
        elif n > self._restarts:
            fatal = post.failures[0][1]
        elif len(self._first_failures) == len(self._posts) and not any(self._heads):
            fatal = next(iter(self._first_failures.values()))
        if fatal is not None:
            post.over = True
            self._item_sender.fail(fatal)
            self._stop.set()
            return
        delay_s = min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2 ** (n - 1))
        where = _write_down(failure, post.order.log_file)
        told = f"restart {n} of {self._restarts} within {self._window_s:g} s follows in {delay_s:g} s"
        log.warning("%s; %s%s", _first_line(failure), told, where)
        post.restart_at = now + delay_s
        self._dismiss(post)

    def _dismiss(self, post: _Post) -> None:
        with self._hiring:
            if not self._stop.is_set():  # else they are being joined, and closed then
                if post.member is not None:
                    post.member.close()
                    post.member = None
                self._cell(post).state = ActorState.RESTARTING
            post.over = post.member is not None

    def _restart_if_due(self, post: _Post) -> None:
        """Start a new actor where the old one is gone for good: its ring goes on at the last message sent."""
        if time.monotonic() < post.restart_at:
            return
        order = replace(post.order, incarnation=post.order.incarnation + 1)
        cell = self._cell(post)
        try:
            with self._hiring:
                if self._stop.is_set():
                    return
                cell.state = ActorState.STARTING
                post.member = self._hire(order)
        except (OSError, EOFError):  # such as no memory, no descriptors; the next attempt may do better
            self._on_failure(post, ActorFailed(order.id, traceback.format_exc()), curable=True)
            return
        post.order, post.seen, post.still_s, post.kill_at = order, (), 0.0, None
        cell.words[cell.RESTARTS] += 1

    def _look_at(self, post: _Post, member: Member, elapsed_s: float) -> None:
        """Notice that an actor shows no sign of life; have it write its stack, then kill it."""
        words, i, now = self._cell(post).words, post.order.id, time.monotonic()
        state = ActorState(words[ActorCell.STATE])
        what, key, limit_s = self._limits.get(state, ("", "", 0.0))
        if post.kill_at is not None:
            if now >= post.kill_at:
                post.kill_at = math.inf
                member.kill(ActorHung(i, what, key, limit_s, self._stack(post)))
            return
        seen = state, words[ActorCell.STEP], words[ActorCell.NAP]
        held = state is ActorState.WAITING_FOR_ROOM and self._heads[i] - self._tails[i] >= self._n_slots
        if seen != post.seen or held or not limit_s:
            post.seen, post.still_s = seen, 0.0
            return
        post.still_s += elapsed_s
        if post.still_s >= limit_s:
            post.dumped_from = _size(post.order.log_file)
            post.kill_at = now + DUMP_S
            member.dump()

    def _stack(self, post: _Post) -> str:
        path = post.order.log_file
        if path is None or not path.exists():
            return ""  # it is on stderr
        with path.open("rb") as file:
            file.seek(post.dumped_from)
            return file.read(STACK_LIMIT_BYTES).decode(errors="replace")

    def _cell(self, post: _Post) -> ActorCell:
        return self._board.cell(post.order.id)


def _first_line(failure: ActorFailed) -> str:
    return str(failure).splitlines()[0]


def _size(path: Path | None) -> int:
    return path.stat().st_size if path is not None and path.exists() else 0


def _write_down(failure: ActorFailed, path: Path | None) -> str:
    """Keep the whole traceback of a failure that ends nothing; says where."""
    if path is not None:
        with contextlib.suppress(OSError), path.open("a", errors="backslashreplace") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {failure}\n")
            return f"; all of it in {path}"
    log.debug("%s", failure)
    return ""
