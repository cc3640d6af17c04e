"""Atari games, preprocessed by ``ale_py``'s own vector environment (an extra: ``outrider[atari]``, licence GPL-2.0)."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.config import Config, require
from outrider.core import EnvSpec
from outrider.data import Array, Obs, Step
from outrider.envs.describe import describe_in_child
from outrider.envs.gymnasium import SPEC_TIMEOUT_S, import_or_refuse
from outrider.envs.vector import VectorEnvAdapter
from outrider.errors import ConfigError
from outrider.seeding import spread


@dataclass(frozen=True, kw_only=True)
class AtariEnvConfig(Config):
    """An Atari game: gray frames, maximum of the last two of each skip, stacked ``[frame_stack, size, size]`` uint8.

    Attributes:
        id: The game, as ``pong``, ``Pong`` or ``ALE/Pong-v5``.
        frame_skip: Emulator frames per env step.
        frame_stack: Frames in an observation, the newest last; at the start of an episode the others are zero.
        size: Height and width of a frame in pixels.
        noop_max: At most this many frames without action begin an episode (drawn per episode).
        fire_reset: An episode begins with the fire button, in games that wait for it.
        repeat_action_probability: Probability that the emulator repeats the last action instead (sticky actions).
        full_action_space: All 18 actions instead of those that do something in this game.
        episodic_life: A lost life counts as ``terminated``; the game goes on.
        clip_reward: ``Step.reward`` is the sign of the score's change; ``Step.raw_reward`` always is the change.
        max_frames: Emulator frames after which a game is ``truncated``.

    Raises:
        ConfigError: A value is out of range.
    """

    id: str = "pong"
    frame_skip: int = 4
    frame_stack: int = 4
    size: int = 84
    noop_max: int = 30
    fire_reset: bool = True
    repeat_action_probability: float = 0.0
    full_action_space: bool = False
    episodic_life: bool = False
    clip_reward: bool = True
    max_frames: int = 108_000

    def __post_init__(self) -> None:
        for name in ("frame_skip", "frame_stack", "size", "max_frames"):
            require(getattr(self, name) >= 1, name, "a positive number", getattr(self, name))
        require(self.noop_max >= 0, "noop_max", "0 or more frames", self.noop_max)
        sticky = self.repeat_action_probability
        require(0.0 <= sticky <= 1.0, "repeat_action_probability", "a number in [0, 1]", sticky)

    def build(self, seed: int | Sequence[int], n_envs: int) -> AtariEnv:
        """Build n games in this process; see :meth:`outrider.core.EnvConfig.build`.

        Raises:
            ConfigError: There is no such game, or ale-py is not installed.
        """
        return AtariEnv(self, self._game(), spread(seed, n_envs))

    def eval(self) -> AtariEnvConfig:
        """The same game with unclipped rewards, played as a whole."""
        return dataclasses.replace(self, clip_reward=False, episodic_life=False)

    def spec(self) -> EnvSpec:
        """Describe the game, from a short-lived process; see :meth:`outrider.core.EnvConfig.spec`."""
        return describe_in_child(self, f"environment {self.id}", SPEC_TIMEOUT_S)

    def describe(self, report: Callable[[EnvSpec], None]) -> None:
        """Build one game here, report its description, and close it."""
        env = self.build(0, 1)
        limit = math.ceil(self.max_frames / self.frame_skip)
        report(EnvSpec(self.id, env.observation_space, env.action_space, limit, None, self.frame_stack))
        env.close()

    def _game(self) -> str:
        """Name of the ROM."""
        import_or_refuse("ale_py", "env.id", "installed Atari games (pip install ale-py)")
        from ale_py import roms

        name = re.sub(r"-v\d+$", "", self.id.removeprefix("ALE/"))
        games = {game.replace("_", ""): game for game in roms.get_all_rom_ids()}
        game = games.get(name.replace("_", "").lower())
        if game is None:
            near = difflib.get_close_matches(name.lower(), games.values(), 3)
            hint = f" (did you mean {' or '.join(near)}?)" if near else ""
            raise ConfigError("env.id", "an Atari game such as pong or ALE/Pong-v5", f"{self.id!r}{hint}")
        return game


class AtariEnv(VectorEnvAdapter):
    """n games in one ``AtariVectorEnv`` with one emulator thread.

    **Process:** the caller's. **Owns:** the emulators. **Blocks:** about 0.3 ms per game and step.
    **Closes:** the emulators.
    """

    def __init__(self, config: AtariEnvConfig, game: str, seeds: Sequence[int]) -> None:
        from ale_py.vector_env import AtariVectorEnv

        emulators = AtariVectorEnv(
            game,
            len(seeds),
            num_threads=1,
            autoreset_mode="SameStep",
            frameskip=config.frame_skip,
            stack_num=config.frame_stack,
            img_height=config.size,
            img_width=config.size,
            noop_max=config.noop_max,
            use_fire_reset=config.fire_reset,
            repeat_action_probability=config.repeat_action_probability,
            full_action_space=config.full_action_space,
            max_num_frames_per_episode=config.max_frames,
            reward_clipping=False,
            # Its own episodic_life starts a new game after each lost life, so that later lives are never played.
            life_loss_info=config.episodic_life,
        )
        super().__init__(emulators, seeds, array_seeds=True)
        self._clip = config.clip_reward
        self._lives_end = config.episodic_life
        self._age = np.zeros(len(seeds), np.int64)  # env steps since the episode began
        self._stack = config.frame_stack

    def reset(self, seed: Sequence[int] | None = None) -> Obs:
        """Start a game in every emulator; see :meth:`outrider.core.Env.reset`."""
        self._age[:] = 0
        return super().reset(seed)

    def step(self, act: Array) -> Step:
        """Apply actions ``[n_envs]`` int64; see :meth:`outrider.core.Env.step`."""
        step = super().step(act)
        step.raw_reward = step.reward
        if self._clip:
            step.reward = np.sign(step.reward)
        if self._lives_end:
            self._forget_last_life(step)
        return step

    def _was_reset(self, info: dict[str, Any]) -> Array:
        """After a lost life the game goes on, and ``final_obs`` is memory that nobody has written."""
        episode, all_games = (info[key] - self._info[key] for key in ("episode_frame_number", "frame_number"))
        new_game: Array = episode != all_games
        return self._ended & new_game

    def _forget_last_life(self, step: Step) -> None:
        """Zero the frames from before the episode, which are in the stack when the game goes on after a lost life."""
        self._age += 1
        ended = step.terminated | step.truncated
        last, first = _writable(step.obs), _writable(step.init_obs)
        for i in np.flatnonzero(self._age < self._stack):
            last[i, : self._stack - 1 - self._age[i]] = 0
            first[i, : self._stack - 1 - self._age[i]] = 0
        first[ended, :-1] = 0
        self._age[ended] = 0
        step.obs, step.init_obs = last, first


def _writable(obs: Any) -> Array:
    array: Array = obs
    return array if array.flags.writeable else array.copy()
