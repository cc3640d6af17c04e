"""Live progress on a terminal; one plain line per flush elsewhere."""

from __future__ import annotations

import atexit
import contextlib
import math
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from outrider.data import Record
from outrider.recording.memory import NullRecorder
from outrider.recording.metrics import AXES, Aggregate, Line

MAX_WIDTH = 120
THREE_COLUMNS = 108
"""Columns of the terminal from which three figures fit beside each other."""
REFRESH_S = 0.5
PLAIN_INTERVAL_S = 30.0
"""Without a terminal there is a line at least this often, also in a long warm-up or between slow opt steps."""
CLOSE_TIMEOUT_S = 5.0
"""For a terminal that takes no output, such as one stopped by Ctrl-S."""

PLAIN_FIGURES = (
    ("rollout/ep_rew_mean", "return {:.1f}"),
    ("train/loss", "loss {:.3g}"),
    ("train/critic_loss", "critic loss {:.3g}"),
    ("async/samples_per_insert", "{:.3g} samples/insert"),
    ("async/opt_steps_per_s", "{:.0f} opt/s"),
    ("time/fps", "{:.0f} env/s"),
    ("async/learner_wait", "learner waits {:.0%}"),
)


@dataclass(frozen=True, kw_only=True)
class Goals:
    """What ends a run; None: this does not.

    Attributes:
        max_opts: Opt steps.
        max_env_steps: Env steps.
        max_time_s: Seconds.
        target_score: Score of an evaluation.
    """

    max_opts: int | None = None
    max_env_steps: int | None = None
    max_time_s: float | None = None
    target_score: float | None = None

    def fraction(self, opt_steps: float, env_steps: float, time_s: float) -> float | None:
        """How far the run is on its way to the goal it reaches first, 0 to 1; None: nothing of it is known."""
        parts = [
            now / goal
            for now, goal in (
                (opt_steps, self.max_opts),
                (env_steps, self.max_env_steps),
                (time_s, self.max_time_s),
            )
            if goal
        ]
        return min(1.0, max(parts)) if parts else None


@dataclass
class Progress:
    """The latest of everything that is shown."""

    goals: Goals
    line: Line = field(default_factory=dict)
    best: float | None = None
    seen_at: float = field(default_factory=time.monotonic)
    path: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=60))

    def update(self, line: Line) -> None:
        """Take the values of a line or a record; those it lacks stay."""
        earlier = float(line.get("time_s", math.inf)) < (self.number("time_s") or 0.0)
        if earlier:  # an evaluation arrives late: it belongs to steps that are long past
            line = {name: value for name, value in line.items() if name not in AXES}
        self.line = self.line | line
        if "time_s" in line:
            self.seen_at = time.monotonic()
        score = line.get("eval/mean_reward")
        if isinstance(score, int | float) and score > (-math.inf if self.best is None else self.best):
            self.best = float(score)
        done = self.fraction()
        if done is not None and (not self.path or done > self.path[-1][1]):
            self.path.append((self.number("time_s") or 0.0, done))

    def number(self, name: str) -> float | None:
        """The latest value of a metric, None if there is no number yet."""
        value = self.line.get(name)
        return None if value is None or isinstance(value, str) else value

    def fraction(self) -> float | None:
        """See :meth:`Goals.fraction`."""
        opt_steps, env_steps, time_s = (self.number(axis) or 0 for axis in AXES)
        return self.goals.fraction(opt_steps, env_steps, time_s)

    def elapsed_s(self) -> float:
        """Seconds since the start of training."""
        return (self.number("time_s") or 0.0) + time.monotonic() - self.seen_at

    def left_s(self) -> float | None:
        """Seconds left at the recent pace, None if that is not known."""
        if len(self.path) < 2 or self.path[-1][1] >= 1:
            return None
        (t0, f0), (t1, f1) = self.path[0], self.path[-1]
        left = (1 - f1) * (t1 - t0) / (f1 - f0) - (time.monotonic() - self.seen_at)
        return max(0.0, left)

    def actors_wait(self) -> float | None:
        """Mean fraction of their time that the actors wait."""
        waits = [value for name, value in self.line.items() if name.startswith("actor/") and name.endswith("/wait")]
        known = [wait for wait in waits if not isinstance(wait, str)]
        return sum(known) / len(known) if known else None

    def actors(self) -> str | None:
        """How many actors are alive and how often they were restarted; None as long as nothing happened to them."""
        alive, restarts = self.number("async/actors_alive"), self.number("async/actor_restarts")
        if alive is None or restarts is None:
            return None
        n = sum(name.startswith("actor/") and name.endswith("/state") for name in self.line)
        return f"{alive:.0f} of {n} alive, {restarts:.0f} restarts" if restarts or alive < n else None


class ConsoleRecorder(NullRecorder):
    """Shows how the run is getting on.

    On a terminal a few lines are redrawn in place; ordinary output and tracebacks appear above them. Elsewhere
    each flush prints one line, and half a minute without one does. The live display shows what is stored at once:
    where opt steps are slow, flushes are minutes apart.
    Keeps no models.

    Process: the learner.
    Owns: the live display, with a thread that redraws it twice a second, from the first record to `close`.
    Blocks: as long as the output does.
    Closes: the display, in `close` or at the exit of the interpreter; the terminal is then as it was.

    Args:
        mode: ``rich``: live display; ``plain``: lines; ``auto``: live where the output is a terminal.
        title: What is running, such as ``CartPole-v1 · dqn``.
        goals: What ends the run, for the bar and the time left.
        file: Where to; None: stdout.
    """

    def __init__(
        self,
        mode: Literal["auto", "rich", "plain"] = "auto",
        *,
        title: str = "",
        goals: Goals | None = None,
        file: TextIO | None = None,
    ) -> None:
        self._file = sys.stdout if file is None else file
        self._console = Console(file=self._file, force_terminal=True if mode == "rich" else None, highlight=False)
        terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        self._plain = mode == "plain" or (mode == "auto" and not terminal)
        self._title = title
        self._aggregate = Aggregate()
        self._progress = Progress(goals or Goals())
        self._live: Live | None = None
        self._ended = threading.Event()
        self._closed = False
        self._printed: int | None = None  # opt steps of the last plain line
        self._printed_at = time.monotonic()

    def store(self, record: Record) -> None:
        """Take metrics; numbers and texts are shown at once, until the next flush says what they were on average."""
        self._aggregate.add(record)
        now: Line = {name: value for name, value in record.items() if isinstance(value, int | float | str)}
        if now:
            self._progress.update(now)
        if self._plain and time.monotonic() - self._printed_at >= PLAIN_INTERVAL_S:
            self._print(plain_line(self._progress, now))
        self._show()

    def flush(self, step: int) -> None:
        """Show what was stored since the last flush."""
        line = self._aggregate.take(step)
        if line is None or self._closed:
            return
        self._progress.update(line)
        if self._plain and (step != self._printed or "eval/mean_reward" in line):
            self._print(plain_line(self._progress, line))
            self._printed = step
        self._show()

    def _print(self, text: str) -> None:
        self._printed_at = time.monotonic()
        try:
            self._file.write(f"{text}\n")  # in one piece, so that nothing from elsewhere comes in between
            self._file.flush()
        except (OSError, ValueError):  # a closed pipe or file: nobody reads any more, and that ends no training
            self._closed = True

    def _show(self) -> None:
        """Start the display at the first call; from then on its thread shows what is new."""
        if self._plain or self._closed or self._live is not None:
            return
        self._live = Live(console=self._console, get_renderable=self._render, auto_refresh=False)
        self._live.start()
        self._painter = threading.Thread(target=self._paint, name="outrider-console", daemon=True)
        self._painter.start()
        atexit.register(self.close)

    def _paint(self) -> None:
        live = self._live
        with contextlib.suppress(OSError):  # the terminal is gone, and that ends no training
            while live is not None and not self._ended.wait(REFRESH_S):
                live.refresh()

    def _render(self) -> RenderableType:
        return render(self._progress, self._title, self._console.width, "utf" in self._console.encoding)

    def close(self) -> None:
        """End the display and give the terminal back. May be called twice."""
        self._closed = True
        live, self._live = self._live, None
        if live is None:
            return
        atexit.unregister(self.close)
        self._ended.set()
        self._painter.join(CLOSE_TIMEOUT_S)
        self._progress.path.clear()  # the frame that stays says nothing of time left
        with contextlib.suppress(OSError):
            live.stop()


def render(progress: Progress, title: str, width: int, unicode: bool = True) -> RenderableType:
    """The live display: title and clock, a bar, and the figures in two or three columns."""
    width = min(width, MAX_WIDTH)
    left, fraction = progress.left_s(), progress.fraction()
    clock = Text(clock_text(progress.elapsed_s()))
    if left is not None:
        bound = ("≤ " if unicode else "< ") if progress.goals.target_score is not None else ""
        clock.append(f"  {bound}{clock_text(left)} left", "dim")
    head = Table.grid(expand=True)
    head.add_column(no_wrap=True, overflow="ellipsis")
    head.add_column(justify="right", no_wrap=True)
    head.add_row(Text(title, "bold"), clock)
    parts: list[RenderableType] = [head]
    if fraction is not None:
        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        bar.add_row(
            ProgressBar(total=1, completed=fraction, complete_style="cyan", finished_style="green"), f"{fraction:4.0%}"
        )
        parts.append(bar)
    columns = 3 if width >= THREE_COLUMNS else 2
    figures = Table.grid(expand=True, padding=(0, 1))
    for _ in range(columns):
        figures.add_column(width=10, style="dim", no_wrap=True)
        figures.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    cells = _cells(progress)
    for at in range(0, len(cells), columns):
        figures.add_row(*[part for cell in cells[at : at + columns] for part in cell])
    parts.append(figures)
    frame = Table.grid()
    frame.add_column(width=width)
    frame.add_row(Group(*parts))
    return Group(frame, Text())  # the cursor rests on an empty line: a ^C echoed after a full one would begin another


def _cells(progress: Progress) -> list[tuple[str, Text]]:
    """Label and figures, those that belong together near each other in two columns as in three."""
    number, goals = progress.number, progress.goals
    score = Text(_figure(number("eval/mean_reward")))
    if progress.best is not None:
        score.append(f"  best {_figure(progress.best)}", "green")
    if goals.target_score is not None:
        score.append(f" / {goals.target_score:g}", "dim")
    waits = [("learner", number("async/learner_wait")), ("actors", progress.actors_wait())]
    waiting = Text("  ".join(f"{who} {part:.0%}" for who, part in waits if part is not None) or "-")
    loss, per_insert = number("train/loss"), number("async/samples_per_insert")
    cells = [
        ("opt steps", _counter(number("opt_steps"), number("async/opt_steps_per_s"), goals.max_opts)),
        ("env steps", _counter(number("env_steps"), number("time/fps"), goals.max_env_steps)),
        ("return", _returns(progress)),
        ("evaluation", score),
        ("loss", Text(_figure(number("train/critic_loss") if loss is None else loss))),
        ("per insert", Text("-" if per_insert is None else f"{_figure(per_insert)} samples")),
        ("waiting", waiting),
    ]
    skipped = number("train/skipped_updates")
    if skipped:
        cells.append(("skipped", Text(f"{skipped:,.0f} updates, not finite", "yellow")))
    actors = progress.actors()
    if actors is not None:
        cells.append(("actors", Text(actors, "yellow")))
    return cells


def _counter(value: float | None, per_s: float | None, goal: float | None) -> Text:
    text = Text(f"{value or 0:,.0f}")
    if goal:
        text.append(f" / {goal / 1e6:g}M" if goal >= 1e6 else f" / {goal:,.0f}", "dim")
    if per_s is not None:
        text.append(f"  {per_s:,.0f}/s", "dim")
    return text


def _returns(progress: Progress) -> Text:
    text = Text(_figure(progress.number("rollout/ep_rew_mean")))
    length = progress.number("rollout/ep_len_mean")
    if length is not None:
        text.append(f"  length {length:,.0f}", "dim")
    return text


def plain_line(progress: Progress, line: Line) -> str:
    """One flush as one line of ASCII; `line` holds what is new."""
    goals, number, left = progress.goals, progress.number, progress.left_s()
    parts = [clock_text(progress.elapsed_s()) + (f" ({clock_text(left)} left)" if left is not None else "")]
    parts.append(f"opt {number('opt_steps') or 0:.0f}" + (f"/{goals.max_opts}" if goals.max_opts else ""))
    parts.append(f"env {number('env_steps') or 0:.0f}" + (f"/{goals.max_env_steps}" if goals.max_env_steps else ""))
    if "eval/mean_reward" in line:
        parts.append(f"eval {_figure(number('eval/mean_reward'))} (best {_figure(progress.best)})")
    for name, text in PLAIN_FIGURES:
        value = number(name)
        if value is not None and name in line:
            parts.append(text.format(value))
    actors_wait = progress.actors_wait()
    if actors_wait is not None:
        parts.append(f"actors wait {actors_wait:.0%}")
    actors = progress.actors()
    if actors is not None:
        parts.append(f"actors {actors}")
    return "  ".join(parts)


def clock_text(seconds: float) -> str:
    """Hours, minutes and seconds: ``0:00:07``."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _figure(value: float | None) -> str:
    """A value in about five characters; a dash if there is none."""
    if value is None:
        return "-"
    if value == 0 or value != value:
        return f"{value:g}"
    if 1e3 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.1f}" if 10 <= abs(value) < 1e3 else f"{value:.3g}"
