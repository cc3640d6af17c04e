"""Virtual environments of the peers, one each, made when first needed and kept in `benchmarks/.venvs/`.

`python benchmarks/peers/venvs.py` makes all of them; with names, only those.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parents[1] / ".venvs"
TORCH = "torch==2.13.0"
PINS: dict[str, tuple[str, ...]] = {
    "sb3": (TORCH, "stable-baselines3==2.9.2", "gymnasium[classic-control]==1.4.0", "numpy==2.4.6"),
    "torchrl": (TORCH, "torchrl==0.14.1", "tensordict==0.14.3", "gymnasium[classic-control]==1.4.0", "numpy==2.4.6"),
    # Sample Factory asks for an older gymnasium and numpy than the others.
    "sample-factory": (TORCH, "sample-factory==2.1.1", "gymnasium[classic-control]==0.29.1", "numpy==1.26.4"),
    "tianshou": (TORCH, "tianshou[eval]==2.0.1"),
    "cpprb": ("cpprb==11.0.0", "numpy==2.4.6"),
}


def python(peer: str) -> Path:
    """The interpreter of a peer's environment; installs it first where it is not there yet.

    Raises:
        subprocess.CalledProcessError: pip failed; what it said is on the screen.
    """
    home = HOME / peer
    interpreter = home / "bin" / "python"
    stamp = home / "installed.txt"
    if not stamp.exists() or tuple(stamp.read_text().split()) != PINS[peer]:
        print(f"installing {peer}: {', '.join(PINS[peer])}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        pip = [interpreter, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        # Torch comes first and alone: a requirement of another package could otherwise bring a build with CUDA.
        for requirements in PINS[peer][:1], PINS[peer]:
            subprocess.run(["nice", *map(str, pip), *requirements], check=True)
        stamp.write_text("\n".join(PINS[peer]))
    return interpreter


if __name__ == "__main__":
    for peer in sys.argv[1:] or PINS:
        print(python(peer))
