"""Everything that `top` and the dashboard show, as one document of plain numbers and texts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from shardkit.telemetry.anomalies import find_anomalies
from shardkit.telemetry.bottleneck import find_bottleneck, shares_of
from shardkit.telemetry.charts import chart_series, lane_history, lane_moves
from shardkit.telemetry.intervals import VERIFICATION, Interval, stage_of, total, window
from shardkit.telemetry.reading import RunTelemetry
from shardkit.telemetry.records import Record, lanes_text

__all__ = ["byte_sources", "summarise"]

_EVENTS: Final = 60
_SHARDS: Final = 48
_SILENT_S: Final = 15.0
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
        "lane_history": lane_history(ranks),
        "lane_moves": lane_moves(ranks),
        "series": chart_series(telemetry, at),
        "events": [dict(event) for event in events[-_EVENTS:]],
        "skipped_lines": telemetry.skipped,
    }  # fmt: skip


def _state(telemetry: RunTelemetry, now: float) -> str:
    ranks = telemetry.ranks
    if not ranks:
        return "no records yet"
    if telemetry.ended:
        return "ended"
    last = max((one[-1] for one in ranks.values()), key=lambda record: record.time)
    return "silent" if now - last.time > max(_SILENT_S, 5 * last.interval_s) else "running"


def _rank(rank: int, records: Sequence[Record], at: float) -> Json:
    last, found = records[-1], window(records)
    seconds = sum(one.seconds for one in found) or 1.0
    steps, cells = sum(one.steps for one in found), sum(one.cells for one in found)
    busy = sum(one.busy_s for one in found)
    waited = total(found, "trainer.data_s" if found and found[-1].has_trainer else "loader.consumer_wait_s")
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
        "bytes_per_s": sum(sum(byte_sources(one).values()) for one in found) / seconds,
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
            row["bytes_per_s"] += sum(sum(byte_sources(one).values()) for one in found) / seconds


def byte_sources(one: Interval) -> dict[str, float]:
    """Bytes that came in an interval, by source: "disk" (local shards), "cache", or a location."""
    names = [name for name in one.last.values if name.startswith("reads.bytes_from_")]
    found = {name.removeprefix("reads.bytes_from_"): one.delta(name) for name in names}
    found["disk"] = one.delta("blocks.local_bytes")
    return {name: value for name, value in found.items() if value}


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
        for name, value in record.values.items():
            if name.startswith("reads.bytes_from_") or name == "blocks.local_bytes":
                source = "disk" if name == "blocks.local_bytes" else name.removeprefix("reads.bytes_from_")
                found[source] = found.get(source, 0.0) + value
    return dict(sorted(found.items(), key=lambda item: -item[1]))


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
