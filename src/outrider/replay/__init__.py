"""Station (3) of the path of a transition: replay buffers, owned by the learner."""

from outrider.replay.prioritized import PrioritizedReplayBuffer, PrioritizedReplayBufferConfig
from outrider.replay.uniform import SimpleReplayBuffer, SimpleReplayBufferConfig

__all__ = [
    "PrioritizedReplayBuffer",
    "PrioritizedReplayBufferConfig",
    "SimpleReplayBuffer",
    "SimpleReplayBufferConfig",
]
