"""``outrider presets``: list the presets, or print one as the beginning of an own YAML file."""

from __future__ import annotations

from outrider import presets
from outrider.cli.arguments import Parser
from outrider.config import did_you_mean, require

EPILOG = """\
examples:
  outrider presets
  outrider presets cartpole-dqn > my_run.yaml
"""


def main(arguments: list[str]) -> int:
    """List the presets with one line each, or print the YAML of one.

    Returns:
        The exit code.
    """
    parser = Parser("outrider presets", "List the presets that `outrider train` knows, or print one as YAML.", EPILOG)
    parser.add_argument("name", metavar="NAME", nargs="?", help="print this preset")
    name = parser.parse_args(arguments).name
    known = presets.names()
    if name is None:
        width = max(map(len, known))
        for preset in known:
            print(f"{preset:<{width}}  {presets.summary(preset)}")
        return 0
    require(name in known, "preset", f"one of {', '.join(known)}", f"{name!r}{did_you_mean(name, known)}")
    print(presets.text(name), end="")
    return 0
