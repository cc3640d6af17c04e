"""Env steps and opt steps a second at the same time: whole runs on CartPole-v1, same network and batch, same cores.

OMP_NUM_THREADS=1 python benchmarks/peers/whole_run.py [--full] [--rounds N] [--seconds N] [--hidden N] [--batch N]

Outrider has one actor process and its learner. Stable-Baselines3 makes an update every two env steps, as rl-zoo
does; TorchRL collects in one process while it learns in another; Sample Factory, which is on-policy, has a rollout
worker, a policy worker and a learner, and an opt step of it is one of APPO.

Further options, such as --agent.compile=on, are overrides of outrider's config. What that compiles is made before the
rounds, unless --cold is given.
"""

from __future__ import annotations

import statistics

from contest import Contestant, interleaved, options, rates, ratio, table, warm_up
from settings import OUTRIDER_CARTPOLE, SB3_CARTPOLE, WARMUP


def main() -> None:
    given = options(__doc__, rounds=(1, 5), seconds=(6, 30), hidden=(128, 128), batch=(128, 128), envs=(16, 16))
    hidden = [given.hidden, given.hidden]
    ours = Contestant("outrider_run")
    overrides = OUTRIDER_CARTPOLE | {
        "agent.hidden": hidden,
        "agent.batch_size": given.batch,
        "actors.n_actors": 1,
        "actors.n_envs": given.envs,
        "trainer.max_opts": None,
        "trainer.max_time_s": given.seconds + 2.0,  # the actor starts meanwhile
        **given.overrides,
    }
    arguments = SB3_CARTPOLE["arguments"] | {"batch_size": given.batch}
    sb3 = SB3_CARTPOLE | {"hidden": hidden, "steps": 10_000_000, "seconds": given.seconds + 1, "arguments": arguments}
    peer = {
        "hidden": hidden,
        "batch": given.batch,
        "n_envs": given.envs,
        "updates_per_batch": 32,
        "warmup": WARMUP,
        "seconds": given.seconds,
    }

    def balanced(samples_per_insert: float | None) -> tuple[Contestant, dict[str, object]]:
        return ours, {"preset": None, "overrides": overrides | {"trainer.samples_per_insert": samples_per_insert}}

    reference = "Stable-Baselines3 DQN"
    contestants = {
        reference: (Contestant("sb3_run", "sb3"), sb3),
        "outrider DQN, unthrottled": balanced(None),
        "outrider DQN, samples_per_insert 32": balanced(32.0),
        "outrider DQN, samples_per_insert 2": balanced(2.0),
        "TorchRL DQN, asynchronous collector": (Contestant("torchrl_run", "torchrl"), peer),
        "Sample Factory APPO": (Contestant("sample_factory_run", "sample-factory"), peer),
    }
    warm_up(contestants, given)
    answers = interleaved(given.rounds, contestants)
    measured = {name: [rates(answer) for answer in found] for name, found in answers.items()}
    sb3_rates = measured[reference]
    table(
        f"CartPole-v1, MLP {given.hidden}-{given.hidden}, batches of {given.batch}, {given.cores} cores, "
        f"{given.rounds} rounds of {given.seconds} s",
        ("what", "env steps/s", "opt steps/s", f"env steps against {reference}", "opt steps against it", "versions"),
        [
            (
                name,
                f"{statistics.median(env for env, _ in found):,.0f}",
                f"{statistics.median(opt for _, opt in found):,.0f}",
                ratio([env for env, _ in found], [env for env, _ in sb3_rates]),
                ratio([opt for _, opt in found], [opt for _, opt in sb3_rates]),
                contestants[name][0].versions,
            )
            for name, found in measured.items()
        ],
    )


if __name__ == "__main__":
    main()
