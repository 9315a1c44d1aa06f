"""Differences of records, what a run waits for, how unequal its ranks' work is (SPEC.md §5). Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from shardkit.telemetry.records import Record

WINDOW_S: Final = 60.0
_LEAST_INTERVALS: Final = 4

BUSY: Final = ("data_s", "prepare_s", "compute_s", "update_s")
"""Stages of the trainer that are the own work of a rank."""

WAITING: Final = ("exchange_s", "reduce_s")
"""Those in which it waits for other ranks."""

_STAGES: Final = (*BUSY, *WAITING, "checkpoint_s", "evaluation_s")
_LOCATION_BYTES: Final = "reads.bytes_from_"

VERIFICATION: Final = ("reads.remote_mismatches", "reads.cache_damaged", "loader.verification_failures")
"""Counters of blocks whose bytes were wrong."""


@dataclass(frozen=True)
class Interval:
    """Two consecutive records of one session."""

    first: Record
    last: Record

    @property
    def seconds(self) -> float:
        """Between the two, above 0."""
        return self.last.time - self.first.time

    def delta(self, name: str) -> float:
        return max(0.0, self.last.value(name) - self.first.value(name))

    @property
    def steps(self) -> float:
        return self.delta("loader.steps")

    @property
    def cells(self) -> float:
        return self.delta("trainer.cells") or self.delta("loader.cells")

    @property
    def has_trainer(self) -> bool:
        """Whether the trainer reports its stages. Before the first step only the number of all steps is there."""
        return not {"trainer.steps", "trainer.steps_in_all"}.isdisjoint(self.last.values)

    @property
    def is_timed(self) -> bool:
        """Whether it is known what the rank computed: the trainer reports, or the loop calls `Loader.computed`."""
        return self.has_trainer or "loader.computed_s" in self.last.values

    @property
    def busy_s(self) -> float:
        """What the rank did by itself; only the wait for data where the loop does not say what it computed."""
        if self.has_trainer:
            return sum(self.delta(f"trainer.{name}") for name in BUSY)
        return self.delta("loader.consumer_wait_s") + self.delta("loader.computed_s")

    @property
    def data_wait_s(self) -> float:
        return self.delta("trainer.data_s" if self.has_trainer else "loader.consumer_wait_s")

    @property
    def waiting_s(self) -> float:
        """What it waited for other ranks."""
        return sum(self.delta(f"trainer.{name}") for name in WAITING)

    @property
    def training_s(self) -> float:
        """Without evaluation and checkpoints."""
        between = self.delta("trainer.evaluation_s") + self.delta("trainer.checkpoint_s")
        return max(0.0, self.seconds - between)

    @property
    def verification_failures(self) -> float:
        return sum(map(self.delta, VERIFICATION))


def intervals(records: Sequence[Record]) -> list[Interval]:
    """Of consecutive records of a session whose clock went on."""
    return [
        Interval(first, last)
        for first, last in pairwise(records)
        if first.session == last.session and last.time > first.time
    ]


def window(records: Sequence[Record], seconds: float = WINDOW_S) -> list[Interval]:
    """The newest intervals: those of the last `seconds`, and at least four."""
    found = intervals(records)
    recent = [one for one in found if one.first.time >= found[-1].last.time - seconds]
    return recent if len(recent) >= _LEAST_INTERVALS else found[-_LEAST_INTERVALS:]


def total(found: Iterable[Interval], name: str) -> float:
    """How much a counter grew over them."""
    return sum(one.delta(name) for one in found)


def step_seconds(found: Sequence[Interval]) -> float:
    """Mean seconds of a step; 0 where there was none."""
    steps = sum(one.steps for one in found)
    return sum(one.seconds for one in found) / steps if steps else 0.0


def stage_of(record: Record) -> str:
    """What the trainer says that it does; empty where it does not say."""
    rows = record.tables.get("stage") or ()
    return str(rows[0][0]) if rows and rows[0] else ""


def byte_counters(record: Record) -> dict[str, str]:
    """Counter of bytes → where they came from: "disk" (local shards), "cache", or a location."""
    found = {
        name: name.removeprefix(_LOCATION_BYTES) for name in record.values if name.startswith(_LOCATION_BYTES)
    }
    return found | {"blocks.local_bytes": "disk"}


@dataclass(frozen=True)
class Bottleneck:
    """What takes most of the critical rank's time."""

    kind: str  # a key of `shares`
    share: float
    rank: int  # the critical one
    shares: Mapping[str, float]  # all of its time; they sum to 1

    @property
    def text(self) -> str:
        """``store-bound, 71 %``."""
        return f"{self.kind}-bound, {100 * self.share:.0f} %"


def find_bottleneck(ranks: Mapping[int, Sequence[Record]]) -> Bottleneck | None:
    """Of the window before the newest record; None before there is anything to tell.

    The critical rank waits least for others: the step is as slow as it is.
    """
    windows = {rank: window(records) for rank, records in ranks.items()}
    windows = {rank: found for rank, found in windows.items() if total(found, "loader.steps")}
    if not windows:
        return None

    def idleness(rank: int) -> tuple[float, float, int]:
        found = windows[rank]
        seconds = sum(one.seconds for one in found)
        waiting, busy = (sum(one.waiting_s for one in found), sum(one.busy_s for one in found))
        return waiting / seconds, -busy / seconds, rank

    critical = min(windows, key=idleness)
    shares = shares_of(windows[critical])
    kind = max(shares, key=lambda name: (shares[name], name))
    return Bottleneck(kind, shares[kind], critical, shares)


def shares_of(found: Sequence[Interval]) -> dict[str, float]:
    """Where the time of one rank went; sums to 1."""
    seconds = sum(one.seconds for one in found)
    if found[-1].has_trainer:
        parts = {name.removesuffix("_s"): total(found, f"trainer.{name}") for name in _STAGES}
        rest = "other"
    else:
        parts = {"data": total(found, "loader.consumer_wait_s"), "compute": total(found, "loader.computed_s")}
        rest = "trainer"
    known = sum(parts.values())
    data = parts.pop("data")
    parts |= {name: data * share for name, share in _data_shares(found).items()}
    parts[rest] = max(0.0, seconds - known)
    whole = max(seconds, known)
    return {name: value / whole for name, value in parts.items() if value > 0.0}


def _data_shares(found: Sequence[Interval]) -> dict[str, float]:
    """The wait for data, in the proportion in which the loader's stages were busy."""
    requests = total(found, "reads.remote_requests") + total(found, "reads.cache_misses")
    busy = {"store" if requests else "disk": total(found, "loader.load_wait_s")}
    busy |= {name: total(found, f"loader.{name}_s") for name in ("gather", "transform")}
    busy["plan"] = total(found, "loader.plan_starved_s")
    whole = sum(busy.values())
    return {name: value / whole for name, value in busy.items()} if whole else {"data": 1.0}


def cost_skew(newest: Iterable[Record]) -> dict[str, float] | None:
    """The dearest rank's cost over the mean rank's, in the steps that all ranks tell of; None where there are none.

    Args:
        newest: the newest record of each rank; those of further workers are left out.

    Returns:
        ``steps``: how many; ``plan`` and ``plain``: the mean over them, as the plan is and as it were without costs;
        ``plan_p95`` and ``plain_p95``: the 95th percentiles.
    """
    ranks = {record.rank: record for record in newest if not record.worker}
    world = max((record.world for record in ranks.values()), default=0)
    told: dict[int, list[Sequence[float]]] = {}
    for record in ranks.values():
        for row in record.tables.get("step_costs", ()):
            if len(row) == 3 and all(type(one) in (int, float) and 0 <= one < math.inf for one in row):
                told.setdefault(int(row[0]), []).append(row[1:])
    found: dict[str, float] = {}
    for place, order in enumerate(("plan", "plain")):
        columns = [[share[place] for share in shares] for shares in told.values() if len(shares) == world]
        skews = sorted(max(one) * world / sum(one) for one in columns if sum(one))
        if not skews:
            return None
        found |= {"steps": len(skews), order: sum(skews) / len(skews)}
        found[f"{order}_p95"] = skews[math.ceil(0.95 * len(skews)) - 1]
    return found
