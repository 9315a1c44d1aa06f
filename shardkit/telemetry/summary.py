"""Everything that `top` and the dashboard show, as one document of plain numbers and texts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from shardkit.notebook import page, table
from shardkit.telemetry.anomalies import SILENT_INTERVALS, SILENT_S, find_anomalies
from shardkit.telemetry.cost_skew import cost_skew
from shardkit.telemetry.intervals import (
    VERIFICATION,
    Interval,
    find_bottleneck,
    intervals,
    shares_of,
    stage_of,
    total,
    window,
)
from shardkit.telemetry.reading import RunTelemetry
from shardkit.telemetry.records import Record, lanes_text

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
        "wait_share": _ratios(grid.spread(every, lambda one: one.data_wait_s), present, most=1.0),
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


def _byte_series(grid: _Grid, every: Sequence[Interval]) -> dict[str, list[float]]:
    found = {}
    for name, source in sorted({pair for one in every for pair in byte_counters(one.last).items()}):
        values = grid.spread(every, lambda one, name=name: one.delta(name))
        if any(values):
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


_EVENTS: Final = 60
_SHARDS: Final = 48
_MAX_LANES: Final = 1 << 16

Json = dict[str, Any]


def summarise(telemetry: RunTelemetry, events: Sequence[Mapping[str, Any]], now: float) -> Json:
    """A run at a moment.

    Args:
        telemetry: its records.
        events: its events, oldest first.
        now: seconds since the epoch. A run that ended is shown as it was then.
    """
    ranks = telemetry.ranks
    at = telemetry.newest if telemetry.ended else now
    bottleneck = find_bottleneck(ranks)
    anomalies = find_anomalies(ranks, at)
    rows = [_rank(rank, records, at) for rank, records in ranks.items()]
    for row in rows:
        _add_workers(row, telemetry)
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
        "anomalies": [one.to_json() for one in anomalies],
        "bytes": _bytes(telemetry),
        "verification_failures": sum(one.value(name) for one in _lasts(telemetry) for name in VERIFICATION),
        "replication_lag_bytes": _lag(telemetry),
        "hot_shards": _hot_shards(telemetry),
        "slow_blocks": _slow_blocks(telemetry),
        "lane_loads": _lane_loads(telemetry),
        "lane_owners": _lane_owners(ranks),
        "cost_skew": cost_skew(records[-1] for records in ranks.values()),
        "lane_history": lane_history(ranks),
        "lane_moves": lane_moves(ranks),
        "series": chart_series(telemetry, at),
        "events": [dict(event) for event in events[-_EVENTS:]],
        "skipped_lines": telemetry.skipped,
    }  # fmt: skip


def run_page(telemetry: RunTelemetry) -> str:
    """A run as a notebook shows it: where it stands, what bounds it, every rank, what is unusual."""
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
    ranks = telemetry.ranks
    if not ranks:
        return "no records yet"
    if telemetry.ended:
        return "ended"
    last = max((one[-1] for one in ranks.values()), key=lambda record: record.time)
    return "silent" if now - last.time > max(SILENT_S, SILENT_INTERVALS * last.interval_s) else "running"


def _rank(rank: int, records: Sequence[Record], at: float) -> Json:
    last, found = records[-1], window(records)
    seconds = sum(one.seconds for one in found) or 1.0
    steps, cells = sum(one.steps for one in found), sum(one.cells for one in found)
    busy = sum(one.busy_s for one in found)
    waited = sum(one.data_wait_s for one in found)
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
        "samples_per_s": total(found, "loader.samples") / seconds,
        "step_s": seconds / steps if steps else 0.0,
        "busy_step_s": busy / steps if steps else 0.0,
        "cell_s": busy / cells if cells else 0.0,
        "data_share": min(1.0, waited / seconds),
        "wait_share": min(1.0, sum(one.waiting_s for one in found) / seconds),
        "bytes_per_s": sum(total(found, name) for name in byte_counters(last)) / seconds,
        "memory_bytes": last.value("process.resident_bytes"),
        "cpu_share": total(found, "process.cpu_s") / seconds,
        "verification_failures": sum(map(last.value, VERIFICATION)),
        "shares": shares_of(found) if found else {},
    }


def _add_workers(row: Json, telemetry: RunTelemetry) -> None:
    """What further DataLoader workers of a rank hand out counts as the rank's."""
    for (rank, worker), records in telemetry.series.items():
        found = window(records) if rank == row["rank"] and worker else []
        seconds = sum(one.seconds for one in found)
        if seconds:
            row["samples_per_s"] += total(found, "loader.samples") / seconds
            row["bytes_per_s"] += sum(total(found, name) for name in byte_counters(records[-1])) / seconds


def byte_counters(record: Record) -> dict[str, str]:
    """Counter of bytes → where they came from: "disk" (local shards), "cache", or a location."""
    prefix = "reads.bytes_from_"
    found = {name: name.removeprefix(prefix) for name in record.values if name.startswith(prefix)}
    return found | {"blocks.local_bytes": "disk"}


def _lasts(telemetry: RunTelemetry) -> list[Record]:
    """The last record of each session: what was counted in all."""
    found: dict[tuple[int, int, str], Record] = {}
    for (rank, worker), records in telemetry.series.items():
        for record in records:
            found[rank, worker, record.session] = record
    return list(found.values())


def _bytes(telemetry: RunTelemetry) -> dict[str, float]:
    found: dict[str, float] = {}
    for record in _lasts(telemetry):
        for name, source in byte_counters(record).items():
            found[source] = found.get(source, 0.0) + record.value(name)
    return dict(sorted(((one, n) for one, n in found.items() if n), key=lambda item: -item[1]))


def _lag(telemetry: RunTelemetry) -> float | None:
    """Bytes below the policy, as the newest record with such a source says; None where no source tells."""
    told = [
        records[-1] for records in telemetry.series.values() if "replication.policies" in records[-1].values
    ]
    return max(told, key=lambda record: record.time).value("replication.lag_bytes") if told else None


def _hot_shards(telemetry: RunTelemetry) -> list[list[Any]]:
    sums: dict[str, list[float]] = {}
    for record in _lasts(telemetry):
        for row in record.tables.get("hot_shards", ()):
            if len(row) == 3 and all(isinstance(one, (int, float)) for one in row[1:]):
                counts = sums.setdefault(str(row[0]), [0.0, 0.0])
                counts[0] += row[1]
                counts[1] += row[2]
    ordered = sorted(sums.items(), key=lambda item: (-item[1][1], item[0]))
    return [[name, *counts] for name, counts in ordered[:_SHARDS]]


def _slow_blocks(telemetry: RunTelemetry) -> list[list[Any]]:
    rows = [
        [*row, record.rank]
        for record in _lasts(telemetry)
        for row in record.tables.get("slow_blocks", ())
        if len(row) == 4 and isinstance(row[0], (int, float))
    ]
    return sorted(rows, key=lambda row: -row[0])[:16]


def _lane_loads(telemetry: RunTelemetry) -> list[list[float]]:
    """Rows of (lane, loads, seconds, bytes) over all ranks that have worked the lane, by lane."""
    sums: dict[int, list[float]] = {}
    for record in _lasts(telemetry):
        for row in record.tables.get("lane_loads", ()):
            numbers = len(row) == 4 and all(isinstance(one, (int, float)) for one in row)
            if numbers and 0 <= row[0] < _MAX_LANES:
                cost = sums.setdefault(int(row[0]), [0.0, 0.0, 0.0])
                for place, value in enumerate(row[1:]):
                    cost[place] += value
    return [[lane, *cost] for lane, cost in sorted(sums.items())]


def _lane_owners(ranks: Mapping[int, Sequence[Record]]) -> list[int]:
    """Rank of each lane, −1 where no rank says that it works it."""
    owners: dict[int, int] = {}
    for rank, records in ranks.items():
        owners |= dict.fromkeys(records[-1].lanes, rank)
    return [owners.get(lane, -1) for lane in range(max(owners, default=-1) + 1)]
