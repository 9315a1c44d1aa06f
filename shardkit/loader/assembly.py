"""One group of steps → batches: gathered at once, cut into steps and cells, transformed in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.formats import Schema
from shardkit.loader.batch import Batch, to_tensors
from shardkit.loader.block_window import BlockWindow
from shardkit.loader.gather import RowAddresses
from shardkit.loader.schedule import StepGroup
from shardkit.loader.transforms import BatchTransform, LazyGenerators, SampleTransform, apply_to_samples
from shardkit.plan import Plan

__all__ = ["Assembler", "StepBatches"]


class StepBatches(NamedTuple):
    """One step as it goes to the trainer."""

    step: int
    batches: list[Batch]  # one, or one per lane
    samples: NDArray[np.int64]  # (n,) all samples of the step, lane after lane
    lane_counts: list[int]

    def cells(self, lanes: Sequence[int]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """(lane, samples) of every cell, as gathered: what the ledger records."""
        first = 0
        for lane, count in zip(lanes, self.lane_counts, strict=True):
            yield lane, self.samples[first : first + count]
            first += count


class Assembler:
    """Gathers groups for one rank; see `Dataset.loader` for the settings."""

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
        transform: SampleTransform | None,
        batch_transform: BatchTransform | None,
        pool: ThreadPoolExecutor | None,
    ) -> None:
        self._plan, self._schema, self._fields = plan, schema, list(fields)
        self._lanes, self._world, self._by_cell, self._tensors = list(lanes), world, by_cell, tensors
        self._transform, self._batch_transform, self._pool = transform, batch_transform, pool

    def __call__(self, group: StepGroup, window: BlockWindow) -> list[StepBatches]:
        """The steps of a group, in order. Waits for its blocks and raises what loading them raised."""
        blocks = window.wait(group.blocks)
        rows = RowAddresses(self._schema, self._fields, blocks, group.which, group.row)
        borders = group.borders.tolist()
        steps = []
        for offset, counts in enumerate(group.lane_counts.tolist()):
            step, first, last = group.numbers[offset], borders[offset], borders[offset + 1]
            weight = self._weight(step, last - first)
            columns = rows.take(first, last)
            samples, slots = group.samples[first:last], group.slots[first:last]
            spans = self._spans(counts) if self._by_cell else [(-1, 0, last - first)]
            batches = [
                self._batch(
                    {name: _slice(value, a, b) for name, value in columns.items()}
                    if self._by_cell
                    else columns,
                    step,
                    lane,
                    samples[a:b],
                    slots[a:b],
                    weight,
                )
                for lane, a, b in spans
            ]
            steps.append(StepBatches(step, batches, samples, counts))
        return steps

    def _spans(self, counts: list[int]) -> list[tuple[int, int, int]]:
        """(lane, first row, end) of every cell of a step."""
        spans, first = [], 0
        for lane, count in zip(self._lanes, counts, strict=True):
            spans.append((lane, first, first + count))
            first += count
        return spans

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
        if self._transform is not None or self._batch_transform is not None:
            fields = self._transformed(fields, step, samples, slots)
        batch = Batch(fields, step=step, lane=lane, samples=samples, slots=slots, weight=weight)
        return to_tensors(batch) if self._tensors else batch

    def _transformed(
        self, fields: dict[str, Any], step: int, samples: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> dict[str, Any]:
        generators = LazyGenerators(self._plan.settings.seed, step, slots, self._plan.cell_size)
        if self._transform is not None:
            fields = apply_to_samples(self._transform, fields, samples, generators, self._pool)
        if self._batch_transform is not None:
            fields = dict(self._batch_transform(fields, generators))
        return fields


def _slice(value: Any, first: int, last: int) -> Any:
    if isinstance(value, tuple):
        values, borders = value
        part = borders[first : last + 1]
        return values[part[0] : part[-1]], part - part[0]
    return value[first:last]
