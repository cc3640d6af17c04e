"""outrider: asynchronous off-policy reinforcement learning.

The path of a transition, one module per station::

    envs            an actor steps its environments ................. actor, actor_manager
    sampling        (1) steps become items: 1-step, n-step, frames
    channel         (2) items fill a slot of the actor's ring ....... replay_buffer_proxy, rings, shared_memory
    replay          (3) the learner drains messages and draws batches  balance, learner
    agents          (4) an opt step updates the agent ............... async_trainer, trainer
    model_sync      (5) the learner publishes parameters
                    (6) actors fetch them between two steps
    wiring          opens all of this in this order; read it first

Contracts are in :mod:`outrider.core`, what travels is in :mod:`outrider.data`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outrider.version import __version__

if TYPE_CHECKING:
    from outrider.actor import Actor, ActorBoard, ActorStat, actor_stats_fmt
    from outrider.actor_manager import ActorManager, ActorManagerConfig
    from outrider.agents.dqn import Dqn, DqnConfig
    from outrider.agents.exploration import ApexEpsilonConfig, EpsilonGreedyConfig, SoftmaxConfig
    from outrider.agents.sac import Sac, SacConfig
    from outrider.async_trainer import AsyncTrainer, AsyncTrainerConfig, AsyncTrainStat
    from outrider.channel import (
        ItemReceiver,
        ItemSender,
        PushedItemMessage,
        ReplayBufferProxy,
        ReplayBufferProxyConfig,
        item_channel,
    )
    from outrider.config import Config
    from outrider.core import (
        Agent,
        AgentConfig,
        Env,
        EnvConfig,
        EnvSpec,
        Evaluator,
        Policy,
        Recorder,
        ReplayBuffer,
        ReplayBufferConfig,
        StepProcessor,
        StepProcessorConfig,
        SyncModel,
    )
    from outrider.data import Batch, Episode, Field, Layout, ModelInfo, Record, Step, UpdateResult
    from outrider.envs.atari import AtariEnvConfig
    from outrider.envs.gymnasium import GymEnvConfig
    from outrider.errors import (
        ActorFailed,
        ChannelError,
        ConfigError,
        EnvFailed,
        Interrupted,
        LayoutMismatch,
        OutriderError,
        ResourceError,
        RunDirError,
        Unbound,
        UnsupportedSpace,
    )
    from outrider.evaluation import DefaultEvaluator, DefaultEvaluatorConfig
    from outrider.flags import InitGuard, StopFlag
    from outrider.loaded_policy import LoadedPolicy
    from outrider.model_sync import ModelReceiver, ModelSender, model_channel
    from outrider.recording import (
        ConsoleRecorder,
        MemoryRecorder,
        NullRecorder,
        RecorderConfig,
        TeeRecorder,
        TensorboardRecorder,
    )
    from outrider.replay.uniform import SimpleReplayBuffer, SimpleReplayBufferConfig
    from outrider.run_config import RunConfig
    from outrider.sampling import (
        NStepProcessorConfig,
        Sampler,
        SimpleStepProcessorConfig,
    )
    from outrider.trainer import Trainer
    from outrider.wiring import TrainResult, load_policy, run, train, train_async, train_sync

_MODULES = {
    "outrider.actor": (
        "Actor",
        "ActorBoard",
        "ActorStat",
        "actor_stats_fmt",
    ),
    "outrider.actor_manager": (
        "ActorManager",
        "ActorManagerConfig",
    ),
    "outrider.agents.dqn": (
        "Dqn",
        "DqnConfig",
    ),
    "outrider.agents.exploration": (
        "ApexEpsilonConfig",
        "EpsilonGreedyConfig",
        "SoftmaxConfig",
    ),
    "outrider.agents.sac": (
        "Sac",
        "SacConfig",
    ),
    "outrider.async_trainer": (
        "AsyncTrainStat",
        "AsyncTrainer",
        "AsyncTrainerConfig",
    ),
    "outrider.channel": (
        "ItemReceiver",
        "ItemSender",
        "PushedItemMessage",
        "ReplayBufferProxy",
        "ReplayBufferProxyConfig",
        "item_channel",
    ),
    "outrider.config": ("Config",),
    "outrider.core": (
        "Agent",
        "AgentConfig",
        "Env",
        "EnvConfig",
        "EnvSpec",
        "Evaluator",
        "Policy",
        "Recorder",
        "ReplayBuffer",
        "ReplayBufferConfig",
        "StepProcessor",
        "StepProcessorConfig",
        "SyncModel",
    ),
    "outrider.data": (
        "Batch",
        "Episode",
        "Field",
        "Layout",
        "ModelInfo",
        "Record",
        "Step",
        "UpdateResult",
    ),
    "outrider.envs.atari": ("AtariEnvConfig",),
    "outrider.envs.gymnasium": ("GymEnvConfig",),
    "outrider.errors": (
        "ActorFailed",
        "ChannelError",
        "ConfigError",
        "EnvFailed",
        "Interrupted",
        "LayoutMismatch",
        "OutriderError",
        "ResourceError",
        "RunDirError",
        "Unbound",
        "UnsupportedSpace",
    ),
    "outrider.evaluation": (
        "DefaultEvaluator",
        "DefaultEvaluatorConfig",
    ),
    "outrider.flags": (
        "InitGuard",
        "StopFlag",
    ),
    "outrider.loaded_policy": ("LoadedPolicy",),
    "outrider.model_sync": (
        "ModelReceiver",
        "ModelSender",
        "model_channel",
    ),
    "outrider.recording": (
        "ConsoleRecorder",
        "MemoryRecorder",
        "NullRecorder",
        "RecorderConfig",
        "TeeRecorder",
        "TensorboardRecorder",
    ),
    "outrider.replay.uniform": (
        "SimpleReplayBuffer",
        "SimpleReplayBufferConfig",
    ),
    "outrider.run_config": ("RunConfig",),
    "outrider.sampling": (
        "NStepProcessorConfig",
        "Sampler",
        "SimpleStepProcessorConfig",
    ),
    "outrider.trainer": ("Trainer",),
    "outrider.wiring": (
        "TrainResult",
        "load_policy",
        "run",
        "train",
        "train_async",
        "train_sync",
    ),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Actor",
    "ActorBoard",
    "ActorFailed",
    "ActorManager",
    "ActorManagerConfig",
    "ActorStat",
    "Agent",
    "AgentConfig",
    "ApexEpsilonConfig",
    "AsyncTrainStat",
    "AsyncTrainer",
    "AsyncTrainerConfig",
    "AtariEnvConfig",
    "Batch",
    "ChannelError",
    "Config",
    "ConfigError",
    "ConsoleRecorder",
    "DefaultEvaluator",
    "DefaultEvaluatorConfig",
    "Dqn",
    "DqnConfig",
    "Env",
    "EnvConfig",
    "EnvFailed",
    "EnvSpec",
    "Episode",
    "EpsilonGreedyConfig",
    "Evaluator",
    "Field",
    "GymEnvConfig",
    "InitGuard",
    "Interrupted",
    "ItemReceiver",
    "ItemSender",
    "Layout",
    "LayoutMismatch",
    "LoadedPolicy",
    "MemoryRecorder",
    "ModelInfo",
    "ModelReceiver",
    "ModelSender",
    "NStepProcessorConfig",
    "NullRecorder",
    "OutriderError",
    "Policy",
    "PushedItemMessage",
    "Record",
    "Recorder",
    "RecorderConfig",
    "ReplayBuffer",
    "ReplayBufferConfig",
    "ReplayBufferProxy",
    "ReplayBufferProxyConfig",
    "ResourceError",
    "RunConfig",
    "RunDirError",
    "Sac",
    "SacConfig",
    "Sampler",
    "SimpleReplayBuffer",
    "SimpleReplayBufferConfig",
    "SimpleStepProcessorConfig",
    "SoftmaxConfig",
    "Step",
    "StepProcessor",
    "StepProcessorConfig",
    "StopFlag",
    "SyncModel",
    "TeeRecorder",
    "TensorboardRecorder",
    "TrainResult",
    "Trainer",
    "Unbound",
    "UnsupportedSpace",
    "UpdateResult",
    "__version__",
    "actor_stats_fmt",
    "item_channel",
    "load_policy",
    "model_channel",
    "run",
    "train",
    "train_async",
    "train_sync",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `outrider presets` need not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names, used or not."""
    return __all__
