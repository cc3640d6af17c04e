"""Stations (1) to (2), and (6): an actor steps its environments and streams what it sees to the learner."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum

from outrider.channel import ItemSender, ReplayBufferProxy, ReplayBufferProxyConfig
from outrider.core import ActorPolicy, AgentConfig, Env, EnvConfig, EnvSpec, StepProcessorConfig
from outrider.data import Record
from outrider.errors import ChannelClosed
from outrider.flags import InitGuard, StopFlag
from outrider.model_sync import ModelReceiver, ModelSnapshot
from outrider.sampling import Sampler
from outrider.shared_memory import Arena, LocalArena

BEAT_S = 0.2  # between two signs of life of an actor that waits


class ActorState(IntEnum):
    """What an actor is doing."""

    STARTING = 0
    WAITING_FOR_GUARD = 1
    BUILDING = 2
    WAITING_FOR_MODEL = 3
    RESETTING = 4
    RUNNING = 5
    WAITING_FOR_ROOM = 6
    RESTARTING = 7
    FINISHED = 8

    @property
    def text(self) -> str:
        """In words, such as ``waiting for room``."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True)
class ActorStat:
    """What one actor did.

    Attributes:
        actor_id: Index of the actor.
        samples: Rows it sent to the learner (border's word; ``inserted`` elsewhere).
        env_steps: Valid single-environment steps.
        episodes: Episodes finished.
        duration_s: Seconds from its first model, when it begins to step, to its end, or to now: what the learner does
            before, such as compiling its update, is not in it.
        wait_s: Seconds spent waiting for room in its ring.
        state: What it is doing.
        restarts: How often another one was started in its place; its numbers are sums over all of them.
        share: Its part of the rows of all actors.
    """

    actor_id: int
    samples: int
    env_steps: int
    episodes: int
    duration_s: float
    wait_s: float
    state: ActorState
    restarts: int = 0
    share: float = 1.0

    @property
    def samples_per_s(self) -> float:
        """Rows sent per second."""
        return self.samples / self.duration_s if self.duration_s > 0 else 0.0


def actor_stats_fmt(stats: Sequence[ActorStat]) -> str:
    """The table of generated samples: a header, then one line per actor; seconds and plain numbers."""
    lines = ["actor_id, samples, samples/sec, duration"]
    lines += [f"{s.actor_id}, {s.samples}, {s.samples_per_s:.1f}, {s.duration_s:.1f}" for s in stats]
    return "\n".join(lines)


class ActorBoard:
    """One row of numbers per actor, written by the actor and read by the learner's process at any time.

    **Owns** an arena: shared between processes, or local for the threads back end.
    """

    WORDS = 16  # 128 bytes an actor: no two actors write the same cache line

    def __init__(self, n_actors: int, *, shared: bool = True) -> None:
        nbytes = n_actors * self.WORDS * 8
        self._set(n_actors, Arena(nbytes) if shared else LocalArena(nbytes))

    def _set(self, n_actors: int, arena: Arena | LocalArena) -> None:
        self.n_actors = n_actors
        self.arena = arena
        self._words = memoryview(arena.buf).cast("B").cast("q")

    def __getstate__(self) -> tuple[int, Arena | LocalArena]:
        return self.n_actors, self.arena

    def __setstate__(self, state: tuple[int, Arena | LocalArena]) -> None:
        self._set(*state)

    def cell(self, actor: int) -> ActorCell:
        """The row of one actor."""
        return ActorCell(self._words[actor * self.WORDS : (actor + 1) * self.WORDS])

    def stats(self) -> list[ActorStat]:
        """What every actor has done so far."""
        stats = [self.cell(i).stat(i) for i in range(self.n_actors)]
        total = max(1, sum(s.samples for s in stats))
        return [replace(s, share=s.samples / total) for s in stats]

    def statistics(self) -> Record:
        """How many actors are alive, how often one was restarted, and what each is doing."""
        stats = self.stats()
        gone = (ActorState.RESTARTING, ActorState.FINISHED)
        record: Record = {f"actor/{s.actor_id}/state": s.state.text for s in stats}
        record["async/actors_alive"] = sum(s.state not in gone for s in stats)
        record["async/actor_restarts"] = sum(s.restarts for s in stats)
        return record

    def signs(self) -> tuple[int, ...]:
        """Numbers that change when an actor makes a step, or gets ready for its first; restarts are none."""
        rows = [self.cell(i).words for i in range(self.n_actors)]
        steps = [w[ActorCell.STEP] for w in rows]
        return *steps, *(0 if w[ActorCell.RESTARTS] else w[ActorCell.STATE] for w in rows)

    def describe(self) -> list[str]:
        """A line on each actor: what it is doing, and what it has done."""
        return [
            f"actor {s.actor_id}: {s.state.text}, {s.env_steps} env steps, {s.samples_per_s:.1f} samples/s"
            + (f", restarted {s.restarts} times" if s.restarts else "")
            for s in self.stats()
        ]

    def close(self) -> None:
        """Give the memory back."""
        self._words.release()
        self.arena.close()


class ActorCell:
    """One actor's row of the board. Counters go on over restarts of the actor.

    ``STEP`` changes with each step, and ``NAP`` now and then while it waits: signs of life.
    """

    STATE, SAMPLES, ENV_STEPS, EPISODES, STARTED_NS, ENDED_NS, WAIT_NS, STEP, NAP, RESTARTS = range(10)

    def __init__(self, words: memoryview) -> None:
        self.words = words

    @property
    def state(self) -> ActorState:
        """What the actor is doing."""
        return ActorState(self.words[self.STATE])

    @state.setter
    def state(self, state: ActorState) -> None:
        self.words[self.STATE] = state

    def start(self) -> None:
        """Note the time at which it first begins to step."""
        if not self.words[self.STARTED_NS]:
            self.words[self.STARTED_NS] = time.monotonic_ns()
        self.words[self.ENDED_NS] = 0

    def end(self) -> None:
        """Note the time of the end."""
        self.words[self.ENDED_NS] = time.monotonic_ns()
        self.state = ActorState.FINISHED

    def stat(self, actor: int) -> ActorStat:
        """The row as numbers."""
        w = self.words
        started, ended = w[self.STARTED_NS], w[self.ENDED_NS] or time.monotonic_ns()
        return ActorStat(
            actor_id=actor,
            samples=w[self.SAMPLES],
            env_steps=w[self.ENV_STEPS],
            episodes=w[self.EPISODES],
            duration_s=(ended - started) / 1e9 if started else 0.0,
            wait_s=w[self.WAIT_NS] / 1e9,
            state=self.state,
            restarts=w[self.RESTARTS],
        )


class Actor:
    """Runs a policy in n environments and pushes the items to the learner.

    **Process**: an actor's own, or a thread, or the caller's.
    **Owns** its environments and its policy.
    **Blocks** while its ring is full, and until the first parameters arrive.
    **Closes** its environments when `run` is left.
    """

    def __init__(
        self,
        id: int,
        policy: ActorPolicy,
        env_config: EnvConfig,
        env_spec: EnvSpec,
        step_proc_config: StepProcessorConfig,
        proxy_config: ReplayBufferProxyConfig,
        stop: StopFlag,
        env_seed: int | Sequence[int],
        cell: ActorCell,
        n_envs: int,
        incarnation: int,
    ) -> None:
        self.id = id
        self.policy = policy
        self.env_config = env_config
        self.env_spec = env_spec
        self.step_proc_config = step_proc_config
        self.proxy_config = proxy_config
        self.stop = stop
        self.env_seed = env_seed
        self.cell = cell
        self.n_envs = n_envs
        self.incarnation = incarnation

    @classmethod
    def build(
        cls,
        id: int,
        agent_config: AgentConfig,
        env_config: EnvConfig,
        step_proc_config: StepProcessorConfig,
        replay_buffer_config: ReplayBufferProxyConfig,
        stop: StopFlag,
        env_seed: int | Sequence[int],
        stats: ActorBoard | None = None,
        *,
        n_envs: int = 1,
        policy_seed: int = 0,
        incarnation: int = 0,
        env_spec: EnvSpec | None = None,
    ) -> Actor:
        """Build the policy; the environments follow in `run`, under the guard.

        Args:
            id: Index of the actor, and of its ring.
            agent_config: Its policy's config.
            env_config: Its environments' config.
            step_proc_config: How steps become items.
            replay_buffer_config: Message size of the proxy.
            stop: Shared flag that ends `run`.
            env_seed: One seed per environment, or one that they are derived from.
            stats: Where it writes its statistics; None: a board of its own.
            n_envs: Environments stepped together.
            policy_seed: Seed of its exploration.
            incarnation: How many actors of this id there were before.
            env_spec: Spaces, if they are known already.
        """
        spec = env_spec or env_config.spec()
        board = stats or ActorBoard(id + 1, shared=False)
        policy = agent_config.build_actor(spec, seed=policy_seed)
        return cls(
            id,
            policy,
            env_config,
            spec,
            step_proc_config,
            replay_buffer_config,
            stop,
            env_seed,
            board.cell(id),
            n_envs,
            incarnation,
        )

    def run(self, item_sender: ItemSender, model_receiver: ModelReceiver, guard_init_env: InitGuard) -> ActorStat:
        """Step until the stop flag is set. The rows of an unfinished message are sent as a short one.

        Raises:
            LayoutMismatch: The policy's parameters are not those that the learner publishes, or the items not those
                that the channel was bound for.
            Exception: Whatever the environment or the policy raises, unchanged.
        """
        try:
            env = self._build_env(guard_init_env)
            if env is not None:
                with _closing_quietly_after_an_error(env):
                    self._run(env, item_sender, model_receiver)
        finally:
            self.cell.end()
        return self.cell.stat(self.id)

    def _build_env(self, guard: InitGuard) -> Env | None:
        """Build the environments when it is this actor's turn; None if the run was stopped by then."""
        self.cell.state = ActorState.WAITING_FOR_GUARD
        while not guard.acquire(BEAT_S, self.stop):
            if self.stop.is_set():
                return None
            self.cell.words[self.cell.NAP] += 1
        self.cell.state = ActorState.BUILDING
        try:
            return self.env_config.build(self.env_seed, self.n_envs)
        finally:
            guard.release()

    def _run(self, env: Env, item_sender: ItemSender, model_receiver: ModelReceiver) -> None:
        who = f"actor {self.id}"
        item_sender.layout.require_equal(self.step_proc_config.layout(self.env_spec), "the item channel", who)
        model_receiver.require_equal(self.policy.model_info()[1], who)
        model = model_receiver.open(self.id)
        self.cell.state = ActorState.WAITING_FOR_MODEL
        while not model.wait_first(self.stop, BEAT_S):
            if self.stop.is_set():
                return
            self.cell.words[self.cell.NAP] += 1
        self.cell.start()
        self.policy.sync_model(model.info)
        self.policy.train()
        proxy = ReplayBufferProxy.build(self.proxy_config, item_sender, self.id, self.incarnation, self.stop)
        processor = self.step_proc_config.build(self.env_spec, self.n_envs)
        sampler = Sampler(env, self.policy, processor, item_sender.layout)
        try:
            self._loop(sampler, proxy, model)
        except ChannelClosed:  # stopped while it waited for room: the rows it held were never promised
            pass
        finally:
            proxy.flush()
            proxy.on_commit()  # steps of which no row came count, too

    def _loop(self, sampler: Sampler, proxy: ReplayBufferProxy, model: ModelSnapshot) -> None:
        words, cell = self.cell.words, self.cell
        env_steps, samples, wait_ns = words[cell.ENV_STEPS], words[cell.SAMPLES], words[cell.WAIT_NS]
        at_step = cell.STEP

        def committed() -> None:  # a message at a time: nothing is counted on the way of a single step
            words[cell.ENV_STEPS] = env_steps + proxy.env_steps
            words[cell.SAMPLES] = samples + proxy.rows
            words[cell.WAIT_NS] = wait_ns + int(proxy.wait_s * 1e9)

        def waits(waiting: bool) -> None:
            cell.state = ActorState.WAITING_FOR_ROOM if waiting else ActorState.RUNNING

        proxy.on_commit, proxy.on_wait = committed, waits
        cell.state = ActorState.RESETTING
        sampler.reset()
        cell.state = ActorState.RUNNING
        stopped, fetch, sync, info = self.stop.is_set, model.fetch, self.policy.sync_model, model.info
        while not stopped():
            if fetch():
                sync(info)
            items, episodes = sampler.sample(model.model_version)
            proxy.env_steps = words[at_step] = sampler.env_steps
            if episodes:
                proxy.report(episodes)
                words[cell.EPISODES] += len(episodes)
            if items is not None:
                proxy.push(items)
            else:
                proxy.tick()


@contextmanager
def _closing_quietly_after_an_error(env: Env) -> Iterator[None]:
    """Close the environments; what fails in that does not hide the error that ended the actor."""
    try:
        yield
    finally:
        error = sys.exception()
        try:
            env.close()
        finally:
            if error is not None:
                raise error
