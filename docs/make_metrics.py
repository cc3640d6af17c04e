"""Writes docs/metrics.md from the table of metrics."""

from pathlib import Path

from outrider.recording.metrics import markdown

Path(__file__).with_name("metrics.md").write_text(markdown())
