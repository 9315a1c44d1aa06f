"""What a run waits for, in shares of the critical rank's time (SPEC.md §5). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shardkit.telemetry.intervals import BUSY, WAITING, Interval, total, window
from shardkit.telemetry.records import Record

__all__ = ["Bottleneck", "find_bottleneck", "shares_of"]

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
