"""The table of what a run needs: aligned, in colour on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.cli.printing import reader_optional

if TYPE_CHECKING:
    from outrider.preflight import Check


def show_needs(checks: Sequence[Check]) -> None:
    """Print needed and free of each, with a remark where it is short."""
    with reader_optional():
        _show(checks)


def _show(checks: Sequence[Check]) -> None:
    rows = [(check.name, check.text(check.expected), _free(check)) for check in checks]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True, justify="right")
    table.add_column(overflow="fold")
    for (name, needed, free), check in zip(rows, checks, strict=True):
        remark = f"! {check.advice}: {check.detail}" if check.tight else check.detail
        if console.is_terminal:
            table.add_row(name, "needs", needed, free, Text(remark, "yellow" if check.tight else "dim"))
        else:
            print(f"{name:<{widths[0]}}  needs  {needed:>{widths[1]}}  {free:>{widths[2]}}  {remark}")
    if console.is_terminal:
        console.print(table)


def _free(check: Check) -> str:
    return check.text(check.free) + " free" * (check.free != sys.maxsize)
