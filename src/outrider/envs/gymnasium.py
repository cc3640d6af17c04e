"""Any environment of Gymnasium's: by id, by import path, or as a class or callable."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

import gymnasium
from gymnasium.envs import registration
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import TimeLimit

from outrider.config import Config, require
from outrider.core import Env, EnvSpec
from outrider.envs.describe import describe_in_child
from outrider.envs.serial import SerialEnv
from outrider.envs.vector import VectorEnvAdapter
from outrider.errors import ConfigError
from outrider.seeding import spread
from outrider.spaces import act_field, obs_fields

SPEC_TIMEOUT_S = 60.0
"""Seconds in which an environment must have been built to be described."""


@dataclass(frozen=True, kw_only=True)
class GymEnvConfig(Config):
    """Any Gymnasium environment, n of them at a time.

    Attributes:
        id: A Gymnasium id ``[module:][namespace/]Name-vN``, whose module is imported and registers it; or the import
            path ``my_package.my_env:MyEnv`` of a class or a callable; or, in Python, the class or callable itself.
            A callable returns a ``gymnasium.Env``, or a Gymnasium vector environment (it is given ``num_envs`` if it
            has such a parameter). Ids that the calling program has registered itself travel along to the actors.
        kwargs: Arguments for it.
        eval_kwargs: Arguments that differ for evaluation; they are laid over ``kwargs``.
        max_episode_steps: Time limit in env steps that replaces the registered one; None: that one, or none. Not for
            callables that return vector environments.
        gym_packages: Modules that are imported first because they register environments.
        vectorization: How several environments are stepped in one process. ``serial``: one after the other.
            ``auto``: by the vectorised implementation that some registered environments have (CartPole), if it has
            the same spaces, else serially.

    Raises:
        ConfigError: A value is out of range.
    """

    id: str | Callable[..., Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    eval_kwargs: dict[str, Any] = field(default_factory=dict)
    max_episode_steps: int | None = None
    gym_packages: tuple[str, ...] = ()
    vectorization: Literal["auto", "serial"] = "auto"

    def __post_init__(self) -> None:
        require(bool(self.id), "id", "a Gymnasium id, an import path, a class or a callable", repr(self.id))
        require(callable(self.id) or isinstance(self.id, str), "id", "a text or a callable", repr(self.id))
        if isinstance(self.id, str) and self.id.startswith("__main__:"):
            # Saved by a script, and loaded by one: children have another main module, so the class goes along.
            found = getattr(sys.modules["__main__"], self.id.partition(":")[2], None)
            expected = "a class or callable in a module, or in the script that is running"
            require(callable(found), "id", expected, repr(self.id))
            object.__setattr__(self, "id", found)
        steps = self.max_episode_steps
        require(steps is None or steps > 0, "max_episode_steps", "a positive number or none", steps)

    @classmethod
    def of(cls, env: Callable[..., Any], **kwargs: Any) -> GymEnvConfig:
        """The config of a class or callable with its arguments: ``GymEnvConfig.of(MyEnv, size=3)``."""
        return cls(id=env, kwargs=kwargs)

    def build(self, seed: int | Sequence[int], n_envs: int) -> Env:
        """Build n environments in this process; see :meth:`outrider.core.EnvConfig.build`.

        Raises:
            ConfigError: There is no such environment, or a vector environment has another number of them.
        """
        seeds = spread(seed, n_envs)
        made = self._open(n_envs)
        if not isinstance(made, VectorEnv):
            return SerialEnv(made, seeds)
        if made.num_envs != n_envs:
            made.close()
            raise ConfigError("actors.n_envs", f"{made.num_envs}, as many as {self.name} has", n_envs)
        return VectorEnvAdapter(made, seeds)

    def eval(self) -> GymEnvConfig:
        """The same environment with ``eval_kwargs`` laid over ``kwargs``; itself if there are none."""
        if not self.eval_kwargs:
            return self
        return dataclasses.replace(self, kwargs={**self.kwargs, **self.eval_kwargs}, eval_kwargs={})

    def spec(self) -> EnvSpec:
        """Describe the environment, from a short-lived process; see :meth:`outrider.core.EnvConfig.spec`."""
        return describe_in_child(self, f"environment {self.name}", SPEC_TIMEOUT_S)

    def describe(self, report: Callable[[EnvSpec], None]) -> None:
        """Build one environment here, report its description, and close it.

        Raises:
            UnsupportedSpace: One of its spaces cannot be stored.
        """
        made = self._open(1)
        env: Any = made if isinstance(made, VectorEnv) else made[0]
        registered: registration.EnvSpec | None = env.spec
        limit, threshold = self.max_episode_steps, None
        if registered is not None:
            limit, threshold = limit or registered.max_episode_steps, registered.reward_threshold
        single = "single_" if isinstance(made, VectorEnv) else ""
        observation_space, action_space = (getattr(env, f"{single}{kind}_space") for kind in ("observation", "action"))
        obs_fields(observation_space)
        act_field(action_space)
        report(EnvSpec(self.name, observation_space, action_space, limit, threshold))
        env.close()

    def single(self) -> gymnasium.Env[Any, Any] | None:
        """One environment as Gymnasium makes it; None for what only makes vector environments."""
        made = self._open(1)
        if isinstance(made, VectorEnv):
            made.close()
            return None
        return made[0]

    @property
    def name(self) -> str:
        """The id, or the import path of the class or callable."""
        if isinstance(self.id, str):
            return self.id
        if hasattr(self.id, "__qualname__"):
            return f"{self.id.__module__}:{self.id.__qualname__}"
        return repr(self.id)

    def __getstate__(self) -> tuple[dict[str, Any], registration.EnvSpec | None]:
        return dict(vars(self)), gymnasium.registry.get(self.id) if isinstance(self.id, str) else None

    def __setstate__(self, state: tuple[dict[str, Any], registration.EnvSpec | None]) -> None:
        values, registered = state
        vars(self).update(values)
        if registered is not None:
            gymnasium.registry.setdefault(registered.id, registered)

    def _open(self, n: int) -> VectorEnv[Any, Any, Any] | list[gymnasium.Env[Any, Any]]:
        maker = self._maker()
        if isinstance(maker, registration.EnvSpec):
            if self.vectorization == "auto" and n > 1 and self._has_vector_entry(maker):
                vector = gymnasium.make_vec(maker, n, "vector_entry_point", **self._make_kwargs)
                if self._is_like_single(vector, maker):
                    return vector
                vector.close()
            return _open_each(lambda: self._make(maker), n)
        first = maker(**self.kwargs, **({"num_envs": n} if _has_parameter(maker, "num_envs") else {}))
        if isinstance(first, VectorEnv):
            require(self.max_episode_steps is None, "env.max_episode_steps", "none for a vector environment", "one")
            return first
        if not isinstance(first, gymnasium.Env):
            raise ConfigError("env.id", "what makes a gymnasium.Env or a VectorEnv", f"{self.name}, {type(first)}")
        limit = self.max_episode_steps
        envs = [first, *_open_each(lambda: maker(**self.kwargs), n - 1)]
        return envs if limit is None else [TimeLimit(env, limit) for env in envs]

    def _maker(self) -> registration.EnvSpec | Callable[..., Any]:
        """What makes the environment: a registered spec, or a callable."""
        for package in self.gym_packages:
            import_or_refuse(package, "env.gym_packages")
        if not isinstance(self.id, str):
            return self.id
        module_name, _, name = self.id.rpartition(":")
        if module_name:
            found: Any = import_or_refuse(module_name, "env.id")
            if name not in gymnasium.registry and all(part.isidentifier() for part in name.split(".")):
                return self._attribute(found, name)
        elif name.startswith("ALE/"):
            import_or_refuse("ale_py", "env.id", "installed Atari games (pip install ale-py)")
        try:
            return gymnasium.spec(name)
        except gymnasium.error.Error as error:
            raise ConfigError(
                "env.id", "a registered environment such as CartPole-v1", f"{self.id!r} ({_one_line(error)})"
            ) from None

    def _attribute(self, module: Any, path: str) -> Callable[..., Any]:
        found = module
        for part in path.split("."):
            found = getattr(found, part, None)
        if not callable(found):
            raise ConfigError("env.id", f"the name of a class or callable in {module.__name__}", repr(self.id))
        maker: Callable[..., Any] = found
        return maker

    @property
    def _make_kwargs(self) -> dict[str, Any]:
        limit = {} if self.max_episode_steps is None else {"max_episode_steps": self.max_episode_steps}
        return {**self.kwargs, **limit}

    def _make(self, registered: registration.EnvSpec) -> gymnasium.Env[Any, Any]:
        # Whoever builds it resets it first: that needs no wrapper that looks after it in every step.
        unwatched = dataclasses.replace(registered, order_enforce=False)
        try:
            return gymnasium.make(unwatched, disable_env_checker=True, **self._make_kwargs)
        except gymnasium.error.DependencyNotInstalled as error:
            expected = "an environment whose packages are installed"
            raise ConfigError("env.id", expected, f"{self.id!r} ({_one_line(error)})") from error

    def _has_vector_entry(self, registered: registration.EnvSpec) -> bool:
        """Whether there is a vectorised implementation that takes the same arguments and has the same time limit."""
        entry = registered.vector_entry_point
        if entry is None or registered.additional_wrappers:
            return False
        takes = registration.load_env_creator(entry) if isinstance(entry, str) else entry
        limited = registered.max_episode_steps is not None
        needed = {*registered.kwargs, *self._make_kwargs, *(["max_episode_steps"] if limited else [])}
        return all(_has_parameter(takes, name) for name in needed)

    def _is_like_single(self, vector: VectorEnv[Any, Any, Any], registered: registration.EnvSpec) -> bool:
        """Whether it has the spaces of the single environment; Atari's, for one, are preprocessed."""
        with closing(self._make(registered)) as single:
            spaces = (vector.single_observation_space, vector.single_action_space)
            return spaces == (single.observation_space, single.action_space)


def import_or_refuse(module: str, key: str, expected: str = "a module that can be imported") -> ModuleType:
    """Import a module by name.

    Raises:
        ConfigError: It cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(key, expected, f"{module!r} ({_one_line(error)})") from error


def _open_each(make: Callable[[], gymnasium.Env[Any, Any]], n: int) -> list[gymnasium.Env[Any, Any]]:
    """Make n environments; those already there are closed if one of them fails."""
    envs: list[gymnasium.Env[Any, Any]] = []
    with ExitStack() as opened:
        for _ in range(n):
            envs.append(make())
            opened.callback(envs[-1].close)
        opened.pop_all()
    return envs


def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except ValueError:  # something built in, which does not tell
        return False


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
