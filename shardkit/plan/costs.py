"""What samples cost, and windows arranged so that cells cost nearly the same (SPEC.md §11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import PlanError

from .permutation import derive, derive_each, order_rows

BALANCES = ("spread", "align")
"""Dear cells of neighbouring lanes in other steps, so that batches are alike; or those of all lanes in the same."""
COST_LIMIT = 1 << 32
"""Costs are below."""
ROUND_PARTS = 4
"""Parts into which a round of dealing is cut: cells are less even with 1, and not more even with 8 or 16."""

_RUN = 64  # steps of which each has another class
_APART = 8  # lanes of which each reaches its dear cells in other steps than the others
_TURNS = (np.array([0, 4, 2, 6, 1, 5, 3, 7], dtype=np.uint64)) << np.uint64(
    61
)  # eighths of a turn, bits reversed
_ORDER, _TIES = 0, 1  # what a key of step classes is for
_LEVELS = np.arange(256, dtype=np.int64)
_VALUES = (2 * (8 + _LEVELS % 8) + 1) << (_LEVELS // 8)  # 16 times the middle of each level, below 2**36


def encode_costs(costs: NDArray[np.int64]) -> NDArray[np.uint8]:
    """One byte per cost in [1, 2**32): eight levels an octave, monotone.

    Raises:
        PlanError: a cost is out of range.
    """
    if len(costs) and not 1 <= int(costs.min()) <= int(costs.max()) < COST_LIMIT:
        raise PlanError(
            f"plan: costs go from {int(costs.min())} to {int(costs.max())}, expected 1 to 2**32 - 1"
        )
    octave = np.frexp(costs.astype(np.float64))[1].astype(np.int64) - 1  # exact below 2**53
    return (8 * octave + ((costs << 3) >> octave) % 8).astype(np.uint8)


def decode_costs(codes: NDArray[np.uint8]) -> NDArray[np.float64]:
    """About the costs that were encoded: the middle of each level."""
    return _VALUES[codes] / 16


class Codes(Protocol):
    """What samples cost, to be had for some of them at a time; an array is one."""

    def __len__(self) -> int: ...
    def __getitem__(self, samples: NDArray[np.int64], /) -> NDArray[np.uint8]:
        """uint8[n], from `encode_costs`, of samples by number; must never change."""


@dataclass(frozen=True, eq=False)
class Costs:
    """What each sample of one manifest costs.

    Attributes:
        text: how the costs follow from the manifest's rows; part of the plan's digest, as the manifest is. Equal texts
            over one manifest mean equal codes.
        codes: of all samples.
    """

    text: str
    codes: Codes

    def of_cells(self, cells: NDArray[np.int64]) -> NDArray[np.float64]:
        """(steps, lanes) what cells (steps, lanes, m) cost; empty slots cost nothing."""
        there = cells >= 0
        found = np.zeros(cells.shape)
        found[there] = decode_costs(self.codes[cells[there]])
        sums: NDArray[np.float64] = found.sum(axis=2)
        return sums


@dataclass(frozen=True, eq=False)
class Balance:
    """How the windows of some hands of one epoch are arranged.

    Attributes:
        codes: what samples cost.
        sizes: int64[hands], rows that a cell takes of each hand; of several groups about so many.
        parts: of each round; with more of them cells are evener.
        key: of the epoch's step classes, which all lanes share.
        offset: uint64[hands], by how much each hand's classes are turned.
        steps: (hand, draw) → the epoch's step in which each of some hands makes each draw.
    """

    codes: Codes
    sizes: NDArray[np.int64]
    parts: int
    key: int
    offset: NDArray[np.uint64]
    steps: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]

    @staticmethod
    def offsets(lanes: NDArray[np.int64], groups: int, balance: str) -> NDArray[np.uint64]:
        """By how much classes are turned: uint64[lanes * groups], hand i * groups + g is that of lane i and group g."""
        turns = _TURNS[(lanes[:, None] + np.arange(groups)).ravel() % _APART]
        return turns if balance == "spread" else np.zeros_like(turns)

    def classes(self, steps: NDArray[np.int64]) -> NDArray[np.uint64]:
        """uint64: the class of each step of the epoch; of 64 steps that begin at a multiple of 64 all differ."""
        run = steps // _RUN
        runs = np.arange(
            run.min(), run.max() + 1
        )  # windows that are drawn together are of steps near each other
        place = order_rows(derive_each(derive(self.key, _ORDER), runs), _RUN)[run - runs[0], steps % _RUN]
        ties = derive_each(derive(self.key, _TIES), steps)
        classes: NDArray[np.uint64] = (place.astype(np.uint64) << np.uint64(58)) | (ties >> np.uint64(6))
        return classes

    def arrange(
        self,
        samples: NDArray[np.int64],
        sizes: NDArray[np.int64],
        hand: NDArray[np.int64],
        first: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Windows in another order: whole cells of nearly equal cost, then what is less than a cell."""
        out, starts, codes = samples.copy(), np.cumsum(sizes) - sizes, self.codes[samples]
        per_cell = self.sizes[hand]
        alike = np.stack((sizes, per_cell), axis=1)[sizes >= per_cell]
        for size, taken in np.unique(alike, axis=0).tolist():
            chosen, cells = np.flatnonzero((sizes == size) & (per_cell == taken)), size // taken
            where = starts[chosen, None] + np.arange(cells * taken, dtype=np.int64)
            draws = first[chosen, None] + taken * np.arange(cells, dtype=np.int64)
            hands = np.repeat(hand[chosen], cells)
            turned = self.classes(self.steps(hands, draws.ravel())) + self.offset[hands]
            order = _cells(codes[where], turned.reshape(draws.shape), taken, self.parts)
            out[where.ravel()] = np.take_along_axis(samples[where], order, axis=1).ravel()
        return out


def _cells(codes: NDArray[np.uint8], classes: NDArray[np.uint64], size: int, parts: int) -> NDArray[np.int64]:
    """(windows, cells * m): places in the window, cell by cell.

    Each cell gets one of the dearest rows, then the cheapest cells get the dearest rows that are left, part after part.
    """
    windows, cells = classes.shape
    ranks = np.argsort(255 - codes, axis=1, kind="stable")
    values = _VALUES[np.take_along_axis(codes, ranks, axis=1)]
    taken = np.empty((windows, cells, size), dtype=np.int64)
    taken[:, :, 0] = ranks[:, :cells]
    sums, free = values[:, :cells].copy(), np.full((windows, cells), size - 1)
    num = (size - 1) * min(parts, cells)
    border = cells + (size - 1) * cells * np.arange(num + 1) // max(1, num)
    coarse = max(0, (cells * size).bit_length() - 24)  # in windows of 2**24 rows sums times cells leave int64
    for left, begin, end in zip(range(num, 0, -1), border[:-1].tolist(), border[1:].tolist(), strict=True):
        if end - begin == cells:  # cells stand in the order of their classes: ties go by it
            chosen = np.argsort(sums, axis=1, kind="stable")
        else:
            chosen = _cheapest(sums >> coarse, free, left, end - begin)
        slots = np.take_along_axis(free, chosen, axis=1)
        taken[np.arange(windows)[:, None], chosen, size - slots] = ranks[:, begin:end]
        np.put_along_axis(free, chosen, slots - 1, axis=1)
        dearer = np.take_along_axis(sums, chosen, axis=1) + values[:, begin:end]
        np.put_along_axis(sums, chosen, dearer, axis=1)
    dearest_first = np.argsort(~classes, axis=1, kind="stable")
    out = np.empty_like(taken)
    np.put_along_axis(out, dearest_first[:, :, None], taken, axis=1)
    return out.reshape(windows, cells * size)


def _cheapest(sums: NDArray[np.int64], free: NDArray[np.int64], left: int, num: int) -> NDArray[np.int64]:
    """(windows, num): cells that take a row each of this part, the cheapest first.

    A cell takes at most one row of a part: one with as many free slots as parts are left goes before all others.
    """
    cells = sums.shape[1]
    keys = sums * cells + np.arange(cells)  # all differ: no tie is left to how numpy partitions
    apart = (1 << 61) // cells * cells
    keys += apart * ((free == 0).astype(np.int64) - (free == left))
    keys = np.partition(keys, num - 1, axis=1)[:, :num]
    keys.sort(axis=1)
    chosen: NDArray[np.int64] = keys % cells
    return chosen
