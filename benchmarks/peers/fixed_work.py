"""The same work: 50,000 env steps and 24,704 updates of DQN on CartPole-v1 with the settings of rl-zoo.

OMP_NUM_THREADS=1 python benchmarks/peers/fixed_work.py [--full] [--rounds N] [--percent N]

The clock runs from the first env step to the last update; nothing is evaluated. Outrider has one actor process and
its learner, and draws a row as often as Stable-Baselines3 does.

Further options, such as --agent.compile=on, are overrides of outrider's config. What that compiles is made before the
rounds, unless --cold is given.
"""

from __future__ import annotations

import statistics

from contest import Contestant, interleaved, options, ratio, seconds, table, warm_up
from settings import OUTRIDER_CARTPOLE, SB3_CARTPOLE, STEPS, updates_in


def main() -> None:
    given = options(__doc__, rounds=(1, 5), percent=(20, 100), envs=(4, 4))
    steps = STEPS * given.percent // 100
    actors = {"actors.n_actors": 1, "actors.n_envs": given.envs}
    overrides = OUTRIDER_CARTPOLE | actors | {"trainer.max_opts": updates_in(steps)} | given.overrides
    reference = "Stable-Baselines3 DQN"
    contestants = {
        reference: (Contestant("sb3_run", "sb3"), SB3_CARTPOLE | {"steps": steps}),
        "outrider DQN": (Contestant("outrider_run"), {"preset": None, "overrides": overrides}),
    }
    warm_up(contestants, given)
    answers = interleaved(given.rounds, contestants)
    rate = {name: [1.0 / seconds(answer) for answer in found] for name, found in answers.items()}
    table(
        f"{given.percent} % of rl-zoo's CartPole-v1 run, {given.cores} cores, {given.rounds} rounds",
        (
            "what",
            "seconds",
            "CPU s of the learner's process",
            "env steps",
            "updates",
            f"times as fast as {reference}",
            "versions",
        ),
        [
            (
                name,
                f"{statistics.median(map(seconds, found)):.1f}",
                f"{statistics.median(answer['cpu_s'] for answer in found):.1f}",
                f"{found[-1]['marks'][-1][2]:,}",
                f"{found[-1]['marks'][-1][1]:,}",
                ratio(rate[name], rate[reference]),
                contestants[name][0].versions,
            )
            for name, found in answers.items()
        ],
    )


if __name__ == "__main__":
    main()
