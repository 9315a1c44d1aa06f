"""The post-mortem archive of a run, redacted: one .tar.gz of what explains a night, and what the night cost."""

from __future__ import annotations

import gzip
import io
import json
import os
import platform
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

from shardkit.ranges import parse_duration
from shardkit.telemetry import RunTelemetry, read_events, read_run
from shardkit.telemetry.intervals import Interval, intervals
from shardkit.telemetry.reading import check_run
from shardkit.telemetry.recorder import request_stacks, telemetry_directory
from shardkit.telemetry.records import Record, read_lines
from shardkit.telemetry.redaction import redact_document, redactor
from shardkit_tools.observing.run_view import clock_text, event_text, view_run
from shardkit_tools.texts import bytes_text, clean, duration_text

DECISIONS: Final = (
    "start", "stop", "end", "configuration", "rebalance", "anomaly", "anomaly_over", "control", "control_changed",
    "control_kept", "control_taken_back", "control_refused", "rank_lost", "regroup", "recovered", "read_failovers",
    "read_circuit_opened", "read_circuit_closed", "read_healed",
)  # fmt: skip
"""Events that a report lists as decisions."""

_TAIL_BYTES: Final = 8 << 20
_MOST_BYTES: Final = 16 << 20
_PACKAGES: Final = (
    "shardkit",
    "numpy",
    "pyarrow",
    "zstandard",
    "xxhash",
    "scipy",
    "torch",
    "obstore",
    "boto3",
    "fsspec",
)

_CONTENT: Final = """In here: events.jsonl, decisions.json, summary.json, outage.json (how the loss was counted),
slow_blocks.json, versions.json, run.json, telemetry/ (records of every rank), stacks/ (of its threads), metrics/.
Credentials, and what looks like one, are replaced by [redacted]. No sample data is in here.
"""

Archive = Mapping[str, bytes]
"""Path in the archive → bytes."""


def parse_since(text: str) -> float:
    """Seconds of ``2h``, ``30min``, ``1d``; infinity for ``all``.

    Raises:
        ConfigurationError: it is something else.
    """
    return float("inf") if text == "all" else parse_duration(text, "--since (a time, or all)")


def collect(run: Path, since_s: float, *, stacks_wait_s: float = 0.0, now: float | None = None) -> Archive:
    """What goes into the archive, redacted.

    Args:
        run: directory.
        since_s: so long before its newest record or event.
        stacks_wait_s: ask live ranks for their stacks, and wait at most so long for them.
        now: seconds since the epoch.

    Raises:
        NotFoundError: there is no run.
    """
    check_run(run)
    asked = _ask_for_stacks(run, stacks_wait_s)
    now = time.time() if now is None else now
    everything, all_events = read_run(run, tail_bytes=_TAIL_BYTES), read_events(run)
    newest = max(everything.newest, max((float(event["time"]) for event in all_events), default=0.0))
    begin = newest - since_s
    telemetry = read_run(run, since=begin, tail_bytes=_TAIL_BYTES)
    events = [event for event in all_events if event["time"] >= begin]
    settings = _settings(run)
    log = (
        settings.get("configuration", {}).get("log", {})
        if isinstance(settings.get("configuration"), dict)
        else {}
    )
    cost = outage_cost(telemetry, price_per_hour=_number(log, "price_per_hour"), watts=_number(log, "watts"))
    view = view_run(run, now)
    apply = redactor()
    documents: dict[str, Any] = {
        "summary.json": view,
        "outage.json": cost,
        "decisions.json": [event for event in events if event["event"] in DECISIONS],
        "versions.json": _versions(settings),
        "slow_blocks.json": view["slow_blocks"],
        "run.json": settings,
    }
    files = {name: _json(redact_document(document, apply)) for name, document in documents.items()}
    files["events.jsonl"] = _lines(redact_document(event, apply) for event in events)
    for (rank, worker), records in telemetry.series.items():
        name = f"telemetry/rank-{rank:05d}{f'.worker-{worker:03d}' if worker else ''}.jsonl"
        files[name] = _lines(redact_document(json.loads(record.to_line()), apply) for record in records)
    for name, text in _texts(run, asked):
        files[name] = apply(text).encode()
    files["README.txt"] = apply(_readme(run, view, cost, events, telemetry, begin)).encode()
    return dict(sorted(files.items()))


def write(archive: Archive, sink: io.BufferedIOBase, folder: str, when: int) -> None:
    """The archive as .tar.gz; the same content gives the same bytes."""
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=sink, mtime=when) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for name, data in archive.items():
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), when, 0o644
            tar.addfile(entry, io.BytesIO(data))


def _ask_for_stacks(run: Path, wait_s: float) -> float:
    """Ask live ranks for their stacks; returns when that was, 0 where nobody is alive."""
    telemetry = read_run(run, tail_bytes=64 << 10)
    alive = [one[-1] for one in telemetry.series.values()
             if one[-1].state != "ended" and time.time() - one[-1].time < 5 * one[-1].interval_s + 5]  # fmt: skip
    if not wait_s or not alive:
        return 0.0
    try:
        asked = request_stacks(run)
    except OSError:
        return 0.0  # a run that this user may only read
    deadline = time.monotonic() + min(wait_s, 2 * max(one.interval_s for one in alive) + 1)
    while time.monotonic() < deadline:
        fresh = [
            path
            for path in telemetry_directory(run).glob("rank-*.stacks.txt")
            if path.stat().st_mtime >= asked
        ]
        if len(fresh) >= len(alive):
            break
        time.sleep(0.05)
    return asked


def _settings(run: Path) -> dict[str, Any]:
    try:
        path = run / "run.json"
        found = json.loads(path.read_bytes()) if path.stat().st_size < _MOST_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _number(settings: object, name: str) -> float:
    value = settings.get(name) if isinstance(settings, Mapping) else None
    return float(value) if isinstance(value, (int, float)) else 0.0


def _texts(run: Path, asked: float) -> Iterator[tuple[str, str]]:
    """Stacks, the control file and the end of the trainer's metrics."""
    directory = telemetry_directory(run)
    for path in sorted(directory.glob("rank-*.stacks.txt")) if directory.is_dir() else ():
        note = "" if path.stat().st_mtime >= asked else "(older than this report)\n"
        yield f"stacks/{path.name}", note + _text(path)
    if (run / "control.toml").is_file():
        yield "control.toml", _text(run / "control.toml")
    metrics = read_lines(run / "metrics" / "train.jsonl", 1 << 20)
    if metrics:
        yield "metrics/train.jsonl", b"\n".join(metrics).decode(errors="replace") + "\n"


def _text(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        return file.read(1 << 20).decode(errors="replace")


def _versions(settings: Mapping[str, Any]) -> dict[str, Any]:
    here = {}
    for name in _PACKAGES:
        try:
            here[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    here |= {"python": platform.python_version(), "system": platform.system(), "machine": platform.machine()}
    return {"run": settings.get("software", {}), "report": here}


def _readme(
    run: Path, view: Mapping[str, Any], cost: Mapping[str, Any], events: Sequence[Mapping[str, Any]],
    telemetry: RunTelemetry, begin: float,
) -> str:  # fmt: skip
    bottleneck = view["bottleneck"]["text"] if view["bottleneck"] else "no steps"
    told = [f"{clock_text(event['time'])}  {clean(str(event['event']))}  {event_text(event)}"
            for event in events if event["event"] in DECISIONS][-40:]  # fmt: skip
    reads = ", ".join(f"{name} {value}" for name, value in cost["reads"].items()) or "none"
    sources = ", ".join(f"{name} {bytes_text(value)}" for name, value in cost["bytes"].items()) or "none"
    first = max(begin, min((one[0].time for one in telemetry.series.values()), default=begin))
    found = ", ".join(one["kind"] for one in view["anomalies"]) or "nothing unusual"
    lost = (f"Lost: {duration_text(cost['lost_s'])} of the run ({duration_text(cost['down_s'])} down, "
            f"{cost['repeated_steps']} steps taken twice), {cost['rank_seconds'] / 3600:.2f} rank hours, "
            f"${cost['dollars']:.2f}.")  # fmt: skip
    return "\n".join([
        f"Report on run {clean(run.absolute().name)}: {view['state']}, step {view['step']}, {view['world']} ranks",
        f"from {_local(first)} to {_local(view['at'])}, local time",
        "",
        f"It is {bottleneck}. Found now: {found}.",
        lost,
        f"Reads that went another way: {reads}. Bytes by source: {sources}.",
        "",
        "Decisions and what led to them:",
        *(told or ["none"]),
        "",
        _CONTENT,
    ])  # fmt: skip


def _local(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _json(document: Any) -> bytes:
    return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"


def _lines(documents: Iterator[Any]) -> bytes:
    return b"".join(json.dumps(one, separators=(",", ":")).encode() + b"\n" for one in documents)


# ---- What an outage cost. A run's own typical pace is the yardstick: its records are cut into spans of at least ten
# seconds and ten steps; the median seconds per step of these is typical. A span that is a quarter slower than that has
# lost the difference. Between two sessions all time is lost, and the steps that were taken twice.


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
