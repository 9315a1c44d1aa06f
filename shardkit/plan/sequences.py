"""Joining consecutive rows to longer sequences at plan time (SPEC.md §10)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import PlanError

from .base_order import BaseOrder
from .natural import NaturalGrid
from .population import Population
from .strata import each_alone, stratum_rows
from .weighted import WeightedGrid

__all__ = ["JoinedGrid", "joined", "rows_per_sequence"]

Numbers = NDArray[np.int64]


def rows_per_sequence(sequence: int, row_tokens: int | None) -> int:
    """Rows that are joined.

    Raises:
        PlanError: rows of unknown or other length.
    """
    if row_tokens is None or row_tokens < 1:
        raise PlanError(f"plan: sequence is {sequence}, but rows have no fixed length; expected row_tokens")
    if sequence < row_tokens or sequence % row_tokens:
        raise PlanError(
            f"plan: sequence is {sequence}, expected a multiple of the {row_tokens} tokens of a row"
        )
    return sequence // row_tokens


def joined(population: Population, join: int) -> Population:
    """The population of sequences: each segment's rows taken ``join`` at a time, its last sequence possibly shorter."""
    return replace(
        population,
        segment_rows=-(-population.segment_rows // join),
        shard_block_rows=np.maximum(1, population.shard_block_rows // join),
    )


class JoinedGrid:
    """A grid of sequences, told in rows: each slot of the inner cell becomes ``join`` rows, -1 where it is shorter.

    Sequence j of a cell is slots [j * join, (j + 1) * join): those are the boundaries. Rows of a sequence are
    neighbours in one segment, in order.
    """

    def __init__(self, inner: NaturalGrid | WeightedGrid, population: Population, join: int) -> None:
        self.inner, self.join = inner, join
        self.order = BaseOrder(population, each_alone(stratum_rows(population)))
        self.width = inner.cell_size * join
        rows = population.segment_rows
        self._row: Numbers = np.cumsum(rows) - rows  # first row of each segment
        units = -(-rows // join)
        self._unit: Numbers = np.cumsum(units) - units  # its first sequence
        self._rows = rows
        #: share of the slots of all sequences that hold a row
        self.filled = float(rows.sum() / max(1, units.sum() * join))

    def bounds(self, step: int) -> tuple[int, int]:
        """First and end step of the epoch that holds a step."""
        return self.inner.bounds(step)

    def cells(self, start: int, stop: int, lane: int) -> Numbers:
        """Cells of one lane for steps [start, stop): (steps, m * join) int64."""
        units = self.inner.cells(start, stop, lane)
        flat = units.ravel()
        segment = np.zeros(len(flat), dtype=np.int64)
        real = flat >= 0
        segment[real] = self.inner.order.segments_of(flat[real])
        place = (flat - self._unit[segment])[:, None] * self.join + np.arange(self.join)
        rows = np.where(
            (place < self._rows[segment][:, None]) & real[:, None], self._row[segment][:, None] + place, -1
        )
        rows.flags.writeable = False
        return rows.reshape(len(units), -1)

    def locate(self, sample: int, number: int) -> tuple[int, int, int] | None:
        """(step, lane, slot) of a row in an epoch."""
        segment = int(self.order.segments_of(np.array([sample]))[0])
        unit, place = divmod(sample - int(self._row[segment]), self.join)
        found = self.inner.locate(int(self._unit[segment]) + unit, number)
        return None if found is None else (found[0], found[1], found[2] * self.join + place)
