"""Memory, descriptors and threads of every process of a run, after ten seconds: what `outrider.preflight` reckons with.

OMP_NUM_THREADS=1 python benchmarks/process_sizes.py PRESET N_ACTORS
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from outrider.run_config import RunConfig
from outrider.wiring import run

AFTER_S, RUN_S = 10.0, 12.0


def show(who: str, process: psutil.Process) -> None:
    memory = process.memory_full_info()
    sizes = f"{memory.pss / 1e6:.1f}, {memory.uss / 1e6:.1f}"
    print(f"{who}, {sizes}, {process.num_fds()}, {process.num_threads()}", flush=True)


def look() -> None:
    time.sleep(AFTER_S)
    me = psutil.Process()
    show("learner", me)
    for child in me.children(recursive=True):
        show("".join(child.cmdline())[-40:], child)


def main(preset: str, n_actors: int) -> None:
    overrides: dict[str, Any] = {
        "actors.n_actors": n_actors,
        "trainer.max_opts": None,
        "trainer.max_time_s": RUN_S,
        "trainer.checkpoint.keep": 1,
        "replay.capacity": 2_000,
        "trainer.warmup_period": 300,
        "recorder.console": "off",
    }
    print("process, PSS MB, USS MB, descriptors, threads")
    show("before", psutil.Process())
    threading.Thread(target=look, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        run(RunConfig.from_sources(preset, overrides | {"run_dir": str(Path(folder) / "run")}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
