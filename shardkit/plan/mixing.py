"""How well a stream of samples is mixed, beside a full shuffle of the same rows (SPEC.md §8)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .base_order import BaseOrder
from .permutation import Feistel, derive
from .plan import Plan

__all__ = ["Mixing", "full_shuffle", "measure", "mixing"]

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Mixing:
    """Figures of a stream of batches.

    Attributes:
        shards_per_batch: mean number of distinct shards in a batch.
        label_run: mean length of runs of one stratum in the stream.
        distance_bits: entropy, in bits, of log2 of the distance between neighbours' sample numbers.
    """

    shards_per_batch: float
    label_run: float
    distance_bits: float


def measure(order: BaseOrder, batches: Numbers) -> Mixing:
    """Figures of (steps, B) sample numbers."""
    segment = order.segments_of(batches.ravel()).reshape(batches.shape)
    shard = np.sort(order.population.segment_shard[segment], axis=1)
    label = order.population.segment_stratum[segment].ravel()
    flat = batches.ravel()
    distance = np.abs(np.diff(flat))
    # 32 classes per octave: fine enough to tell streams apart, coarse enough to fill
    classes = np.floor(np.log2(np.maximum(1, distance).astype(np.float64)) * 4).astype(np.int64)
    share = np.bincount(classes) / max(1, len(classes))
    share = share[share > 0]
    return Mixing(
        float(1 + (np.diff(shard, axis=1) > 0).sum(axis=1).mean()),
        len(label) / (1 + int((np.diff(label) != 0).sum())),
        float(-(share * np.log2(share)).sum()),
    )


def full_shuffle(rows: int, steps: int, global_batch: int, seed: int = 0) -> Numbers:
    """The first steps of an unstratified full shuffle: (steps, B) int64."""
    first = np.arange(min(rows, steps * global_batch), dtype=np.int64)
    return Feistel(derive(seed, rows), rows)(first)[: len(first) // global_batch * global_batch].reshape(
        -1, global_batch
    )


def mixing(plan: Plan, steps: int) -> tuple[Mixing, Mixing]:
    """The plan's first full steps, and as many of a full shuffle of its rows."""
    steps = max(1, min(steps, plan.population.rows // plan.global_batch))
    batches = plan.steps(plan.from_step, plan.from_step + steps).reshape(steps, -1)
    batches = batches[(batches >= 0).all(axis=1)]
    order = plan.grid.order
    if not len(batches):
        nothing = Mixing(0.0, 0.0, 0.0)
        return nothing, nothing
    return measure(order, batches), measure(
        order, full_shuffle(plan.population.rows, steps, plan.global_batch)
    )
