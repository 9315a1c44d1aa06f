"""Groups of steps → batches: gathered a step at a time, cut into cells, decoded and transformed in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.formats import Schema
from shardkit.loader.batch import Batch, to_tensors
from shardkit.loader.block_window import GroupBlocks
from shardkit.loader.gather import Allocate, RowAddresses
from shardkit.loader.row_work import BegunRows, RowWork
from shardkit.loader.statistics import LoaderCounts
from shardkit.plan import Plan

__all__ = ["Assembler", "BegunStep", "StepBatches"]

_NO_SAMPLES = np.zeros(0, dtype=np.int64)


class BegunStep(NamedTuple):
    """A step that is gathered, and in the hands of workers."""

    step: int
    rows: int
    parts: list[tuple[int, BegunRows]]  # (lane, rows) of each batch to be; lane -1: of all
    lane_counts: list[int]

    def give_up(self) -> None:
        """It will not be finished; returns once no worker has any of it."""
        for _, begun in self.parts:
            begun.give_up()


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
        counts: LoaderCounts,
        allocate: Allocate,
    ) -> None:
        self._allocate = allocate
        self._plan, self._schema, self._fields = plan, schema, list(fields)
        self._lanes, self._world, self._by_cell, self._tensors = list(lanes), world, by_cell, tensors
        self._work, self._counts, self._pin = work, counts, pin

    @property
    def ahead(self) -> int:
        """How many steps should be begun before one is finished."""
        return self._work.steps_ahead(self._plan.cell_size * len(self._lanes))

    def begin(
        self, needed: GroupBlocks, timeout_s: float, on_stall: Callable[[float], None]
    ) -> Iterator[BegunStep]:
        """The steps of a group, in order, each as soon as its blocks are there."""
        group = needed.group
        rows = RowAddresses(self._schema, self._fields, len(needed), group.which, group.row, self._allocate)
        borders = group.borders.tolist()
        for offset, counts in enumerate(group.lane_counts.tolist()):
            started = time.perf_counter()
            rows.add(*needed.wait(offset, timeout_s, on_stall))
            self._counts.load_wait_s += time.perf_counter() - started
            # those of the step are kept by `rows`, those of other steps by their window alone
            lanes = zip(self._lanes, counts, strict=True) if self._by_cell else [(-1, sum(counts))]
            step, first, end = group.numbers[offset], borders[offset], borders[offset + 1]
            parts, a = [], first
            for lane, count in lanes:
                started, b = time.perf_counter(), a + count
                columns = rows.take(a, b)
                self._counts.gather_s += time.perf_counter() - started
                # copies: a batch that is kept keeps no other step of its group
                samples, slots = group.samples[a:b].copy(), group.slots[a:b].copy()
                parts.append((lane, self._begin(columns, step, samples, slots, end - first)))
                a = b
            rows.drop(needed.done(offset))
            yield BegunStep(step, end - first, parts, counts)

    def _begin(
        self,
        fields: dict[str, Any],
        step: int,
        samples: NDArray[np.int64],
        slots: NDArray[np.int64],
        step_rows: int,
    ) -> BegunRows:
        started = time.perf_counter()
        begun = self._work.begin(fields, step, samples, slots, step_rows)
        if begun.pieces:
            self._counts.transform_s += time.perf_counter() - started
        return begun

    def finish(self, begun: BegunStep) -> StepBatches:
        """The step as it goes to the trainer; steps are finished in the order in which they were begun."""
        weight = self._weight(begun.step, begun.rows)
        batches = [self._batch(lane, part, weight) for lane, part in begun.parts]
        if len(batches) == 1:
            samples = batches[0].samples
        else:
            samples = np.concatenate([batch.samples for batch in batches]) if batches else _NO_SAMPLES
        return StepBatches(begun.step, batches, samples, begun.lane_counts, self._work.take_replaced())

    def _weight(self, step: int, rows: int) -> float:
        if self._world == 1:
            return 1.0
        everyone = self._plan.global_batch
        if rows != self._plan.cell_size * len(self._lanes):  # a short step: count what all ranks hold
            everyone = int((self._plan.step(step) >= 0).sum())
        return rows * self._world / everyone

    def _batch(self, lane: int, begun: BegunRows, weight: float) -> Batch:
        fields, samples = begun.fields, begun.samples
        if self._work:
            started = time.perf_counter()
            fields, samples = self._work.finish(begun)
            self._counts.transform_s += time.perf_counter() - started
        batch = Batch(fields, step=begun.step, lane=lane, samples=samples, slots=begun.slots, weight=weight)
        return to_tensors(batch, pin=self._pin) if self._tensors else batch
