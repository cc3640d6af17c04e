"""Opens everything in the order of the path of a transition, and closes it again. Read this first.

::

    actors: env -> policy -> (1) step processor -> proxy -> (2) ring
    learner: (2) ring -> (3) replay buffer -> (4) agent -> (5) model slab -> (6) actors
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from outrider import presets, processes
from outrider.actor import ActorStat
from outrider.actor_manager import ActorManager, ActorManagerConfig
from outrider.async_trainer import AsyncTrainer, AsyncTrainerConfig, AsyncTrainStat
from outrider.channel import item_channel
from outrider.checkpoint import Checkpoints, report
from outrider.checkpoint_files import Checkpoint, newest_checkpoint, set_newer_aside
from outrider.config import require
from outrider.core import (
    AgentConfig,
    EnvConfig,
    Evaluator,
    Recorder,
    ReplayBufferConfig,
    StepProcessorConfig,
)
from outrider.data import Record
from outrider.envs.gymnasium import GymEnvConfig
from outrider.errors import ActorFailed
from outrider.evaluation import DefaultEvaluator
from outrider.flags import InitGuard, StopFlag
from outrider.interrupts import Interrupts
from outrider.learner import Learner
from outrider.loaded_policy import LoadedPolicy, build_saved
from outrider.model_sync import model_channel
from outrider.recording import Goals, rewind
from outrider.run_config import AGENTS, RunConfig, differences
from outrider.run_dir import RunDir, default_path, model_meta
from outrider.run_state import restore_agent
from outrider.trainer import Trainer


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
        evaluator: Scores the agent; not closed here.
        seed: Seed of the run.
        checkpoints: Saves the run, and says what it goes on from; not closed here. None: it is not saved.

    Raises:
        ConfigError: Something that cannot work, before any process was started.
        CheckpointError: The agent cannot go on from the checkpoint.
        ActorFailed: An actor ended before it was asked to; carries its traceback.
        Interrupted: SIGINT or SIGTERM; everything was flushed and saved.
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
            incarnations=_incarnations(checkpoints),
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
        )
        _restore(trainer.learner, checkpoints)
        interrupts.request, interrupts.busy = trainer.request_stop, lambda: trainer.learner.looping
        try:
            with actors:
                actors.run(guard)
                stats = trainer.train(recorder, evaluator, guard, checkpoints)
        except ActorFailed:
            interrupts.check()  # who stops a whole process group stops the actors, too, maybe before the learner looks
            raise
    interrupts.check()
    return TrainResult(stats, actors.stats())


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
        _restore(trainer.learner, checkpoints)
        interrupts.request, interrupts.busy = trainer.request_stop, lambda: trainer.learner.looping
        stats = trainer.train(recorder, evaluator, checkpoints=checkpoints)
    interrupts.check()
    return TrainResult(stats, trainer.actor_stats())


def run(config: RunConfig, *, argv: Sequence[str] = ()) -> TrainResult:
    """Train as a run config says, into a run directory.

    Args:
        config: The run.
        argv: The command line, kept in the run directory.

    Raises:
        ConfigError: Something that cannot work, before any process of the run was started.
        RunDirError: The run directory is not empty, or in use.
        ActorFailed: An actor ended before it was asked to.
        Interrupted: SIGINT or SIGTERM; everything was flushed and saved.
    """
    processes.ensure_server()
    _require_possible(config)
    with RunDir.create(config.run_dir or _default_run_dir(config), config.to_yaml(), argv) as run_dir:
        return _train_in(run_dir, config)


def resume(
    run_dir: Path | str,
    overrides: Mapping[str, Any] | None = None,
    *,
    checkpoint: int | None = None,
    argv: Sequence[str] = (),
) -> TrainResult:
    """Go on with a run from its newest checkpoint that is whole, in its directory; from the start if there is none.

    What differs in the configuration, and what cannot be restored, is said on stderr.

    Args:
        run_dir: The run directory.
        overrides: Values by dotted key that win over those of the run, such as ``{"trainer.max_opts": 20_000}``.
        checkpoint: Opt steps of the checkpoint to go on from instead; newer ones are set aside.
        argv: The command line, kept in the run directory.

    Raises:
        ConfigError: Something that cannot work, before any process of the run was started.
        RunDirError: It is no run directory, or in use.
        CheckpointError: There are checkpoints, but none is whole; or the agent cannot take its state.
        ActorFailed: An actor ended before it was asked to.
        Interrupted: SIGINT or SIGTERM; everything was flushed and saved.
    """
    processes.ensure_server()
    require("run_dir" not in (overrides or {}), "run_dir", "no other one for a run that goes on", "one")
    with RunDir.open(run_dir) as opened:
        file = opened.path / "config.yaml"
        before, config = RunConfig.load(file), RunConfig.from_sources(file, overrides)
        _require_possible(config)
        found, damages = newest_checkpoint(opened.checkpoints, checkpoint)
        if found is not None:
            restore_agent(found, config.agent.build(config.env.spec()))  # refused before anything is changed
        for damage in damages:
            report(f"damaged: {damage}")
        for difference in differences(before, config):
            report(f"changed: {difference}")
        _go_back(opened, found)
        opened.go_on(config.to_yaml(), argv)
        return _train_in(opened, config, found)


def _go_back(run_dir: RunDir, found: Checkpoint | None) -> None:
    """Take the metrics back to the checkpoint, and set aside what came after it."""
    if found is None:
        report(f"{run_dir.checkpoints}: no checkpoint yet, the run starts from the beginning")
        rewind(run_dir.path, -1, -1)
        return
    at = found.moment
    for path in set_newer_aside(run_dir.checkpoints, at.opt_steps):
        report(f"{path}: set aside, since the run goes on from before it")
    cut, best = rewind(run_dir.path, at.opt_steps, at.env_steps)
    scores = [score for score in (best, found.state["best_score"]) if score is not None]
    found.state["best_score"] = max(scores, default=None)
    lines = f"; {cut} later lines of metrics are cut" if cut else ""
    report(f"goes on from {found.path}: {at.opt_steps} opt steps, {at.env_steps} env steps ({at.reason}){lines}")
    report(f"not in the checkpoint: {', '.join(found.manifest.not_contained)}")


def _restore(learner: Learner, checkpoints: Checkpoints | None) -> None:
    if checkpoints is not None and checkpoints.resumed is not None:
        for note in learner.restore(checkpoints.resumed):
            report(note)
        checkpoints.resumed.state.clear()  # or it would stay in memory beside what was made of it


def _incarnations(checkpoints: Checkpoints | None) -> list[int]:
    """Those of the actors of a run that goes on: new ones, with new seeds."""
    if checkpoints is None or checkpoints.resumed is None:
        return []
    return [incarnation + 1 for incarnation, _ in checkpoints.resumed.state["counters"]["actors"]]


def _train_in(run_dir: RunDir, config: RunConfig, resumed: Checkpoint | None = None) -> TrainResult:
    """Train as a run config says, into a run directory that is locked."""
    env_eval = config.env.eval()
    n_actors = config.actors.count()
    agent_configs = [config.agent.for_actor(i, n_actors) for i in range(n_actors)]
    trainer = config.trainer
    recorder = config.recorder.build(
        run_dir.path,
        title=run_dir.path.name,
        goals=Goals(
            max_opts=trainer.max_opts,
            max_env_steps=trainer.max_env_steps,
            max_time_s=trainer.max_time_s,
            target_score=trainer.target_score,
        ),
        meta=model_meta(config.env.spec()),
    )
    with (
        closing(recorder),
        closing(config.evaluator.build(env_eval)) as evaluator,
        Checkpoints(run_dir.checkpoints, trainer.checkpoint, resumed) as checkpoints,
    ):
        train = train_sync if trainer.mode == "sync" else train_async
        result = train(
            config.agent,
            agent_configs,
            config.env,
            env_eval,
            config.step_processor,
            config.replay,
            config.actors,
            trainer,
            recorder,
            evaluator,
            seed=config.seed,
            checkpoints=checkpoints,
        )
    result = replace(result, run_dir=run_dir.path)
    run_dir.write_stats({"trainer": asdict(result.stats), "actors": [asdict(s) for s in result.actor_stats]})
    return result


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


def evaluate_run(run_dir: Path | str, model: str = "best", episodes: int = 10, seed: int = 0) -> tuple[float, Record]:
    """Play whole episodes with a model that a run has kept.

    Args:
        run_dir: The run directory; it may be in use.
        model: ``best``, ``last`` or a number of opt steps.
        episodes: Number of episodes.
        seed: Seed of the environments.

    Returns:
        Mean return, and ``eval/*`` metrics.

    Raises:
        RunDirError: It is no run directory, or has no such model.
    """
    config, path = _open_run(run_dir, model)
    env = config.env.eval()
    agent = build_saved(config.agent, env.spec(), path)
    with closing(DefaultEvaluator(env, seed=seed, n_episodes=episodes)) as evaluator:
        return evaluator.evaluate(agent)


def load_policy(run_dir: Path | str, model: str = "best") -> LoadedPolicy:
    """A policy that a run has learned, for one observation or a batch.

    Args:
        run_dir: The run directory; it may be in use.
        model: ``best``, ``last`` or a number of opt steps.

    Raises:
        RunDirError: It is no run directory, or has no such model.
    """
    config, path = _open_run(run_dir, model)
    spec = config.env.eval().spec()
    return LoadedPolicy(build_saved(config.agent, spec, path), spec)


def _open_run(run_dir: Path | str, model: str) -> tuple[RunConfig, Path]:
    run = RunDir.open(run_dir, lock=False)
    return RunConfig.load(run.path / "config.yaml"), run.model_path(model)


def _require_possible(config: RunConfig) -> None:
    """Find out before anything is created whether items, agent and evaluation suit the environment."""
    spec = config.env.spec()
    config.step_processor.layout(spec)
    config.agent.build_actor(spec)
    spec.require_same_spaces(config.env.eval().spec())


def _default_run_dir(config: RunConfig) -> Path:
    env = str(getattr(config.env, "id", None) or type(config.env).__name__)
    return default_path(env, AGENTS.name_of(type(config.agent)).rpartition(":")[2])
