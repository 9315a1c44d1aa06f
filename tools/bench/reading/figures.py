"""Compute medians, ranges and shares of the limit from the measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Spread", "later", "of", "rates", "shares", "spread"]


@dataclass(frozen=True)
class Spread:
    """Median and range over repeats."""

    median: float
    lowest: float
    highest: float

    def told(self, form: str = ",.0f") -> str:
        return f"{self.median:{form}} ({self.lowest:{form}}–{self.highest:{form}})"


def spread(values: Sequence[float]) -> Spread | None:
    """Return the spread of the values; None if there are none."""
    return Spread(statistics.median(values), min(values), max(values)) if values else None


def of(reader: dict[str, Any], mode: str, epoch: int) -> list[dict[str, Any]]:
    """Return the results of one epoch of a mode, a dict per repeat."""
    return [epochs[epoch] for epochs in reader.get("epochs", {}).get(mode, ()) if len(epochs) > epoch]


def rates(reader: dict[str, Any], mode: str, epoch: int) -> list[float]:
    """Return the samples per second of one epoch, per repeat."""
    return [one["samples"] / one["seconds"] for one in of(reader, mode, epoch)]


def later(reader: dict[str, Any], mode: str) -> range:
    """Return the epochs of a mode that follow another epoch of the process; the only epoch if there is just one."""
    count = max((len(epochs) for epochs in reader.get("epochs", {}).get(mode, ())), default=0)
    return range(1 if mode in ("touched", "cold") and count > 1 else 0, count)


def shares(reader: dict[str, Any], limit: dict[str, Any], mode: str, epoch: int) -> list[float]:
    """Return the rate of an epoch over the median rate of the limit's later epochs, per repeat."""
    found = []
    for mine, theirs in zip(
        reader.get("epochs", {}).get(mode, ()), limit.get("epochs", {}).get(mode, ()), strict=False
    ):
        steady = [theirs[k] for k in later(limit, mode) if k < len(theirs)]
        if len(mine) > epoch and steady:
            rate = statistics.median(one["samples"] / one["seconds"] for one in steady)
            found.append(mine[epoch]["samples"] / mine[epoch]["seconds"] / rate)
    return found
