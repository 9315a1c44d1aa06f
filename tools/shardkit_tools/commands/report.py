"""`shardkit report`: a run's last hours as one redacted .tar.gz: what explains a night, and what the night cost."""

from __future__ import annotations

import gzip
import io
import json
import os
import platform
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, BinaryIO, Final

from shardkit.ranges import parse_duration
from shardkit.telemetry import RunTelemetry, read_events, read_run
from shardkit.telemetry.diagnosis import Interval, byte_counters, intervals, is_silent, step_seconds, total
from shardkit.telemetry.recorder import request_stacks
from shardkit.telemetry.records import Record, check_run, read_lines, record_path, telemetry_directory
from shardkit.telemetry.redaction import redact_document, redactor
from shardkit_tools import console, options
from shardkit_tools.console import bytes_text, clean, duration_text
from shardkit_tools.installed import installed
from shardkit_tools.observing.run_view import clock_text, event_text, run_settings, view_run
from shardkit_tools.options import argument, option

DECISIONS: Final = (
    "start", "stop", "end", "configuration", "rebalance", "anomaly", "anomaly_over", "control", "control_changed",
    "control_kept", "control_taken_back", "control_refused", "rank_lost", "regroup", "recovered", "read_failovers",
    "read_circuit_opened", "read_circuit_closed", "read_healed",
)  # fmt: skip
"""Events that a report lists as decisions."""

_TAIL_BYTES: Final = 8 << 20
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
_DECISIONS_SHOWN: Final = 40

_CONTENT: Final = """In here: events.jsonl, decisions.json, summary.json, outage.json (how the loss was counted),
slow_blocks.json, versions.json, run.json, telemetry/ (records of every rank), stacks/ (of its threads), metrics/.
Credentials, and what looks like one, are replaced by [redacted]. No sample data is in here.
"""


def parse_since(text: str) -> float:
    """Seconds of ``2h``, ``30min``, ``1d``; infinity for ``all``."""
    return float("inf") if text == "all" else parse_duration(text, "--since (a time, or all)")


def collect(run: Path, since_s: float, *, stacks_wait_s: float = 0.0) -> dict[str, bytes]:
    """What goes into the archive, redacted: path in it → bytes."""
    check_run(run)
    asked = _ask_for_stacks(run, stacks_wait_s)
    every_event = read_events(run)
    newest = max([read_run(run).newest, *(float(event["time"]) for event in every_event)])
    telemetry = read_run(run, since=newest - since_s, tail_bytes=_TAIL_BYTES)
    events = [event for event in every_event if event["time"] >= newest - since_s]
    decisions = [event for event in events if event["event"] in DECISIONS]
    settings, view = run_settings(run), view_run(run)
    cost = outage_cost(telemetry, **_prices(settings))
    apply = redactor()
    documents = {"summary.json": view, "outage.json": cost, "decisions.json": decisions,
                 "versions.json": {"run": settings.get("software", {}), "report": _versions()},
                 "slow_blocks.json": view["slow_blocks"], "run.json": settings}  # fmt: skip
    files = {
        name: json.dumps(redact_document(document, apply), indent=1, sort_keys=True).encode() + b"\n"
        for name, document in documents.items()
    }
    files["events.jsonl"] = _lines(redact_document(event, apply) for event in events)
    for (rank, worker), records in telemetry.series.items():
        lines = (redact_document(json.loads(record.to_line()), apply) for record in records)
        files[f"telemetry/{record_path(run, rank, worker).name}"] = _lines(lines)
    for name, text in _texts(run, asked):
        files[name] = apply(text).encode()
    begin = max(
        newest - since_s, min((one[0].time for one in telemetry.series.values()), default=newest - since_s)
    )
    files["README.txt"] = apply(_readme(run, view, cost, decisions, begin)).encode()
    return dict(sorted(files.items()))


def write(archive: Mapping[str, bytes], sink: BinaryIO, folder: str, when: int) -> None:
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
    """Ask live ranks for their stacks; returns when that was, 0 where none is alive."""
    lasts = [one[-1] for one in read_run(run, tail_bytes=64 << 10).series.values()]
    alive = [one for one in lasts if one.state != "ended" and not is_silent(one, time.time())]
    if not wait_s or not alive:
        return 0.0
    try:
        asked = request_stacks(run)
    except OSError:
        return 0.0  # a run that this user may only read
    deadline = time.monotonic() + min(wait_s, 2 * max(one.interval_s for one in alive) + 1)
    while time.monotonic() < deadline:
        if sum(path.stat().st_mtime >= asked for path in _stacks(run)) >= len(alive):
            break
        time.sleep(0.05)
    return asked


def _stacks(run: Path) -> list[Path]:
    return sorted(telemetry_directory(run).glob("rank-*.stacks.txt"))


def _prices(settings: Mapping[str, Any]) -> dict[str, float]:
    found: Any = settings.get("configuration")
    for_log = found.get("log") if isinstance(found, dict) else None
    log = for_log if isinstance(for_log, dict) else {}
    named = {name: log.get(name) for name in ("price_per_hour", "watts")}
    return {name: float(value) for name, value in named.items() if isinstance(value, (int, float))}


def _texts(run: Path, asked: float) -> Iterator[tuple[str, str]]:
    """Stacks, the control file and the end of the trainer's metrics."""
    for path in _stacks(run):
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


def _versions() -> dict[str, str]:
    return installed(_PACKAGES) | {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
    }


def _readme(
    run: Path,
    view: Mapping[str, Any],
    cost: Mapping[str, Any],
    decisions: Sequence[Mapping[str, Any]],
    begin: float,
) -> str:
    bottleneck = view["bottleneck"]["text"] if view["bottleneck"] else "no steps"
    told = [f"{clock_text(event['time'])}  {clean(str(event['event']))}  {event_text(event)}"
            for event in decisions[-_DECISIONS_SHOWN:]]  # fmt: skip
    reads = ", ".join(f"{name} {value}" for name, value in cost["reads"].items()) or "none"
    sources = ", ".join(f"{name} {bytes_text(value)}" for name, value in cost["bytes"].items()) or "none"
    found = ", ".join(one["kind"] for one in view["anomalies"]) or "nothing unusual"
    lost = (f"Lost: {duration_text(cost['lost_s'])} of the run ({duration_text(cost['down_s'])} down, "
            f"{cost['repeated_steps']} steps taken twice), {cost['rank_seconds'] / 3600:.2f} rank hours, "
            f"${cost['dollars']:.2f}.")  # fmt: skip
    return "\n".join([
        f"Report on run {clean(run.absolute().name)}: {view['state']}, step {view['step']}, {view['world']} ranks",
        f"from {_local(begin)} to {_local(view['at'])}, local time",
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


def _lines(documents: Iterable[Any]) -> bytes:
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

    Returns:
        `lost_s` of the run, `lost_spans` [{"from", "to", "lost_s", "steps"}], `down_s`, `repeated_steps`,
        `rank_seconds`, `dollars`, `joules`, `reads` kind → count, `bytes` source → bytes, `typical_step_s`.
    """
    ranks = telemetry.ranks
    records = ranks[min(ranks)] if ranks else []
    spans = [(span, sum(one.steps for one in span), sum(one.training_s for one in span))
             for span in _spans(intervals(records))]  # fmt: skip
    typical = median([seconds / steps for _, steps, seconds in spans if steps] or [0.0])
    slow = [
        {"from": span[0].first.time, "to": span[-1].last.time, "steps": steps,
         "lost_s": round(seconds - steps * typical, 1)}
        for span, steps, seconds in spans
        if typical and seconds > _SLOWER * steps * typical
    ]  # fmt: skip
    gaps = [(before, after) for before, after in pairwise(records) if before.session != after.session]
    down = sum(max(0.0, after.time - before.time) for before, after in gaps)
    repeated = sum(max(0, _step(before) - _step(after)) for before, after in gaps)
    lost = sum(one["lost_s"] for one in slow) + down + repeated * typical
    rank_seconds = lost * telemetry.world
    every = [one for series in telemetry.series.values() for one in intervals(series)]
    reads = {name: int(total(every, f"reads.remote_{name}")) for name in _TROUBLES}
    counters = sorted(
        {pair for one in every for pair in byte_counters(one.last).items()}, key=lambda pair: pair[1]
    )
    return {
        "typical_step_s": round(typical, 4),
        "lost_s": round(lost, 1),
        "lost_spans": slow,
        "down_s": round(down, 1),
        "repeated_steps": repeated,
        "rank_seconds": round(rank_seconds, 1),
        "dollars": round(rank_seconds / 3600 * price_per_hour, 4),
        "joules": round(rank_seconds * watts, 1),
        "reads": {name: value for name, value in reads.items() if value},
        "bytes": {source: int(value) for name, source in counters if (value := total(every, name))},
    }


def _spans(found: Sequence[Interval]) -> list[list[Interval]]:
    """Intervals joined until each span has enough of both; what is left at the end joins the last."""
    enough = max(_SPAN_S, _SPAN_STEPS * step_seconds(found))
    spans: list[list[Interval]] = []
    for one in found:
        if not spans or _seconds(spans[-1]) >= enough or spans[-1][0].last.session != one.last.session:
            spans.append([])
        spans[-1].append(one)
    if (
        len(spans) > 1
        and _seconds(spans[-1]) < enough
        and spans[-1][0].last.session == spans[-2][0].last.session
    ):
        last = spans.pop()
        spans[-1] += last
    return spans


def _seconds(span: Sequence[Interval]) -> float:
    return span[-1].last.time - span[0].first.time if span else 0.0


def _step(record: Record) -> int:
    return int(record.value("loader.step"))


_STACKS_WAIT_S = 10.0


def report(
    run: Annotated[str, argument("RUN", "The run directory.")],
    since: Annotated[str, option("--since TIME", "How far back: 30min, 2h, 1d, all.")] = "2h",
    output: Annotated[
        str | None, option("--output -o FILE", "Where to; by default RUN-report-TIME.tar.gz here.")
    ] = None,
    stacks: Annotated[
        bool, option("--stacks/--no-stacks", "Ask live ranks what their threads are doing.")
    ] = True,
    as_json: options.JsonFlag = False,
) -> None:
    """Pack what explains the last hours of a run into one redacted archive.

    In it: events, decisions, versions, stacks, the slowest blocks, every rank's records, what the outage cost;
    README.txt sums it up. Credentials are taken out: in addresses, behind names that sound like secrets, and the values
    of such environment variables; read it all the same before you hand it on. The run is not disturbed.

    Example: shardkit report runs/mine --since 2h
    """
    path, seconds = Path(run), parse_since(since)
    archive = collect(path, seconds, stacks_wait_s=_STACKS_WAIT_S if stacks else 0.0)
    now = int(time.time())
    folder = f"{path.absolute().name}-report-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"
    target = Path(output or f"{folder}.tar.gz")
    with console.new_file(target) as sink:
        os.fchmod(sink.fileno(), 0o600)
        write(archive, sink, folder, now)
    size = target.stat().st_size
    if as_json:
        sizes = {name: len(data) for name, data in archive.items()}
        console.print_json({"archive": str(target), "bytes": size, "files": sizes})
        return
    summary = archive["README.txt"].decode().partition("\nDecisions")[0].rstrip()
    for line in [*summary.splitlines(), "", f"{target}  {bytes_text(size)}, {len(archive)} files"]:
        console.print_line(line)
