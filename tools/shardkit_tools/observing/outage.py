"""What stalls, restarts and detours cost a run: time, money, requests. Pure.

A run's own typical pace is the yardstick: its records are cut into spans of at least ten seconds and ten steps; the
median seconds per step of these is typical. A span that is a quarter slower than that has lost the difference. Between
two sessions all time is lost, and the steps that were taken twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Final

from shardkit.telemetry.intervals import Interval, intervals
from shardkit.telemetry.reading import RunTelemetry
from shardkit.telemetry.records import Record

__all__ = ["outage_cost"]

_SPAN_S: Final = 10.0
_SPAN_STEPS: Final = 10
_SLOWER: Final = 1.25
_TROUBLES: Final = ("retries", "refetches", "mismatches", "failovers", "hedges", "throttled", "timeouts",
                    "circuit_opened", "rebuilt", "healed")  # fmt: skip


def outage_cost(
    telemetry: RunTelemetry, *, price_per_hour: float = 0.0, watts: float = 0.0
) -> dict[str, Any]:
    """What was lost in the time that the records cover.

    Args:
        telemetry: records since some moment.
        price_per_hour: of one rank, in dollars.
        watts: of one rank.

    Returns:
        `lost_s` of the run, `lost_spans` [{"from", "to", "lost_s", "steps"}], `down_s`, `repeated_steps`,
        `rank_seconds`, `dollars`, `joules`, `reads` kind → count, `bytes` source → bytes, `typical_step_s`.
    """
    ranks = telemetry.ranks
    records = ranks[min(ranks)] if ranks else []
    spans = _spans(intervals(records))
    paces = [span["productive_s"] / span["steps"] for span in spans if span["steps"]]
    typical = median(paces) if paces else 0.0
    slow = []
    for span in spans:
        lost = span["productive_s"] - span["steps"] * typical
        if typical and span["productive_s"] > _SLOWER * span["steps"] * typical:
            slow.append(
                {"from": span["from"], "to": span["to"], "steps": span["steps"], "lost_s": round(lost, 1)}
            )
    down, repeated = _between_sessions(records)
    lost = sum(one["lost_s"] for one in slow) + down + repeated * typical
    rank_seconds = lost * telemetry.world
    return {
        "typical_step_s": round(typical, 4),
        "lost_s": round(lost, 1),
        "lost_spans": slow,
        "down_s": round(down, 1),
        "repeated_steps": repeated,
        "rank_seconds": round(rank_seconds, 1),
        "dollars": round(rank_seconds / 3600 * price_per_hour, 4),
        "joules": round(rank_seconds * watts, 1),
        **_reads(telemetry.series),
    }


def _spans(found: Sequence[Interval]) -> list[dict[str, Any]]:
    """Intervals joined until each span has enough of both; what is left at the end joins the last."""
    steps = sum(one.steps for one in found)
    typical = sum(one.seconds for one in found) / steps if steps else 0.0
    enough = max(_SPAN_S, _SPAN_STEPS * typical)
    spans: list[dict[str, Any]] = []
    for one in found:
        productive = one.seconds - one.delta("trainer.evaluation_s") - one.delta("trainer.checkpoint_s")
        if (
            not spans
            or spans[-1]["to"] - spans[-1]["from"] >= enough
            or spans[-1]["session"] != one.last.session
        ):
            spans.append(
                {"from": one.first.time, "steps": 0.0, "productive_s": 0.0, "session": one.last.session}
            )
        spans[-1]["to"] = one.last.time
        spans[-1]["steps"] += one.steps
        spans[-1]["productive_s"] += max(0.0, productive)
    if len(spans) > 1 and spans[-1]["to"] - spans[-1]["from"] < enough:
        last = spans.pop()
        if last["session"] == spans[-1]["session"]:
            spans[-1] |= {"to": last["to"], "steps": spans[-1]["steps"] + last["steps"],
                          "productive_s": spans[-1]["productive_s"] + last["productive_s"]}  # fmt: skip
    return spans


def _between_sessions(records: Sequence[Record]) -> tuple[float, int]:
    down, repeated = 0.0, 0
    for before, after in pairwise(records):
        if before.session != after.session:
            down += max(0.0, after.time - before.time)
            repeated += max(0, int(before.value("loader.step") - after.value("loader.step")))
    return down, repeated


def _reads(series: Mapping[tuple[int, int], Sequence[Record]]) -> dict[str, Any]:
    every = [one for records in series.values() for one in intervals(records)]
    counts = {name: int(sum(one.delta(f"reads.remote_{name}") for one in every)) for name in _TROUBLES}
    sources: dict[str, float] = {}
    for one in every:
        for name in one.last.values:
            if name.startswith("reads.bytes_from_") or name == "blocks.local_bytes":
                source = "disk" if name == "blocks.local_bytes" else name.removeprefix("reads.bytes_from_")
                sources[source] = sources.get(source, 0.0) + one.delta(name)
    return {
        "reads": {name: value for name, value in counts.items() if value},
        "bytes": {name: int(value) for name, value in sorted(sources.items()) if value},
    }
