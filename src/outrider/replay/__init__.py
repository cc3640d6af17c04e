"""Station (3) of the path of a transition: replay buffers, owned by the learner."""

from outrider.replay.frames import FrameReplayBuffer, FrameReplayBufferConfig
from outrider.replay.prioritized import PrioritizedReplayBuffer, PrioritizedReplayBufferConfig
from outrider.replay.uniform import SimpleReplayBuffer, SimpleReplayBufferConfig

__all__ = [
    "FrameReplayBuffer",
    "FrameReplayBufferConfig",
    "PrioritizedReplayBuffer",
    "PrioritizedReplayBufferConfig",
    "SimpleReplayBuffer",
    "SimpleReplayBufferConfig",
]
