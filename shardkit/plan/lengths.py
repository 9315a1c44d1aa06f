"""Grids by length: buckets of samples of similar length, and rows joined to sequences (SPEC.md §10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np

from shardkit.arrays import Int64s
from shardkit.errors import PlanError
from shardkit.ranges import Range, shown

from .natural import NaturalGrid
from .permutation import derive
from .population import BaseOrder, Population, each_alone, stratum_rows
from .settings import Settings, whole
from .stage import Tree, first_step
from .weighted import WeightedGrid

_BUCKET = 6  # purpose of a key derived from the seed


class Bucket(NamedTuple):
    """Strata whose samples are at most ``longest`` long, and the number of samples in a cell."""

    longest: int
    strata: tuple[int, ...]
    cell_size: int


def find_buckets(group_by: object, strata: Sequence[str]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Resolve globs over strata to buckets: (longest, strata) of each, in descending order of length."""
    if not isinstance(group_by, Mapping) or not group_by:
        raise PlanError(
            f"plan: group_by is {shown(group_by)}, expected a mapping of globs over strata to the greatest length of "
            'their samples, such as {"short": 64, "*": 512}'
        )
    lengths_of = {
        pattern: whole(f"plan: group_by: greatest length of {shown(pattern)}", longest, Range(1, 2**63 - 1))
        for pattern, longest in group_by.items()
    }
    of = [next((n for p, n in lengths_of.items() if fnmatchcase(name, p)), None) for name in strata]
    missing = [name for name, longest in zip(strata, of, strict=True) if longest is None]
    if missing:
        raise PlanError(
            f"plan: stratum {missing[0]!r} is in no group of group_by; name it or end with a glob '*'"
        )
    lengths = sorted({n for n in of if n is not None}, reverse=True)
    return tuple((n, tuple(s for s, m in enumerate(of) if m == n)) for n in lengths)


class BucketGrid:
    """Grid of steps that each take samples of one bucket, with natural weights.

    A cell has as many samples of its bucket as the token budget allows. Arrays have the width of the largest cell;
    smaller cells are filled with -1. Each bucket is a `NaturalGrid`. After any number of steps each bucket has had its
    share of them within one, and all buckets end with the epoch.
    """

    def __init__(self, population: Population, settings: Settings) -> None:
        rows = stratum_rows(population)
        # token budget of every cell: B / L samples of the greatest length
        budget = settings.global_batch // settings.lanes * settings.buckets[0][0]
        buckets = [Bucket(longest, strata, budget // longest) for longest, strata in settings.buckets]
        self.buckets = tuple(b for b in buckets if any(rows[s] for s in b.strata))
        self.grids: list[NaturalGrid] = []
        for number, bucket in enumerate(self.buckets):
            masses = [n if s in set(bucket.strata) else 0 for s, n in enumerate(rows)]
            batch = bucket.cell_size * settings.lanes
            if settings.remainder == "drop" and sum(masses) < batch:
                raise PlanError(
                    f"plan: the group of length {bucket.longest} has {sum(masses)} rows, its step takes {batch}; "
                    f'take a smaller global batch, join groups, or take remainder="short"'
                )
            own = replace(
                settings, global_batch=batch, seed=derive(settings.seed, _BUCKET, number) >> 1, buckets=()
            )
            self.grids.append(NaturalGrid(population, own, masses))
        self.order = BaseOrder(population, each_alone(rows))
        self.width = max(b.cell_size for b in self.buckets)
        self.steps_per_epoch = sum(g.steps_per_epoch for g in self.grids)
        self._tree = Tree([g.steps_per_epoch for g in self.grids])

    def bounds(self, step: int) -> tuple[int, int]:
        """Return the first and end step of the epoch that contains a step."""
        first = step - step % self.steps_per_epoch
        return first, first + self.steps_per_epoch

    def bucket_of(self, steps: Int64s) -> tuple[Int64s, Int64s]:
        """Return the bucket of each step and the step in that bucket's grid. The pattern repeats every epoch."""
        return self._tree.draws(steps)

    def cells(self, start: int, stop: int, lane: int) -> Int64s:
        """Return cells of one lane for steps [start, stop): (steps, width) int64, -1 after the samples of a cell."""
        out = np.full((stop - start, self.width), -1, dtype=np.int64)
        bucket, own = self.bucket_of(np.arange(start, stop, dtype=np.int64))
        for number, grid in enumerate(self.grids):
            at = np.flatnonzero(bucket == number)
            if len(at):
                out[at, : grid.cell_size] = grid.cells(int(own[at[0]]), int(own[at[-1]]) + 1, lane)
        out.flags.writeable = False
        return out

    def locate(self, sample: int, number: int) -> tuple[int, int, int] | None:
        """Return (step, lane, slot) of a sample in an epoch, or None if it is dropped."""
        stratum = int(self.order.strata_of(np.array([sample]))[0])
        bucket = next(i for i, b in enumerate(self.buckets) if stratum in b.strata)
        found = self.grids[bucket].locate(sample, number)
        if found is None:
            return None
        turns, rest = divmod(found[0], int(self._tree.masses[bucket]))
        step = first_step(lambda n: int(self._tree.totals(np.array([n]))[0, bucket]), rest, self._tree.period)
        return turns * self._tree.period + (step or 0), found[1], found[2]

    def padding(self) -> dict[str, float]:
        """Return the tokens of an epoch padded to the greatest length, padded to bucket lengths, and the saving."""
        rows = [g.rows for g in self.grids]
        filled = sum(n * b.longest for n, b in zip(rows, self.buckets, strict=True))
        whole = sum(rows) * max(b.longest for b in self.buckets)
        return {"tokens_ungrouped": whole, "tokens_grouped": filled, "saved": 1 - filled / whole}


def rows_per_sequence(sequence: int, row_tokens: int | None) -> int:
    """Return the number of rows joined to a sequence; ``sequence`` must be a multiple of ``row_tokens``."""
    sequence = whole("plan: sequence", sequence, Range(1, 2**63 - 1))
    if row_tokens is None:
        raise PlanError(f"plan: sequence is {sequence}, but rows have no fixed length; expected row_tokens")
    row_tokens = whole("plan: row_tokens", row_tokens, Range(1, 2**63 - 1))
    if sequence < row_tokens or sequence % row_tokens:
        raise PlanError(
            f"plan: sequence is {sequence}, expected a multiple of the {row_tokens} tokens of a row"
        )
    return sequence // row_tokens


def joined(population: Population, join: int) -> Population:
    """Return the population of sequences: each segment in runs of ``join`` rows, the last possibly shorter."""
    return replace(
        population,
        segment_rows=-(-population.segment_rows // join),
        shard_block_rows=np.maximum(1, population.shard_block_rows // join),
    )


class JoinedGrid:
    """Grid of rows made from a grid of sequences.

    Each slot of the inner cell becomes ``join`` slots: sequence j of a cell is slots [j * join, (j + 1) * join), with
    -1 at the end of a shorter sequence. Rows of a sequence are consecutive rows of one segment.
    """

    def __init__(self, inner: NaturalGrid | WeightedGrid, population: Population, join: int) -> None:
        self.inner, self.join = inner, join
        self.order = BaseOrder(population, each_alone(stratum_rows(population)))
        self.width = inner.cell_size * join
        rows = population.segment_rows
        self._row: Int64s = np.cumsum(rows) - rows  # first row of each segment
        units = -(-rows // join)
        self._unit: Int64s = np.cumsum(units) - units  # first sequence of each segment
        self._rows = rows
        #: share of the slots of all sequences that contain a row
        self.filled = float(rows.sum() / max(1, units.sum() * join))

    def bounds(self, step: int) -> tuple[int, int]:
        """Return the first and end step of the epoch that contains a step."""
        return self.inner.bounds(step)

    def cells(self, start: int, stop: int, lane: int) -> Int64s:
        """Return cells of one lane for steps [start, stop): (steps, m * join) int64."""
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
        """Return (step, lane, slot) of a row in an epoch, or None if its sequence is dropped."""
        segment = int(self.order.segments_of(np.array([sample]))[0])
        unit, place = divmod(sample - int(self._row[segment]), self.join)
        found = self.inner.locate(int(self._unit[segment]) + unit, number)
        return None if found is None else (found[0], found[1], found[2] * self.join + place)
