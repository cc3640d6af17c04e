"""The config of a whole run: what ``outrider train`` reads, overrides, checks and writes to ``config.yaml``.

::

    preset or YAML file ──▶ overrides ──▶ strict types ──▶ checks across sections ──▶ RunConfig
    load_preset             override      Config           RunConfig.__post_init__
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from outrider import presets
from outrider.actor_manager import ActorManagerConfig
from outrider.config import Config, Family, did_you_mean, family_of, field_types, require, without_version
from outrider.core import AgentConfig, EnvConfig, EnvSpec, ReplayBufferConfig, StepProcessorConfig
from outrider.data import Layout
from outrider.errors import ConfigError, LayoutMismatch, UnknownKey
from outrider.sampling import require_same_discount
from outrider.strict_yaml import in_file, parse_yaml, read_yaml
from outrider.trainer_config import AsyncTrainerConfig

ENVS = Family(
    {"gym": "outrider.envs.gymnasium:GymEnvConfig", "atari": "outrider.envs.atari:AtariEnvConfig"}, default="gym"
)
AGENTS = Family({"dqn": "outrider.agents.dqn:DqnConfig", "sac": "outrider.agents.sac:SacConfig"})
STEP_PROCESSORS = Family(
    {
        "simple": "outrider.sampling:SimpleStepProcessorConfig",
        "n_step": "outrider.sampling:NStepProcessorConfig",
        "frames": "outrider.frame_stream:FrameStreamProcessorConfig",
    },
    default="simple",
)
REPLAYS = Family(
    {
        "uniform": "outrider.replay.uniform:SimpleReplayBufferConfig",
        "prioritized": "outrider.replay.prioritized:PrioritizedReplayBufferConfig",
        "frames": "outrider.replay.frames:FrameReplayBufferConfig",
    },
    default="uniform",
)
EVALUATORS = Family({"default": "outrider.evaluation:DefaultEvaluatorConfig"}, default="default")
RECORDERS = Family({"default": "outrider.recording:RecorderConfig"}, default="default")

EXAMPLES = {"env.id": "--env.id=CartPole-v1"}
"""How values that have no default are given, by their keys."""

METHODS = {
    "env": ("build", "eval", "spec"),
    "agent": ("build", "build_actor", "for_actor"),
    "step_processor": ("layout", "build"),
    "replay": ("build",),
    "evaluator": ("build",),
    "recorder": ("build",),
}
"""What the config of each section must have: the contracts of :mod:`outrider.core`."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """Everything about a run.

    Attributes:
        env: The environment: ``gym`` (the default) or ``atari``, or an own class.
        agent: The agent: ``dqn`` or ``sac``, or an own class.
        actors: How many actors, how many environments each, and what they send.
        step_processor: Turns steps into items: ``simple`` (the default), ``n_step``, or ``frames``.
        replay: The replay buffer: ``uniform`` (the default), ``prioritized``, or ``frames``.
        trainer: The learner's loop: budgets, intervals and the balance with the actors.
        evaluator: How the agent is scored: ``default``.
        recorder: What is written and shown: ``default``.
        seed: The one seed that all others come from, >= 0.
        run_dir: Directory of the run, new or empty; None: :func:`outrider.run_dir.default_path` makes one.
    """

    env: Annotated[EnvConfig, ENVS]
    agent: Annotated[AgentConfig, AGENTS]
    actors: ActorManagerConfig = field(default_factory=ActorManagerConfig)
    step_processor: Annotated[StepProcessorConfig, STEP_PROCESSORS] = field(
        default_factory=STEP_PROCESSORS.build_default
    )
    replay: Annotated[ReplayBufferConfig, REPLAYS] = field(default_factory=REPLAYS.build_default)
    trainer: AsyncTrainerConfig = field(default_factory=AsyncTrainerConfig)
    evaluator: Annotated[Any, EVALUATORS] = field(default_factory=EVALUATORS.build_default)
    recorder: Annotated[Any, RECORDERS] = field(default_factory=RECORDERS.build_default)
    seed: int = 0
    run_dir: str | None = None

    def __post_init__(self) -> None:
        """Check what no section can see alone. Own classes are checked as far as they have these fields."""
        require(self.seed >= 0, "seed", "an integer >= 0", self.seed)
        require(self.run_dir != "", "run_dir", "a path, or null", "an empty one")
        for section, methods in METHODS.items():
            part = getattr(self, section)
            missing = [name for name in methods if not callable(getattr(part, name, None))]
            expected = f"a config with the methods {', '.join(methods)}"
            require(not missing, section, expected, f"{type(part).__name__} without {', '.join(missing)}")
        streams = (self.actors.n_actors or 1) * self.actors.n_envs  # at least
        self.trainer.require_possible(self.replay, self.agent, streams)
        self._settle_discount()

    def _settle_discount(self) -> None:
        """Whatever sums rewards over several steps discounts them as the agent does."""
        for section in ("step_processor", "replay"):
            part, bootstrapped = getattr(self, section), getattr(self.agent, "gamma", None)
            if not hasattr(part, "gamma") or (section == "replay" and getattr(part, "n_steps", 0) == 1):
                continue
            if part.gamma is None:
                require(bootstrapped is not None, f"{section}.gamma", "a number, as the agent has no gamma", "null")
                object.__setattr__(self, section, dataclasses.replace(part, gamma=bootstrapped))
            require_same_discount(getattr(self, section), self.agent, section)

    @classmethod
    def from_sources(cls, source: str | Path, overrides: Mapping[str, Any] | None = None) -> Self:
        """Read a preset or a YAML file, with overrides.

        Args:
            source: Name of a preset, or path of a YAML file.
            overrides: Values by dotted key; see :func:`override`, and :func:`parse_overrides` for a command line.

        Raises:
            ConfigError: No such preset or file, or the result is not a possible run.
        """
        data = load_preset(source)
        try:
            return cls.from_dict(override(data, overrides or {}))
        except ConfigError as error:
            if error.key in EXAMPLES and error.got == "nothing":
                error = ConfigError(error.key, f"{error.expected}, as in {EXAMPLES[error.key]}", error.got)
            if str(source) in presets.names():
                raise error from error.__cause__
            if not data:
                raise ConfigError(error.key, error.expected, f"{error.got} ({source} is empty)") from None
            raise (in_file(error, source) if _is_from(error.key, data, overrides or {}) else error) from error.__cause__


def require_suitable_replay(config: RunConfig, env_spec: EnvSpec) -> None:
    """Refuse a replay buffer that cannot store what the step processor makes, found by building a tiny one.

    Classes without a field ``capacity`` are not tried: nobody knows what building them takes.

    Raises:
        ConfigError: Names the classes that would do, of both sections.
    """
    layout = config.step_processor.layout(env_spec)
    if (reason := _refusal(config.replay, layout)) is None:
        return
    made_by, replay = STEP_PROCESSORS.name_of(type(config.step_processor)), REPLAYS.name_of(type(config.replay))
    buffers = [name for name in REPLAYS.classes if _refusal(REPLAYS.build(name), layout) is None]
    makers = []
    for name in STEP_PROCESSORS.classes:
        with suppress(ConfigError):  # one that does not suit this environment, or lacks a number, is no advice
            if _refusal(config.replay, STEP_PROCESSORS.build(name).layout(env_spec)) is None:
                makers.append(name)
    advice = f"; {replay} needs --step_processor.class={' or '.join(makers)}" if makers else ""
    expected = f"{' or '.join(buffers) or 'another class'} with step_processor.class {made_by}"
    raise ConfigError("replay.class", expected, f"{replay} ({reason}{advice})")


def _refusal(replay: Any, layout: Layout) -> str | None:
    """Why a replay buffer cannot store rows of this layout, None if it can or cannot be tried."""
    tiny = {"capacity": 1, "disk": None}
    with suppress(ConfigError):  # a class that takes no such capacity, or needs more than it was given
        if "capacity" in field_types(type(replay)):
            known = {name: value for name, value in tiny.items() if name in field_types(type(replay))}
            try:
                dataclasses.replace(replay, **known).build(layout)
            except LayoutMismatch as error:
                return str(error)
    return None


def load_preset(name_or_path: str | Path) -> dict[str, Any]:
    """Read a preset by name, or any YAML file by path.

    Raises:
        ConfigError: Neither a preset nor a file, or not a mapping in YAML.
    """
    known = presets.names()
    if str(name_or_path) in known:
        return without_version(parse_yaml(presets.text(str(name_or_path)), f"{name_or_path}.yaml"))
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return without_version(read_yaml(path))
    expected = f"one of {', '.join(known)}, or the path of a YAML file"
    hint = did_you_mean(str(name_or_path), known)
    if (path / "config.yaml").is_file():  # a run directory
        hint = f", a run directory (did you mean `outrider resume {path}`, or {path / 'config.yaml'}?)"
    raise ConfigError("preset", expected, f"{str(name_or_path)!r}{hint}")


def _is_from(key: str, data: Mapping[str, Any], overrides: Mapping[str, Any]) -> bool:
    """Whether the value at a dotted key is that of a file, and not an override."""
    below: Any = data
    for part in key.split("."):
        if not isinstance(below, Mapping) or part not in below:
            return False
        below = below[part]
    return not any(f"{key}.".startswith(f"{given}.") or given.startswith(f"{key}.") for given in overrides)


def differences(before: RunConfig, after: RunConfig) -> list[str]:
    """What differs between two configs: ``trainer.max_opts: 1000 -> 2000``, one value each."""
    old, new = (dict(_leaves(config.to_dict())) for config in (before, after))
    nothing = "(nothing)"
    return [
        f"{key}: {old.get(key, nothing)} -> {new.get(key, nothing)}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key, nothing) != new.get(key, nothing)
    ]


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def parse_overrides(options: Iterable[str]) -> dict[str, Any]:
    """Read ``--dotted.key=value`` and ``--dotted.key value``; values are YAML, ``-`` in keys stands for ``_``.

    Raises:
        ConfigError: Something that is no such option, one without a value, or a value that is not YAML.
    """
    values: dict[str, Any] = {}
    rest = iter(options)
    for option in rest:
        name, equals, text = option.partition("=")
        require(name.startswith("--") and len(name) > 2, option, "an override such as --trainer.max_opts=1000", option)
        key = name[2:].replace("-", "_")
        if not equals:
            text = next(rest, "--")
            require(not text.startswith("--"), key, f"a value, as in {name}=VALUE", "nothing")
        values[key] = parse_yaml(text, key)
    return values


def override(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Put values at dotted keys into the sections of a run.

    A mapping given to a whole section is merged into it, anything deeper is replaced. A name given to a section is
    its ``class``. A class other than the one in `data` begins its section anew: keys of the old class are dropped,
    those among the overrides stay, in whatever order they come.

    Args:
        data: Sections by top-level key, as in YAML. Left as it is.
        overrides: Values by dotted key. Those inside sections are not checked here: building the
            :class:`RunConfig` does.

    Returns:
        The new sections.

    Raises:
        ConfigError: A key below a value that has no keys, or a key without its section.
    """
    families = {name: family_of(annotation) for name, annotation in field_types(RunConfig).items()}
    result = {
        key: {"class": value} if families.get(key) and isinstance(value, str) else value for key, value in data.items()
    }
    flat = dict(_flatten(overrides, families))
    for name, family in families.items():
        given = flat.get(f"{name}.class")
        section = result.get(name)
        if family and given is not None and isinstance(section, Mapping):
            result[name] = section if section.get("class", family.default) == given else {}
    for key, value in flat.items():
        if key not in families and "." not in key:
            raise _unknown(key, families, result)
        result = _with(result, key.split("."), value, key)
    return result


def _flatten(overrides: Mapping[str, Any], families: Mapping[str, Family | None]) -> Iterable[tuple[str, Any]]:
    """Dotted keys for mappings that stand for sections, ``class`` for names that do."""
    for key, value in overrides.items():
        if isinstance(value, Mapping) and "." not in key:
            yield from ((f"{key}.{name}", item) for name, item in value.items())
        elif families.get(key) and isinstance(value, str):
            yield f"{key}.class", value
        else:
            yield key, value


def _unknown(key: str, families: Mapping[str, Family | None], data: Mapping[str, Any]) -> ConfigError:
    """What to say to ``--max_opts=1``, which lacks its section."""
    classes: dict[str, Any] = {"actors": ActorManagerConfig, "trainer": AsyncTrainerConfig}
    for name, family in families.items():
        section = data.get(name, {})
        if family and isinstance(section, Mapping) and ("class" in section or family.default):
            classes[name] = family.resolve(section.get("class", family.default), f"{name}.class")
    found = next((f"{name}.{key}" for name in families if name in classes and key in field_types(classes[name])), None)
    hint = f" (did you mean {found}?)" if found else did_you_mean(key, families)
    return UnknownKey(key, f"one of {', '.join(families)}", f"an unknown key{hint}")


def _with(data: Any, path: list[str], value: Any, key: str) -> dict[str, Any]:
    """A copy of nested mappings with a value at a path."""
    if data is not None and not isinstance(data, Mapping):
        parent = key.removesuffix("." + ".".join(path))
        raise ConfigError(key, f"{parent} to have keys", f"{data!r} there")
    first, *rest = path
    below = dict(data or {})
    below[first] = _with(below.get(first), rest, value, key) if rest else value
    return below
