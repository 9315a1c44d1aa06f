"""Parameters laid end to end, and the slices of that line that ranks own (SPEC.md §3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["ALIGNMENT", "FlatLayout"]

ALIGNMENT = 64
"""Elements. Vectorised kernels treat a tail differently: cuts at multiples leave no new tails."""


@dataclass(frozen=True)
class FlatLayout:
    """Where each parameter lies on the line.

    Attributes:
        offsets: first element of each parameter; multiples of `ALIGNMENT`.
        lengths: elements of each parameter.
        share: elements per rank; a multiple of `ALIGNMENT`.
        shards: ranks that share the line; its length is share · shards.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    share: int
    shards: int

    @classmethod
    def of(cls, parameters: Sequence[Tensor], shards: int) -> FlatLayout:
        """The layout of ``parameters`` in their order, cut into ``shards`` equal slices."""
        offsets, end = [], 0
        for parameter in parameters:
            offsets.append(end)
            end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        share = -(-end // (shards * ALIGNMENT)) * ALIGNMENT
        return cls(tuple(offsets), tuple(p.numel() for p in parameters), share, shards)

    @property
    def total(self) -> int:
        """Elements of the line, padding included."""
        return self.share * self.shards

    def views(self, line: Tensor) -> list[Tensor]:
        """The part of ``line`` that is each parameter's, flat."""
        return [line[o : o + n] for o, n in zip(self.offsets, self.lengths, strict=True)]

    def owned(self, shard: int) -> list[tuple[int, int, int]]:
        """(parameter, first, last + 1 element of it) that ``shard`` owns, where that is not empty."""
        start, end = shard * self.share, (shard + 1) * self.share
        cuts = []
        for index, (offset, length) in enumerate(zip(self.offsets, self.lengths, strict=True)):
            low, high = max(0, start - offset), min(length, end - offset)
            if low < high:
                cuts.append((index, low, high))
        return cuts
