"""Records of a run and its other files of JSON lines (SPEC.md §2).

Readers validate every line: several processes append to these files, and a killed process leaves a torn line.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from shardkit.errors import NotFoundError
from shardkit.notebook import NotebookPage

RECORD_VERSION: Final = 1
MAX_LINE_BYTES: Final = 64 << 10
"""Maximum bytes of a record; a longer line is skipped."""

_MAX_VALUES: Final = 512
_MAX_ROWS: Final = 64
_MAX_CELLS: Final = 8
_MAX_TEXT: Final = 200
_MAX_LANES: Final = 1 << 16
_MAX_RANK: Final = 1 << 20
_WHOLE: Final = 1 << 62
_TAIL_BYTES: Final = 256 << 10
NEWEST_BYTES: Final = 64 << 10
"""Bytes to read per rank if only its newest records are needed."""
_FILE: Final = re.compile(r"rank-([0-9]{5,7})(?:\.worker-([0-9]{3,4}))?\.jsonl")


@dataclass(frozen=True, kw_only=True)
class Record:
    """Values of all sources of one rank at one time."""

    time: float  # seconds since the epoch
    rank: int
    world: int = 1
    worker: int = 0  # above 0 in additional DataLoader workers of the rank
    host: str = ""
    pid: int = 0
    session: str = ""  # id of the registry
    state: str = "running"  # or "ended"
    interval_s: float = 2.0
    lanes: tuple[int, ...] = ()  # lanes of the rank, ascending
    values: Mapping[str, float] = field(default_factory=dict)  # source.name → number; missing values are 0
    tables: Mapping[str, Sequence[Sequence[Any]]] = field(default_factory=dict)  # name → short rows

    def value(self, name: str) -> float:
        """Return a value, or 0 if no source reported it."""
        return self.values.get(name, 0.0)

    def to_line(self) -> bytes:
        document = {
            "v": RECORD_VERSION,
            **vars(self),
            "time": round(self.time, 3),
            "lanes": lanes_text(self.lanes),
            "values": {
                name: int(value) if value == int(value) else round(value, 6)
                for name, value in self.values.items()
                if value
            },
            "tables": {name: list(rows)[:_MAX_ROWS] for name, rows in self.tables.items() if rows},
        }
        return json.dumps(document, separators=(",", ":"), allow_nan=False).encode() + b"\n"


_Text = Annotated[str, Meta(max_length=_MAX_TEXT)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 40)]
_Row = Annotated[list[int | float | _Text], Meta(max_length=_MAX_CELLS)]


class _Line(msgspec.Struct, kw_only=True):
    """A line of a file of records: lanes are text, and unknown fields are ignored."""

    v: Literal[1]
    time: float
    rank: Annotated[int, Meta(ge=0, lt=_MAX_RANK)] = 0
    world: _Count = 1
    worker: _Count = 0
    host: _Text = ""
    pid: _Count = 0
    session: _Text = ""
    state: _Text = "running"
    interval_s: float = 2.0
    lanes: str = ""
    values: Annotated[dict[_Text, float], Meta(max_length=_MAX_VALUES)] = {}
    tables: dict[_Text, Annotated[list[_Row], Meta(max_length=_MAX_ROWS)]] = {}


_decoder: Final = msgspec.json.Decoder(_Line)


def parse_record(line: bytes) -> Record | None:
    """Parse a record; return None if the line is not a valid record of this version."""
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        found = msgspec.structs.asdict(_decoder.decode(line))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    lanes = parse_lanes(found["lanes"])
    if lanes is None:
        return None
    del found["v"]
    return Record(**found | {"interval_s": max(0.01, found["interval_s"]), "lanes": lanes})


def lanes_text(lanes: Iterable[int]) -> str:
    """Format ascending lanes as runs: ``0-15,32``."""
    runs: list[list[int]] = []
    for lane in lanes:
        if runs and lane == runs[-1][1] + 1:
            runs[-1][1] = lane
        else:
            runs.append([lane, lane])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


_RUN: Final = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


def parse_lanes(text: object) -> tuple[int, ...] | None:
    """Parse the text of `lanes_text`; return None if it is invalid."""
    if not isinstance(text, str) or len(text) > MAX_LINE_BYTES:
        return None
    lanes: list[int] = []
    for run in text.split(",") if text else ():
        match = _RUN.fullmatch(run)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < _MAX_LANES or (lanes and first <= lanes[-1]):
            return None
        lanes.extend(range(first, last + 1))
    return tuple(lanes)


# ---- Files of JSON lines


def append_line(path: Path, line: bytes) -> int:
    """Append a line, which includes its newline, in one write; end a torn last line first.

    The file is opened each time, because other processes may move or delete the files of a run.

    Returns:
        Size of the file after the write, in bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        return size + os.write(descriptor, line)
    finally:
        os.close(descriptor)


def append_document(path: Path, document: Mapping[str, object]) -> None:
    """Append a JSON object as one line."""
    append_line(path, json.dumps(document, separators=(",", ":")).encode() + b"\n")


def read_lines(path: Path, tail_bytes: int = _WHOLE) -> list[bytes]:
    """Return the complete lines in the last ``tail_bytes`` of a file; none if it is not a regular file."""
    if tail_bytes <= 0:
        return []
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return []
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return []
    with open(descriptor, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - tail_bytes)
        file.seek(start)
        lines = file.read(size - start).split(b"\n")
    # the first line may begin earlier; a last line without newline is torn or being written
    return [line for line in lines[1 if start else 0 : -1] if line]


def read_documents(path: Path, tail_bytes: int = _WHOLE, *, most_bytes: int = _WHOLE) -> list[dict[str, Any]]:
    """Return the JSON objects of `read_lines`, without invalid lines and lines longer than ``most_bytes``."""
    parsed = (json_object(line) for line in read_lines(path, tail_bytes) if len(line) <= most_bytes)
    return [one for one in parsed if one is not None]


def json_object(text: object) -> dict[str, Any] | None:
    """Parse a JSON object from text or bytes; return None if it is anything else."""
    try:
        value = json.loads(text)  # type: ignore[arg-type]  # what somebody else wrote; TypeError where it is no text
    except (ValueError, TypeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


# ---- The files of a run


def telemetry_directory(run: Path) -> Path:
    """Return the directory of a run's records."""
    return run / "telemetry"


def record_path(run: Path, rank: int, worker: int = 0) -> Path:
    """Return the path of the records of one rank, or of one of its additional workers."""
    more = f".worker-{worker:03d}" if worker else ""
    return telemetry_directory(run) / f"rank-{rank:05d}{more}.jsonl"


def check_run(run: Path) -> Path:
    """Return ``run`` if it is the directory of a run.

    Raises:
        NotFoundError: it does not exist, or has none of the files of a run.
    """
    known = ("telemetry", "events.jsonl", "run.json", "journal", "ledger")
    if not any((run / name).exists() for name in known):
        what = "is no run directory" if run.is_dir() else "does not exist"
        raise NotFoundError(
            f"run {run} {what}: expected a folder with {', '.join(known)} in it; name the run's folder"
        )
    return run


@dataclass(frozen=True)
class RunTelemetry(NotebookPage):
    """Records of all ranks of a run."""

    series: Mapping[tuple[int, int], Sequence[Record]] = field(default_factory=dict)
    """(rank, worker) → its records, oldest first, at least one each."""
    skipped: int = 0  # number of invalid lines

    @property
    def newest(self) -> float:
        """Time of the newest record in seconds since the epoch, or 0 without records."""
        return max((one[-1].time for one in self.series.values()), default=0.0)

    @property
    def world(self) -> int:
        """World size in the newest record, or 0 without records."""
        last = max((one[-1] for one in self.series.values()), key=lambda record: record.time, default=None)
        return 0 if last is None else last.world

    @property
    def ranks(self) -> dict[int, Sequence[Record]]:
        """Records of the first worker of each rank of the present world."""
        world, found = self.world, sorted(self.series.items())
        return {rank: records for (rank, worker), records in found if worker == 0 and rank < world}

    @property
    def ended(self) -> bool:
        """True if every rank of the present world has ended its session."""
        ranks = self.ranks.values()
        return bool(ranks) and all(one[-1].state == "ended" for one in ranks)


def read_run(run: Path, *, since: float = 0.0, tail_bytes: int = _TAIL_BYTES) -> RunTelemetry:
    """Read the records of all ranks.

    Records before `since` (seconds since the epoch) are left out. At most `tail_bytes` are read of each rank.
    """
    series: dict[tuple[int, int], list[Record]] = {}
    skipped = 0
    directory = telemetry_directory(run)
    present = os.listdir(directory) if directory.is_dir() else []
    # a file may have been renamed to .1 since it was listed
    for name in sorted({one.removesuffix(".1") for one in present}):
        match = _FILE.fullmatch(name)
        if match is None:
            continue
        owner = int(match[1]), int(match[2] or 0)
        lines = read_lines(directory / name, tail_bytes)
        newer = _records(lines, owner)
        lines_before = read_lines(directory / f"{name}.1", tail_bytes - sum(len(line) + 1 for line in lines))
        older = _records(lines_before, owner)
        skipped += len(lines) + len(lines_before) - len(newer) - len(older)
        # the newer file is read first; if it was renamed in between, its records are read twice
        records = [*(one for one in older if not newer or one.time < newer[0].time), *newer]
        if records := [one for one in records if one.time >= since]:
            series[owner] = records
    return RunTelemetry(series, skipped)


def _records(lines: Iterable[bytes], owner: tuple[int, int]) -> list[Record]:
    parsed = map(parse_record, lines)
    return [one for one in parsed if one is not None and (one.rank, one.worker) == owner]


def read_events(run: Path, *, since: float = 0.0, tail_bytes: int = 4 << 20) -> list[dict[str, Any]]:
    """Read the events of a run since a time, in file order; invalid lines are omitted."""
    found = read_documents(run / "events.jsonl", tail_bytes, most_bytes=MAX_LINE_BYTES)
    return [one for one in found if isinstance(one.get("event"), str) and _time(one) >= since]


def _time(event: Mapping[str, Any]) -> float:
    time: Any = event.get("time")
    return float(time) if type(time) in (int, float) else -math.inf
