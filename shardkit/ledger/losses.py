"""Losses of samples in a run directory: one float32 per sample or per cell, as the trainer reports them.

A loader with ``run=`` writes two files per start of a rank, ``losses/<rank>-<number>.steps`` and ``….samples``. Records
of the first have one size, so that the means of a million steps are read at once; the second has the values of a step
at the offset that its record names (SPEC.md, "Losses").
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.errors import FormatError, NotFoundError, UsageError
from shardkit.ledger.files import append, new_rank_file, rank_files, read_file
from shardkit.stores.file_operations import explained

__all__ = ["LossWriter", "Losses", "read_losses"]

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


class LossWriter:
    """Writes the losses of one rank from one start of its loader on.

    Args:
        run: the run directory.
        rank: rank of this process.
        plan: hex digest of the plan.
        batch, lanes, cell_size: of the plan.
    """

    def __init__(self, run: Path, *, rank: int, plan: str, batch: int, lanes: int, cell_size: int) -> None:
        self._cell_size, self._offset = cell_size, 0
        folder = run / "losses"
        with explained(f"write losses in {folder}", writing=True):
            folder.mkdir(parents=True, exist_ok=True)
            self._path, self._steps = new_rank_file(folder, rank, _SUFFIX)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._samples = os.open(self._path.with_suffix(".samples"), flags, 0o644)
            header = np.array([(MAGIC, plan.encode(), time.time_ns(), batch, lanes)], HEADER)
            append(self._steps, header.tobytes())

    def write(self, step: int, slots: NDArray[np.int64], losses: NDArray[np.float32]) -> None:
        """Append the losses of this rank's part of a step.

        Args:
            step: number of the step in the run.
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
    started: int
    most: int  # losses of a step of all ranks


class Losses:
    """Losses of a run, of all its ranks and starts; where a step was repeated, the newest count.

    Attributes:
        steps: (n,) int64, steps with losses, ascending.
        means: (n,) float64, mean loss of each of these steps.
    """

    def __init__(self, files: list[_File], records: NDArray[Any], of_file: NDArray[np.int64]) -> None:
        order = np.argsort(records["step"], kind="stable")
        self._files, self._records, self._of_file = files, records[order], of_file[order]
        self.steps, first = np.unique(self._records["step"], return_index=True)
        self._ends = np.append(first[1:], len(order))
        self._first = first
        totals = np.add.reduceat(self._records["total"], first) if len(first) else np.empty(0)
        counts = (
            np.add.reduceat(self._records["count"].astype(np.int64), first) if len(first) else np.empty(0)
        )
        self.means: NDArray[np.float64] = totals / np.maximum(1, counts)
        most = np.array([one.most for one in files], dtype=np.int64)[self._of_file]
        repeated = counts > np.maximum.reduceat(most, first) if len(first) else np.empty(0, dtype=np.bool_)
        for place in np.flatnonzero(repeated).tolist():  # few: only what a restart repeated
            self.means[place] = float(self.of_step(int(self.steps[place]))[1].mean())

    def of_step(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.float32], bool]:
        """Return the losses of a step.

        Returns:
            (places, losses, is_by_cell): (n,) int64 places in the grid, lane · cell_size + slot, or lanes if there is
            one loss per cell; (n,) float32.

        Raises:
            NotFoundError: there are no losses of this step.
            FormatError: the files were changed.
        """
        place = int(np.searchsorted(self.steps, step))
        if place == len(self.steps) or self.steps[place] != step:
            raise NotFoundError(f"no losses of step {step}: loader.note(batch, losses) was not called for it")
        chosen = range(int(self._first[place]), int(self._ends[place]))
        newest_last = sorted(chosen, key=lambda i: self._files[self._of_file[i]].started)
        found: dict[int, np.float32] = {}
        is_by_cell = False
        for i in newest_last:
            record, file = self._records[i], self._files[self._of_file[i]]
            places, losses, is_by_cell = _body(record, file.path)
            found |= zip(places.tolist(), losses, strict=True)
        places = np.array(sorted(found), dtype=np.int64)
        return places, np.array([found[one] for one in places.tolist()], dtype=np.float32), is_by_cell


def _body(record: Any, path: Path) -> tuple[NDArray[np.int64], NDArray[np.float32], bool]:
    count, cells, offset = int(record["count"]), int(record["cells"]), int(record["offset"])
    size = 4 * ((cells or count) + count)
    path = path.with_suffix(".samples")
    body = b""
    with contextlib.suppress(FormatError):  # a pipe, or nothing to read there
        body = read_file(path, _MOST, size=size, offset=max(0, offset)) or b""
    if len(body) != size or _check(record, body) != int(record["check"]):
        raise FormatError(
            f"{path}: the losses of step {record['step']} were changed or cut; restore it from a copy"
        )
    places = np.frombuffer(body, "<u4", cells or count).astype(np.int64)
    losses = np.frombuffer(body, "<f4", count, 4 * len(places))
    if cells in (0, count):
        return places, losses, cells == count
    size = count // cells
    return (places[:, None] * size + np.arange(size)).ravel(), losses, False


def read_losses(run: Path) -> Losses:
    """Read the losses of a run directory. A record that was cut off at the end of a file is left out.

    Raises:
        NotFoundError: the run has none.
        FormatError: a file is not one of losses.
    """
    files: list[_File] = []
    parts, numbers = [np.empty(0, RECORD)], [np.empty(0, dtype=np.int64)]
    for _, _, path in rank_files(run / "losses", _SUFFIX):
        data = read_file(path, _MOST) or b""
        if len(data) < HEADER.itemsize:
            continue
        header = np.frombuffer(data, HEADER, 1)[0]
        if header["magic"] != MAGIC:
            raise FormatError(f"{path} is no file of losses; restore it from a copy")
        count = (len(data) - HEADER.itemsize) // RECORD.itemsize
        records = np.frombuffer(data, RECORD, count, HEADER.itemsize)
        if count and records["step"].min() < 0:
            raise FormatError(f"{path}: a step below 0; restore it from a copy")
        by_cell = bool(count) and bool((records["cells"] == records["count"]).all())
        most = int(header["lanes"] if by_cell else header["batch"])
        files.append(_File(path, int(header["started"]), most))
        parts.append(records)
        numbers.append(np.full(count, len(files) - 1, dtype=np.int64))
    if not files:
        raise NotFoundError(
            f"{run} has no losses: call loader.note(batch, losses) after each step of a loader with run=…"
        )
    return Losses(files, np.concatenate(parts), np.concatenate(numbers))
