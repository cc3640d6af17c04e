"""An agent of your own, in plain PyTorch: one class, and a config that builds it.

    python examples/own_agent.py [--short]

The same from YAML or the command line, once the config lies in an importable module:

    outrider train dqn --env.id=CartPole-v1 --agent.class=my_package.my_agent:SoftmaxQConfig
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from outrider import AgentConfig, Config, EnvSpec, GymEnvConfig, train
from outrider.testing import check_agent_config


@dataclass(frozen=True, kw_only=True)
class SoftmaxQConfig(Config, AgentConfig):  # the contract brings defaults: actors get a whole agent, all alike
    lr: float = 1e-3
    gamma: float = 0.99
    batch_size: int = 64
    temperature: float = 1.0

    def build(self, env_spec: EnvSpec, *, device: str = "cpu", seed: int = 0) -> "SoftmaxQ":
        return SoftmaxQ(self, env_spec, seed)


class SoftmaxQ:
    """Q-learning with softmax exploration and the mean over actions, weighted by the policy, as the next value."""

    def __init__(self, config: SoftmaxQConfig, env_spec: EnvSpec, seed: int) -> None:
        torch.manual_seed(seed)
        self.config, self.n_opts, self.exploring, self.rng = config, 0, True, np.random.default_rng(seed)
        n_in, n_out = env_spec.observation_space.shape[0], int(env_spec.action_space.n)
        self.net = nn.Sequential(nn.Linear(n_in, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, n_out))
        self.optimizer = torch.optim.Adam(self.net.parameters(), config.lr)

    @torch.no_grad()
    def sample(self, obs: np.ndarray) -> np.ndarray:
        q = self.net(torch.from_numpy(obs))
        if not self.exploring:
            return q.argmax(1).numpy()
        return (q.numpy() / self.config.temperature + self.rng.gumbel(size=q.shape)).argmax(1)

    def train(self) -> None:
        self.exploring = True

    def eval(self) -> None:
        self.exploring = False

    def model_info(self) -> tuple[int, dict[str, np.ndarray]]:
        return self.n_opts, {name: value.numpy() for name, value in self.net.state_dict().items()}

    def sync_model(self, info: Any) -> None:
        self.net.load_state_dict({name: torch.tensor(info[name]) for name in self.net.state_dict()})

    def opt_with_record(self, buffer: Any) -> dict[str, float]:
        batch = buffer.batch(self.config.batch_size)
        with torch.no_grad():
            next_q = self.net(torch.tensor(batch.next_obs))
            value = (next_q * (next_q / self.config.temperature).softmax(1)).sum(1)
            discount = self.config.gamma ** torch.tensor(batch["n_steps"]) * ~torch.tensor(batch["terminated"])
            target = torch.tensor(batch["reward"]) + discount * value  # a truncated episode would have gone on
        q = self.net(torch.tensor(batch.obs)).gather(1, torch.tensor(batch["act"])[:, None])[:, 0]
        loss = nn.functional.mse_loss(q, target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.n_opts += 1
        return {"train/loss": loss.item()}

    opt = opt_with_record

    def save_params(self, path: Path) -> None:
        torch.save(self.net.state_dict(), path / "net.pt")

    def load_params(self, path: Path) -> None:
        self.net.load_state_dict(torch.load(path / "net.pt"))

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict(), "n_opts": self.n_opts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.n_opts = state["n_opts"]


if __name__ == "__main__":
    check_agent_config(SoftmaxQConfig(), GymEnvConfig(id="CartPole-v1").spec())  # is the contract kept?
    max_opts = 300 if "--short" in sys.argv else 5_000
    trainer = {"max_opts": max_opts, "eval_interval": max_opts // 3, "warmup_period": 500}
    result = train(env="CartPole-v1", agent=SoftmaxQConfig(), trainer=trainer)
    print(f"best score {result.stats.best_score:.1f} after {result.stats.opt_steps} opt steps, in {result.run_dir}")
