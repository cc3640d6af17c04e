"""``outrider train``: a preset or a YAML file, overrides, a run."""

from __future__ import annotations

import shlex
from contextlib import suppress
from typing import TYPE_CHECKING

from outrider.cli.arguments import Parser, import_from_here
from outrider.cli.needs import show_needs
from outrider.cli.printing import aligned, reader_optional
from outrider.config import did_you_mean, require
from outrider.processes import ensure_server

if TYPE_CHECKING:
    from outrider.wiring import TrainResult

EPILOG = """\
keys:
  Sections are env, agent, actors, step_processor, replay, trainer, evaluator and recorder, beside seed and run_dir.
  `outrider train PRESET --print-config` shows every key with its value, docs/configuration.md says what each means.
  A section's class is a short name or an import path; another class begins its section anew.

examples:
  outrider train cartpole-dqn
  outrider train cartpole-dqn --trainer.target_score=475 --actors.n_actors=4 --seed=1
  outrider train dqn --env.id=Acrobot-v1 --agent.lr=3e-4 --run_dir=runs/acrobot
  outrider train sac --env.id=my_package:MyEnv-v0 --env.kwargs='{size: 3}'
  outrider train my_run.yaml --env.class=my_package.my_env:MyEnvConfig
"""

GOALS = ("max_opts", "max_env_steps", "max_time_s", "target_score")
"""What ends a run that has done all that it was to do."""

FLAGS = ("-h", "--help", "--print-config", "--print_config")


def main(arguments: list[str]) -> int:
    """Train as the arguments say, and print the statistics of both sides.

    Returns:
        The exit code.
    """
    parser = Parser(
        "outrider train",
        "Train from a preset (see `outrider presets`) or a YAML file, with any key overridden.",
        EPILOG,
    )
    parser.add_argument("source", metavar="PRESET_OR_YAML", help="name of a preset, or path of a YAML file")
    parser.add_argument("--print-config", "--print_config", action="store_true", help="print the config, do not train")
    parser.usage = "outrider train PRESET_OR_YAML [--dotted.key=value ...] [--print-config]"
    own, options = split(arguments)
    parsed = parser.parse_args(own)
    import_from_here()

    if not parsed.print_config:
        with suppress(OSError):  # what the machine lacks for it, the start-up checks say
            ensure_server()  # it imports torch while we do

    # Imported here: torch comes with it, and neither --help nor `outrider presets` should wait for that.
    from outrider.run_config import RunConfig, parse_overrides

    config = RunConfig.from_sources(parsed.source, parse_overrides(options))
    if parsed.print_config:
        print(config.to_yaml(), end="")
        return 0

    from outrider.wiring import run

    run(config, argv=["outrider", "train", *arguments], report=show, show_needs=show_needs)
    return 0


def show(result: TrainResult, *, resumed: bool = False) -> None:
    """Print the statistics of both sides, and how to go on; also of a run that was interrupted or failed.

    Args:
        result: Of the run.
        resumed: Whether the run was there before, while its actors are new ones.
    """
    from outrider.actor import actor_stats_fmt
    from outrider.checkpoint_files import opt_steps_of_checkpoints

    best, ended, run_dir = result.stats.best_score, result.stats.stopped_by, result.run_dir
    with reader_optional():
        print("Stats of async trainer")
        print(aligned(result.stats.fmt()))
        print("Stats of generated samples in actors" + ", since the run was resumed" * resumed)
        print(aligned(actor_stats_fmt(result.actor_stats)))
        print(f"Ended by {ended}" + ("" if best is None else f", best score {best:g}"))
        print(f"Run directory: {run_dir}")
        if run_dir is not None and ended not in GOALS and opt_steps_of_checkpoints(run_dir / "checkpoints"):
            print(f"To go on: outrider resume {shlex.quote(str(run_dir))}")


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Tell the verb's own arguments from overrides, each with its value where that is an argument of its own."""
    own: list[str] = []
    overrides: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument in FLAGS or not argument.startswith("--"):
            own.append(argument)
            continue
        overrides.append(argument)
        if "=" not in argument:
            value = next(rest, None)
            meant = did_you_mean(argument, FLAGS)
            require(value is not None or not meant, argument, "a value, or a flag" + meant, "nothing")
            overrides += [] if value is None else [value]
    return own, overrides
