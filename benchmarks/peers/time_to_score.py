"""Seconds until DQN has solved CartPole-v1: the first evaluation of 20 episodes with a mean return of 475 or more.

OMP_NUM_THREADS=1 python benchmarks/peers/time_to_score.py [--full] [--seeds N] [--limit ENV_STEPS]

Evaluations come every 2,500 env steps, or every 1,250 updates with the settings of rl-zoo, which both have in the
first two rows; outrider's preset is as `make train` runs it. The clock starts with the first env step. It leaves out
the evaluations of Stable-Baselines3, but not those of outrider. A run that does not get there counts with all its
time, as a lower bound, and is listed.

Further options, such as --agent.compile=on, are overrides of outrider's config. What that compiles is made before the
rounds, unless --cold is given.
"""

from __future__ import annotations

import statistics
from typing import Any

from contest import Answer, Contestant, interleaved, options, table, warm_up
from settings import OUTRIDER_CARTPOLE, SB3_CARTPOLE, updates_in

TARGET, EPISODES, EVAL_STEPS = 475.0, 20, 2_500


def solved(answer: Answer) -> bool:
    return bool(answer["scores"]) and answer["scores"][-1][3] >= TARGET


def seconds(answer: Answer) -> float:
    """Until the score that ended it; all of the time, if none did."""
    return float((answer["scores"] if solved(answer) else answer["marks"])[-1][0])


def main() -> None:
    given = options(__doc__, seeds=(1, 10), limit=(50_000, 50_000))
    ours = Contestant("outrider_run")
    evaluation = {"trainer.target_score": TARGET, "evaluator.n_episodes": EPISODES, **given.overrides}
    same: dict[str, Any] = OUTRIDER_CARTPOLE | {
        "actors.n_actors": 1,
        "actors.n_envs": 4,
        "trainer.max_opts": updates_in(given.limit),
        "trainer.eval_interval": EVAL_STEPS // 2,
    }
    reference = "Stable-Baselines3, rl-zoo's settings"
    sb3 = SB3_CARTPOLE | {"steps": given.limit, "target": TARGET, "eval_every": EVAL_STEPS, "episodes": EPISODES}
    contestants = {
        reference: (Contestant("sb3_run", "sb3"), sb3),
        "outrider, rl-zoo's settings": (ours, {"preset": None, "overrides": same | evaluation}),
        "outrider, its preset": (ours, {"preset": "cartpole-dqn", "overrides": evaluation}),
    }
    warm_up(contestants, given)
    answers = interleaved(given.seeds, contestants)
    medians = {name: statistics.median(map(seconds, found)) for name, found in answers.items()}
    table(
        f"CartPole-v1 solved, {given.cores} cores, {given.seeds} seeds",
        ("what", "seconds (median)", "of the seeds", "solved", "times as fast as the first", "env steps", "opt steps"),
        [
            (
                name,
                f"{medians[name]:.1f}",
                ", ".join(f"{seconds(answer):.1f}" + ("" if solved(answer) else "+") for answer in found),
                f"{sum(map(solved, found))} of {len(found)}",
                f"{medians[reference] / medians[name]:.2f}",
                f"{statistics.median(answer['marks'][-1][2] for answer in found):,.0f}",
                f"{statistics.median(answer['marks'][-1][1] for answer in found):,.0f}",
            )
            for name, found in answers.items()
        ],
    )
    print("\n" + "\n".join(f"{name}: {contestant.versions}" for name, (contestant, _) in contestants.items()))


if __name__ == "__main__":
    main()
