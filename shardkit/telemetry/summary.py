"""Summary of a run for `top` and the dashboard, as one document of plain numbers and texts. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from shardkit.notebook import page, table
from shardkit.telemetry.diagnosis import (
    VERIFICATION,
    Interval,
    Ranks,
    byte_counters,
    cost_skew,
    find_anomalies,
    find_bottleneck,
    intervals,
    is_silent,
    shares_of,
    stage_of,
    total,
    window,
)
from shardkit.telemetry.records import Record, RunTelemetry, lanes_text

_POINTS: Final = 90
_MOVES: Final = 200
_ROWS: Final = 60
_EVENTS: Final = 60
_SHARDS: Final = 48
_SLOW_BLOCKS: Final = 16
_MAX_LANES: Final = 1 << 16
_SAME_MOVE_S: Final = 1.0

Json = dict[str, Any]


def summarise(telemetry: RunTelemetry, events: Sequence[Mapping[str, Any]], now: float) -> Json:
    """Summarise a run at one time.

    Times are seconds since the epoch, and events are ordered by time. A run that ended is shown at its end.
    """
    ranks, lasts = telemetry.ranks, _lasts(telemetry)
    at = telemetry.newest if telemetry.ended else now
    bottleneck = find_bottleneck(ranks)
    rows = [_rank(rank, records, at, telemetry) for rank, records in ranks.items()]
    return {
        "time": now,
        "at": at,
        "state": _state(telemetry, now),
        "world": telemetry.world,
        "step": max((row["step"] for row in rows), default=0),
        "steps": max((int(records[-1].value("trainer.steps_in_all")) for records in ranks.values()), default=0),
        "samples_per_s": sum(row["samples_per_s"] for row in rows),
        "bottleneck": None if bottleneck is None else {
            "text": bottleneck.text, "kind": bottleneck.kind, "share": bottleneck.share, "rank": bottleneck.rank,
            "shares": dict(sorted(bottleneck.shares.items(), key=lambda item: -item[1])),
        },
        "ranks": rows,
        "anomalies": [one.to_json() for one in find_anomalies(ranks, at)],
        "bytes": _bytes(lasts),
        "verification_failures": sum(one.value(name) for one in lasts for name in VERIFICATION),
        "replication_lag_bytes": _lag(telemetry),
        "hot_shards": sorted(_row_sums(lasts, "hot_shards", 3, str), key=lambda row: (-row[2], row[0]))[:_SHARDS],
        "slow_blocks": _slow_blocks(lasts),
        "lane_loads": sorted(_row_sums(lasts, "lane_loads", 4, _lane)),
        "lane_owners": _owner_list({lane: rank for rank, records in ranks.items() for lane in records[-1].lanes}),
        "cost_skew": cost_skew(records[-1] for records in ranks.values()),
        "lane_history": lane_history(ranks),
        "lane_moves": lane_moves(ranks),
        "series": chart_series(telemetry, at),
        "events": [dict(event) for event in events[-_EVENTS:]],
        "skipped_lines": telemetry.skipped,
    }  # fmt: skip


def run_page(telemetry: RunTelemetry) -> str:
    """Render a run for a notebook: progress, bottleneck, ranks and anomalies."""
    found = summarise(telemetry, [], telemetry.newest)
    steps = f" of {found['steps']:,}" if found["steps"] else ""
    bound = f", {found['bottleneck']['text']}" if found["bottleneck"] else ""
    ranks = [
        (one["rank"], one["host"], one["state"], one["step"], f"{one['samples_per_s']:,.0f}",
         f"{100 * one['data_share']:.0f} %", f"{100 * one['wait_share']:.0f} %", one["lanes"])
        for one in found["ranks"]
    ]  # fmt: skip
    names = ["rank", "host", "state", "step", "samples/s", "waiting for data", "for other ranks", "lanes"]
    unusual = [(one["kind"], one["rank"], f"{one['action']}: {one['advice']}") for one in found["anomalies"]]
    return page(
        "run", found["state"], f"step {found['step']:,}{steps}{bound}", table(names, ranks),
        table(["unusual", "rank", "what to do"], unusual) if unusual else "",
    )  # fmt: skip


def _state(telemetry: RunTelemetry, now: float) -> str:
    last = max((one[-1] for one in telemetry.ranks.values()), key=lambda record: record.time, default=None)
    if last is None:
        return "no records yet"
    return "ended" if telemetry.ended else "silent" if is_silent(last, now) else "running"


def _rank(rank: int, records: Sequence[Record], at: float, telemetry: RunTelemetry) -> Json:
    last, found = records[-1], window(records)
    seconds = sum(one.seconds for one in found) or 1.0
    steps, cells = sum(one.steps for one in found), sum(one.cells for one in found)
    # without compute time, busy_s is only the wait for data
    busy = sum(one.busy_s for one in found) if found and found[-1].is_timed else None
    # samples and bytes of additional DataLoader workers count for their rank
    rates = [_rates(window(one)) for (owner, _), one in telemetry.series.items() if owner == rank]
    return {
        "rank": rank,
        "host": last.host,
        "pid": last.pid,
        "state": last.state,
        "age_s": max(0.0, at - last.time),
        "stage": stage_of(last),
        "step": int(last.value("loader.step")),
        "lanes": lanes_text(last.lanes),
        "num_lanes": len(last.lanes),
        "samples_per_s": sum(samples for samples, _ in rates),
        "step_s": seconds / steps if steps else 0.0,
        "busy_step_s": None if busy is None else busy / steps if steps else 0.0,
        "cell_s": None if busy is None else busy / cells if cells else 0.0,
        "data_share": min(1.0, sum(one.data_wait_s for one in found) / seconds),
        "wait_share": min(1.0, sum(one.waiting_s for one in found) / seconds),
        "bytes_per_s": sum(num_bytes for _, num_bytes in rates),
        "memory_bytes": last.value("process.resident_bytes"),
        "cpu_share": total(found, "process.cpu_s") / seconds,
        "verification_failures": sum(map(last.value, VERIFICATION)),
        "shares": shares_of(found) if found else {},
    }


def _rates(found: Sequence[Interval]) -> tuple[float, float]:
    """Return samples and bytes per second."""
    if not found:
        return 0.0, 0.0
    seconds = sum(one.seconds for one in found)
    num_bytes = sum(total(found, name) for name in byte_counters(found[-1].last))
    return total(found, "loader.samples") / seconds, num_bytes / seconds


# ---- Sums over all sessions of a run


def _lasts(telemetry: RunTelemetry) -> list[Record]:
    """Return the last record of each session, which has its total counts."""
    records = (one for series in telemetry.series.values() for one in series)
    return list({(one.rank, one.worker, one.session): one for one in records}.values())


def _bytes(lasts: Iterable[Record]) -> dict[str, float]:
    found: dict[str, float] = {}
    for record in lasts:
        for name, source in byte_counters(record).items():
            found[source] = found.get(source, 0.0) + record.value(name)
    return dict(sorted(((one, n) for one, n in found.items() if n), key=lambda item: -item[1]))


def _lag(telemetry: RunTelemetry) -> float | None:
    """Return the bytes below the replication policy in the newest record that reports them, or None."""
    lasts = [records[-1] for records in telemetry.series.values()]
    told = [one for one in lasts if "replication.policies" in one.values]
    return max(told, key=lambda record: record.time).value("replication.lag_bytes") if told else None


def _row_sums(lasts: Iterable[Record], name: str, width: int, key: Callable[[Any], Any]) -> list[list[Any]]:
    """Return the rows of a table summed by key, without rows that have no valid key or no numbers."""
    sums: dict[Any, list[float]] = {}
    for record in lasts:
        for row in record.tables.get(name, ()):
            if len(row) != width or not all(isinstance(one, (int, float)) for one in row[1:]):
                continue
            found = key(row[0])
            if found is not None:
                sums[found] = [
                    a + b for a, b in zip(sums.get(found, [0.0] * (width - 1)), row[1:], strict=True)
                ]
    return [[found, *counts] for found, counts in sums.items()]


def _lane(cell: Any) -> int | None:
    return int(cell) if isinstance(cell, (int, float)) and 0 <= cell < _MAX_LANES else None


def _slow_blocks(lasts: Iterable[Record]) -> list[list[Any]]:
    tables = ((record.rank, row) for record in lasts for row in record.tables.get("slow_blocks", ()))
    rows = [[*row, rank] for rank, row in tables if len(row) == 4 and isinstance(row[0], (int, float))]
    return sorted(rows, key=lambda row: -row[0])[:_SLOW_BLOCKS]


# ---- Owners of lanes


def lane_moves(ranks: Ranks) -> list[Json]:
    """Return the changes of lane owners in the records of all ranks, oldest first."""
    owners: dict[int, int] = {}
    moves: list[Json] = []
    for time, step, rank, lanes in _claims(ranks):
        for lane in lanes:
            before = owners.get(lane, rank)
            if before != rank:
                moves.append({"time": time, "step": step, "lane": lane, "from": before, "to": rank})
            owners[lane] = rank
    return moves[-_MOVES:]


def lane_history(ranks: Ranks) -> list[Json]:
    """Return the rows of the lane grid, one per change: {"time", "step", "owners": rank of each lane}."""
    claims = _claims(ranks)
    count = max((lanes[-1] for *_, lanes in claims), default=-1) + 1
    owners = [-1] * count
    rows: list[Json] = []
    for time, step, rank, lanes in claims:
        before, owners = owners, list(owners)
        for lane in lanes:
            owners[lane] = rank
        if owners == before:
            continue
        if rows and (-1 in before or time - rows[-1]["time"] < _SAME_MOVE_S):
            rows.pop()  # ranks report one change at different times
        rows.append({"time": time, "step": step, "owners": owners})
    return rows[-_ROWS:]


def _claims(ranks: Ranks) -> list[tuple[float, int, int, tuple[int, ...]]]:
    """Return (time, step, rank, lanes) of each record with lanes other than in the previous record."""
    claims = []
    for rank, records in ranks.items():
        before: tuple[int, ...] = ()
        for record in records:
            if record.lanes != before and record.lanes:
                claims.append((record.time, int(record.value("loader.step")), rank, record.lanes))
            before = record.lanes or before
    return sorted(claims)


def _owner_list(owners: Mapping[int, int]) -> list[int]:
    """Return the rank of each lane, or −1 if no rank reports it."""
    return [owners.get(lane, -1) for lane in range(max(owners, default=-1) + 1)]


# ---- Charts


def chart_series(telemetry: RunTelemetry, at: float) -> Json:
    """Return rates of the whole run over time.

    Returns:
        ``time``: n midpoints in seconds since the epoch; ``width_s``: width of a point; and lists of n values:
        ``samples_per_s``, ``wait_share`` (share of all ranks' time spent waiting for data), ``peers_share`` (waiting
        for other ranks), ``failures`` (blocks that failed verification), ``lag_bytes`` (None if unknown),
        ``bytes_per_s`` (a list per source) and ``busy_by_rank`` (seconds of own work per step, a list per rank).
    """
    series = {key: intervals(records) for key, records in telemetry.series.items()}
    every = [one for found in series.values() for one in found]
    if not every:
        return {"time": [], "width_s": 0.0}
    typical = max(one.last.interval_s for one in every)
    begin, at = _time_range([found for found in series.values() if found], typical, at)
    width = max(typical, (at - begin) / _POINTS)
    grid = _Grid(at, width, max(1, int(-(-(at - begin) // width))))
    seconds = grid.spread(every, lambda one: one.seconds)
    counters = sorted({pair for one in every for pair in byte_counters(one.last).items()})
    sources = {source: grid.rates(every, name) for name, source in counters}
    return {
        "time": [round(grid.begin + (i + 0.5) * width, 3) for i in range(grid.points)],
        "width_s": width,
        "samples_per_s": grid.rates(every, "loader.samples"),
        "wait_share": _ratios(grid.spread(every, lambda one: one.data_wait_s), seconds, most=1.0),
        "peers_share": _ratios(grid.spread(every, lambda one: one.waiting_s), seconds, most=1.0),
        "failures": grid.spread(every, lambda one: one.verification_failures),
        "bytes_per_s": {source: values for source, values in sources.items() if any(values)},
        "busy_by_rank": {
            str(rank): _ratios(
                grid.spread(series[rank, 0], lambda one: one.busy_s),
                grid.spread(series[rank, 0], lambda one: one.steps),
            )
            for rank in telemetry.ranks
        },
        "lag_bytes": _lag_series(grid, telemetry),
    }


def _time_range(series: Sequence[Sequence[Interval]], typical: float, at: float) -> tuple[float, float]:
    """Return the time range covered by all ranks if they began and ended together, otherwise by any rank.

    Points that only some ranks cover would be misleading.
    """
    firsts, lasts = [one[0].first.time for one in series], [one[-1].last.time for one in series]
    begin = max(firsts) if max(firsts) - min(firsts) < 0.25 * (max(lasts) - min(firsts)) else min(firsts)
    together = [last for last in lasts if last > max(lasts) - 5 * typical]
    return begin, min(together) if at - max(lasts) < 5 * typical else at


class _Grid:
    """Points of equal width; the growth in an interval is spread over the points that it covers."""

    def __init__(self, end: float, width: float, points: int) -> None:
        self.begin, self.width, self.points = end - points * width, width, points

    def spread(self, found: Sequence[Interval], amount: Callable[[Interval], float]) -> list[float]:
        sums = [0.0] * self.points
        for one in found:
            value = amount(one)
            if not value:
                continue
            first, last = ((record.time - self.begin) / self.width for record in (one.first, one.last))
            for point in range(max(0, int(first)), min(self.points, int(last) + 1)):
                covered = min(last, point + 1) - max(first, point)
                if covered > 0:
                    sums[point] += value * covered / (last - first)
        return sums

    def rates(self, found: Sequence[Interval], counter: str) -> list[float]:
        """Return the growth of a counter per second at each point."""
        return [value / self.width for value in self.spread(found, lambda one: one.delta(counter))]


def _ratios(above: list[float], below: list[float], most: float = float("inf")) -> list[float | None]:
    return [min(most, a / b) if b > 0 else None for a, b in zip(above, below, strict=True)]


def _lag_series(grid: _Grid, telemetry: RunTelemetry) -> list[float | None]:
    told: list[float | None] = [None] * grid.points
    for record in (one for records in telemetry.series.values() for one in records):
        place = int((record.time - grid.begin) / grid.width)
        if "replication.policies" in record.values and 0 <= place < grid.points:
            told[place] = record.value("replication.lag_bytes")
    return told
