"""Costs of samples, and the arrangement of windows into cells of nearly equal cost (SPEC.md §11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardkit.errors import PlanError

from .permutation import derive, derive_each, order_rows

BALANCES = ("spread", "align")
"""``spread`` puts expensive cells of neighbouring lanes in different steps, so that batches cost the same; ``align``
puts those of all lanes in the same steps."""
COST_LIMIT = 1 << 32
"""Exclusive upper bound of a cost."""
ROUND_PARTS = 4
"""Parts per round of filling cells. Cells are less even with 1 part, and not more even with 8 or 16."""

_RUN = 64  # consecutive steps with distinct classes
_APART = 8  # neighbouring lanes whose expensive cells come in different steps
_TURNS = (np.array([0, 4, 2, 6, 1, 5, 3, 7], dtype=np.uint64)) << np.uint64(
    61
)  # eighths of a turn, bits reversed
_ORDER, _TIES = 0, 1  # purposes of keys derived for step classes
_LEVELS = np.arange(256, dtype=np.int64)
_VALUES = (2 * (8 + _LEVELS % 8) + 1) << (_LEVELS // 8)  # 16 times the middle of each level, below 2**36


def encode_costs(costs: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Encode costs in [1, 2**32) as one byte each: eight levels per octave, monotone.

    Raises:
        PlanError: a cost is out of range.
    """
    if len(costs) and not 1 <= int(costs.min()) <= int(costs.max()) < COST_LIMIT:
        raise PlanError(
            f"plan: costs go from {int(costs.min())} to {int(costs.max())}, expected 1 to 2**32 - 1"
        )
    octave = np.frexp(costs.astype(np.float64))[1].astype(np.int64) - 1  # exact below 2**53
    return (8 * octave + ((costs << 3) >> octave) % 8).astype(np.uint8)


class Codes(Protocol):
    """Encoded costs of all samples, looked up by sample number; an array satisfies this protocol."""

    def __len__(self) -> int: ...
    def __getitem__(self, samples: NDArray[np.int64], /) -> NDArray[np.uint8]:
        """Return the codes of samples, given by number: uint8[n], as `encode_costs` makes them.

        The codes of a dataset are constant, because plans depend on them.
        """


@dataclass(frozen=True, eq=False)
class Costs:
    """Costs of the samples of one manifest.

    Attributes:
        text: description of how costs follow from the manifest's rows. It is part of the plan's digest: equal texts
            for one manifest imply equal codes.
        codes: encoded costs of all samples.
    """

    text: str
    codes: Codes

    def of_cells(self, cells: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the costs of cells (steps, lanes, m) as (steps, lanes) float64; empty slots cost nothing."""
        there = cells >= 0
        found = np.zeros(cells.shape)
        found[there] = _VALUES[self.codes[cells[there]]] / 16  # the middle of each code's level
        sums: NDArray[np.float64] = found.sum(axis=2)
        return sums


class Balance(msgspec.Struct, frozen=True, eq=False):
    """Arrangement by cost of the windows of several hands of one epoch."""

    codes: Codes  # encoded costs of samples
    # int64[hands], rows that a cell takes from each hand; an average if there are several groups
    sizes: NDArray[np.int64]
    parts: int  # parts per round; more parts make cells more even
    key: int  # key of the epoch's step classes, shared by all lanes
    offset: NDArray[np.uint64]  # uint64[hands], added to the classes of each hand modulo 2**64
    # function (hand, draw) → step of the epoch in which the hand makes the draw, elementwise
    steps: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]

    @staticmethod
    def offsets(lanes: NDArray[np.int64], groups: int, balance: str) -> NDArray[np.uint64]:
        """Return the class offsets of hands: uint64[lanes * groups], hand ``i * groups + g`` for lane i, group g."""
        turns = _TURNS[(lanes[:, None] + np.arange(groups)).ravel() % _APART]
        return turns if balance == "spread" else np.zeros_like(turns)

    def arrange(
        self,
        samples: NDArray[np.int64],
        sizes: NDArray[np.int64],
        hand: NDArray[np.int64],
        first: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Reorder each window: whole cells of nearly equal cost, then the rows that do not fill a cell.

        ``samples`` concatenates windows of ``sizes`` rows; ``hand`` and ``first`` give each window's hand and its
        first draw in that hand.
        """
        out, starts, codes = samples.copy(), np.cumsum(sizes) - sizes, self.codes[samples]
        per_cell = self.sizes[hand]
        alike = np.stack((sizes, per_cell), axis=1)[sizes >= per_cell]
        for size, taken in np.unique(alike, axis=0).tolist():
            chosen, cells = np.flatnonzero((sizes == size) & (per_cell == taken)), size // taken
            where = starts[chosen, None] + np.arange(cells * taken, dtype=np.int64)
            draws = first[chosen, None] + taken * np.arange(cells, dtype=np.int64)
            hands = np.repeat(hand[chosen], cells)
            turned = step_classes(self.key, self.steps(hands, draws.ravel())) + self.offset[hands]
            order = _cells(codes[where], turned.reshape(draws.shape), taken, self.parts)
            out[where.ravel()] = np.take_along_axis(samples[where], order, axis=1).ravel()
        return out


def step_classes(key: int, steps: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the class of each step: uint64[n]. The 64 steps from any multiple of 64 have distinct classes."""
    run = steps // _RUN
    runs, of = np.unique(run, return_inverse=True)
    place = order_rows(derive_each(derive(key, _ORDER), runs), _RUN)[of, steps % _RUN]
    ties = derive_each(derive(key, _TIES), steps)
    classes: NDArray[np.uint64] = (place.astype(np.uint64) << np.uint64(58)) | (ties >> np.uint64(6))
    return classes


def arrange_bins(
    samples: NDArray[np.int64],
    codes: NDArray[np.uint8],
    bins: NDArray[np.int64],
    classes: NDArray[np.uint64],
    parts: int,
) -> NDArray[np.int64]:
    """Reorder one window whose bins take other rows than consecutive ones.

    ``bins`` (n, size) gives the places in the window that each bin takes; the remaining places get the last rows.
    """
    count = bins.size
    order = _cells(codes[:count][None], classes[None], bins.shape[1], parts)[0]
    out, is_left = np.empty_like(samples), np.ones(len(samples), dtype=np.bool_)
    out[bins.ravel()] = samples[:count][order]
    is_left[bins.ravel()] = False
    out[is_left] = samples[count:]
    return out


def _cells(codes: NDArray[np.uint8], classes: NDArray[np.uint64], size: int, parts: int) -> NDArray[np.int64]:
    """Return indices of the window's rows, cell by cell: (windows, cells * m) int64.

    Each cell first gets one of the most expensive rows. Then, part by part, the cheapest cells get the most expensive
    of the remaining rows.
    """
    windows, cells = classes.shape
    ranks = np.argsort(255 - codes, axis=1, kind="stable")
    values = _VALUES[np.take_along_axis(codes, ranks, axis=1)]
    taken = np.empty((windows, cells, size), dtype=np.int64)
    taken[:, :, 0] = ranks[:, :cells]
    sums, free = values[:, :cells].copy(), np.full((windows, cells), size - 1)
    num = (size - 1) * min(parts, cells)
    border = cells + (size - 1) * cells * np.arange(num + 1) // max(1, num)
    coarse = max(0, (cells * size).bit_length() - 24)  # otherwise sums times cells overflow int64
    for left, begin, end in zip(range(num, 0, -1), border[:-1].tolist(), border[1:].tolist(), strict=True):
        if end - begin == cells:  # cells are ordered by class, which breaks ties
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
    """Return the cells that take one row each in this part, cheapest first: (windows, num) int64.

    A cell takes at most one row per part, so cells with as many free slots as remaining parts come first.
    """
    cells = sums.shape[1]
    keys = sums * cells + np.arange(cells)  # distinct keys: the result does not depend on numpy's partition
    apart = (1 << 61) // cells * cells
    keys += apart * ((free == 0).astype(np.int64) - (free == left))
    keys = np.partition(keys, num - 1, axis=1)[:, :num]
    keys.sort(axis=1)
    chosen: NDArray[np.int64] = keys % cells
    return chosen
