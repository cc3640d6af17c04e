"""Opens everything in the order of the path of a transition, and closes it again. Read this first.

::

    actors: env -> policy -> (1) step processor -> proxy -> (2) ring
    learner: (2) ring -> (3) replay buffer -> (4) agent -> (5) model slab -> (6) actors
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from outrider import presets, processes, resuming
from outrider.actor import ActorStat
from outrider.actor_manager import ActorManager, ActorManagerConfig
from outrider.async_trainer import AsyncTrainer
from outrider.channel import item_channel
from outrider.checkpoint import Checkpoints
from outrider.checkpoint_files import Checkpoint
from outrider.config import did_you_mean, field_types
from outrider.core import (
    AgentConfig,
    EnvConfig,
    EnvSpec,
    Evaluator,
    Recorder,
    ReplayBufferConfig,
    StepProcessorConfig,
)
from outrider.envs.gymnasium import GymEnvConfig
from outrider.errors import ActorFailed, CheckpointError, ConfigError, ResourceError, UnknownKey
from outrider.flags import InitGuard, StopFlag
from outrider.interrupts import Interrupts
from outrider.learner import Learner
from outrider.model_sync import model_channel
from outrider.preflight import Check, processes_check, require_compiler, require_enough, space_check, warn_if_tight
from outrider.recording import Goals
from outrider.run_config import AGENTS, RunConfig, require_suitable_replay
from outrider.run_dir import RunDir, default_path, model_meta, require_new_or_empty
from outrider.trainer import Trainer
from outrider.trainer_config import AsyncTrainerConfig, AsyncTrainStat

log = logging.getLogger(__name__)

REFUSALS = (CheckpointError, ConfigError, ResourceError)
"""Errors of a run that cannot begin."""


@dataclass(frozen=True)
class TrainResult:
    """What a run left.

    Attributes:
        stats: Statistics of the trainer.
        actor_stats: Statistics of each actor.
        run_dir: Where models and metrics are, None if the run had no directory.
    """

    stats: AsyncTrainStat
    actor_stats: list[ActorStat]
    run_dir: Path | None = None


Report: TypeAlias = Callable[[TrainResult], object]


def _no_report(result: TrainResult) -> None:
    """Report nothing."""


ShowNeeds: TypeAlias = Callable[[Sequence[Check]], object]


def train_async(
    agent_config: AgentConfig,
    agent_configs: Sequence[AgentConfig],
    env_config_train: EnvConfig,
    env_config_eval: EnvConfig,
    step_proc_config: StepProcessorConfig,
    replay_buffer_config: ReplayBufferConfig,
    actor_man_config: ActorManagerConfig,
    async_trainer_config: AsyncTrainerConfig,
    recorder: Recorder,
    evaluator: Evaluator,
    *,
    seed: int = 0,
    checkpoints: Checkpoints | None = None,
    report: Report = _no_report,
    logs: Path | None = None,
) -> TrainResult:
    """Train asynchronously: actors in processes of their own, the learner in this thread.

    Args:
        agent_config: The agent to train.
        agent_configs: One per actor; they may differ in exploration.
        env_config_train: The actors' environments.
        env_config_eval: The environment as it is evaluated.
        step_proc_config: How steps become items.
        replay_buffer_config: The replay buffer.
        actor_man_config: How actors run and send.
        async_trainer_config: When the learner does what.
        recorder: Takes metrics and models; not closed here.
        evaluator: Scores the agent, or a copy of it does in a process of its own; not closed here.
        seed: Seed of the run.
        checkpoints: Saves the run, and says what it goes on from; not closed here. None: it is not saved.
        report: Called with what was done when the run ends, however that is; for those who get no result because
            it ends with an exception. Not called for a run that is refused before it has begun.
        logs: Directory for what actors and evaluators that fail leave, see `ActorManager.build`.

    Raises:
        ConfigError: Something that cannot work, before any process was started.
        CheckpointError: The agent has a state that cannot be stored, or cannot take that of the checkpoint.
        ActorFailed: An actor ended before it was asked to; carries its traceback.
        Interrupted: SIGINT, SIGTERM or SIGHUP; everything was flushed and saved.
    """
    with Interrupts() as interrupts:
        stop = StopFlag()
        item_sender, item_receiver = item_channel()
        model_sender, model_receiver = model_channel()
        guard = InitGuard()
        actors = ActorManager.build(
            actor_man_config,
            agent_configs,
            env_config_train,
            step_proc_config,
            item_sender,
            model_receiver,
            stop,
            seed=seed,
            incarnations=resuming.incarnations(checkpoints),
            logs=logs,
        )
        trainer = AsyncTrainer.build(
            async_trainer_config,
            agent_config,
            env_config_eval,
            replay_buffer_config,
            item_receiver,
            model_sender,
            stop,
            seed=seed,
            logs=logs,
        )
        resuming.prepare(trainer.learner, checkpoints)
        interrupts.request, interrupts.busy = trainer.request_stop, lambda: trainer.learner.looping
        try:
            with actors:
                actors.run(guard)
                trainer.train(recorder, evaluator, guard, checkpoints=checkpoints)
        except ActorFailed:
            interrupts.check()  # who stops a whole process group stops the actors, too, maybe before the learner looks
            raise
        finally:
            result = TrainResult(trainer.learner.stat(), actors.stats())
            if not _refused(trainer.learner):
                report(result)
    interrupts.check()
    return result


def train_sync(
    agent_config: AgentConfig,
    agent_configs: Sequence[AgentConfig],
    env_config_train: EnvConfig,
    env_config_eval: EnvConfig,
    step_proc_config: StepProcessorConfig,
    replay_buffer_config: ReplayBufferConfig,
    actor_man_config: ActorManagerConfig,
    trainer_config: AsyncTrainerConfig,
    recorder: Recorder,
    evaluator: Evaluator,
    *,
    seed: int = 0,
    checkpoints: Checkpoints | None = None,
    report: Report = _no_report,
) -> TrainResult:
    """Train in this thread alone, actors and learner in turns: bit for bit reproducible. Arguments as `train_async`."""
    with Interrupts() as interrupts:
        trainer = Trainer.build(
            trainer_config,
            agent_config,
            agent_configs,
            env_config_train,
            env_config_eval,
            step_proc_config,
            replay_buffer_config,
            n_envs=actor_man_config.n_envs,
            bad_data=actor_man_config.bad_data,
            seed=seed,
        )
        resuming.prepare(trainer.learner, checkpoints)
        interrupts.request, interrupts.busy = trainer.request_stop, lambda: trainer.learner.looping
        try:
            trainer.train(recorder, evaluator, checkpoints=checkpoints)
        finally:
            result = TrainResult(trainer.learner.stat(), trainer.actor_stats())
            if not _refused(trainer.learner):
                report(result)
    interrupts.check()
    return result


def run(
    config: RunConfig,
    *,
    argv: Sequence[str] = (),
    report: Report = _no_report,
    show_needs: ShowNeeds = warn_if_tight,
) -> TrainResult:
    """Train as a run config says, into a run directory.

    Args:
        config: The run.
        argv: The command line, kept in the run directory.
        report: Called with what was done when the run has ended, however that was, and ``stats.json`` is written.
        show_needs: Called with what the run needs and what is free, before anything is started.

    Raises:
        ConfigError: Something that cannot work, before any process of the run was started.
        ResourceError: Memory, disk, descriptors or processes certainly do not suffice; nothing was started.
        RunDirError: The run directory is not empty, or in use.
        ActorFailed: An actor ended before it was asked to.
        Interrupted: SIGINT, SIGTERM or SIGHUP; everything was flushed and saved.
    """
    if config.run_dir:
        require_new_or_empty(Path(config.run_dir))
    spec = _require_possible(config, Path(config.run_dir or "runs"), show_needs)
    with (
        RunDir.create(config.run_dir or _default_run_dir(config), config.to_yaml(), argv) as run_dir,
        _discarded_if_refused(run_dir),
    ):
        return _run_in(run_dir, config, spec, report)


def resume(
    run_dir: Path | str,
    overrides: Mapping[str, Any] | None = None,
    *,
    checkpoint: int | None = None,
    argv: Sequence[str] = (),
    report: Report = _no_report,
    show_needs: ShowNeeds = warn_if_tight,
) -> TrainResult:
    """Go on with a run from its newest checkpoint that is whole, in its directory; from the start if there is none.

    What differs in the configuration, and what cannot be restored, is said on stderr.

    Args:
        run_dir: The run directory.
        overrides: Values by dotted key that win over those of the run, such as ``{"trainer.max_opts": 20_000}``.
        checkpoint: Opt steps of the checkpoint to go on from instead; newer ones are set aside.
        argv: The command line, kept in the run directory.
        report: As for :func:`run`.
        show_needs: As for :func:`run`.

    Raises:
        ConfigError: Something that cannot work, before any process of the run was started.
        ResourceError: As for :func:`run`.
        RunDirError: It is no run directory, or in use.
        CheckpointError: There are checkpoints, but none is whole; or the agent cannot take its state.
        ActorFailed: An actor ended before it was asked to.
        Interrupted: SIGINT, SIGTERM or SIGHUP; everything was flushed and saved.
    """
    with RunDir.open(run_dir) as opened:
        config = resuming.new_config(opened, overrides or {})
        found = resuming.find_checkpoint(opened, checkpoint)
        resuming.require_ahead(opened, config, found)
        spec = _require_possible(config, opened.path, show_needs)
        resuming.require_restorable(found, config, spec)
        resuming.go_back(opened, found)
        opened.go_on(config.to_yaml(), argv)
        return _run_in(opened, config, spec, report, found)


def _run_in(
    run_dir: RunDir, config: RunConfig, spec: EnvSpec, report: Report, resumed: Checkpoint | None = None
) -> TrainResult:
    """Train as a run config says, in a run directory that is locked."""
    n_actors = config.actors.count()
    env_eval = config.env.eval()
    ended = _Ended(run_dir, report)
    with ExitStack() as closed:
        closed.callback(ended.tell)  # the last, when the display is gone
        recorder = config.recorder.build(
            run_dir.path, title=run_dir.path.name, goals=_goals(config.trainer), meta=model_meta(spec)
        )
        closed.callback(recorder.close)
        evaluator = closed.enter_context(closing(config.evaluator.build(env_eval)))
        checkpoints = closed.enter_context(Checkpoints(run_dir.checkpoints, config.trainer.checkpoint, resumed))
        train = train_sync if config.trainer.mode == "sync" else partial(train_async, logs=run_dir.logs)
        result = train(
            config.agent,
            [config.agent.for_actor(i, n_actors) for i in range(n_actors)],
            config.env,
            env_eval,
            config.step_processor,
            config.replay,
            config.actors,
            config.trainer,
            recorder,
            evaluator,
            seed=config.seed,
            checkpoints=checkpoints,
            report=ended.note,
        )
    return replace(result, run_dir=run_dir.path)


def _goals(trainer: AsyncTrainerConfig) -> Goals:
    return Goals(
        max_opts=trainer.max_opts,
        max_env_steps=trainer.max_env_steps,
        max_time_s=trainer.max_time_s,
        target_score=trainer.target_score,
    )


class _Ended:
    """Keeps the result of a run until everything is closed, then writes and reports it."""

    def __init__(self, run_dir: RunDir, report: Report) -> None:
        self._run_dir, self._report = run_dir, report
        self._result: TrainResult | None = None

    def note(self, result: TrainResult) -> None:
        self._result = replace(result, run_dir=self._run_dir.path)

    def tell(self) -> None:
        if self._result is None:  # it failed before it began
            return
        stats = asdict(self._result.stats)
        actors = [asdict(s) | {"state": s.state.name.lower()} for s in self._result.actor_stats]
        try:
            self._run_dir.write_stats({"trainer": stats, "actors": actors})
        except OSError as error:  # such as a full disk: it must not hide how the run ended
            log.error("%s: stats.json could not be written: %s", self._run_dir.path, error)
        self._report(self._result)


def train(
    env: str | EnvConfig | Callable[..., Any],
    agent: str | AgentConfig = "dqn",
    *,
    n_actors: int | None = None,
    run_dir: str | Path | None = None,
    **overrides: Any,
) -> TrainResult:
    """Train in one call.

    Args:
        env: A Gymnasium id, an environment class or callable, or an environment config.
        agent: ``dqn``, ``sac``, the import path of a config class, or an agent config.
        n_actors: Actor processes; None: as many as the preset of the agent has, 2.
        run_dir: New or empty directory for models and metrics; None: one below ``runs/``.
        **overrides: Sections of the run config, such as ``trainer={"max_opts": 10_000}``, or single values by
            dotted key, such as ``**{"trainer.max_opts": 10_000}``.

    Raises:
        ConfigError: Something that cannot work, before any process of the run was started.
        ActorFailed: An actor ended before it was asked to.
    """
    name = agent if isinstance(agent, str) else AGENTS.name_of(type(agent))
    known = ("n_actors", *field_types(RunConfig))
    for key in overrides:
        hint = "" if key in known else did_you_mean(key, known)
        if hint and "." not in key:
            raise UnknownKey(key, f"one of {', '.join(known)}", f"an unknown key{hint}")
    preset = name if name in presets.names() else "dqn"  # of an own agent's run only the other sections count
    given: dict[str, Any] = {"agent": agent, **overrides}
    if isinstance(env, str):
        given["env.id"] = env
    else:
        given["env"] = env if isinstance(env, EnvConfig) else GymEnvConfig(id=env)
    if n_actors is not None:
        given["actors.n_actors"] = n_actors
    if run_dir is not None:
        given["run_dir"] = str(run_dir)
    return run(RunConfig.from_sources(preset, given))


def _require_possible(config: RunConfig, path: Path, show_needs: ShowNeeds) -> EnvSpec:
    """Find out before anything is created whether the machine suffices, and all parts suit the environment."""
    if callable(require_usable := getattr(config.agent, "require_usable", None)):
        require_usable()
    require_compiler(config.agent)
    checks = processes_check(config)
    require_enough(checks)  # at once: even describing the environment takes a process
    processes.ensure_server()
    spec = config.env.spec()
    require_suitable_replay(config, spec)
    streams = config.actors.count() * config.actors.n_envs
    config.trainer.require_possible(config.replay, config.agent, streams, spec.frame_stack)
    _, model = config.agent.build_actor(spec).model_info()
    spec.require_same_spaces(config.env.eval().spec())
    checks = [*space_check(config, spec, model, path), *checks]
    require_enough(checks)
    show_needs(checks)
    return spec


def _refused(learner: Learner) -> bool:
    """Whether what ends the run now says that it cannot begin: there is nothing to report then."""
    return isinstance(sys.exception(), REFUSALS) and not learner.began


@contextmanager
def _discarded_if_refused(run_dir: RunDir) -> Iterator[None]:
    """Leave no run directory behind a run that never began, such as one for which the memory does not suffice."""
    try:
        yield
    except REFUSALS:
        run_dir.discard()
        raise


def _default_run_dir(config: RunConfig) -> Path:
    env = str(getattr(config.env, "id", None) or type(config.env).__name__)
    return default_path(env, AGENTS.name_of(type(config.agent)).rpartition(":")[2])
