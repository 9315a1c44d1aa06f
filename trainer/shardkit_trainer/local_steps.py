"""Semi-synchronous training: ranks step alone and meet every H steps (DiLoCo, Douillard et al. 2023; SPEC.md §9)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .configuration import Configuration
from .distributed import World
from .optimizers import LocalOptimizer
from .strategy import Strategy
from .tasks import Inputs, Task

__all__ = ["LocalSteps"]


class LocalSteps(Strategy):
    """Whole replicas that differ between meetings.

    A meeting takes how far each replica has come since the last one, weighted by the samples it saw, as the gradient of
    an outer Nesterov optimizer. Moments of the inner optimizer are averaged with the same weights, so that after a
    meeting all of the state is the same everywhere and fits any number of ranks.
    """

    def __init__(self, task: Task, config: Configuration, world: World, cells: int):
        super().__init__(task, config, world, cells)
        self.optimizer = LocalOptimizer(self._whole_parameters(), config.optimizer, fused=True)
        self._start = [p.detach().clone() for p in self.parameters]
        self._momentum = [torch.zeros_like(p) for p in self.parameters]
        self._samples = 0
        self._since = 0  # updates since the last meeting

    def divisor(self, own: int, everyone: int) -> int:
        """The mean over this rank's targets."""
        return own

    def passes(self, cells: Sequence[Inputs], cells_of_ranks: Sequence[int], cell_size: int) -> list[Inputs]:
        """As everywhere; remembers this rank's weight in the next meeting."""
        self._samples += sum(cell.samples for cell in cells)
        return super().passes(cells, cells_of_ranks, cell_size)

    def update(self, rate: float) -> None:
        """A step of this rank alone; a meeting after every H-th."""
        super().update(rate)
        self._since += 1
        if self._since == self.config.parallel.sync_every:
            self.settle()

    def whole(self) -> bool:
        """Only at a meeting: between two, replicas differ, and what a dead one has learned is nowhere else."""
        return super().whole() and not self._since

    def settle(self) -> None:
        """Meet now; nothing where no step was taken since the last meeting."""
        if not self._since:
            return
        everyone = sum(row[0] for row in self.world.gather_integers([self._samples]))
        weight = self._samples / max(1, everyone)
        rate, momentum = self.config.parallel.outer_lr, self.config.parallel.outer_momentum
        with torch.no_grad():
            for parameter, start, velocity in zip(self.parameters, self._start, self._momentum, strict=True):
                way = self.world.all_reduce((start - parameter) * weight)
                velocity.mul_(momentum).add_(way)
                start.sub_(way.add_(velocity, alpha=momentum), alpha=rate)
                parameter.copy_(start)
            for moments in self.optimizer.moments().values():
                for tensor in moments.values():
                    tensor.copy_(self.world.all_reduce(tensor * weight))
        self._samples = self._since = 0

    def state(self) -> dict[str, dict[str, Tensor]]:
        """As everywhere, with the outer optimizer's momentum."""
        outer = dict(zip(self.names, self._momentum, strict=True))
        return {**super().state(), "outer": outer}

    def after_load(self, updates: int) -> None:
        """The next meeting counts from what was loaded."""
        super().after_load(updates)
        for start, parameter in zip(self._start, self.parameters, strict=True):
            start.copy_(parameter.detach())
        self._samples = self._since = 0
