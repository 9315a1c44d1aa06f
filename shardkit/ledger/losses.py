"""Losses of samples in a run directory: one float32 per sample, as the trainer reports them.

A loader with ``run=`` writes two files per start of a rank, and per return to an earlier step:
``losses/<rank>-<number>.steps`` and ``….samples``. Records of the first have one size, so that the means of a million
steps are read at once; the second has the values of a step at the offset that its record names (SPEC.md, "Losses").
`bind_losses` adds their digest to the ledger.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
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
from shardkit.ledger.ledger import Ledger, StepRecords
from shardkit.stores.file_operations import explained

__all__ = ["Leg", "LossRows", "LossWriter", "Losses", "branch_legs", "former_losses", "read_losses"]

MAGIC: Final = b"shardkit losses 1\n"
HEADER: Final = np.dtype([("magic", "S24"), ("plan", "S64"), ("started", "<u8"), ("batch", "<u8")])
"""Magic, hex digest of the plan, beginning in nanoseconds since 1970, rows of a full step."""
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
_MOST_PASSES: Final = 1000  # files with losses of the same steps that are looked at


class LossWriter:
    """Writes the losses of one rank from one start of its loader on.

    `plan` is a hex digest. `since` is the time at which the rank's journal started, in nanoseconds since 1970: a clock
    may be set back.
    """

    def __init__(
        self, run: Path, *, rank: int, plan: str, batch: int, cell_size: int, since: int = 0
    ) -> None:
        self._folder, self._rank, self._started = run / "losses", rank, since
        self._plan, self._batch, self._cell_size = plan, batch, cell_size
        self._steps = self._samples = self._last = -1
        self._open()

    def _open(self) -> None:
        """Begin the next pair of files."""
        self.close()
        self._offset, self._started = 0, max(time.time_ns(), self._started + 1)
        with explained(f"write losses in {self._folder}", writing=True):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path, self._steps = new_rank_file(self._folder, self._rank, _SUFFIX)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._samples = os.open(self._path.with_suffix(".samples"), flags, 0o644)
            header = np.array([(MAGIC, self._plan.encode(), self._started, self._batch)], HEADER)
            append(self._steps, header.tobytes())

    def write(self, step: int, slots: Int64s, losses: NDArray[np.float32]) -> NDArray[np.float32]:
        """Append the losses of this rank's part of a step and return them, one per row.

        Args:
            step: number of the step.
            slots: (n,) places of the rows in the grid, lane · cell_size + slot, lane after lane.
            losses: (n,) one per row, or (lanes of this rank,) one per cell, which becomes the loss of its rows.

        Raises:
            UsageError: there are neither as many losses as rows nor as many as cells.
        """
        lane = slots // self._cell_size
        first = np.flatnonzero(np.diff(lane, prepend=-1))
        lanes = lane[first]
        if losses.shape not in ((len(slots),), (len(lanes),)):
            raise UsageError(
                f"step {step}: losses of shape {losses.shape}, expected ({len(slots)},), one per row of the batch, or "
                f"({len(lanes)},), one per cell"
            )
        if len(losses) != len(slots):
            losses = np.repeat(losses, np.diff(first, append=len(slots)))
        is_whole = len(slots) == len(lanes) * self._cell_size
        places = lanes if is_whole else slots
        body = places.astype("<u4").tobytes() + losses.astype("<f4").tobytes()
        if step < self._last:  # files that were begun later hold what was noted later
            self._open()
        self._last = step
        total = float(losses.sum(dtype=np.float64))
        record = np.array([(step, self._offset, total, len(losses), len(lanes) * is_whole, 0)], RECORD)
        record["check"] = _check(record.tobytes(), body)
        with explained(f"write {self._path}", writing=True):
            append(self._samples, body)
            append(self._steps, record.tobytes())
        self._offset += len(body)
        return losses

    def close(self) -> None:
        """Sync and close the files; may be called twice."""
        for descriptor in (self._samples, self._steps):
            if descriptor >= 0:
                os.fsync(descriptor)
                os.close(descriptor)
        self._samples = self._steps = -1


def _check(record: bytes, body: bytes) -> int:
    """Return the checksum of a record, whose own one is not covered, and its values."""
    return int(xxhash.xxh3_64_intdigest(body, seed=xxhash.xxh3_64_intdigest(record[:-8])))


class _File(NamedTuple):
    path: Path
    plan: str
    started: int
    batch: int  # rows of a full step of all ranks


class Leg(NamedTuple):
    """Steps [first, end) of a run under the plan with this hex digest."""

    plan: str
    first: int
    end: int


def branch_legs(records: StepRecords, events: Iterable[Mapping[str, Any]]) -> list[Leg]:
    """Return the ranges of steps of a branch under one plan, in order."""
    digests = {event["number"]: event["plan"] for event in events if event["kind"] == "plan"}
    plans, steps = records["plan"].astype(np.int64), records["step"].tolist()
    borders = [*np.flatnonzero(np.diff(plans, prepend=-1)).tolist(), len(records)]
    return [
        Leg(digests.get(int(plans[first]), ""), steps[first], steps[end - 1] + 1)
        for first, end in itertools.pairwise(borders)
    ]


class LossRows(NamedTuple):
    """Losses of several steps, ordered by step and place."""

    steps: Int64s  # (n,) int64
    places: Int64s  # (n,) int64 places in the grid, lane · cell_size + slot
    losses: NDArray[np.float32]  # (n,) float32


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
        self.steps: Int64s = records["step"][first].astype(np.int64)
        totals = np.add.reduceat(self._records["total"], first) if len(first) else np.empty(0)
        counts = (
            np.add.reduceat(self._records["count"].astype(np.int64), first) if len(first) else np.empty(0)
        )
        self.means: Float64s = totals / np.maximum(1, counts)
        most = np.array([one.batch for one in files], dtype=np.int64)[self._of_file]
        repeated = counts > np.maximum.reduceat(most, first) if len(first) else np.empty(0, dtype=np.bool_)
        for place in np.flatnonzero(repeated).tolist():  # few: only what a restart repeated
            self.means[place] = float(self.of_step(int(self.steps[place]))[1].mean())

    def of_step(self, step: int) -> tuple[Int64s, NDArray[np.float32]]:
        """Return the losses of a step.

        Returns:
            (places, losses): as in `LossRows`.

        Raises:
            NotFoundError: there are no losses of this step.
            FormatError: the files were changed.
        """
        rows = self.of_steps(step, step + 1)
        if not len(rows.steps):
            raise NotFoundError(f"no losses of step {step}: loader.note(batch, losses) was not called for it")
        return rows.places, rows.losses

    def of_steps(self, first: int, end: int) -> LossRows:
        """Return the losses of steps [first, end).

        Raises:
            FormatError: the files were changed.
        """
        low, high = np.searchsorted(self._records["step"], [first, end]).tolist()
        records, of_file = self._records[low:high], self._of_file[low:high]
        parts: dict[int, _Body] = {}
        for number in np.unique(of_file).tolist():
            where = np.flatnonzero(of_file == number)
            parts |= zip(where.tolist(), _bodies(records[where], self._files[number].path), strict=True)
        bodies = [parts[place] for place in range(len(records))]
        counts = [len(body.losses) for body in bodies]
        steps = np.repeat(records["step"].astype(np.int64), counts)
        places = np.concatenate([np.empty(0, np.int64), *(body.places for body in bodies)])
        losses = np.concatenate([np.empty(0, np.float32), *(body.losses for body in bodies)])
        number = np.cumsum(np.diff(steps, prepend=-1) != 0)
        keys = number * (int(places.max(initial=0)) + 1) + places
        # steps of several ranks, or repeated ones
        if (np.diff(records["step"]) <= 0).any() or (np.diff(keys) <= 0).any():
            order = np.argsort(keys, kind="stable")  # the newest loss of a place is the last
            chosen = order[np.diff(keys[order], append=-1) != 0]
            return LossRows(steps[chosen], places[chosen], losses[chosen])
        return LossRows(steps, places, losses)


class _Body(NamedTuple):
    places: Int64s
    losses: NDArray[np.float32]


def _bodies(records: NDArray[Any], path: Path) -> Iterator[_Body]:
    """Yield the values of records of a file. Values that follow each other are read at once."""
    path, checks = path.with_suffix(".samples"), records["check"].tolist()
    heads = records.view(f"V{RECORD.itemsize}").tolist()
    count, cells = (records[name].astype(np.int64) for name in ("count", "cells"))
    size, offset = 4 * (np.where(cells > 0, cells, count) + count), np.maximum(0, records["offset"])
    ends = np.flatnonzero(offset[1:] != (offset + size)[:-1]) + 1
    for begin, end in itertools.pairwise((0, *ends.tolist(), len(records))):
        data, at = b"", 0
        with contextlib.suppress(FormatError):  # a pipe, or nothing to read there
            data = read_file(path, _MOST, size=int(size[begin:end].sum()), offset=int(offset[begin])) or b""
        for place in range(begin, end):
            body, number, lanes = data[at : at + int(size[place])], int(count[place]), int(cells[place])
            at += len(body)
            is_uneven = lanes > 0 and number % lanes
            if is_uneven or len(body) != size[place] or _check(heads[place], body) != int(checks[place]):
                raise FormatError(
                    f"{path}: the losses of step {records[place]['step']} were changed or cut; restore it from a copy"
                )
            places = np.frombuffer(body, "<u4", lanes or number).astype(np.int64)
            losses = np.frombuffer(body, "<f4", number, 4 * len(places))
            if lanes:
                rows = np.arange(number // lanes)
                places = (places[:, None] * len(rows) + rows).ravel()
            yield _Body(places, losses)


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


def former_losses(run: Path, legs: Sequence[Leg], first: int, end: int) -> Iterator[Losses]:
    """Yield the losses of steps [first, end) before each file that has some of them was begun, the newest first."""
    files, parts = _read_files(run, legs)
    parts = [part[(part["step"] >= first) & (part["step"] < end)] for part in parts]
    begun = sorted((one.started for one, part in zip(files, parts, strict=True) if len(part)), reverse=True)
    for before in begun[:_MOST_PASSES]:
        known = [part if one.started < before else part[:0] for one, part in zip(files, parts, strict=True)]
        yield _joined(files, known)


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
        plan, started, batch = header["plan"].decode(errors="replace"), header["started"], header["batch"]
        files.append(_File(path, plan, int(started), int(batch)))
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
        for body in _bodies(records, one.path):
            digest.update(body.places.tobytes() + body.losses.tobytes())
    return f"sha256:{digest.hexdigest()}"
