"""Chooses the recorders of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outrider.config import Config
from outrider.core import Recorder
from outrider.recording.console import ConsoleRecorder, Goals
from outrider.recording.files import JsonlRecorder, TensorboardRecorder
from outrider.recording.memory import TeeRecorder


@dataclass(frozen=True, kw_only=True)
class RecorderConfig(Config):
    """Builds the recorder of a run. ``metrics.jsonl`` and models are always kept.

    Attributes:
        tensorboard: Write TensorBoard events too.
        console: Progress on stdout. ``rich``: a live display; ``plain``: one line per flush; ``auto``: live where
            stdout is a terminal, else lines; ``off``: none.
    """

    tensorboard: bool = True
    console: Literal["auto", "rich", "plain", "off"] = "auto"

    def build(
        self,
        path: Path | str,
        *,
        title: str = "",
        goals: Goals | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Recorder:
        """Build it.

        Args:
            path: The run directory.
            title: What is running, for the console.
            goals: What ends the run, for the console.
            meta: What to write beside each model.

        Raises:
            RunDirError: The directory cannot be written.
        """
        files = (TensorboardRecorder if self.tensorboard else JsonlRecorder)(path, meta)
        if self.console == "off":
            return files
        return TeeRecorder(files, ConsoleRecorder(self.console, title=title, goals=goals))
