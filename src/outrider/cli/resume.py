"""``outrider resume``: go on with a run from its newest checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from outrider.cli.arguments import Parser, import_from_here, integer
from outrider.cli.needs import show_needs
from outrider.cli.train import show, split
from outrider.config import require

EPILOG = """\
The newest checkpoint that is whole is taken; a run that has none yet starts from the beginning. Metrics, counters and
models go on where they were. What differs from the run's config.yaml, which is rewritten, is said on stderr, and so is
what cannot be restored.

examples:
  outrider resume runs/CartPole-v1-dqn-20260102-030405
  outrider resume runs/pong --trainer.max_opts=2000000
  outrider resume runs/pong --checkpoint=500000
"""


def main(arguments: list[str]) -> int:
    """Go on with a run as the arguments say, and print the statistics of both sides.

    Returns:
        The exit code.
    """
    parser = Parser("outrider resume", "Go on with a run from its newest checkpoint.", EPILOG)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of the run")
    parser.add_argument("--checkpoint", metavar="N", help="opt steps of another checkpoint to go on from")
    parser.usage = "outrider resume RUN_DIR [--dotted.override=value ...] [--checkpoint=N]"
    parsed, rest = parser.parse_known_args(arguments)
    own, options = split(rest)
    require(not own, "outrider resume", "no more arguments", " ".join(own))
    checkpoint = None if parsed.checkpoint is None else integer(parsed.checkpoint, "--checkpoint", least=0)
    import_from_here()

    # Imported here: torch comes with it, and --help does not wait for that.
    from outrider.run_config import parse_overrides
    from outrider.wiring import resume

    argv = ["outrider", "resume", *arguments]
    resume(
        Path(parsed.run_dir),
        parse_overrides(options),
        checkpoint=checkpoint,
        argv=argv,
        report=partial(show, resumed=True),
        show_needs=show_needs,
    )
    return 0
