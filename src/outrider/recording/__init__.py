"""Recorders: where metrics and models go."""

from outrider.recording.choice import RecorderConfig
from outrider.recording.console import ConsoleRecorder, Goals
from outrider.recording.files import JsonlRecorder, TensorboardRecorder, read_metrics, rewind
from outrider.recording.memory import MemoryRecorder, NullRecorder, TeeRecorder
from outrider.recording.metrics import METRICS, Metric

__all__ = [
    "METRICS",
    "ConsoleRecorder",
    "Goals",
    "JsonlRecorder",
    "MemoryRecorder",
    "Metric",
    "NullRecorder",
    "RecorderConfig",
    "TeeRecorder",
    "TensorboardRecorder",
    "read_metrics",
    "rewind",
]
