"""(1) The step processor that sends each frame of stacked observations once.

The replay buffer that stacks them again is :mod:`outrider.replay.frames`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gymnasium import spaces

from outrider.config import Config
from outrider.core import EnvSpec
from outrider.data import Array, Field, Items, Layout, Obs, Step, any_true
from outrider.errors import UnsupportedSpace
from outrider.item_rows import Rows, valid_rows
from outrider.spaces import act_field, obs_fields


def frame_layout(env_spec: EnvSpec) -> Layout:
    """Layout of a frame stream: every frame once, in the order of time within each environment.

    An entry is a frame, the action taken at it and the reward that this brought. The last frame of an episode is an
    entry of its own, the only one with ``terminated`` or ``truncated`` set; its ``act`` and ``reward`` are 0 and mean
    nothing. So an episode of T steps is T + 1 entries, and its transitions start at the entries without a flag.
    ``t`` counts the entries of an episode from 0, so that one that is missing (its reward was not finite, say) is
    noticed; stacks that reach before the first are filled with zeros. ``env`` is the environment's index in its actor.

    Raises:
        UnsupportedSpace: The observation is no stack of frames.
    """
    space, stack = env_spec.observation_space, env_spec.frame_stack
    if stack < 1 or not isinstance(space, spaces.Box) or not space.shape or space.shape[0] != stack:
        expected = "a Box of stacked frames (EnvSpec.frame_stack along its first axis)"
        raise UnsupportedSpace("env.observation_space", expected, f"{space} with frame_stack={stack}")
    (stacked,) = obs_fields(space)
    return Layout(
        "frames",
        (
            Field("frame", stacked.shape[1:], stacked.dtype),
            Field("t", (), np.dtype(np.int32)),
            act_field(env_spec.action_space),
            Field("reward", (), np.dtype(np.float32)),
            Field("terminated", (), np.dtype(np.bool_)),
            Field("truncated", (), np.dtype(np.bool_)),
            Field("env", (), np.dtype(np.int32)),
        ),
        frame_stack=stack,
    )


@dataclass(frozen=True, kw_only=True)
class FrameStreamProcessorConfig(Config):
    """A stream of single frames, for a replay buffer that stores each frame once and stacks them when it samples."""

    def layout(self, env_spec: EnvSpec) -> Layout:
        """See :func:`frame_layout`."""
        return frame_layout(env_spec)

    def build(self, env_spec: EnvSpec, n_envs: int) -> FrameStreamProcessor:
        """Build one for n environments."""
        return FrameStreamProcessor(self.layout(env_spec), n_envs)


class FrameStreamProcessor:
    """The newest frame of each environment's stack, and the last frame of each episode; see :func:`frame_layout`."""

    def __init__(self, layout: Layout, n_envs: int) -> None:
        # The next rows' frames are written when these rows are complete: hence two blocks. Of each, the first n rows
        # are those of the environments, which have views of their own; last frames follow.
        blocks = [Rows.zeros(layout, 2 * n_envs) for _ in range(2)]
        self._blocks = [(block, Rows(block.rows[:n_envs])) for block in blocks]
        self._n = n_envs
        for _, newest in self._blocks:
            newest.columns["env"][...] = np.arange(n_envs)

    def reset(self, init_obs: Obs) -> None:
        """Begin with these first observations ``[n_envs, frame_stack, ...]``."""
        self._begin(self._blocks[0][1], init_obs, np.zeros(self._n, np.int32))

    def process(self, step: Step) -> Items | None:
        """The entries ``[m]`` of this step, m <= 2 * n_envs; they hold until the next call."""
        (block, newest), (_, following) = self._blocks
        self._blocks.reverse()
        newest.act[...] = step.act
        newest.reward[...] = step.reward
        t = newest.columns["t"] + 1
        if not (any_true(step.terminated) or any_true(step.truncated) or b"\0" in step.valid.tobytes()):
            self._begin(following, step.init_obs, t)
            return newest.rows
        flags = step.terminated | step.truncated
        self._begin(following, step.init_obs, np.where(flags | ~step.valid, 0, t))
        ended = np.flatnonzero(flags & step.valid)
        self._put_last(block, step, ended)
        valid = np.concatenate([step.valid, np.ones(len(ended), np.bool_)])
        return valid_rows(block.rows[: len(valid)], valid)

    def cut(self, obs: Obs) -> Items | None:
        """The last frames ``[m]`` of all open episodes, truncated there; call `reset` next."""
        block, n = self._blocks[0][0], self._n
        assert not isinstance(obs, dict)
        begun = np.flatnonzero(block.columns["t"][:n])  # of the others there is nothing yet
        rows = slice(n, n + len(begun))
        block.rows[rows] = np.zeros((), block.rows.dtype)
        block.columns["frame"][rows] = obs[begun, -1]
        block.columns["t"][rows] = block.columns["t"][begun]
        block.truncated[rows] = True
        block.columns["env"][rows] = begun
        return block.rows[rows] if len(begun) else None

    def _begin(self, newest: Rows, init_obs: Obs, t: Array) -> None:
        assert not isinstance(init_obs, dict)
        newest.columns["frame"][...] = init_obs[:, -1]
        newest.columns["t"][...] = t

    def _put_last(self, block: Rows, step: Step, ended: Array) -> None:
        assert not isinstance(step.obs, dict)
        to = slice(self._n, self._n + len(ended))
        block.rows[to] = np.zeros((), block.rows.dtype)
        block.columns["frame"][to] = step.obs[ended, -1]
        block.columns["t"][to] = block.columns["t"][ended] + 1
        block.terminated[to] = step.terminated[ended]
        block.truncated[to] = step.truncated[ended]
        block.columns["env"][to] = ended
