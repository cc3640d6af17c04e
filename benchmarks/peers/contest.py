"""Contestants in processes of their own, asked in turns, and what the tables of this folder share."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import venvs

from outrider.run_config import parse_overrides

WORKERS = Path(__file__).resolve().parent / "workers"
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")

Answer = dict[str, Any]


class Contestant:
    """A script of `workers/` that answers requests, with the interpreter of its peer; outrider has this one.

    Args:
        script: Its name in `workers/`, without the suffix.
        peer: A name in `venvs.PINS`, None for outrider.
        *arguments: Of the script.
    """

    def __init__(self, script: str, peer: str | None = None, *arguments: str) -> None:
        python = venvs.python(peer) if peer else Path(sys.executable)
        self.command = [str(python), str(WORKERS / f"{script}.py"), *arguments]
        self.versions = ""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 it goes with the object
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Mapping[str, Any]) -> Answer:
        """Have it do something, and wait for its answer. It is started by the first question.

        Raises:
            RuntimeError: It ended without an answer; carries the end of what it wrote.
        """
        if self._process is None:
            environment = os.environ | ONE_THREAD
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")
            raise RuntimeError(f"{' '.join(self.command)} ended with {self._process.wait()}:\n{said[-4000:]}")
        answer: Answer = json.loads(line)
        self.versions = answer.pop("versions")
        return answer

    def ask_anew(self, request: Mapping[str, Any]) -> Answer:
        """The same in a process that has done nothing before, and that ends with the answer."""
        self.close()
        answer = self.ask(request)
        self.close()
        return answer

    def close(self) -> None:
        """End the process: it is told that there are no more questions, and awaited."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(60)
            self._process = None


def interleaved(
    rounds: int, contestants: Mapping[str, tuple[Contestant, Mapping[str, Any]]], anew: bool = True
) -> dict[str, list[Answer]]:
    """The answers of each, round by round; they take turns, so that a change of the machine's speed meets all alike.

    Args:
        rounds: How often each is asked.
        contestants: Each with its question, which gets the round's number as `seed`.
        anew: In a new process each time; otherwise in the same one, after a round that does not count.
    """
    answers: dict[str, list[Answer]] = {name: [] for name in contestants}
    for i in range(rounds if anew else rounds + 1):
        for name, (contestant, request) in contestants.items():
            answer = (contestant.ask_anew if anew else contestant.ask)({**request, "seed": i})
            if anew or i:
                answers[name].append(answer)
            print(f"  round {i}: {name}: {json.dumps(_short(answer))}", file=sys.stderr, flush=True)
    for contestant, _ in contestants.values():
        contestant.close()
    return answers


def _short(answer: Answer) -> Answer:
    return {key: value[-1:] if isinstance(value, list) else value for key, value in answer.items()}


def warm_up(contestants: Mapping[str, tuple[Contestant, Mapping[str, Any]]], given: argparse.Namespace) -> None:
    """Have outrider compile what it is going to need, so that no round does; not with `--cold`."""
    if given.cold or not any(key.endswith("compile") for key in given.overrides):
        return
    for contestant, request in contestants.values():
        if "overrides" in request:
            once = request["overrides"] | {"trainer.max_opts": 1}
            contestant.ask_anew({**request, "overrides": once, "seed": 0})


def rates(answer: Answer) -> tuple[float, float]:
    """Env steps and opt steps a second, from the first mark with an opt step to the last."""
    marks = [mark for mark in answer["marks"] if mark[1] > 0]
    (t0, opts0, envs0), (t1, opts1, envs1) = marks[0], marks[-1]
    return (envs1 - envs0) / (t1 - t0), (opts1 - opts0) / (t1 - t0)


def seconds(answer: Answer) -> float:
    """Seconds of training, from the first env step to the end, a peer's evaluations left out."""
    return float(answer["marks"][-1][0])


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Ours by theirs, round by round: the median and the range."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    print(f"\n{title}\n")
    print(f"| {' | '.join(header)} |")
    print(f"|{'---|' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def options(description: str | None, **defaults: tuple[int, int]) -> argparse.Namespace:
    """The command line: `--full`, `--cold`, `--cores`, overrides of outrider's config, one option for each of these.

    An option whose name is a key of a config, such as ``--agent.compile=on``, comes back in `overrides`.

    Args:
        description: What the script measures.
        **defaults: The short and the full value of each option.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--full", action="store_true", help="the whole length, instead of a look at whether it works")
    parser.add_argument("--cold", action="store_true", help="outrider may have to compile in the first round")
    parser.add_argument("--cores", type=int, default=2, help="cores that everybody gets (2)")
    for name, (short, full) in defaults.items():
        parser.add_argument(f"--{name}", type=int, help=f"{short}, with --full {full}")
    arguments, overrides = parser.parse_known_args()
    arguments.overrides = parse_overrides(overrides)
    for name, lengths in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, lengths[arguments.full])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    return arguments
