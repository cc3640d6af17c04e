"""The same settings for Stable-Baselines3 and for outrider: those of rl-zoo for CartPole-v1 and Pendulum-v1."""

from __future__ import annotations

from typing import Any

STEPS = 50_000
PHASE_STEPS, PHASE_UPDATES, WARMUP = 256, 128, 1_000


def updates_in(steps: int) -> int:
    """The updates that Stable-Baselines3 makes in so many steps of CartPole-v1: 24,704 in 50,000."""
    phases = -(-steps // PHASE_STEPS)  # it collects whole phases, and learns after those that end behind the warm-up
    return (phases - WARMUP // PHASE_STEPS) * PHASE_UPDATES


SB3_CARTPOLE: dict[str, Any] = {
    "algorithm": "dqn",
    "env": "CartPole-v1",
    "hidden": [256, 256],
    "steps": STEPS,
    "arguments": {
        "learning_rate": 2.3e-3,
        "batch_size": 64,
        "buffer_size": 100_000,
        "learning_starts": WARMUP,
        "gamma": 0.99,
        "target_update_interval": 10,
        "train_freq": PHASE_STEPS,
        "gradient_steps": PHASE_UPDATES,
        "exploration_fraction": 0.16,
        "exploration_final_eps": 0.04,
    },
}

# Stable-Baselines3 counts the target interval in env steps, so that the target is a copy from the start of each phase
# of 128 updates: here that is every 128 updates.
OUTRIDER_CARTPOLE: dict[str, Any] = {
    "env.id": "CartPole-v1",
    "agent": "dqn",
    "agent.hidden": [256, 256],
    "agent.lr": 2.3e-3,
    "agent.batch_size": 64,
    "agent.gamma": 0.99,
    "agent.double": False,
    "agent.loss": "huber",
    "agent.max_grad_norm": 10.0,
    "agent.target_update_interval": PHASE_UPDATES,
    "agent.explorer": {"start": 1.0, "final": 0.04, "decay_env_steps": 8_000},
    "replay.capacity": 100_000,
    "trainer.warmup_period": WARMUP,
    "trainer.samples_per_insert": 64 * PHASE_UPDATES / PHASE_STEPS,
    "trainer.max_opts": updates_in(STEPS),
    "trainer.eval_interval": 0,
}

PENDULUM_WARMUP = 256  # rl-zoo has 100; outrider wants a whole batch first
SB3_PENDULUM: dict[str, Any] = {
    "algorithm": "sac",
    "env": "Pendulum-v1",
    "hidden": [256, 256],
    "steps": 20_000,
    "arguments": {"learning_rate": 1e-3, "learning_starts": PENDULUM_WARMUP},
}
OUTRIDER_PENDULUM: dict[str, Any] = {
    "env.id": "Pendulum-v1",
    "agent": "sac",
    "agent.hidden": [256, 256],
    "agent.actor_lr": 1e-3,
    "agent.critic_lr": 1e-3,
    "agent.alpha_lr": 1e-3,
    "agent.batch_size": 256,
    "agent.gamma": 0.99,
    "agent.tau": 0.005,
    "agent.random_steps": PENDULUM_WARMUP,
    "replay.capacity": 1_000_000,
    "trainer.warmup_period": PENDULUM_WARMUP,
    "trainer.samples_per_insert": 256.0,
    "trainer.max_opts": None,
    "trainer.max_env_steps": 20_000,
    "trainer.eval_interval": 0,
}


def phased(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings for CartPole with the phases of Stable-Baselines3: 256 env steps, then 128 updates, and so on.

    An opt step is a phase, the parameters are published after each, and the agent acts with them until the next.
    """
    return settings | {
        "agent.updates_per_opt": PHASE_UPDATES,
        "trainer.max_opts": settings["trainer.max_opts"] // PHASE_UPDATES,
        "trainer.sync_interval": 1,
    }
