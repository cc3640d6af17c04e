"""What ends a run and when the learner does what; and what it has done in the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from outrider.checkpoint import CheckpointConfig
from outrider.config import Config, require
from outrider.process_scorer import EvaluationConfig
from outrider.sampling import require_same_discount


@dataclass(frozen=True, kw_only=True)
class AsyncTrainerConfig(Config):
    """When the learner does what. Intervals are in opt steps; 0 switches an evaluation, save or record interval off.

    Attributes:
        max_opts: Opt steps after which the run ends; None: no limit.
        max_env_steps: Env steps after which the run ends; None: no limit.
        max_time_s: Seconds of training after which the run ends; None: no limit.
        target_score: Evaluation score that ends the run; None: no target.
        eval_interval: Opt steps between evaluations.
        flush_record_interval: Opt steps between writes of the recorder; evaluations are written in any case.
        record_compute_cost_interval: Opt steps between measurements of the cost of an opt step.
        record_agent_info_interval: Opt steps between records of the agent (losses and the like).
        save_interval: Opt steps between numbered saves of the model.
        sync_interval: Opt steps between publications to the actors, at least 1.
        warmup_period: Rows in the replay buffer before the first opt step.
        samples_per_insert: Rows drawn per row inserted after the warm-up; None: both sides run free.
        mode: ``async`` (actors in processes or threads of their own), or ``sync`` (actors and learner take turns
            in one process, bit for bit reproducible).
        checkpoint: When the run is saved so that it can be resumed.
        evaluation: Where the agent is evaluated.
        stall_timeout_s: Seconds without an env step, opt step, evaluation step or checkpoint anywhere after which an
            asynchronous run ends with an error; a learner that computes, as in a compilation, is no stall. 0: off.
    """

    max_opts: int | None = 100_000
    max_env_steps: int | None = None
    max_time_s: float | None = None
    target_score: float | None = None
    eval_interval: int = 5_000
    flush_record_interval: int = 500
    record_compute_cost_interval: int = 500
    record_agent_info_interval: int = 500
    save_interval: int = 0
    sync_interval: int = 10
    warmup_period: int = 1_000
    samples_per_insert: float | None = 8.0
    mode: Literal["async", "sync"] = "async"
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    stall_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("max_opts", "max_env_steps", "max_time_s"):
            value = getattr(self, name)
            require(value is None or value > 0, name, "a number > 0, or null", value)
        for name in (
            "eval_interval",
            "flush_record_interval",
            "record_compute_cost_interval",
            "record_agent_info_interval",
            "save_interval",
        ):
            require(getattr(self, name) >= 0, name, "an int >= 1, or 0 for off", getattr(self, name))
        require(self.stall_timeout_s >= 0, "stall_timeout_s", "a number > 0, or 0 for off", self.stall_timeout_s)
        require(self.sync_interval >= 1, "sync_interval", "an int >= 1", self.sync_interval)
        require(self.warmup_period >= 1, "warmup_period", "an int >= 1", self.warmup_period)
        spi = self.samples_per_insert
        require(spi is None or 0 < spi < float("inf"), "samples_per_insert", "a number > 0, or null", spi)
        require(
            self.target_score is None or self.eval_interval > 0,
            "eval_interval",
            "an int >= 1, since target_score is set",
            self.eval_interval,
        )

    @property
    def ends_by_score_only(self) -> bool:
        """Whether nothing but an evaluation can end the run."""
        limits = self.max_opts, self.max_env_steps, self.max_time_s
        return self.target_score is not None and limits == (None, None, None)

    def require_possible(self, replay: Any, agent: Any, streams: int = 1, frame_stack: int = 0) -> None:
        """Refuse a warm-up that never ends, batches larger than what is there after it, and two discounts.

        Args:
            replay: Config of the replay buffer; only ``capacity``, ``warmup_limit`` and ``gamma`` count.
            agent: Config of the agent; only fields ``batch_size`` and ``gamma`` count.
            streams: Environments of all actors, as far as that is known.
            frame_stack: See :class:`outrider.core.EnvSpec`; 0 also if it is not known yet.

        Raises:
            ConfigError: The numbers do not go together.
        """
        warmup = self.warmup_period
        capacity, batch_size = getattr(replay, "capacity", None), getattr(agent, "batch_size", None)
        limit, which = capacity, f"at most replay.capacity ({capacity})"
        if hasattr(replay, "warmup_limit"):
            limit = replay.warmup_limit(streams, frame_stack)
            which = f"at most {limit} with replay.capacity {capacity} and {streams} environments"
        if limit is not None:
            require(warmup <= limit, "trainer.warmup_period", which, warmup)
        require_same_discount(replay, agent, "replay")
        if batch_size is not None:
            expected = f"at most trainer.warmup_period ({warmup})"
            require(batch_size <= warmup, "agent.batch_size", expected, batch_size)


@dataclass(frozen=True)
class AsyncTrainStat:
    """What a run of the trainer did.

    Attributes:
        samples: Rows inserted into the replay buffer (border's word).
        sampled: Rows drawn from it.
        env_steps: Valid single-environment steps.
        opt_steps: Calls of ``Agent.opt``.
        updates: Gradient steps.
        episodes: Episodes finished.
        samples_per_insert: Rows drawn per row inserted after the warm-up.
        duration_s: Seconds of training.
        best_score: Best evaluation score, None without evaluations.
        stopped_by: Why it ended: ``max_opts``, ``max_env_steps``, ``max_time_s``, ``target_score``, ``request``, the
            name of a signal, or ``error``.
    """

    samples: int
    sampled: int
    env_steps: int
    opt_steps: int
    updates: int
    episodes: int
    samples_per_insert: float
    duration_s: float
    best_score: float | None
    stopped_by: str

    @property
    def samples_per_s(self) -> float:
        """Rows inserted per second."""
        return self.samples / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def opt_steps_per_s(self) -> float:
        """Opt steps per second."""
        return self.opt_steps / self.duration_s if self.duration_s > 0 else 0.0

    def fmt(self) -> str:
        """A header and a line of three numbers."""
        numbers = f"{self.samples_per_s:.1f}, {self.opt_steps_per_s:.1f}, {self.duration_s:.1f}"
        return f"samples/sec, opt_steps/sec, duration\n{numbers}"
