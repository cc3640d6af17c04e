"""Station (3): the replay buffer for frame streams, which stacks frames when it samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.config import Config, require
from outrider.data import Array, Batch, Items, Layout, Record
from outrider.replay.frame_memory import ACTOR, LINK_BYTES, FrameMemory
from outrider.replay.priorities import TREE_BYTES, Priorities, PriorityConfig, as_array
from outrider.replay.row_buffer import RowBuffer
from outrider.seeding import Role, derive


@dataclass(frozen=True, kw_only=True)
class FrameReplayBufferConfig(Config):
    """Builds a :class:`FrameReplayBuffer`. The step processor has to be the frame stream.

    Attributes:
        capacity: Frames it can hold; the oldest are overwritten then. An episode of T steps takes T + 1. At least 1.
        n_steps: Steps of a transition, at least 1; fewer at the end of an episode.
        gamma: Discount of the rewards within a transition of several steps, which must be the agent's. None: a run
            config fills in the agent's.
        prioritized: Draw by priority; null: uniformly.
        seed: Seed of the draws, at least 0.
        disk: An existing directory on whose disk the frames are kept, for buffers larger than memory; null: in memory.

    Raises:
        ConfigError: A value is out of range.
    """

    capacity: int = 100_000
    n_steps: int = 1
    gamma: float | None = None
    prioritized: PriorityConfig | None = None
    seed: int = 0
    disk: str | None = None

    def __post_init__(self) -> None:
        require(self.capacity >= 1, "capacity", "at least 1 frame", self.capacity)
        require(self.n_steps >= 1, "n_steps", "at least 1", self.n_steps)
        require(self.gamma is None or 0.0 <= self.gamma <= 1.0, "gamma", "a number in [0, 1]", self.gamma)
        require(self.seed >= 0, "seed", "a seed of at least 0", self.seed)
        require(self.disk != "", "disk", "a directory, or null", self.disk)

    def nbytes(self, layout: Layout) -> int:
        """Bytes that frames, entries and priorities will take."""
        more = LINK_BYTES + ACTOR.dtype.itemsize + (TREE_BYTES if self.prioritized else 0)
        return self.capacity * (layout.record_dtype().itemsize + more)

    def disk_bytes(self, layout: Layout) -> int:
        """Bytes of :meth:`nbytes` that will lie in `disk`."""
        return self.capacity * (layout.record_dtype().itemsize + ACTOR.dtype.itemsize) if self.disk else 0

    def warmup_limit(self, streams: int, frame_stack: int) -> int:
        """The longest warm-up that ends, and does not begin again when the oldest frames are overwritten.

        Of each stream the newest frames lack some of their steps, and the oldest some of their stack. Of the others,
        in episodes of one step, every second one starts a transition.

        Args:
            streams: Environments whose frames it gets.
            frame_stack: Frames of an observation.
        """
        return max(0, self.capacity - streams * (self.n_steps + frame_stack)) // 2

    def build(self, layout: Layout) -> FrameReplayBuffer:
        """Reserve memory or disk for frames of this layout.

        Raises:
            LayoutMismatch: The items are no frame stream.
            ConfigError: Rewards of several steps are to be summed, and nobody has said what gamma is.
            ResourceError: Not enough memory or disk.
        """
        if self.n_steps > 1:
            require(self.gamma is not None, "replay.gamma", "the agent's gamma", self.gamma)
        gamma = 1.0 if self.gamma is None else self.gamma
        seed = derive(self.seed, Role.REPLAY)
        return FrameReplayBuffer(layout, self.capacity, self.n_steps, gamma, self.prioritized, seed, self.disk)


@dataclass(frozen=True)
class _Output:
    """What is reused by batches of one size.

    Attributes:
        places: ``[B, width]`` of the frames.
        frames: ``[B, width, ...]``; observations are the first, their successors the last of each row.
        bytes: The same, ``[B * width]``.
        columns: The batch.
    """

    places: Array
    frames: Array
    bytes: Array
    columns: dict[str, Array] = field(default_factory=dict)


class FrameReplayBuffer(RowBuffer):
    """The newest ``capacity`` frames, of which transitions over up to n steps are made when they are drawn.

    A batch has the columns ``obs`` and ``next_obs`` ``[B, frame_stack, ...]``, ``act``, ``reward`` (the discounted
    sum), ``terminated``, ``truncated`` and ``n_steps``, as :func:`outrider.sampling.transition_layout` has them, and
    holds what the step processors ``simple`` and ``n_step`` would have made. Before the first frame of an episode
    there are zeros. Every start state of an episode can be drawn once its n steps, or the end, have arrived; the open
    episode of an actor that died ends where it is. A batch's ``ixs`` are numbers of entries.

    Process: the learner.
    Owns: frames, entries, priorities, one reused batch per batch size, and its random generator.
    Blocks: never.
    Closes: nothing; memory and file go with the object.

    Args:
        layout: Columns of an entry; of kind ``frames``.
        capacity: Frames it can hold, at least 1.
        n_steps: Steps of a transition, at least 1.
        gamma: Discount of the rewards within a transition.
        priorities: Draw by priority; None: uniformly.
        seed: Seed of the draws, at least 0.
        disk: Directory on whose disk frames and entries lie, without priorities; None: in memory.

    Raises:
        LayoutMismatch: The layout is no frame stream.
        ConfigError: The capacity is less than 1.
        ResourceError: Not enough memory or disk.
    """

    def __init__(
        self,
        layout: Layout,
        capacity: int,
        n_steps: int = 1,
        gamma: float = 1.0,
        priorities: PriorityConfig | None = None,
        seed: int = 0,
        disk: str | None = None,
    ) -> None:
        self._frames = FrameMemory(layout, capacity, n_steps, TREE_BYTES if priorities else 0, disk)
        super().__init__(layout, self._frames, seed)
        self._priorities = None if priorities is None else Priorities(priorities, capacity)
        self._stack, self._n_steps, self._gamma = layout.frame_stack, n_steps, gamma
        frames = self._frames.frames
        self._frame_bytes = frames.view(np.uint8).reshape(len(frames), -1).view(f"V{frames[0].nbytes}")[:, 0]
        self._outputs: dict[int, _Output] = {}

    def __len__(self) -> int:
        return self._frames.n_ready

    @property
    def nbytes(self) -> int:
        """Bytes reserved, unused places included."""
        return self._frames.nbytes + (0 if self._priorities is None else self._priorities.nbytes)

    def push(self, items: Items) -> None:
        """Take entries ``[m]`` of a single actor; see :meth:`push_from`."""
        self.push_from(items, 0)

    def push_from(self, items: Items, actor: int) -> None:
        """Copy entries ``[m]`` in, over the oldest once the buffer is full.

        Args:
            items: Records or columns of the layout, in the order in which the actor made them.
            actor: Its index.

        Raises:
            LayoutMismatch: A column is missing, unknown, or of another shape or dtype.
        """
        gone, ready = self._frames.push(items, actor)
        if self._priorities is not None:
            self._priorities.remove(gone)
            self._priorities.add(ready)

    def batch(self, size: int) -> Batch:
        """Draw `size` transitions with replacement; all but ``ixs`` is reused by the next call with this size.

        Raises:
            ValueError: No transition is complete yet.
        """
        if not len(self):
            raise ValueError("replay buffer: expected at least one complete transition to draw, there is none")
        weights = None
        if self._priorities is None:
            starts = self._draw(size)
        else:
            starts, weights = self._priorities.draw(size, self.sampled, self._rng)
        self.sampled += size
        out = self._output(size)
        self._walk(starts, out)
        self._frame_bytes.take(out.places.reshape(-1), out=out.bytes, mode="clip")
        return Batch(out.columns, self._frames.entries.numbers(starts), weights)

    def _draw(self, size: int) -> Array:
        """Places ``[size]`` of entries that are ready, each with the same probability."""
        ready, n_ready, stored = self._frames.ready, self._frames.n_ready, self.inserted - self.oldest
        if 4 * n_ready < stored:
            return np.flatnonzero(ready)[(self._rng.random(size) * n_ready).astype(np.int64)]
        places = (self._rng.random(size) * stored).astype(np.int64)
        while len(bad := np.flatnonzero(~ready[places])):
            places[bad] = self._rng.random(len(bad)) * stored
        return places

    def _walk(self, starts: Array, out: _Output) -> None:
        """Follow the links of the entries: places of all frames, and all columns but these."""
        memory, columns, places = self._frames, out.columns, out.places
        at = starts
        for i in range(self._stack - 1, -1, -1):
            places[:, i] = at
            at = memory.previous.take(at)
        entries = memory.entries.array
        columns["act"][...] = entries["act"][starts]
        end = self._walk_on(starts, columns)
        columns["terminated"][...] = entries["terminated"][end]
        columns["truncated"][...] = entries["truncated"][end]
        places[:, -1] = at = end
        if self._n_steps > 1:  # else the rest of the successor's stack is the start's
            for i in range(2, self._stack + 1):
                at = memory.previous.take(at)
                places[:, -i] = at

    def _walk_on(self, starts: Array, columns: dict[str, Array]) -> Array:
        """Sum the rewards of n steps, or of those up to the end; gives the places where they lead to."""
        memory, entries = self._frames, self._frames.entries.array
        end = memory.next.take(starts)
        if self._n_steps == 1:
            columns["reward"][...] = entries["reward"][starts]
            return end
        total, n_steps = entries["reward"][starts].astype(np.float64), columns["n_steps"]
        n_steps[...] = 1
        for k in range(1, self._n_steps):
            goes_on = ~(entries["terminated"][end] | entries["truncated"][end])
            total += goes_on * (self._gamma**k * entries["reward"][end])
            n_steps += goes_on
            end = np.where(goes_on, memory.next.take(end), end)
        columns["reward"][...] = total
        return end

    def _output(self, size: int) -> _Output:
        out = self._outputs.get(size)
        if out is None:
            stack, frames = self._stack, self._frames.frames
            # One step later all frames of a stack but one are the same, and are not copied twice.
            width = stack + 1 if self._n_steps == 1 else 2 * stack
            made = np.zeros((size, width, *frames.shape[1:]), frames.dtype)
            raw = made.view(np.uint8).reshape(size * width, -1).view(self._frame_bytes.dtype)[:, 0]
            out = self._outputs[size] = _Output(np.zeros((size, width), np.int64), made, raw)
            act = self._frames.entries.dtype["act"]
            out.columns.update(
                obs=made[:, :stack],
                act=np.zeros((size, *act.shape), act.base),
                reward=np.zeros(size, np.float32),
                next_obs=made[:, -stack:],
                terminated=np.zeros(size, np.bool_),
                truncated=np.zeros(size, np.bool_),
                n_steps=np.ones(size, np.int32),
            )
        return out

    def update_priority(self, ixs: Array, td_errors: Any) -> None:
        """Set priorities from TD errors, if rows are drawn by priority; of equal rows the last one counts.

        Args:
            ixs: A batch's ``ixs`` ``[B]``, also of an earlier one: rows that are gone are left out and counted.
            td_errors: ``[B]``, an array or a tensor; NaN and infinite ones are left out and counted. None: nothing.
        """
        if td_errors is not None and self._priorities is not None:
            places = self._frames.entries.places(ixs)
            there = (ixs >= self.oldest) & self._frames.ready[places]
            self._priorities.update(places, as_array(td_errors), there)

    def statistics(self) -> Record:
        """Metrics of the priorities, if there are any."""
        return {} if self._priorities is None else self._priorities.statistics(self.sampled)

    def state_without_rows(self) -> dict[str, Any]:
        """Counters, priorities and the random generator."""
        state = super().state_without_rows()
        return state if self._priorities is None else state | {"priorities": self._priorities.state(self._stored())}

    def load_rows(self, state: dict[str, Any], blocks: Iterable[tuple[int, Array]]) -> None:
        """Restore entries, priorities, counters and random generator; of a larger buffer the newest entries.

        Args:
            state: What :meth:`state_without_rows` gave. Without priorities, all rows get the highest.
            blocks: First row and rows of consecutive blocks ``[m]``, the last one up to ``inserted``.

        Raises:
            LayoutMismatch: They have other columns.
        """
        if self._priorities is not None:
            self._priorities.clear()
        super().load_rows(state, blocks)
        if self._priorities is not None:
            if "priorities" in state:
                self._priorities.load_state(state["priorities"], self._stored())
                self._priorities.remove(self._not_ready())
            # those which were not ready in the saved buffer, with more steps per transition, say
            self._priorities.add_new(np.flatnonzero(self._frames.ready))

    def _stored(self) -> Array:
        """The places of all entries, the oldest first."""
        return self._frames.entries.places(np.arange(self.oldest, self.inserted))

    def _not_ready(self) -> Array:
        return np.flatnonzero(~self._frames.ready[: self.capacity])
