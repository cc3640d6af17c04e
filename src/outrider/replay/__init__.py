"""Station (3) of the path of a transition: replay buffers, owned by the learner."""

from outrider.replay.uniform import SimpleReplayBuffer, SimpleReplayBufferConfig

__all__ = ["SimpleReplayBuffer", "SimpleReplayBufferConfig"]
