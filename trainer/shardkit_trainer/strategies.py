"""Four strategies behind one interface (`strategy.Strategy`), and which class makes which.

==========  ============  =====================  ===============  ========================================
strategy    parameters    gradients              optimizer        made of
==========  ============  =====================  ===============  ========================================
ddp         whole         whole                  whole            torch DDP
zero1       whole         whole                  1/ranks          torch DDP, flat slices
zero2       1/ranks (*)   1/ranks                1/ranks          fully_shard, gathered from forward to backward
zero3       1/ranks       1/ranks                1/ranks          fully_shard, gathered layer by layer
==========  ============  =====================  ===============  ========================================

(*) in exact mode zero2 keeps whole parameters and slices of gradients. Exact mode replaces DDP's reduction by
`ExactSum`.
"""

from __future__ import annotations

from .configuration import Configuration
from .distributed import World
from .fully_sharded import FullySharded
from .local_steps import LocalSteps
from .replicated import Replicated
from .strategy import Strategy
from .tasks import Task

__all__ = ["make_strategy"]


def make_strategy(task: Task, config: Configuration, world: World, cells: int) -> Strategy:
    """The strategy that the configuration names; ``cells``, those of a whole step, bound the sums of exact mode."""
    if config.parallel.sync_every > 1:
        return LocalSteps(task, config, world, cells)
    sharded = config.parallel.strategy in {"zero2", "zero3"} and config.parallel.exact == "off"
    return FullySharded(task, config, world, cells) if sharded else Replicated(task, config, world, cells)
