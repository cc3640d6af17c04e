"""outrider: asynchronous off-policy reinforcement learning.

The path of a transition, one module per station::

    envs            an actor steps its environments ................. actor, supervisor, actor_manager
    sampling        (1) steps become items: 1-step, n-step, frames
    channel         (2) items fill a slot of the actor's ring ....... replay_buffer_proxy, rings, shared_memory
    replay          (3) the learner drains messages and draws batches  balance, learner
    agents          (4) an opt step updates the agent ............... async_trainer, trainer
    model_sync      (5) the learner publishes parameters
                    (6) actors fetch them between two steps
    wiring          opens all of this in this order; read it first

Contracts are in :mod:`outrider.core`, what travels is in :mod:`outrider.data`.
"""

import lazy_loader

# Listed once, in __init__.pyi, and imported when first used: `outrider presets` does not wait for torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
