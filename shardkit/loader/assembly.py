"""Groups of steps → batches: gathered a step at a time, cut into cells, decoded and transformed in order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.formats import Schema
from shardkit.loader.batch import Batch, to_tensors
from shardkit.loader.gather import GatherColumns, RowAddresses
from shardkit.loader.row_work import RowWork
from shardkit.loader.schedule import StepGroup
from shardkit.loader.statistics import LoaderCounts
from shardkit.loader.step_gather import GatherThreads, StepGather, rows_of
from shardkit.plan import Plan

__all__ = ["Assembler", "StepBatches"]


class StepBatches(NamedTuple):
    """One step as it goes to the trainer."""

    step: int
    batches: list[Batch]  # one, or one per lane
    samples: NDArray[np.int64]  # (n,) all samples of the step, lane after lane
    lane_counts: list[int]
    replaced: list[dict[str, Any]]  # rows that were substituted or masked, as the journal records them

    def cells(self, lanes: Sequence[int]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """(lane, samples) of every cell, as gathered: what the ledger records."""
        first = 0
        for lane, count in zip(lanes, self.lane_counts, strict=True):
            yield lane, self.samples[first : first + count]
            first += count


class Assembler:
    """Turns groups into batches for one rank; see `Dataset.loader` for the settings."""

    def __init__(
        self,
        plan: Plan,
        schema: Schema,
        fields: Sequence[str],
        *,
        lanes: Sequence[int],
        world: int,
        by_cell: bool,
        tensors: bool,
        pin: bool,
        work: RowWork,
        threads: GatherThreads,
        step_bytes: int,
        counts: LoaderCounts,
    ) -> None:
        self._threads, self._step_bytes = threads, step_bytes
        self._plan, self._schema, self._fields = plan, schema, list(fields)
        self._lanes, self._world, self._by_cell, self._tensors = list(lanes), world, by_cell, tensors
        self._work, self._counts, self._pin = work, counts, pin

    def gather(
        self, group: StepGroup, blocks: Sequence[GatherColumns], beside: Callable[[], None] | None = None
    ) -> StepGather:
        """Where the rows of a group lie, ready to be copied; `blocks` are those of `group.blocks`."""
        rows = RowAddresses(self._schema, self._fields, blocks, group.which, group.row)
        return StepGather(
            rows.take,
            group.borders.tolist(),
            threads=self._threads,
            step_bytes=self._step_bytes,
            beside=beside,
        )

    def __call__(self, group: StepGroup, gather: StepGather) -> Iterator[StepBatches]:
        """The steps of a group, in order; closes `gather` in the end."""
        with contextlib.closing(gather):
            yield from self._assembled(group, group.borders.tolist(), iter(gather))

    def _assembled(
        self, group: StepGroup, borders: list[int], gathered: Iterator[dict[str, Any]]
    ) -> Iterator[StepBatches]:
        for offset, counts in enumerate(group.lane_counts.tolist()):
            step, first, last = group.numbers[offset], borders[offset], borders[offset + 1]
            started = time.perf_counter()
            columns = next(gathered)
            self._counts.gather_s += time.perf_counter() - started
            samples, slots = group.samples[first:last], group.slots[first:last]
            weight = self._weight(step, last - first)
            if not self._by_cell:
                batch = self._batch(columns, step, -1, samples, slots, weight)
                yield StepBatches(step, [batch], batch.samples, counts, self._work.take_replaced())
                continue
            batches, a = [], 0
            for lane, count in zip(self._lanes, counts, strict=True):
                b = a + count
                cell = {name: rows_of(value, a, b) for name, value in columns.items()}
                batches.append(self._batch(cell, step, lane, samples[a:b], slots[a:b], weight))
                a = b
            whole = np.concatenate([batch.samples for batch in batches]) if batches else samples
            yield StepBatches(step, batches, whole, counts, self._work.take_replaced())

    def _weight(self, step: int, rows: int) -> float:
        if self._world == 1:
            return 1.0
        everyone = self._plan.global_batch
        if rows != self._plan.cell_size * len(self._lanes):  # a short step: count what all ranks hold
            everyone = int((self._plan.step(step) >= 0).sum())
        return rows * self._world / everyone

    def _batch(
        self,
        fields: dict[str, Any],
        step: int,
        lane: int,
        samples: NDArray[np.int64],
        slots: NDArray[np.int64],
        weight: float,
    ) -> Batch:
        if self._work:
            started = time.perf_counter()
            fields, samples = self._work(fields, step, samples, slots)
            self._counts.transform_s += time.perf_counter() - started
        batch = Batch(fields, step=step, lane=lane, samples=samples, slots=slots, weight=weight)
        return to_tensors(batch, pin=self._pin) if self._tensors else batch
