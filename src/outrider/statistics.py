"""Counters of a run, and the rates that are made of them while it runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from outrider.data import Episode, Record

SHORTEST_S = 0.02  # the shortest time over which a rate is told


@dataclass
class ActorCounters:
    """What the learner knows of one actor from its messages.

    Attributes:
        env_steps: Env steps of the actor's present incarnation.
        past_env_steps: Env steps of its earlier incarnations.
        wait_s: Seconds it has waited for room in its ring.
        dropped: Rows its present incarnation left out.
        returns: Returns of episodes finished since the last reading.
    """

    incarnation: int = 0
    env_steps: int = 0
    past_env_steps: int = 0
    wait_s: float = 0.0
    dropped: int = 0
    returns: list[float] = field(default_factory=list)


class Counters:
    """Opt steps of the learner; env steps and episodes of all actors, as far as their messages have arrived."""

    def __init__(self, n_actors: int) -> None:
        self.actors = [ActorCounters() for _ in range(n_actors)]
        self.opt_steps = 0
        self.env_steps = 0
        self.episodes = 0
        self.dropped = 0  # rows left out because a value was not finite
        self.recent: deque[Episode] = deque(maxlen=100)  # Stable-Baselines3 averages over as many
        self.staleness: list[int] = []  # opt steps between a row's model and its arrival, one per message
        self.staleness_max = 0

    def arrived(
        self,
        actor: int,
        incarnation: int,
        env_steps: int,
        episodes: Sequence[Episode],
        *,
        wait_s: float = 0.0,
        dropped: int = 0,
    ) -> None:
        """Count a message: `env_steps`, `wait_s` and `dropped` are totals of the actor's incarnation so far."""
        a = self.actors[actor]
        if incarnation != a.incarnation:
            a.past_env_steps += a.env_steps
            a.incarnation, a.env_steps, a.dropped = incarnation, 0, 0
        self.env_steps += env_steps - a.env_steps
        self.dropped += dropped - a.dropped
        a.env_steps, a.wait_s, a.dropped = env_steps, wait_s, dropped
        if episodes:
            self.episodes += len(episodes)
            self.recent += episodes
            a.returns += [e.ret for e in episodes]

    def aged(self, lowest: int, highest: int) -> None:
        """Count how stale a message's rows are: its lowest and highest model version against the opt steps now."""
        self.staleness.append(self.opt_steps - (lowest + highest) // 2)
        self.staleness_max = max(self.staleness_max, self.opt_steps - lowest)

    def state_dict(self) -> dict[str, Any]:
        """The totals, of every actor too, and the latest episodes."""
        return {
            "opt_steps": self.opt_steps,
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "dropped": self.dropped,
            "recent": [(e.ret, e.length, e.env) for e in self.recent],
            "actors": [(a.incarnation, a.past_env_steps + a.env_steps) for a in self.actors],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from there; actors that send now are new incarnations. There may be fewer or more of them."""
        self.opt_steps, self.env_steps = state["opt_steps"], state["env_steps"]
        self.episodes, self.dropped = state["episodes"], state["dropped"]
        self.recent.extend(Episode(*episode) for episode in state["recent"])
        for actor, (incarnation, env_steps) in zip(self.actors, state["actors"], strict=False):
            actor.incarnation, actor.past_env_steps = incarnation + 1, env_steps


class Meter:
    """Turns counters into rates since the last reading, and into sums since the start.

    Args:
        counters: Of the run.
        inserted: Rows in the replay buffer that were there before.
        seconds: Seconds of training before.
    """

    def __init__(self, counters: Counters, inserted: int = 0, seconds: float = 0.0) -> None:
        self.counters = counters
        self._last = time.monotonic()
        self._start = self._last - seconds
        self._before = (counters.env_steps, counters.opt_steps, inserted)
        self._actors_before = [(a.past_env_steps, 0.0) for a in counters.actors]
        self._waited_s = 0.0

    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def seconds_since_read(self) -> float:
        """Seconds since the last reading."""
        return time.monotonic() - self._last

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time spent within counts as the learner's wait for data."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._waited_s += time.monotonic() - started

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent within does not count at all."""
        started = time.monotonic()
        try:
            yield
        finally:
            paused_s = time.monotonic() - started
            self._start += paused_s
            self._last += paused_s

    def read(self, inserted: int, sampled: int) -> Record:
        """Totals, and rates since the last reading unless that was only just now: over an instant they mean nothing."""
        record: Record = {
            "time/time_elapsed": self.seconds(),
            "async/inserted": inserted,
            "async/sampled": sampled,
            "async/episodes": self.counters.episodes,
            "async/dropped_rows": self.counters.dropped,
        }
        self._read_messages(record)
        if self.seconds_since_read() >= SHORTEST_S:
            self._read_rates(record, inserted)
        return record

    def _read_rates(self, record: Record, inserted: int) -> None:
        now = time.monotonic()
        dt = now - self._last
        env_steps, opt_steps = self.counters.env_steps, self.counters.opt_steps
        d_env, d_opt, d_ins = (a - b for a, b in zip((env_steps, opt_steps, inserted), self._before, strict=True))
        record["time/fps"] = d_env / dt
        record["async/opt_steps_per_s"] = d_opt / dt
        record["async/samples_per_s"] = d_ins / dt
        record["async/learner_wait"] = min(1.0, self._waited_s / dt)
        self._read_actors(record, dt)
        self._last, self._before, self._waited_s = now, (env_steps, opt_steps, inserted), 0.0

    def _read_messages(self, record: Record) -> None:
        c = self.counters
        if c.recent:
            record["rollout/ep_rew_mean"] = sum(e.ret for e in c.recent) / len(c.recent)
            record["rollout/ep_len_mean"] = sum(e.length for e in c.recent) / len(c.recent)
        if c.staleness:
            record["async/staleness_mean"] = sum(c.staleness) / len(c.staleness)
            record["async/staleness_max"] = c.staleness_max
            c.staleness, c.staleness_max = [], 0

    def _read_actors(self, record: Record, dt: float) -> None:
        for i, a in enumerate(self.counters.actors):
            total = a.past_env_steps + a.env_steps
            before, waited_before = self._actors_before[i]
            record[f"actor/{i}/env_steps"] = total
            record[f"actor/{i}/env_steps_per_s"] = (total - before) / dt
            record[f"actor/{i}/wait"] = min(1.0, max(0.0, a.wait_s - waited_before) / dt)
            if a.returns:
                record[f"actor/{i}/ep_rew_mean"] = sum(a.returns) / len(a.returns)
                a.returns = []
            self._actors_before[i] = (total, a.wait_s)
