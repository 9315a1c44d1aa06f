"""Losses of samples in a run directory: one float32 per sample or per cell, as the trainer reports them.

A loader with ``run=`` writes two files per start of a rank, ``losses/<rank>-<number>.steps`` and ``….samples``. Records
of the first have one size, so that the means of a million steps are read at once; the second has the values of a step
at the offset that its record names (SPEC.md, "Losses").
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.arrays import Bools, Float64s, Int64s
from shardkit.errors import FormatError, NotFoundError, UsageError
from shardkit.ledger.journal import RankFile, append, new_rank_file, rank_files, read_file
from shardkit.ledger.ledger import Ledger
from shardkit.stores.file_operations import explained

__all__ = ["Leg", "LossRows", "LossWriter", "Losses", "former_losses", "read_losses"]

MAGIC: Final = b"shardkit losses 1\n"
HEADER: Final = np.dtype(
    [("magic", "S24"), ("plan", "S64"), ("started", "<u8"), ("batch", "<u4"), ("lanes", "<u4")]
)
"""Magic, hex digest of the plan, start in nanoseconds since 1970, rows of a full step, lanes."""
RECORD: Final = np.dtype(
    [
        ("step", "<i8"),
        ("offset", "<i8"),
        ("total", "<f8"),
        ("count", "<u4"),
        ("cells", "<u4"),
        ("check", "<u8"),
    ]
)
"""Step; offset of its values; their sum and number; lanes that precede them, or 0 if places do; XXH3-64 of both."""
_SUFFIX: Final = "steps"
_MOST: Final = 1 << 34  # bytes of a file
_MOST_PASSES: Final = 1000  # passes over steps within a start


class LossWriter:
    """Writes the losses of one rank from one start of its loader on.

    `plan` is a hex digest. `since` is the time at which the rank's journal started, in nanoseconds since 1970: a clock
    may be set back.
    """

    def __init__(
        self, run: Path, *, rank: int, plan: str, batch: int, lanes: int, cell_size: int, since: int = 0
    ) -> None:
        self._cell_size, self._offset = cell_size, 0
        folder = run / "losses"
        with explained(f"write losses in {folder}", writing=True):
            folder.mkdir(parents=True, exist_ok=True)
            self._path, self._steps = new_rank_file(folder, rank, _SUFFIX)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._samples = os.open(self._path.with_suffix(".samples"), flags, 0o644)
            header = np.array([(MAGIC, plan.encode(), max(time.time_ns(), since), batch, lanes)], HEADER)
            append(self._steps, header.tobytes())

    def write(self, step: int, slots: Int64s, losses: NDArray[np.float32]) -> None:
        """Append the losses of this rank's part of a step.

        Args:
            step: number of the step.
            slots: (n,) places of the rows in the grid, lane · cell_size + slot, lane after lane.
            losses: (n,) one per row, or (lanes of this rank,) one per cell.

        Raises:
            UsageError: there are neither as many losses as rows nor as many as cells.
        """
        lanes = slots // self._cell_size
        lanes = lanes[np.flatnonzero(np.diff(lanes, prepend=-1))]
        if losses.shape not in ((len(slots),), (len(lanes),)):
            raise UsageError(
                f"step {step}: losses of shape {losses.shape}, expected ({len(slots)},), one per row of the batch, or "
                f"({len(lanes)},), one per cell"
            )
        whole = (lanes[:, None] * self._cell_size + np.arange(self._cell_size)).ravel()
        if len(losses) == len(lanes) or np.array_equal(whole, slots):
            places, cells = lanes, len(lanes)
        else:
            places, cells = slots, 0
        body = places.astype("<u4").tobytes() + losses.astype("<f4").tobytes()
        total = float(losses.sum(dtype=np.float64))
        record = np.array([(step, self._offset, total, len(losses), cells, 0)], RECORD)
        record["check"] = _check(record[0], body)
        with explained(f"write {self._path}", writing=True):
            append(self._samples, body)
            append(self._steps, record.tobytes())
        self._offset += len(body)

    def close(self) -> None:
        """Sync and close the files; may be called twice."""
        for descriptor in (self._samples, self._steps):
            if descriptor >= 0:
                os.fsync(descriptor)
                os.close(descriptor)
        self._samples = self._steps = -1


def _check(record: Any, body: bytes) -> int:
    head = record.tobytes()[: RECORD.itemsize - 8]
    return int(xxhash.xxh3_64_intdigest(body, seed=xxhash.xxh3_64_intdigest(head)))


class _File(NamedTuple):
    path: Path
    plan: str
    started: int
    most: int  # losses of a step of all ranks


class Leg(NamedTuple):
    """Steps [first, end) of a run under the plan with this hex digest."""

    plan: str
    first: int
    end: int


class LossRows(NamedTuple):
    """Losses of several steps, ordered by step and place."""

    steps: Int64s  # (n,) int64
    # (n,) int64 places in the grid, lane · cell_size + slot, or lanes if there is one loss per cell
    places: Int64s
    losses: NDArray[np.float32]  # (n,) float32
    by_cell: Bools  # (n,) bool, True for losses of cells


class Losses:
    """Losses of a run, of all its ranks and starts; where a step was repeated, the newest count.

    Attributes:
        steps: (n,) int64, steps with losses, ascending.
        means: (n,) float64, mean loss of each of these steps.
    """

    def __init__(self, files: list[_File], records: NDArray[Any], of_file: Int64s) -> None:
        if (np.diff(records["step"]) <= 0).any():
            started = np.array([one.started for one in files], dtype=np.int64)
            order = np.lexsort((started[of_file], records["step"]))  # in a step the newest start is the last
            records, of_file = records[order], of_file[order]
        self._files, self._records, self._of_file = files, records, of_file
        first = np.flatnonzero(np.diff(records["step"], prepend=-1))
        self._starts: Int64s = np.append(first, len(records))
        self.steps: Int64s = records["step"][first].astype(np.int64)
        totals = np.add.reduceat(self._records["total"], first) if len(first) else np.empty(0)
        counts = (
            np.add.reduceat(self._records["count"].astype(np.int64), first) if len(first) else np.empty(0)
        )
        self.means: Float64s = totals / np.maximum(1, counts)
        most = np.array([one.most for one in files], dtype=np.int64)[self._of_file]
        repeated = counts > np.maximum.reduceat(most, first) if len(first) else np.empty(0, dtype=np.bool_)
        for place in np.flatnonzero(repeated).tolist():  # few: only what a restart repeated
            self.means[place] = float(self.of_step(int(self.steps[place]))[1].mean())

    def of_step(self, step: int) -> tuple[Int64s, NDArray[np.float32], bool]:
        """Return the losses of a step.

        Returns:
            (places, losses, is_by_cell): as in `LossRows`.

        Raises:
            NotFoundError: there are no losses of this step.
            FormatError: the files were changed.
        """
        rows = self.of_steps(step, step + 1)
        if not len(rows.steps):
            raise NotFoundError(f"no losses of step {step}: loader.note(batch, losses) was not called for it")
        return rows.places, rows.losses, bool(rows.by_cell[0])

    def of_steps(self, first: int, end: int) -> LossRows:
        """Return the losses of steps [first, end).

        Raises:
            FormatError: the files were changed.
        """
        low, high = np.searchsorted(self._records["step"], [first, end]).tolist()
        records = self._records[low:high]
        parts = [
            _body(record, self._files[file].path)
            for record, file in zip(records, self._of_file[low:high].tolist(), strict=True)
        ]
        counts = [len(losses) for _, losses, _ in parts]
        steps = np.repeat(records["step"].astype(np.int64), counts)
        places = np.concatenate([np.empty(0, np.int64), *(part[0] for part in parts)])
        losses = np.concatenate([np.empty(0, np.float32), *(part[1] for part in parts)])
        by_cell = np.repeat(np.array([part[2] for part in parts], dtype=np.bool_), counts)
        newest = by_cell[np.searchsorted(steps, steps, side="right") - 1] if len(steps) else by_cell
        order = np.lexsort((places, steps))  # stable: the newest loss of a place is the last
        is_last = np.ones(len(order), dtype=np.bool_)
        is_last[:-1] = (np.diff(steps[order]) != 0) | (np.diff(places[order]) != 0)
        chosen = order[is_last & (by_cell == newest)[order]]
        return LossRows(steps[chosen], places[chosen], losses[chosen], by_cell[chosen])

    def read_unchecked(self, first: int, end: int) -> tuple[Int64s, NDArray[np.float32]] | None:
        """Return the losses of ``steps[first:end]`` without comparing checksums, if they were noted alike in each step.

        Returns:
            (places, losses): (places,) as in `LossRows`, ascending, and (steps, places); None if a step was repeated,
            rows were masked, or losses are of cells. Use `of_steps` for what is shown.
        """
        steps, low, high = self.steps[first:end], int(self._starts[first]), int(self._starts[end])
        of_file = self._of_file[low:high]
        numbers = np.unique(of_file).tolist()
        if high - low != len(numbers) * len(steps):
            return None
        places, losses = [], []
        for number in numbers:
            records = self._records[low:high][of_file == number]
            found = None
            if np.array_equal(records["step"], steps):
                found = _uniform(records, self._files[number].path)
            if found is None:
                return None
            places.append(found[0])
            losses.append(found[1])
        joined = np.concatenate(places)
        order = np.argsort(joined, kind="stable")
        if (np.diff(joined[order]) == 0).any():  # two starts noted these steps
            return None
        return joined[order], np.concatenate(losses, axis=1)[:, order]


def _uniform(records: NDArray[Any], path: Path) -> tuple[Int64s, NDArray[np.float32]] | None:
    """Return (places, losses of each record) of consecutive records with the same lanes, unchecked; otherwise None."""
    count, cells, offset = (int(records[0][name]) for name in ("count", "cells", "offset"))
    size = 4 * (cells + count)
    if (
        cells in (0, count)
        or count % cells
        or (records["count"] != count).any()
        or (records["cells"] != cells).any()
    ):
        return None
    if not np.array_equal(records["offset"], offset + size * np.arange(len(records))):
        return None
    data = b""
    with contextlib.suppress(FormatError):  # a pipe, or nothing to read there
        data = (
            read_file(path.with_suffix(".samples"), _MOST, size=size * len(records), offset=max(0, offset))
            or b""
        )
    if len(data) != size * len(records):
        return None
    bodies = np.frombuffer(data, "<u4").reshape(len(records), -1)
    lanes = bodies[0, :cells].astype(np.int64)
    if (bodies[:, :cells] != bodies[0, :cells]).any():
        return None
    places = (lanes[:, None] * (count // cells) + np.arange(count // cells)).ravel()
    return places, bodies[:, cells:].view("<f4")


def _body(record: Any, path: Path) -> tuple[Int64s, NDArray[np.float32], bool]:
    count, cells, offset = int(record["count"]), int(record["cells"]), int(record["offset"])
    size = 4 * ((cells or count) + count)
    path = path.with_suffix(".samples")
    body = b""
    with contextlib.suppress(FormatError):  # a pipe, or nothing to read there
        body = read_file(path, _MOST, size=size, offset=max(0, offset)) or b""
    is_uneven = cells > 0 and count % cells
    if is_uneven or len(body) != size or _check(record, body) != int(record["check"]):
        raise FormatError(
            f"{path}: the losses of step {record['step']} were changed or cut; restore it from a copy"
        )
    places = np.frombuffer(body, "<u4", cells or count).astype(np.int64)
    losses = np.frombuffer(body, "<f4", count, 4 * len(places))
    if cells in (0, count):
        return places, losses, cells == count
    size = count // cells
    return (places[:, None] * size + np.arange(size)).ravel(), losses, False


def read_losses(run: Path, legs: Sequence[Leg] | None = None) -> Losses:
    """Read the losses of a run directory. A record that was cut off at the end of a file is left out.

    Args:
        run: the run directory.
        legs: the steps of the run by plan, ascending: losses of other plans at these steps, which a start has
            abandoned, and of later steps are left out. None: take all.

    Raises:
        NotFoundError: the run has none.
        FormatError: a file is not one of losses.
    """
    files, parts = _read_files(run, legs)
    if not files:
        raise NotFoundError(
            f"{run} has no losses: call loader.note(batch, losses) after each step of a loader with run=…, or set "
            "log.sample_losses = true in the trainer's run file"
        )
    return _joined(files, parts)


def former_losses(
    run: Path, legs: Sequence[Leg], first: int, end: int, *, since: int, before: int
) -> Iterator[Losses]:
    """Yield the losses of steps [first, end) as a start read them, the newest first.

    Losses that ranks noted before they went back to an earlier step come after those that they noted then.

    `since` and `before` are the times of the start and of the next one, whose losses are left out, in nanoseconds since
    1970.
    """
    files, parts = _read_files(run, legs)
    parts = [
        part[(part["step"] >= first) & (part["step"] < end) & (file.started < before)]
        for file, part in zip(files, parts, strict=True)
    ]
    passes = [
        np.cumsum(np.diff(part["step"], prepend=-1) <= 0) * (file.started >= since)
        for file, part in zip(files, parts, strict=True)
    ]
    last = max((int(one.max(initial=0)) for one in passes), default=-1)
    for number in range(last, max(-1, last - _MOST_PASSES), -1):
        yield _joined(files, [part[of <= number] for part, of in zip(parts, passes, strict=True)])


def _joined(files: list[_File], parts: list[NDArray[Any]]) -> Losses:
    of_file = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return Losses(files, np.concatenate([np.empty(0, RECORD), *parts]), of_file)


def _read_files(run: Path, legs: Sequence[Leg] | None) -> tuple[list[_File], list[NDArray[Any]]]:
    """Return the files of losses and the records of each, in the order in which they were written."""
    files: list[_File] = []
    parts: list[NDArray[Any]] = []
    for _, _, path in rank_files(run / "losses", _SUFFIX):
        header, records = _records(path)
        if header is None:
            continue
        by_cell = bool(len(records)) and bool((records["cells"] == records["count"]).all())
        most = int(header["lanes"] if by_cell else header["batch"])
        files.append(_File(path, header["plan"].decode(errors="replace"), int(header["started"]), most))
        if legs is not None:
            records = records[_in_legs(records["step"], files[-1].plan, legs)]
        parts.append(records)
    return files, parts


def _records(path: Path, first: int = 0, end: int | None = None) -> tuple[Any, NDArray[Any]]:
    """Return (header, records [first, end) or to the end) of a file of steps; the header is None if it is cut."""
    data = read_file(path, _MOST, size=HEADER.itemsize) or b""
    if len(data) < HEADER.itemsize:
        return None, np.empty(0, RECORD)
    header = np.frombuffer(data, HEADER, 1)[0]
    if header["magic"] != MAGIC:
        raise FormatError(f"{path} is no file of losses; restore it from a copy")
    size = None if end is None else (end - first) * RECORD.itemsize
    data = read_file(path, _MOST, size=size, offset=HEADER.itemsize + first * RECORD.itemsize) or b""
    records = np.frombuffer(data, RECORD, len(data) // RECORD.itemsize)
    if len(records) and records["step"].min() < 0:
        raise FormatError(f"{path}: a step below 0; restore it from a copy")
    return header, records


def _in_legs(steps: Int64s, plan: str, legs: Sequence[Leg]) -> Bools:
    """Return True for steps that the run consumed under this plan."""
    found = np.zeros(len(steps), dtype=np.bool_)
    for leg in legs:
        if leg.plan == plan:
            found |= (steps >= leg.first) & (steps < leg.end)
    return found


# ---- bound by the ledger

LOSSES: Final = "losses"
"""Kind of the event of losses that were written since the last such event."""

Ranges = Sequence[tuple[str, int, int]]
"""(name of a file of steps, first record, end) of each file."""


def bind_losses(ledger: Ledger) -> None:
    """Add an event with the digest of the losses written since the last such event, if there are any.

    Call it before a checkpoint is bound: the heads of the ledger then cover the losses.
    """
    bound = bound_records(ledger.event_documents())
    ranges = []
    for _, _, path in rank_files(ledger.run / "losses", _SUFFIX):
        first = bound.get(path.name, 0)
        count = len(_records(path, first)[1])
        if count:
            ranges.append((path.name, first, first + count))
    if ranges:
        digest = digest_of_losses(ledger.run, ranges)
        ledger.add_event({"kind": LOSSES, "step": ledger.next_step, "files": ranges, "digest": digest})


def bound_records(events: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of records of each file of steps that events cover."""
    found: dict[str, int] = {}
    for event in events:
        if event["kind"] == LOSSES:
            found |= {name: end for name, _, end in event["files"]}
    return found


def digest_of_losses(run: Path, ranges: Ranges) -> str:
    """Return "sha256:…" over the records of each range and their losses; the header precedes a file's first record.

    Raises:
        NotFoundError: a file is missing.
        FormatError: a file is shorter than its range, or is not one of losses.
    """
    digest = hashlib.sha256()
    for name, first, end in ranges:
        one = RankFile.of(run / "losses" / name, _SUFFIX)
        if one is None or not one.path.exists():
            raise NotFoundError(f"losses/{name[:80]} is missing")
        header, records = _records(one.path, first, end)
        if header is None or len(records) != end - first:
            raise FormatError(f"{one.path} was cut: expected {end} records; restore it from a copy")
        digest.update(header.tobytes() if first == 0 else b"")
        digest.update(records.tobytes())
        for record in records:
            places, losses, _ = _body(record, one.path)
            digest.update(places.tobytes() + losses.tobytes())
    return f"sha256:{digest.hexdigest()}"
