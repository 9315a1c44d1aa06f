"""A run's records and events as they are on disk: bounded, and without trusting any of it (SPEC.md §2)."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from shardkit.errors import NotFoundError
from shardkit.notebook import Shown
from shardkit.telemetry.recorder import telemetry_directory
from shardkit.telemetry.records import MAX_LINE_BYTES, Record, parse_record, read_documents, read_lines

_NAME: Final = re.compile(r"rank-([0-9]{5,7})(?:\.worker-([0-9]{3,4}))?\.jsonl")
_TAIL_BYTES: Final = 256 << 10


@dataclass(frozen=True)
class RunTelemetry(Shown):
    """What the files of a run say.

    Attributes:
        series: (rank, worker) → its records, oldest first.
        skipped: lines that are no records.
    """

    series: Mapping[tuple[int, int], Sequence[Record]] = field(default_factory=dict)
    skipped: int = 0

    @property
    def newest(self) -> float:
        """Time of the newest record, 0 where there is none."""
        return max((one[-1].time for one in self.series.values() if one), default=0.0)

    @property
    def world(self) -> int:
        """Ranks of the world that the newest record speaks of."""
        last = [one[-1] for one in self.series.values() if one]
        return max(last, key=lambda record: record.time).world if last else 0

    @property
    def ranks(self) -> dict[int, Sequence[Record]]:
        """Rank → records of its first worker, for the ranks of the present world."""
        world = self.world
        return {
            rank: found
            for (rank, worker), found in sorted(self.series.items())
            if worker == 0 and rank < world
        }

    @property
    def ended(self) -> bool:
        """Whether every rank of the present world closed its session."""
        ranks = self.ranks.values()
        return bool(ranks) and all(one[-1].state == "ended" for one in ranks)


def check_run(run: Path) -> Path:
    """The directory of a run.

    Raises:
        NotFoundError: nothing there looks like a run.
    """
    known = ("telemetry", "events.jsonl", "run.json", "journal", "ledger")
    if not any((run / name).exists() for name in known):
        what = "is no run directory" if run.is_dir() else "does not exist"
        raise NotFoundError(
            f"run {run} {what}: expected a folder with {', '.join(known)} in it; name the run's folder"
        )
    return run


def read_run(run: Path, *, since: float = 0.0, tail_bytes: int = _TAIL_BYTES) -> RunTelemetry:
    """The records of all ranks.

    Args:
        run: directory.
        since: leave out records before this time (seconds since the epoch).
        tail_bytes: of each file, read the end only.
    """
    series: dict[tuple[int, int], list[Record]] = {}
    skipped = 0
    directory = telemetry_directory(run)
    present = os.listdir(directory) if directory.is_dir() else []
    for name in sorted(
        {one.removesuffix(".1") for one in present}
    ):  # a file may just have become the older half
        found = _NAME.fullmatch(name)
        if found is None:
            continue
        rank, worker = int(found[1]), int(found[2] or 0)
        newer, bad = _read_records(directory / name, rank, worker, tail_bytes)
        older, worse = _read_records(
            directory / f"{name}.1", rank, worker, tail_bytes - _size(directory / name)
        )
        skipped += bad + worse
        # the newer file is read first; if it became the older one in between, its records come twice
        records = [*(one for one in older if not newer or one.time < newer[0].time), *newer]
        records = [one for one in records if one.time >= since]
        if records:
            series[rank, worker] = records
    return RunTelemetry(series, skipped)


def _read_records(path: Path, rank: int, worker: int, tail_bytes: int) -> tuple[list[Record], int]:
    """The records of one file that are of this rank, and how many lines are not."""
    lines = read_lines(path, tail_bytes)
    parsed = (parse_record(line) for line in lines)
    found = [one for one in parsed if one is not None and (one.rank, one.worker) == (rank, worker)]
    return found, len(lines) - len(found)


def read_events(run: Path, *, since: float = 0.0, tail_bytes: int = 4 << 20) -> list[dict[str, Any]]:
    """Events of a run in file order, those since a time; anything that is no event is left out."""
    lines = read_documents(run / "events.jsonl", tail_bytes, most_bytes=MAX_LINE_BYTES)
    return [one for one in lines if isinstance(one.get("event"), str) and _time(one) >= since]


def _time(event: Mapping[str, Any]) -> float:
    time: Any = event.get("time")
    return float(time) if type(time) in (int, float) else -math.inf


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
