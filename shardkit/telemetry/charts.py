"""A run over time, in evenly spaced points: what charts draw. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from shardkit.telemetry.intervals import Interval, intervals
from shardkit.telemetry.reading import RunTelemetry
from shardkit.telemetry.records import Record

__all__ = ["chart_series", "lane_history", "lane_moves"]

_POINTS: Final = 90
_MOVES: Final = 200
_ROWS: Final = 60
_SAME_MOVE_S: Final = 1.0


def chart_series(telemetry: RunTelemetry, at: float) -> dict[str, Any]:
    """Rates of the whole run.

    Returns:
        `time`: (n,) middle of each point, seconds since the epoch; `width_s`; and lists of n: `samples_per_s`,
        `wait_share` (of all ranks' time, waiting for data), `peers_share` (waiting for other ranks), `failures` (blocks
        that failed verification), `lag_bytes` (None where no source tells), `bytes_per_s`: source → list;
        `busy_by_rank`: rank → seconds of its own work per step.
    """
    series = {key: intervals(records) for key, records in telemetry.series.items()}
    every = [one for found in series.values() for one in found]
    if not every:
        return {"time": [], "width_s": 0.0}
    typical = max(one.last.interval_s for one in every)
    begin, at = _covered([found for found in series.values() if found], typical, at)
    width = max(typical, (at - begin) / _POINTS)
    points = max(1, int(-(-(at - begin) // width)))
    grid = _Grid(at - points * width, width, points)
    present = grid.spread(every, lambda one: one.seconds)
    busy = {
        str(rank): _ratios(
            grid.spread(series[rank, 0], lambda one: one.busy_s),
            grid.spread(series[rank, 0], lambda one: one.steps),
        )
        for rank in telemetry.ranks
    }
    return {
        "time": [round(grid.begin + (i + 0.5) * width, 3) for i in range(points)],
        "width_s": width,
        "samples_per_s": [
            value / width for value in grid.spread(every, lambda one: one.delta("loader.samples"))
        ],
        "wait_share": _ratios(grid.spread(every, _data_wait), present, most=1.0),
        "peers_share": _ratios(grid.spread(every, lambda one: one.waiting_s), present, most=1.0),
        "failures": grid.spread(every, lambda one: one.verification_failures),
        "bytes_per_s": _byte_series(grid, every),
        "busy_by_rank": busy,
        "lag_bytes": _lag_series(grid, telemetry),
    }


def _covered(series: Sequence[Sequence[Interval]], typical: float, at: float) -> tuple[float, float]:
    """The time that all ranks speak of, where they began and ended together: half-filled points mislead."""
    firsts, lasts = [one[0].first.time for one in series], [one[-1].last.time for one in series]
    begin = max(firsts) if max(firsts) - min(firsts) < 0.25 * (max(lasts) - min(firsts)) else min(firsts)
    together = [last for last in lasts if last > max(lasts) - 5 * typical]
    return begin, min(together) if at - max(lasts) < 5 * typical else at


class _Grid:
    """Points of equal width; what grew in an interval is spread over the points that it covers."""

    def __init__(self, begin: float, width: float, points: int) -> None:
        self.begin, self.width, self.points = begin, width, points

    def spread(self, found: Sequence[Interval], amount: Any) -> list[float]:
        sums = [0.0] * self.points
        for one in found:
            value = amount(one)
            if not value:
                continue
            first = (one.first.time - self.begin) / self.width
            last = (one.last.time - self.begin) / self.width
            for point in range(max(0, int(first)), min(self.points, int(last) + 1)):
                covered = min(last, point + 1) - max(first, point)
                if covered > 0:
                    sums[point] += value * covered / (last - first)
        return sums


def _ratios(above: list[float], below: list[float], most: float | None = None) -> list[float | None]:
    found = [a / b if b > 0 else None for a, b in zip(above, below, strict=True)]
    return found if most is None else [None if one is None else min(most, one) for one in found]


def _data_wait(one: Interval) -> float:
    return one.delta("trainer.data_s" if one.has_trainer else "loader.consumer_wait_s")


def _byte_series(grid: _Grid, every: Sequence[Interval]) -> dict[str, list[float]]:
    names = {name for one in every for name in one.last.values if name.startswith("reads.bytes_from_")}
    names.add("blocks.local_bytes")
    found = {}
    for name in sorted(names):
        values = grid.spread(every, lambda one, name=name: one.delta(name))
        if any(values):
            source = "disk" if name == "blocks.local_bytes" else name.removeprefix("reads.bytes_from_")
            found[source] = [value / grid.width for value in values]
    return found


def _lag_series(grid: _Grid, telemetry: RunTelemetry) -> list[float | None]:
    told: list[float | None] = [None] * grid.points
    for records in telemetry.series.values():
        for record in records:
            place = int((record.time - grid.begin) / grid.width)
            if "replication.policies" in record.values and 0 <= place < grid.points:
                told[place] = record.value("replication.lag_bytes")
    return told


def lane_moves(ranks: Mapping[int, Sequence[Record]]) -> list[dict[str, Any]]:
    """Lanes that changed hands, oldest first, as the ranks' own records show it."""
    owners: dict[int, int] = {}
    moves: list[dict[str, Any]] = []
    for time, step, rank, lanes in _claims(ranks):
        for lane in lanes:
            before = owners.get(lane)
            if before is not None and before != rank:
                moves.append({"time": time, "step": step, "lane": lane, "from": before, "to": rank})
            owners[lane] = rank
    return moves[-_MOVES:]


def lane_history(ranks: Mapping[int, Sequence[Record]]) -> list[dict[str, Any]]:
    """Rows of the lane grid: at each change, {"time", "step", "owners": rank of each lane}."""
    owners: dict[int, int] = {}
    rows: list[dict[str, Any]] = []
    claims = _claims(ranks)
    count = max((lanes[-1] for *_, lanes in claims), default=-1) + 1
    for time, step, rank, lanes in claims:
        before = dict(owners)
        owners |= dict.fromkeys(lanes, rank)
        if owners != before:
            shown = [owners.get(lane, -1) for lane in range(count)]
            if rows and (-1 in rows[-1]["owners"] or time - rows[-1]["time"] < _SAME_MOVE_S):
                rows[-1] = {"time": time, "step": step, "owners": shown}  # ranks speak one after the other
            else:
                rows.append({"time": time, "step": step, "owners": shown})
    return rows[-_ROWS:]


def _claims(ranks: Mapping[int, Sequence[Record]]) -> list[tuple[float, int, int, tuple[int, ...]]]:
    """(time, step, rank, lanes) wherever a rank's lanes are others than in its record before."""
    claims = []
    for rank, records in ranks.items():
        before: tuple[int, ...] = ()
        for record in records:
            if record.lanes != before and record.lanes:
                claims.append((record.time, int(record.value("loader.step")), rank, record.lanes))
            before = record.lanes or before
    return sorted(claims)
