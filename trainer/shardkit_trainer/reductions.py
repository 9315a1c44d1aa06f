"""Sums of gradients that do not depend on who computed what in which order (SPEC.md §2)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .distributed import World
from .slices import FlatLayout

__all__ = ["ExactSum"]

FRACTION_BITS = 40  # fixed point: range ±2²² (8.4·10⁶ with sign and room), resolution 9·10⁻¹³


class ExactSum:
    """Gradients of cells, summed as 64-bit fixed-point integers: associative, so any order on any rank gives the bits.

    The fp64 variant sums floats of 53 bits instead: half the work, equal in practice, not by construction.
    """

    def __init__(self, parameters: Sequence[Tensor], layout: FlatLayout, kind: str, world: World, cells: int):
        self._parameters, self._layout, self._world = parameters, layout, world
        self._integers = kind == "int64"
        device, dtype = parameters[0].device, torch.int64 if self._integers else torch.float64
        self._sum = torch.zeros(layout.total, dtype=dtype, device=device)
        self._scratch = torch.empty(max(layout.lengths), dtype=torch.float64, device=device)
        # no sum of `cells` values below this can leave the 63 bits
        self._limit = 2.0 ** (62 - FRACTION_BITS) / max(1, cells)
        self.overflowed = False

    def add_cell(self) -> None:
        """Move the gradients of one cell from ``.grad`` into the sum; remember values that do not fit."""
        for parameter, part in zip(self._parameters, self._layout.views(self._sum), strict=True):
            if parameter.grad is None:
                continue
            wide = self._scratch[: len(part)].copy_(parameter.grad.reshape(-1))
            parameter.grad = None
            peak = float(wide.abs().max()) if len(part) else 0.0
            if not peak <= self._limit:  # also true for NaN
                self.overflowed = True
                continue
            part += wide.mul_(2.0**FRACTION_BITS).round_().to(torch.int64) if self._integers else wide

    def reduce(self) -> float:
        """Sum over ranks; returns the global norm, computed parameter by parameter in a fixed order."""
        self._world.all_reduce(self._sum)
        squares = 0.0
        for index in range(len(self._parameters)):
            wide = self._wide(index, 0, self._layout.lengths[index])
            squares += float(wide.mul_(wide).sum())
        return math.sqrt(squares)

    def _wide(self, index: int, low: int, high: int) -> Tensor:
        offset = self._layout.offsets[index]
        wide = self._scratch[: high - low].copy_(self._sum[offset + low : offset + high])
        return wide.mul_(2.0**-FRACTION_BITS) if self._integers else wide

    def gradient(self, index: int, low: int, high: int) -> Tensor:
        """(high − low,) float32: the summed gradient of elements low … high−1 of a parameter."""
        return self._wide(index, low, high).to(torch.float32)

    def clear(self) -> None:
        """Begin the next step."""
        self._sum.zero_()
        self.overflowed = False
