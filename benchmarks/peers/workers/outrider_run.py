"""Trains with outrider and says when it was where.

Request: `preset`, None for an empty config; `overrides` by dotted key; `seed`.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from answering import Marks, answer

from outrider import processes, wiring
from outrider.core import Layout
from outrider.data import Items, Record
from outrider.recording import NullRecorder
from outrider.replay.uniform import SimpleReplayBuffer, SimpleReplayBufferConfig
from outrider.run_config import RunConfig, override
from outrider.seeding import Role, derive


class Watch(NullRecorder):
    """Notes a mark whenever statistics are stored, and every score with all that its evaluation took."""

    def __init__(self) -> None:
        self.first = math.inf
        self.marks: Marks = []
        self.scores: list[tuple[float, int, int, float]] = []

    def store(self, record: Record) -> None:
        mark = (time.monotonic() - self.first, record.get("opt_steps", 0), record.get("env_steps", 0))
        if mark[0] >= 0.0 and "opt_steps" in record:
            self.marks.append(mark)
            if "eval/mean_reward" in record:
                self.scores.append((*mark, float(record["eval/mean_reward"])))


@dataclass(frozen=True, kw_only=True)
class WatchedReplayConfig(SimpleReplayBufferConfig):
    """The uniform replay buffer, which tells when its first rows come."""

    watch: Any = None

    def build(self, layout: Layout) -> SimpleReplayBuffer:
        watch = self.watch

        class Watched(SimpleReplayBuffer):
            def push(self, items: Items) -> None:
                watch.first = min(watch.first, time.monotonic())
                super().push(items)

        return Watched(layout, self.capacity, derive(self.seed, Role.REPLAY))


def run(request: dict[str, Any]) -> dict[str, Any]:
    # Start states of evaluations are the same throughout a run; they should not be so for all seeds, too.
    overrides = request["overrides"] | {"seed": request["seed"], "evaluator.seed": request["seed"]}
    if request["preset"]:
        config = RunConfig.from_sources(request["preset"], overrides)
    else:
        config = RunConfig.from_dict(override({}, overrides))
    watch = Watch()
    n_actors = config.actors.count()
    env_eval = config.env.eval()
    train = wiring.train_sync if config.trainer.mode == "sync" else wiring.train_async
    with closing(config.evaluator.build(env_eval)) as evaluator:
        result = train(
            config.agent,
            [config.agent.for_actor(i, n_actors) for i in range(n_actors)],
            config.env,
            env_eval,
            config.step_processor,
            WatchedReplayConfig(capacity=config.replay.capacity, seed=config.replay.seed, watch=watch),
            config.actors,
            config.trainer,
            watch,
            evaluator,
            seed=config.seed,
        )
    return {"marks": watch.marks, "scores": watch.scores, "stopped_by": result.stats.stopped_by}


if __name__ == "__main__":
    logging.basicConfig()
    processes.ensure_server()
    answer(run, "torch", "gymnasium", "numpy")
