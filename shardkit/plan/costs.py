"""What samples cost, and windows arranged so that cells cost nearly the same (SPEC.md §11)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import PlanError

from .permutation import GOLDEN, derive, derive_each, order_rows

__all__ = ["BALANCES", "COST_LIMIT", "Balance", "Costs", "encode_costs"]

BALANCES = ("spread", "align")
"""Dear cells of lanes in other steps, so that a rank of several lanes is balanced; or all in the same steps."""
COST_LIMIT = 1 << 32
"""Costs are below."""

_RUN = 64  # steps of which each has another class
_ORDER, _TIES = 0, 1  # what a key of step classes is for
_LEVELS = np.arange(256, dtype=np.int64)
_VALUES = (2 * (8 + _LEVELS % 8) + 1) << (_LEVELS // 8)  # 16 times the middle of each level


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


@dataclass(frozen=True, eq=False)
class Costs:
    """What each sample of one manifest costs.

    Attributes:
        text: how the costs follow from the manifest's rows.
        codes: uint8[rows], from `encode_costs`, by sample number. Not copied; must not change.

    Both are part of the plan's digest: with other costs it is another plan.
    """

    text: str
    codes: NDArray[np.uint8]

    @property
    def digest(self) -> str:
        """SHA-256 of the codes, in hex."""
        return hashlib.sha256(np.ascontiguousarray(self.codes).data).hexdigest()


@dataclass(frozen=True, eq=False)
class Balance:
    """How the windows of some hands of one epoch are arranged.

    Attributes:
        codes: uint8[rows], what samples cost.
        size: m, rows of a cell.
        key: of the epoch's step classes, which all lanes share.
        offset: uint64[hands], by how much each lane's classes are turned.
    """

    codes: NDArray[np.uint8]
    size: int
    key: int
    offset: NDArray[np.uint64]

    @classmethod
    def of(cls, costs: Costs, size: int, key: int, lanes: NDArray[np.int64], balance: str) -> Balance:
        """Of the hands of some lanes."""
        turn = np.uint64(GOLDEN if balance == "spread" else 0)
        return cls(costs.codes, size, key, lanes.astype(np.uint64) * turn)

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
        """Windows in another order: whole cells of nearly equal cost, then what is less than a cell.

        Args:
            samples: int64[sum(sizes)], rows of each window in its keyed order, which decides between equals.
            sizes: int64[n], rows of each window.
            hand: int64[n], whose each window is.
            first: int64[n], the epoch's step of its first cell.
        """
        out, starts = samples.copy(), np.cumsum(sizes) - sizes
        for size in np.unique(sizes[sizes >= self.size]).tolist():
            chosen, cells = np.flatnonzero(sizes == size), size // self.size
            where = starts[chosen, None] + np.arange(cells * self.size, dtype=np.int64)
            steps = first[chosen, None] + np.arange(cells, dtype=np.int64)
            turned = self.classes(steps.ravel()).reshape(steps.shape) + self.offset[hand[chosen], None]
            out[where.ravel()] = self._cells(samples[where], turned).ravel()
        return out

    def _cells(self, rows: NDArray[np.int64], classes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """(windows, cells, m) of (windows, cells * m): in each round the cheapest cell takes the dearest row."""
        windows, cells = classes.shape
        codes = self.codes[rows]
        ranks = np.argsort(255 - codes, axis=1, kind="stable")
        rounds = np.take_along_axis(rows, ranks, axis=1).reshape(windows, self.size, cells)
        values = _VALUES[np.take_along_axis(codes, ranks, axis=1)].reshape(rounds.shape)
        sums = np.zeros((windows, cells), dtype=np.int64)
        taken = np.empty((windows, cells, self.size), dtype=np.int64)
        for number in range(self.size):  # cells stand in the order of their classes: ties go by it
            next_cells = np.argsort(sums, axis=1, kind="stable")
            np.put_along_axis(taken[:, :, number], next_cells, rounds[:, number], axis=1)
            np.put_along_axis(
                sums, next_cells, np.take_along_axis(sums, next_cells, axis=1) + values[:, number], axis=1
            )
        dearest_first = np.argsort(~classes, axis=1, kind="stable")
        out = np.empty_like(taken)
        np.put_along_axis(out, dearest_first[:, :, None], taken, axis=1)
        return out
