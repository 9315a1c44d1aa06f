"""A step as it goes to the trainer, and what a loop counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.loader.batch import Batch

Int64s = NDArray[np.int64]


@dataclass(slots=True)
class LoaderCounts:
    """Of one loop: plain numbers that cost nanoseconds. Each is a key of `Loader.stats`; times are seconds."""

    assembly_blocked_s: float = 0.0  # the assembly thread waited for room
    assembly_starved_s: float = 0.0  # the trainer waited for it
    computed_s: float = 0.0  # the rank's own part of steps, where the loop says when it is done
    consumer_wait_s: float = 0.0  # the trainer waited in `next`
    gather_s: float = 0.0
    last_wait_s: float = 0.0  # of the step handed out last
    load_wait_s: float = 0.0  # gathering waited for blocks
    plan_blocked_s: float = 0.0  # the plan thread waited for room
    plan_s: float = 0.0
    plan_starved_s: float = 0.0  # gathering waited for it
    samples: int = 0
    stalls: int = 0  # reports of the watchdog
    steps: int = 0
    substitutions: int = 0  # rows replaced or masked
    transform_s: float = 0.0  # decoding and transforms, as the assembling thread sees them


class StepBatches(NamedTuple):
    """One step as it goes to the trainer."""

    step: int
    batches: list[Batch]  # one, or one per lane
    samples: Int64s  # (n,) all samples of the step, lane after lane
    lane_counts: Int64s
    replaced: list[dict[str, Any]]  # rows that were substituted or masked, as the journal records them
