"""``outrider doctor``: what this machine offers, what a run would need of it, and whether its environment is well."""

from __future__ import annotations

import multiprocessing
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.cli.arguments import Parser, import_from_here
from outrider.cli.needs import show_needs
from outrider.cli.train import split
from outrider.config import require
from outrider.errors import EnvFailed
from outrider.version import __version__

if TYPE_CHECKING:
    from outrider.env_trial import Check
    from outrider.run_config import RunConfig

EPILOG = """\
Without a config only the machine is shown. With one the environment is built in a process of its own, checked and
stepped with random actions, and so are own classes: a crash or a hang is a finding. Nothing is written.

exit codes:
  0  no problem, though there may be warnings
  1  problems
  2  the config is wrong, or the machine does not suffice for it

examples:
  outrider doctor
  outrider doctor cartpole-dqn
  outrider doctor dqn --env.id=my_package.my_env:MyEnv --timeout=10
"""

LONGEST_TIMEOUT_S = 86_400  # what waits takes no more than some weeks


def main(arguments: list[str]) -> int:
    """Look at the machine, and at what a config describes.

    Returns:
        The exit code.
    """
    parser = Parser("outrider doctor", "Show what this machine offers, and try what a run would use.", EPILOG)
    parser.add_argument("source", metavar="PRESET_OR_YAML", nargs="?", help="name of a preset, or path of a YAML file")
    parser.add_argument("--timeout", metavar="S", help="seconds for each stage of the trial (default 60)")
    parser.usage = "outrider doctor [PRESET_OR_YAML] [--dotted.key=value ...] [--timeout=S]"
    own, options = split(arguments)
    timeout_s = _take_timeout(options)
    parsed = parser.parse_args(own)
    require(parsed.source is not None or not options, "outrider doctor", "PRESET_OR_YAML before overrides", "none")
    import_from_here()
    say = _Say()
    if parsed.source is None:
        _show_machine(say)
        return 0

    from outrider.run_config import RunConfig, parse_overrides  # imported here for torch: --help does not wait for it

    config = RunConfig.from_sources(parsed.source, parse_overrides(options))
    _show_machine(say)
    return _examine(config, timeout_s, say)


def _take_timeout(options: list[str]) -> float:
    """Seconds of ``--timeout``, which is taken out of the overrides."""
    for i, option in enumerate(options):
        name, equals, value = option.partition("=")
        if name == "--timeout":
            value = value if equals else next(iter(options[i + 1 : i + 2]), "")
            number = bool(re.fullmatch(r"\d+(\.\d+)?", value)) and 0 < float(value) <= LONGEST_TIMEOUT_S
            require(number, "--timeout", f"seconds > 0, at most {LONGEST_TIMEOUT_S}", repr(value))
            del options[i : i + 1 + (not equals)]
            return float(value)
    return 60.0


class _Say:
    """Lines with a label, on a terminal in colour and wrapped beside it."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)

    def __call__(self, label: str, text: str, style: str = "bold") -> None:
        if self._console.is_terminal:
            line = Table.grid(padding=(0, 2))
            line.add_column(width=11, style=style)
            line.add_column(overflow="fold")
            line.add_row(label, Text(text))
            self._console.print(line)
        else:
            print(f"{label:<11}  {text}")
        sys.stdout.flush()


def _show_machine(say: _Say) -> None:
    import torch

    from outrider import machine
    from outrider.agents.compilation import compiler
    from outrider.run_dir import system_info
    from outrider.shared_memory import available_bytes, size_text

    info = system_info()
    versions = info["versions"]
    say("outrider", f"{__version__}, python {sys.version.split()[0]}")
    say("packages", ", ".join(f"{name} {text}" for name, text in versions.items() if name != "outrider"))
    say("cpu", f"{info['cpu']}, {info['usable_cores']} of {info['cores']} cores usable")
    say("memory", f"{size_text(available_bytes())} free of {size_text(info['memory_bytes'])}")
    say("disk", f"{size_text(machine.free_disk(Path.cwd()))} free here")
    say("descriptors", _or_no_limit(machine.free_descriptors()))
    say("processes", _or_no_limit(machine.free_processes()))
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    say("fork server", "available" if forks else "not available: each process loads everything anew")
    say(
        "compiler",
        shutil.which(compiler()) or f"no {compiler()} (the variable CXX names another): agents run uncompiled",
    )
    gpus = ", ".join(info["gpus"])
    say("cuda", f"{torch.version.cuda}: {gpus}" if torch.cuda.is_available() else "not available")


def _or_no_limit(free: int) -> str:
    return "no limit" if free == sys.maxsize else f"{free} free"


def _examine(config: RunConfig, timeout_s: float, say: _Say) -> int:
    """The table of needs, and a trial of the environment and of own classes."""
    from outrider.env_trial import Trial, try_parts
    from outrider.preflight import processes_check, require_compiler, require_enough, space_check

    print(flush=True)
    require_compiler(config.agent)
    checks = processes_check(config)
    require_enough(checks)
    trial = Trial()
    try:
        spec = config.env.spec()
    except EnvFailed as error:
        trial.problems.append(f"{error.where}: {error.cause}")
    else:
        policy = config.agent.build_actor(spec)
        checks = [*space_check(config, spec, policy.model_info()[1], Path(config.run_dir or "runs")), *checks]
        show_needs(checks)
        require_enough(checks)
        print(flush=True)
        say("environment", f"{spec.id}: {_short(spec.observation_space)} -> {_short(spec.action_space)}")
        trial = try_parts(config.env, spec, _own(config, spec), n_envs=config.actors.n_envs, timeout_s=timeout_s)
    for text in trial.facts:
        say("", text)
    for text in trial.warnings:
        say("warning", text, "yellow")
    for text in trial.problems:
        say("problem", text, "bold red")
    found = _count(len(trial.problems), "problem")
    say("result", f"{found}, {_count(len(trial.warnings), 'warning')}", "bold red" if trial.problems else "bold green")
    return 1 if trial.problems else 0


def _short(space: Any) -> str:
    """A space in a few words: of a Box its shape and dtype."""
    bounds = getattr(space, "low", None)
    return f"{space.dtype} {list(space.shape)}" if bounds is not None else " ".join(str(space).split())


def _count(n: int, what: str) -> str:
    return f"{n or 'no'} {what}{'s' * (n != 1)}"


def _own(config: RunConfig, spec: Any) -> list[Check]:
    """Checks of the contracts of classes that are not outrider's own."""
    from outrider.testing import contracts

    layout = config.step_processor.layout(spec)
    parts: list[tuple[str, Any, Check]] = [
        ("agent", config.agent, ("contract of the agent", lambda: contracts.check_agent_config(config.agent, spec))),
        (
            "step_processor",
            config.step_processor,
            (
                "contract of the step processor",
                lambda: contracts.check_step_processor_config(config.step_processor, spec),
            ),
        ),
        (
            "replay",
            config.replay,
            ("contract of the replay buffer", lambda: contracts.check_replay_buffer_config(config.replay, layout)),
        ),
    ]
    return [check for _, part, check in parts if type(part).__module__.split(".")[0] != "outrider"]
