"""Going on in process when ranks have died or joined: what survives where, and who has it (SPEC.md §5)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .distributed import World
from .strategy import Strategy

__all__ = ["carry_over"]


def carry_over(world: World, before: Strategy | None, strategy: Strategy, *, step: int) -> int | None:
    """Give every rank the state of the rank with the largest committed step; collective.

    A reduction may finish on some ranks and fail on others, so ranks can be one step apart: the larger step has all
    that the smaller one has. Only state that each rank holds in full can be taken over.

    Args:
        world: the new ranks.
        before: this rank's strategy among the old ranks, None where it is new.
        strategy: the one to fill.
        step: steps that ``before`` has taken, −1 without.

    Returns:
        The step to go on from; None where nobody has the whole state.
    """
    updates = before.optimizer.updates if before is not None else 0
    rows = world.gather_integers((step if strategy.state_is_whole else -1, updates))
    source = max(range(world.size), key=lambda rank: (rows[rank][0], -rank))
    if rows[source][0] < 0:
        return None
    # without what compression has not sent: it is each rank's own, and starts anew
    mine, other = strategy.loading_state({}), before.state() if before is not None else None
    for part, tensors in mine.items():
        for name, tensor in tensors.items():
            if world.rank == source:
                assert other is not None
                tensor.copy_(other[part][name])
            contiguous = tensor.contiguous()
            dist.broadcast(contiguous, source)
            with torch.no_grad():
                tensor.copy_(contiguous)
    strategy.after_load(rows[source][1])
    return rows[source][0]
