"""``outrider eval``: play with what a run has learned."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.arguments import Parser, import_from_here, integer
from outrider.config import require
from outrider.machine import usable_cores
from outrider.run_dir import RunDir

if TYPE_CHECKING:
    from outrider.data import Episode

EPILOG = """\
examples:
  outrider eval runs/CartPole-v1-dqn-20260102-030405
  outrider eval runs/pong --episodes=3 --model=last
"""


def main(arguments: list[str]) -> int:
    """Evaluate the model of a run directory, and print score and metrics.

    Returns:
        The exit code.
    """
    parser = Parser("outrider eval", "Play whole episodes with a model that a run has kept.", EPILOG)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of the run")
    parser.add_argument("--episodes", metavar="N", default="10", help="number of episodes, >= 1 (default 10)")
    parser.add_argument("--model", metavar="NAME", help="best, last, or a number (default: best, if there is one)")
    parser.add_argument("--seed", metavar="N", default="0", help="seed of the environments, >= 0 (default 0)")
    parsed = parser.parse_args(arguments)
    episodes = integer(parsed.episodes, "--episodes", least=1)
    seed = integer(parsed.seed, "--seed", least=0)
    known = parsed.model in (None, "best", "last") or parsed.model.isdigit()
    require(known, "--model", "best, last or a number of opt steps", repr(parsed.model))
    run_dir = Path(parsed.run_dir)
    model = parsed.model or RunDir.open(run_dir, lock=False).default_model()
    import_from_here()

    # Imported here for torch: --help does not wait for it.
    from outrider.async_trainer import choose_threads
    from outrider.loaded_policy import evaluate_run

    choose_threads(cores := usable_cores(), cores)  # as for an actor: more than one costs more than it brings
    progress: dict[str, Any] = {"on_episode": _Progress(episodes)} if sys.stdout.isatty() else {}
    score, record = evaluate_run(run_dir, model, episodes, seed, **progress)
    print(f"Score of model {model} over {episodes} episodes: {score:g}")
    for name, value in sorted(record.items()):
        print(f"{name}: {value:g}" if isinstance(value, float) else f"{name}: {value}")
    return 0


class _Progress:
    """Prints each episode when it has ended."""

    def __init__(self, episodes: int) -> None:
        self._episodes, self._ended = episodes, 0

    def __call__(self, episode: Episode) -> None:
        self._ended += 1
        print(f"episode {self._ended}/{self._episodes}  return {episode.ret:g}", flush=True)
