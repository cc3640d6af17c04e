"""What a run needs of the machine against what is free, computed before anything of it is started.

Only what is certainly needed is a reason to refuse; what a run will probably need, by the figures measured below, is a
reason to say so. What environments need is not known before they are built: `outrider doctor` measures it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider import machine
from outrider.agents.compilation import lacks_compiler
from outrider.async_trainer import learner_threads
from outrider.config import require
from outrider.core import EnvSpec
from outrider.data import Layout
from outrider.errors import ResourceError
from outrider.model_sync import N_SLOTS, model_fields, slot_bytes
from outrider.rings import rings_bytes
from outrider.run_config import RunConfig
from outrider.shared_memory import available_bytes, size_text

MB = 1_000_000

log = logging.getLogger(__name__)

# Proportional set sizes and descriptors as `python benchmarks/process_sizes.py cartpole-dqn 1` and `6`, `pong-dqn 1`
# and `3` show them; what is certain is well below each.
SERVER_BYTES = 200 * MB  # fork server, resource tracker and what actors share with them
ACTOR_BYTES = 18 * MB  # of its own, with a policy in numpy and CartPole
ACTOR_MODELS = 4  # sizes of the model on top: its policy, its snapshot, and what torch works with
CERTAIN_ACTOR_BYTES = 8 * MB
LEARNER_MODELS = 12  # sizes of the model: parameters, targets, gradients, Adam's moments, activations
CHECKPOINT_MODELS = 4  # parameters, targets, Adam's moments
LOG_BYTES = 10 * MB
DESCRIPTORS, DESCRIPTORS_PER_ACTOR, DESCRIPTORS_OF_EVALUATOR = 20, 4, 9
CERTAIN_DESCRIPTORS = 8
SERVER_PROCESSES, LEARNER_EXTRA_THREADS = 2, 6


@dataclass(frozen=True)
class Check:
    """One thing that a run needs.

    Attributes:
        name: Such as ``memory``.
        certain: What the run cannot do without.
        expected: What it will probably need; at least `certain`.
        free: What there is; ``sys.maxsize``: no limit.
        detail: What it is needed for.
        advice: What to do where it is not enough.
        in_bytes: Whether these are bytes, else they are counts.
    """

    name: str
    certain: int
    expected: int
    free: int
    detail: str
    advice: str
    in_bytes: bool = True

    @property
    def tight(self) -> bool:
        """Whether there will probably not be enough."""
        return self.expected > self.free

    def text(self, amount: int) -> str:
        """An amount of it, in words."""
        if amount == sys.maxsize:
            return "no limit"
        return size_text(amount) if self.in_bytes else str(amount)

    def require(self) -> None:
        """Refuse what cannot work.

        Raises:
            ResourceError: There is less than the run cannot do without.
        """
        if self.certain > self.free:
            needed, free = self.text(self.certain), self.text(self.free)
            raise ResourceError(f"{self.name}: needs at least {needed}, {free} free ({self.detail}); {self.advice}")


def require_enough(checks: Iterable[Check]) -> None:
    """Refuse a run for which something certainly does not suffice.

    Raises:
        ResourceError: Names it, with needed and free.
    """
    for check in checks:
        check.require()


def warn_if_tight(checks: Sequence[Check]) -> None:
    """Log what will probably not suffice."""
    for check in checks:
        if check.tight:
            needed, free = check.text(check.expected), check.text(check.free)
            log.warning("%s: will need %s, %s free (%s): %s", check.name, needed, free, check.detail, check.advice)


def require_compiler(agent: Any) -> None:
    """Refuse an agent whose update has to be compiled where nothing can do that.

    Args:
        agent: Config of the agent; one with ``compile: on`` and no other ``device`` than the CPU needs a compiler.

    Raises:
        ConfigError: There is no compiler.
    """
    if getattr(agent, "compile", "off") == "on" and getattr(agent, "device", "cpu") == "cpu":
        lacking = lacks_compiler()
        require(lacking is None, "agent.compile", "a C++ compiler", lacking)


def processes_check(config: RunConfig) -> list[Check]:
    """Descriptors, processes and cores: known from the config alone."""
    n = config.actors.count()
    cores, alone = machine.usable_cores(), config.trainer.mode == "sync"
    threads = torch.get_num_threads() if alone else learner_threads(n, cores)
    in_processes = not alone and config.actors.backend == "processes"
    scored = 1 if _evaluates_beside(config) else 0
    started = (n if in_processes else 0) + scored
    fds = DESCRIPTORS_PER_ACTOR * (n if in_processes else 0) + DESCRIPTORS_OF_EVALUATOR * scored
    own = DESCRIPTORS if in_processes else DESCRIPTORS // 2
    busy = threads if alone else threads + n
    actors = "no actors" if alone else f"{n} actor{'s' * (n > 1)}"
    evaluator = ", evaluator" if scored else ""
    return [
        Check(
            "descriptors",
            fds + CERTAIN_DESCRIPTORS,
            fds + own,
            machine.free_descriptors(),
            f"{DESCRIPTORS_PER_ACTOR} per actor{evaluator}" if in_processes else f"files{evaluator}",
            "raise `ulimit -n`, or lower actors.n_actors",
            in_bytes=False,
        ),
        Check(
            "processes",
            started + 1,
            started + SERVER_PROCESSES + threads + LEARNER_EXTRA_THREADS,
            machine.free_processes(),
            f"{actors}{evaluator}, fork server, learner's threads",
            "raise `ulimit -u` or the control group's limit, or lower actors.n_actors",
            in_bytes=False,
        ),
        Check(
            "cores",
            1,
            busy,
            cores,
            f"{actors}, learner {threads} thread{'s' * (threads > 1)}",
            "oversubscribed",
            in_bytes=False,
        ),
    ]


def _evaluates_beside(config: RunConfig) -> bool:
    """Whether evaluations have a process of their own, if their evaluator can be pickled."""
    trainer = config.trainer
    return trainer.mode == "async" and trainer.eval_interval > 0 and trainer.evaluation.process


def space_check(config: RunConfig, env_spec: EnvSpec, model: Mapping[str, Any], run_dir: Path) -> list[Check]:
    """Memory and disk.

    Args:
        config: The run.
        env_spec: Its environment.
        model: What acting needs, by name: the model info of a policy.
        run_dir: Where it will write.
    """
    layout = config.step_processor.layout(env_spec)
    row_bytes = layout.record_dtype().itemsize
    model_bytes = sum(np.asarray(value).nbytes for value in model.values())
    replay, certain = replay_bytes(config.replay, layout)
    on_disk, folder = replay_on_disk(config.replay, layout)
    usable = folder.is_dir() and os.access(folder, os.W_OK)
    shared = on_disk if usable and machine.same_disk(folder, run_dir) else 0
    checks = [
        _memory(config, layout, replay - on_disk, certain, slot_bytes(model_fields(model)), model_bytes),
        _disk(config, row_bytes, replay, model_bytes, run_dir, shared),
    ]
    if on_disk > shared:
        free, detail = machine.free_disk(folder), f"rows in {folder}"
        if not usable:
            free, detail = 0, f"{folder} is no directory that can be written"
        advice = "lower replay.capacity, or another replay.disk"
        checks.append(Check("replay disk", on_disk, on_disk, free, detail, advice))
    return checks


def replay_bytes(config: Any, layout: Layout) -> tuple[int, bool]:
    """Bytes of a replay buffer's rows, and whether that is certain.

    A config may say it itself, in a method ``nbytes(layout)``; else it is its ``capacity`` times a row; else nothing
    is known.
    """
    if callable(tell := getattr(config, "nbytes", None)):
        return int(tell(layout)), True
    capacity = getattr(config, "capacity", None)
    return (capacity * layout.record_dtype().itemsize, False) if isinstance(capacity, int) else (0, False)


def replay_on_disk(config: Any, layout: Layout) -> tuple[int, Path]:
    """How many of a replay buffer's bytes lie on which disk; a "disk" that is memory counts as that.

    A config may say it itself, in a method ``disk_bytes(layout)`` and an attribute ``disk``.
    """
    tell, folder = getattr(config, "disk_bytes", None), Path(getattr(config, "disk", None) or ".")
    return (int(tell(layout)), folder) if callable(tell) and not machine.is_memory(folder) else (0, folder)


def _memory(
    config: RunConfig, layout: Layout, replay: int, replay_is_certain: bool, slot: int, model_bytes: int
) -> Check:
    actors, n = config.actors, config.actors.count()
    channels = own = server = certain_own = 0
    if config.trainer.mode == "async":
        channels = rings_bytes(layout, n, actors.n_buffer, actors.n_slots) + N_SLOTS * slot
        if actors.backend == "processes":
            own, certain_own = n * (ACTOR_BYTES + ACTOR_MODELS * model_bytes), n * CERTAIN_ACTOR_BYTES
            server = SERVER_BYTES
        if _evaluates_beside(config):  # its process is like an actor's; the learner has a second agent for it
            channels += N_SLOTS * slot
            server = SERVER_BYTES + ACTOR_BYTES + (ACTOR_MODELS + LEARNER_MODELS) * model_bytes
    certain = (replay if replay_is_certain else 0) + channels + certain_own
    expected = replay + channels + own + server + LEARNER_MODELS * model_bytes
    rest = expected - replay - own
    parts = [f"replay {_short(replay)}"]
    if own:
        parts.append(f"{n} actor{'s' * (n > 1)} {_short(own)}")
    parts.append(f"rest {_short(rest)}")
    advice = "lower replay.capacity or actors.n_actors, or see replay.disk"
    return Check("memory", certain, max(certain, expected), available_bytes(), ", ".join(parts), advice)


def _disk(config: RunConfig, row_bytes: int, replay: int, model_bytes: int, run_dir: Path, mapped: int) -> Check:
    """At most: the rows of all kept checkpoints, no two of which share any, or all rows that the run can ever make.

    Args:
        config: The run.
        row_bytes: Of a row.
        replay: Bytes of the replay buffer.
        model_bytes: Of the model.
        run_dir: Where it will write.
        mapped: Bytes of the replay buffer that lie on the same disk.
    """
    trainer, kept = config.trainer, config.trainer.checkpoint
    state = CHECKPOINT_MODELS * model_bytes
    certain, detail = mapped + 2 * model_bytes, "models, metrics"
    expected = certain + LOG_BYTES
    if mapped:
        detail = f"replay.disk {_short(mapped)}, {detail}"
    if kept.keep:
        certain += state
        copies = kept.keep + 2  # the best, and the one that is being written
        expected += copies * state
        detail += f", {kept.keep}+1 checkpoints"
        if kept.replay:
            first = min(trainer.warmup_period * row_bytes, replay)
            certain += first
            ever = _rows_ever(config)
            most = copies * replay if ever is None else min(copies * replay, ever * row_bytes)
            expected += max(most, first)
            detail += f" with up to {_short(most)} of replay" if mapped else f", replay up to {_short(most)}"
    free = machine.free_disk(run_dir)
    return Check("disk", certain, max(certain, expected), free, detail, "see trainer.checkpoint, or another run_dir")


def _rows_ever(config: RunConfig) -> int | None:
    """Rows that a run will insert, by its goals and its balance; None: as many as come."""
    trainer, bounds = config.trainer, []
    if trainer.max_env_steps is not None:
        bounds.append(trainer.max_env_steps)
    batch = getattr(config.agent, "batch_size", None)
    if trainer.max_opts is not None and trainer.samples_per_insert is not None and isinstance(batch, int):
        bounds.append(trainer.warmup_period + int(trainer.max_opts * batch / trainer.samples_per_insert))
    return min(bounds, default=None)


def _short(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"
