"""The batches of one step, and the counters of a loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.loader.batch import Batch

Int64s = NDArray[np.int64]


@dataclass(slots=True)
class LoaderCounts:
    """Counters of one loop. Each is a key of `Loader.stats`; times are in seconds."""

    assembly_blocked_s: float = 0.0  # the assembly thread waited for room
    assembly_starved_s: float = 0.0  # the trainer waited for it
    computed_s: float = 0.0  # the rank's own part of steps, if it is reported
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
    transform_s: float = 0.0  # time of the assembling thread in decoding and transforms


class StepBatches(NamedTuple):
    """One step in the form that the trainer gets."""

    step: int
    batches: list[Batch]  # a single batch, or with `by_cell` one per lane
    samples: Int64s  # (n,) all samples of the step, lane after lane
    lane_counts: Int64s  # (lanes,) rows of each lane
    replaced: list[dict[str, Any]]  # rows that were substituted or masked, as the journal records them
