"""One moment of one rank (SPEC.md §2), and files of JSON lines: written by us and read as if by a stranger.

Files are appended to by several processes, and torn by kills.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

RECORD_VERSION: Final = 1
MAX_LINE_BYTES: Final = 64 << 10
"""Of a record; a longer line is skipped."""

_MAX_VALUES: Final = 512
_MAX_ROWS: Final = 64
_MAX_TEXT: Final = 200
_MAX_LANES: Final = 1 << 16
_MAX_RANK: Final = 1 << 20
_INTEGERS: Final = ("rank", "world", "worker", "pid")
_TEXTS: Final = ("host", "session", "state")


@dataclass(frozen=True, kw_only=True)
class Record:
    """What the sources of one rank gave at one moment.

    Attributes:
        time: seconds since the epoch.
        rank, world, worker: who; `worker` is 0 but in further DataLoader workers.
        host, pid, session: where; a session is the life of one registry.
        state: "running" or "ended".
        interval_s: how often records come.
        lanes: that the rank works now, ascending.
        values: `source.name` → number; a missing one is 0.
        tables: short lists of rows for people.
    """

    time: float
    rank: int
    world: int = 1
    worker: int = 0
    host: str = ""
    pid: int = 0
    session: str = ""
    state: str = "running"
    interval_s: float = 2.0
    lanes: tuple[int, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)
    tables: Mapping[str, Sequence[Sequence[Any]]] = field(default_factory=dict)

    def value(self, name: str) -> float:
        """A number, 0 where no source gave it."""
        return self.values.get(name, 0.0)

    def to_line(self) -> bytes:
        document = {
            "v": RECORD_VERSION, "time": round(self.time, 3), "rank": self.rank, "world": self.world,
            "worker": self.worker, "host": self.host, "pid": self.pid, "session": self.session, "state": self.state,
            "interval_s": self.interval_s, "lanes": lanes_text(self.lanes),
            "values": {name: _short(value) for name, value in self.values.items() if value},
            "tables": {name: list(rows)[:_MAX_ROWS] for name, rows in self.tables.items() if rows},
        }  # fmt: skip
        return json.dumps(document, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _short(value: float) -> float | int:
    return int(value) if value == int(value) else round(value, 6)


def parse_record(line: bytes) -> Record | None:
    """A record, or None where the line is not one that this version writes."""
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("v") != RECORD_VERSION:
        return None
    numbers = {name: found.get(name, 0) for name in _INTEGERS}
    texts = {name: found.get(name, "") for name in _TEXTS}
    if not all(type(one) is int and 0 <= one < 1 << 40 for one in numbers.values()):
        return None
    if not all(isinstance(one, str) and len(one) <= _MAX_TEXT for one in texts.values()):
        return None
    time: Any = found.get("time")
    interval, values = found.get("interval_s", 2.0), found.get("values", {})
    if not (_is_number(time) and _is_number(interval)) or numbers["rank"] >= _MAX_RANK:
        return None
    lanes, tables = parse_lanes(found.get("lanes", "")), found.get("tables", {})
    if lanes is None or not _are_values(values) or not _are_tables(tables):
        return None
    return Record(time=float(time), interval_s=max(0.01, float(interval)), lanes=lanes, tables=tables,
                  values={name: float(value) for name, value in values.items()}, **numbers, **texts)  # fmt: skip


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _are_values(values: object) -> bool:
    return (
        isinstance(values, dict)
        and len(values) <= _MAX_VALUES
        and all(len(name) <= _MAX_TEXT and _is_number(value) for name, value in values.items())
    )


def _are_tables(tables: object) -> bool:
    return isinstance(tables, dict) and all(
        len(name) <= _MAX_TEXT
        and isinstance(rows, list)
        and len(rows) <= _MAX_ROWS
        and all(isinstance(row, list) and len(row) <= 8 and all(map(_is_cell, row)) for row in rows)
        for name, rows in tables.items()
    )


def _is_cell(cell: object) -> bool:
    return (isinstance(cell, str) and len(cell) <= _MAX_TEXT) or _is_number(cell)


def lanes_text(lanes: Iterable[int]) -> str:
    """Ascending lanes as runs: ``0-15,32``."""
    runs: list[list[int]] = []
    for lane in lanes:
        if runs and lane == runs[-1][1] + 1:
            runs[-1][1] = lane
        else:
            runs.append([lane, lane])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def parse_lanes(text: object) -> tuple[int, ...] | None:
    """Lanes of `lanes_text`; None where the text is something else."""
    if not isinstance(text, str) or len(text) > MAX_LINE_BYTES:
        return None
    lanes: list[int] = []
    for run in text.split(",") if text else ():
        first, dash, last = run.partition("-")
        if not (first.isascii() and first.isdigit()) or (dash and not (last.isascii() and last.isdigit())):
            return None
        if len(first) > 6 or len(last) > 6:
            return None
        begin, end = int(first), int(last or first)
        if not begin <= end < _MAX_LANES or (lanes and begin <= lanes[-1]):
            return None
        lanes.extend(range(begin, end + 1))
    return tuple(lanes)


_WHOLE: Final = 1 << 62


def append_line(path: Path, line: bytes) -> int:
    """Append a line, with its newline, in one write; a last line that a kill has torn is closed first.

    The file is opened each time, because others may move or delete the files of a run.

    Returns:
        Bytes of the file afterwards.

    Raises:
        OSError: it cannot be written.
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
    """Append a JSON object, likewise."""
    append_line(path, json.dumps(document, separators=(",", ":")).encode() + b"\n")


def read_lines(path: Path, tail_bytes: int = _WHOLE) -> list[bytes]:
    """The whole lines among the last `tail_bytes` of a file; none where there is no such regular file."""
    if tail_bytes <= 0:
        return []
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return []
    with open(descriptor, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - tail_bytes)
        file.seek(start)
        data = file.read(size - start)
    lines = data.split(b"\n")
    if start:
        lines = lines[1:]  # begun before
    return [line for line in lines[:-1] if line]  # what has no newline yet is torn or under way


def read_documents(path: Path, tail_bytes: int = _WHOLE, *, most_bytes: int = _WHOLE) -> list[dict[str, Any]]:
    """The JSON objects among those lines; torn ones, those longer than `most_bytes` and other values are left out."""
    found = []
    for line in read_lines(path, tail_bytes):
        if len(line) > most_bytes:
            continue
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            found.append(document)
    return found
