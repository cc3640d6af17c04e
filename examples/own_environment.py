"""An environment of your own: write a Gymnasium environment and hand over its class.

    python examples/own_environment.py [--short]

The same from YAML or the command line, once the class lies in an importable module:

    outrider train dqn --env.id=my_package.my_env:Corridor --env.kwargs='{length: 8}'
"""

import sys
import tempfile
from typing import Any

import gymnasium
import numpy as np

import outrider
from outrider import GymEnvConfig


class Corridor(gymnasium.Env[np.ndarray, np.int64]):
    """Walk to the right end of a corridor; every step costs, the goal pays."""

    def __init__(self, length: int = 6) -> None:
        self.length = length
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.at = int(self.np_random.integers(self.length - 1))
        self.t = 0
        return self._obs(), {}

    def step(self, action: np.int64) -> Any:
        self.at = max(0, self.at + (1 if action == 1 else -1))
        self.t += 1
        at_goal = self.at >= self.length - 1
        return self._obs(), 1.0 if at_goal else -0.1, at_goal, self.t >= 50, {}

    def _obs(self) -> np.ndarray:
        return np.array([self.at / self.length], np.float32)


if __name__ == "__main__":
    max_opts = 300 if "--short" in sys.argv else 3_000
    with tempfile.TemporaryDirectory() as directory:
        result = outrider.train(
            env=GymEnvConfig(id=Corridor, kwargs={"length": 8}),
            agent="dqn",
            n_actors=1,
            run_dir=f"{directory}/run",
            trainer={"max_opts": max_opts, "eval_interval": max_opts // 3, "warmup_period": 500},
        )
        print(f"best score {result.stats.best_score:.2f} after {result.stats.env_steps} env steps")
        policy = outrider.load_policy(f"{directory}/run", model="best")
        print("actions along the corridor:", policy.sample(np.linspace(0, 0.75, 7, dtype=np.float32)[:, None]))
