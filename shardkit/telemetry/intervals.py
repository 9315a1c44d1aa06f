"""Differences of records, and what a run waits for in shares of the critical rank's time (SPEC.md §5). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        """Whether the trainer reports its stages."""
        values = (
            self.last.values
        )  # zeros are left out of records: before the first step only the number of all is there
        return "trainer.steps" in values or "trainer.steps_in_all" in values

    @property
    def is_timed(self) -> bool:
        """Whether it is known what the rank computed: the trainer reports, or the loop calls `Loader.computed`."""
        return self.has_trainer or "loader.computed_s" in self.last.values

    @property
    def busy_s(self) -> float:
        """What the rank did by itself; the wait for data alone where nobody says what it computed."""
        if self.has_trainer:
            return sum(self.delta(f"trainer.{name}") for name in BUSY)
        return self.delta("loader.consumer_wait_s") + self.delta("loader.computed_s")

    @property
    def data_wait_s(self) -> float:
        """What it waited for data."""
        return self.delta("trainer.data_s" if self.has_trainer else "loader.consumer_wait_s")

    @property
    def waiting_s(self) -> float:
        """What it waited for other ranks."""
        return sum(self.delta(f"trainer.{name}") for name in WAITING)

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
    if not found:
        return []
    recent = [one for one in found if one.first.time >= found[-1].last.time - seconds]
    return recent if len(recent) >= _LEAST_INTERVALS else found[-_LEAST_INTERVALS:]


def total(found: Sequence[Interval], name: str) -> float:
    """How much a counter grew over them."""
    return sum(one.delta(name) for one in found)


def stage_of(record: Record) -> str:
    """What the trainer says that it does; empty where it does not say."""
    rows = record.tables.get("stage") or ()
    return str(rows[0][0]) if rows and rows[0] else ""


_STAGES: Final = (*BUSY, *WAITING, "checkpoint_s", "evaluation_s")


@dataclass(frozen=True)
class Bottleneck:
    """What takes most of the critical rank's time.

    Attributes:
        kind: a key of `shares`.
        share: 0 to 1.
        rank: the critical one.
        shares: all of its time; they sum to 1.
    """

    kind: str
    share: float
    rank: int
    shares: Mapping[str, float]

    @property
    def text(self) -> str:
        """``store-bound, 71 %``."""
        return f"{self.kind}-bound, {100 * self.share:.0f} %"


def find_bottleneck(ranks: Mapping[int, Sequence[Record]]) -> Bottleneck | None:
    """Of the window before the newest record; None before there is anything to tell.

    The critical rank waits least for others: the step is as slow as it is.
    """
    windows = {
        rank: found for rank, records in ranks.items() if total(found := window(records), "loader.steps")
    }
    if not windows:
        return None

    def idleness(rank: int) -> tuple[float, float, int]:
        found = windows[rank]
        seconds = sum(one.seconds for one in found)
        return (
            sum(one.waiting_s for one in found) / seconds,
            -sum(one.busy_s for one in found) / seconds,
            rank,
        )

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
    busy = {
        "store" if requests else "disk": total(found, "loader.load_wait_s"),
        "gather": total(found, "loader.gather_s"),
        "transform": total(found, "loader.transform_s"),
        "plan": total(found, "loader.plan_starved_s"),
    }
    whole = sum(busy.values())
    return {name: value / whole for name, value in busy.items()} if whole else {"data": 1.0}
