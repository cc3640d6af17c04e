"""Whether outrider learns as a reference does: returns after the same env steps, with the same settings.

OMP_NUM_THREADS=1 python benchmarks/peers/learning.py [--full] [--seeds N] [--cartpole ENV_STEPS] [--pendulum ENV_STEPS]

Outrider runs in its synchronous mode, with the phases of Stable-Baselines3: DQN collects 256 env steps with fixed
parameters and then makes 128 updates, SAC makes an update after every env step. Evaluations of 20 episodes, greedy
or with the mean action. Mean over the seeds, and the standard error of that mean.

Further options, such as --agent.compile=on, are overrides of outrider's config.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from contest import Contestant, interleaved, options, table
from settings import (
    OUTRIDER_CARTPOLE,
    OUTRIDER_PENDULUM,
    PHASE_UPDATES,
    SB3_CARTPOLE,
    SB3_PENDULUM,
    phased,
    updates_in,
)

EPISODES = 20
SYNC = {"trainer.mode": "sync", "actors.n_actors": 1, "evaluator.n_episodes": EPISODES}
REFERENCE = "Stable-Baselines3"


def mean(values: Sequence[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.fmean(values):.0f} ± {error:.0f}"


def compare(title: str, sb3: dict[str, Any], overrides: dict[str, Any], seeds: int, eval_updates: int) -> None:
    """A table of the two after the same updates, in at most ten rows, and over all evaluations.

    Args:
        title: Of the table.
        sb3: Request for Stable-Baselines3.
        overrides: Config of outrider.
        seeds: Runs of each.
        eval_updates: Updates between two evaluations.
    """
    interval = eval_updates // overrides.get("agent.updates_per_opt", 1)
    theirs = Contestant("sb3_run", "sb3"), sb3 | {"eval_every_updates": eval_updates, "episodes": EPISODES}
    ours = (
        Contestant("outrider_run"),
        {"preset": None, "overrides": overrides | SYNC | {"trainer.eval_interval": interval}},
    )
    answers = interleaved(seeds, {REFERENCE: theirs, "outrider": ours})
    n = min(len(answer["scores"]) for found in answers.values() for answer in found)
    rows = [
        (
            f"{(i + 1) * eval_updates:,}",
            " and ".join(f"{found[0]['scores'][i][2]:,}" for found in answers.values()),
            *(mean([answer["scores"][i][3] for answer in found]) for found in answers.values()),
        )
        for i in range(0, n, -(-n // 10))
    ]
    over_all = [
        mean([statistics.fmean(score for *_, score in answer["scores"][:n]) for answer in found])
        for found in answers.values()
    ]
    table(title, ("updates", "env steps", *answers), [*rows, ("all evaluations", "", *over_all)])
    print(f"\n{REFERENCE}: {theirs[0].versions}\noutrider: {ours[0].versions}")


def main() -> None:
    given = options(__doc__, seeds=(1, 8), cartpole=(10_000, 50_000), pendulum=(1_500, 10_000))
    if given.cartpole:
        compare(
            f"DQN on CartPole-v1, {given.seeds} seeds: return after env steps",
            SB3_CARTPOLE | {"steps": given.cartpole, "arguments": SB3_CARTPOLE["arguments"] | fixed(given.cartpole)},
            phased(OUTRIDER_CARTPOLE | {"trainer.max_opts": updates_in(given.cartpole)}) | given.overrides,
            given.seeds,
            10 * PHASE_UPDATES,
        )
    if given.pendulum:
        compare(
            f"SAC on Pendulum-v1, {given.seeds} seeds: return after env steps",
            SB3_PENDULUM | {"steps": given.pendulum},
            OUTRIDER_PENDULUM | {"trainer.max_env_steps": given.pendulum} | given.overrides,
            given.seeds,
            500,
        )


def fixed(steps: int) -> dict[str, float]:
    """The decay of epsilon as it is in the whole run, however long this one is."""
    return {"exploration_fraction": OUTRIDER_CARTPOLE["agent.explorer"]["decay_env_steps"] / steps}


if __name__ == "__main__":
    main()
