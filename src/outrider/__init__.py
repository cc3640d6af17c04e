"""outrider: asynchronous off-policy reinforcement learning."""
