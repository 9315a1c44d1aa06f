"""Journals: append-only files with one entry per step or event that a rank delivered (SPEC.md, "Journal").

Recording a step takes one `write`, without a collective and without waiting for a disk. The checksum of an entry is
seeded with the previous one, so a reader skips a torn tail and detects any other change.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import multiprocessing
import os
import re
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.arrays import Int64s
from shardkit.documents import convert, decode_plain, encode
from shardkit.errors import FormatError, RunError, StoreError, UsageError
from shardkit.ledger.events import PlanFacts, journaled_event
from shardkit.ledger.files import lock_holder, read_file
from shardkit.stores.file_operations import explained

ROTATE_BYTES: Final = 1 << 20
"""Bytes after which a rank continues in a new file, so that merged files can be removed."""

# (folder, rank, worker) → lanes that the journal opened last records
_newest: dict[tuple[str, int, int], set[int]] = {}


class Journal:
    """Writer of one rank's journal.

    Args:
        directory: ``journal/`` of a run directory, created if missing. Every start of a rank writes new files,
            ``<rank>-<number>.cells``; an existing file is never changed.
        manifest: "sha256:…" of the dataset.
        plan: hex digest of the plan.
        rank: rank of this process.
        world: number of ranks.
        lanes: number of lanes of the plan. A step is complete when all are recorded.
        meta: facts that rebuild the plan (`events.PlanFacts`), written once.
        worker: index of this process; it records the steps that equal `worker` modulo `workers`.
        workers: number of processes of the rank that record steps.

    Raises:
        RunError: another process of this machine records steps of the rank in the directory.
    """

    def __init__(
        self,
        directory: Path,
        *,
        manifest: str,
        plan: str,
        rank: int,
        world: int,
        lanes: int,
        meta: Mapping[str, Any] | None = None,
        worker: int = 0,
        workers: int = 1,
    ) -> None:
        self._directory = directory
        self._guard = threading.Lock()  # events come from the thread that prepares steps
        self._packed: tuple[tuple[int, ...], bytes] = ((), b"")
        with explained(f"write a journal in {directory}", writing=True):
            directory.mkdir(parents=True, exist_ok=True)
        if (
            workers == 1 and multiprocessing.parent_process() is None
        ):  # workers of an earlier loop may still end
            _refuse_second_writer(directory, rank)
        started = max(time.time_ns(), _newest_start(directory, rank) + 1)  # a clock may be set back
        self._header = Header(manifest, plan, rank, world, lanes, worker, workers, 0, started)
        self._descriptor = -1
        self._size = self._check = 0
        self._last, self._rewinds = -1, 0  # the last recorded step; number of returns to an earlier step
        self._writer = (os.path.realpath(directory), rank, worker)
        _newest[self._writer] = self._recorded = set[int]()
        self._open()
        if meta is not None:
            convert(PlanFacts, dict(meta), "journal: how the plan is made")
            self._append((0, META, encode(dict(meta))))

    def record_step(
        self, step: int, lanes: Sequence[int], counts: Sequence[int], samples: NDArray[np.int64]
    ) -> None:
        """Append one step in one write, at about 0.8 microseconds per cell.

        Args:
            step: number of the step in the run.
            lanes: lane numbers, ascending.
            counts: number of rows in the cell of each lane.
            samples: int64[sum(counts)], sample numbers as gathered, cell after cell, without empty slots.

        Raises:
            StoreError: the disk is full or unavailable; training must not continue unrecorded.
            UsageError: a journal of the same rank that was opened later in this process has recorded these lanes.
        """
        key = tuple(lanes)
        newest = _newest[self._writer]
        if newest is not self._recorded and not newest.isdisjoint(key):
            raise UsageError(
                f"{self._directory.parent}: another loader of this process has recorded steps there since, and a run "
                "has one training loader; make loaders for validation without run=, or give each its own directory"
            )
        if self._packed[0] != key:
            self._packed = (key, struct.pack(f"<{len(key)}I", *key))
            self._recorded.update(key)
        data = np.ascontiguousarray(samples, "<i8").data.cast("B")
        sha256 = hashlib.sha256
        digests, first = [self._packed[1], struct.pack(f"<{len(counts)}I", *counts)], 0
        for count in counts:
            last = first + 8 * count
            digests.append(sha256(data[first:last]).digest()[:16])
            first = last
        entries = [(step, CELLS, b"".join(digests))]
        if step <= self._last:
            numbers = {"worker": self._header.worker, "number": self._rewinds, "reached": self._last + 1}
            entries.insert(0, (step, EVENT, encode({"kind": "rewind", **numbers})))
            self._rewinds += 1
        self._last = step
        self._append(*entries)

    def event(self, step: int, kind: str, **details: Any) -> None:
        """Append an event of the last recorded step.

        Args:
            step: number of the step.
            kind: one of `events.JOURNALED`.
            details: fields of that kind.

        Raises:
            FormatError: the kind or its fields are not allowed in a journal.
        """
        text = {name: _unicode(value) if isinstance(value, str) else value for name, value in details.items()}
        body = {"kind": kind, **text}
        journaled_event(step, self._header.rank, 0, body, f"journal {self.path}")
        self._append((step, EVENT, encode(body)))

    def record_losses(self, step: int, places: Int64s, losses: NDArray[np.float32]) -> None:
        """Append the losses of rows of a step in one write, one entry for each run of consecutive places.

        Args:
            step: number of the step.
            places: (n,) int64, places of the rows in the grid, lane · cell size + slot.
            losses: (n,) float32, one per row.
        """
        if not len(places):
            return
        borders = np.flatnonzero(np.diff(places) != 1) + 1
        runs = zip(np.split(places, borders), np.split(losses.astype("<f4"), borders), strict=True)
        self._append(*((step, LOSSES, PLACE.pack(int(own[0])) + values.tobytes()) for own, values in runs))

    def close(self) -> None:
        """Sync and close the file. Closing twice is harmless."""
        if self._descriptor >= 0:
            with explained(f"close {self.path}", writing=True):
                os.fsync(self._descriptor)
                os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, *entries: tuple[int, int, bytes]) -> None:
        """Append (step, kind, body) entries in one write."""
        with self._guard:
            if self._size >= ROTATE_BYTES:
                self.close()
                self._header = self._header._replace(part=self._header.part + 1)
                self._open()
            data = []
            for step, kind, body in entries:
                head = HEAD.pack(step, kind, len(body), 0)[:-8]
                head_check = xxh3(head, seed=self._check)
                self._check = xxh3(body, seed=head_check)
                data += [head, CHECK.pack(head_check), body, CHECK.pack(self._check)]
            self._write(b"".join(data))

    def _write(self, data: bytes) -> None:
        with explained(f"write {self.path}", writing=True):
            written = os.write(self._descriptor, data)
        if written != len(data):
            raise StoreError(
                f"{self.path}: only {written} of {len(data)} bytes were written; make room and resume"
            )
        self._size += written

    def _open(self) -> None:
        header = self._header
        with explained(f"write a journal in {self._directory}", writing=True):
            self.path, self._descriptor = _new_file(self._directory, header.rank)
            # The lock is held while this process lives: a file whose lock is free is never written again.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # a new file: `lock_holder` may hold it for a moment
        self._size = 0
        packed = HEADER.pack(MAGIC, _raw(header.manifest), _raw(header.plan), *header[2:], 0)[:-8]
        self._check = xxh3(packed)
        self._write(packed + CHECK.pack(self._check))


def _unicode(text: str) -> str:
    """Replace lone surrogates, which file names may hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def _raw(digest: str) -> bytes:
    return bytes.fromhex(digest.removeprefix("sha256:"))


MAGIC: Final = b"shardkit cells 1\n"
"""First bytes of a journal, including the format version."""

HEADER: Final = struct.Struct("<24s32s32sIIIIIIQQ")
"""Magic, manifest, plan, the numbers of `Header`, checksum."""

HEAD: Final = struct.Struct("<QIIQ")
"""Head of an entry: step, kind, size of the body, XXH3-64 of these three."""

CHECK: Final = struct.Struct("<Q")
"""XXH3-64 of an entry's body, stored after the body."""

CELL_BYTES: Final = 24
"""Size of a cell in the body of an entry: lane, rows and digest."""

PLACE: Final = struct.Struct("<I")
"""Place of the first row in the body of an entry of losses; float32 of it and of the following places follow."""

MAX_STEP: Final = 1 << 62
_MAX_BODY: Final = 1 << 26
_MAX_LANES: Final = 1 << 24
_PATIENCE: Final = 100  # times 0.1 s: the ranks of a killed command end with a delay

CELLS, EVENT, META, LOSSES = 0, 1, 2, 3
"""Kinds of entries."""

xxh3 = xxhash.xxh3_64_intdigest


class CellRecord(NamedTuple):
    """One delivered cell."""

    step: int
    lane: int
    rows: int
    digest: str  # hex, 32 characters


class Header(NamedTuple):
    """Header of a journal file."""

    manifest: str  # "sha256:…"
    plan: str  # hex
    rank: int
    world: int
    lanes: int  # number of lanes of the plan
    worker: int  # the process records the steps that equal `worker` modulo `workers`
    workers: int
    part: int  # number of the file within its attempt
    started: int  # start time of the attempt in nanoseconds since 1970


class Entry(NamedTuple):
    """One entry of a journal file."""

    step: int  # number of the step in the run
    kind: int  # CELLS, EVENT, META or LOSSES
    # for CELLS, lanes (u32 each), rows (u32 each) and digests (16 bytes each); for LOSSES, the place of the first row
    # and the losses; otherwise canonical JSON
    body: bytes
    end: int  # offset of the first byte after the entry
    check: int  # checksum of the entry, the seed of the next entry's

    def cells(self) -> tuple[tuple[int, ...], tuple[int, ...], bytes]:
        """Return (lanes, rows, digests) of a CELLS entry; the digests are packed."""
        count = len(self.body) // CELL_BYTES
        numbers = struct.unpack_from(f"<{2 * count}I", self.body)
        return numbers[:count], numbers[count:], self.body[8 * count :]

    def losses(self) -> tuple[int, bytes]:
        """Return (place of the first row, float32 losses, packed) of a LOSSES entry."""
        return PLACE.unpack_from(self.body)[0], self.body[PLACE.size :]

    def document(self) -> dict[str, Any]:
        """Return the JSON object of an EVENT or META entry."""
        value = decode_plain(self.body, max_bytes=_MAX_BODY)
        if not isinstance(value, dict):
            raise FormatError(f"journal entry of step {self.step}: expected a JSON object; do not trust it")
        return value

    @property
    def repeats(self) -> int:
        """Number of steps that a `rewind` event repeats; 0 for other entries."""
        if self.kind != EVENT or b'"rewind"' not in self.body:
            return 0
        body = self.document()
        reached = body.get("reached")
        return max(0, reached - self.step) if body.get("kind") == "rewind" and isinstance(reached, int) else 0


class JournalFile:
    """The contents of a journal file at the time it was opened.

    Reading begins at `settled`, (offset, checksum) at the end of the last merged entry, otherwise after the header.

    Raises:
        FormatError: the file is not a journal of this version, its header is damaged, or it ends before `settled`.
    """

    def __init__(self, path: Path, settled: tuple[int, int] | None = None) -> None:
        self.path = path
        self.torn_bytes = 0  # size of the torn tail, known after `entries` is exhausted
        self.header: Header | None = None  # None if the writer was killed before it was complete
        data = read_file(path, ROTATE_BYTES + _MAX_BODY + HEADER.size) or b""
        if len(data) < HEADER.size:
            self.start, self.torn_bytes = (len(data), 0), len(data)
        else:
            self.header, check = _read_header(data[: HEADER.size], path)
            self.start = (HEADER.size, check) if settled is None else settled
        if settled is not None and len(data) < settled[0]:
            raise FormatError(
                f"{path} was cut: {len(data)} bytes, and {settled[0]} of them are merged in the ledger; restore it "
                "from a copy"
            )
        self._data = data[self.start[0] :]

    @property
    def is_empty(self) -> bool:
        """True if no entry is complete from `start` on: its writer was killed, or has only begun."""
        data, check = memoryview(self._data), self.start[1]
        return not data or (_entry(data, 0, check) is None and _is_torn(data, 0, check))

    def entries(self) -> Iterator[Entry]:
        """Yield the complete entries from `start` on. The size of a torn tail is added to `torn_bytes`."""
        if self.header is None:
            return
        data = memoryview(self._data)
        before, check = self.start
        offset = 0
        while offset < len(data):
            entry = _entry(data, offset, check)
            if entry is None:
                if _is_torn(data, offset, check):
                    self.torn_bytes = len(data) - offset
                    return
                raise FormatError(
                    f"{self.path}: the entry at byte {before + offset} is damaged or not the one that was written "
                    "there: its checksum does not continue from the entry before"
                )
            offset, check = entry.end, entry.check
            yield entry._replace(end=before + offset)


def _newest_start(directory: Path, rank: int) -> int:
    """Return the time of the last start of a rank, 0 if there is none."""
    for path in reversed(_paths_of(directory, rank)):
        with contextlib.suppress(FormatError):
            head = read_file(path, HEADER.size, size=HEADER.size) or b""
            return _read_header(head, path)[0].started if len(head) == HEADER.size else 0
    return 0


def _refuse_second_writer(directory: Path, rank: int) -> None:
    """Raise RunError if another process records steps of a rank: two would count as a start that repeats steps."""
    for _ in range(_PATIENCE):
        holder = next(
            (one for path in _paths_of(directory, rank)[-1:] if (one := lock_holder(path))), os.getpid()
        )
        if holder == os.getpid():
            return
        time.sleep(0.1)
    raise RunError(
        f"run directory {directory.parent}: process {holder} records the steps of rank {rank} in it; give each process "
        "its own rank= and world=, or a run directory of its own"
    )


def _read_header(head: bytes, path: Path) -> tuple[Header, int]:
    magic, manifest, plan, *numbers, check = HEADER.unpack(head)
    if magic.rstrip(b"\0") != MAGIC or xxh3(head[:-8]) != check:
        raise FormatError(f"{path} is not a cell journal of this version, or its header is damaged")
    header = Header("sha256:" + manifest.hex(), plan.hex(), *numbers)
    if _name(path)[0] not in (header.rank, -1):
        raise FormatError(f"{path} is a journal of rank {header.rank}: it was renamed")
    is_sound = header.rank < header.world < _MAX_LANES and header.worker < header.workers < _MAX_LANES
    if not is_sound or not 0 < header.lanes <= _MAX_LANES or header.started >= MAX_STEP:
        raise FormatError(f"{path}: its header holds impossible numbers {numbers}; do not trust it")
    return header, int(check)


def read_journal(path: Path) -> Iterator[CellRecord]:
    """Yield the cells of a journal file in the order of delivery. A torn tail is skipped.

    Raises:
        FormatError: the file is not a journal, or is damaged.
    """
    for entry in JournalFile(path).entries():
        if entry.kind == CELLS:
            lanes, rows, digests = entry.cells()
            for lane, count, at in zip(lanes, rows, range(0, len(digests), 16), strict=True):
                yield CellRecord(entry.step, lane, count, digests[at : at + 16].hex())


def _entry(data: memoryview, offset: int, check: int) -> Entry | None:
    """Return the entry at `offset`, or None unless a complete entry continues the checksum `check`."""
    if offset + HEAD.size + CHECK.size > len(data):
        return None
    step, kind, size, head_check = HEAD.unpack_from(data, offset)
    end = offset + HEAD.size + size + CHECK.size
    if end > len(data) or xxh3(data[offset : offset + HEAD.size - 8], seed=check) != head_check:
        return None
    body = data[offset + HEAD.size : end - CHECK.size]
    (tail,) = CHECK.unpack_from(data, end - CHECK.size)
    if xxh3(body, seed=head_check) != tail or (kind == CELLS and size % CELL_BYTES):
        return None
    if kind == LOSSES and (size <= PLACE.size or size % 4):
        return None
    if step >= MAX_STEP or kind not in (CELLS, EVENT, META, LOSSES):
        raise FormatError(
            f"journal: an entry of kind {kind} for step {step}, which no rank writes; do not trust it"
        )
    return Entry(step, kind, bytes(body), end, tail)


def _is_torn(data: memoryview, offset: int, check: int) -> bool:
    """Return True if the bytes from `offset` on are an incompletely written entry."""
    rest = len(data) - offset
    if rest < HEAD.size or not bytes(data[offset:]).strip(b"\0"):
        return True  # zeros: a power cut kept the size and lost the bytes
    _, _, size, head_check = HEAD.unpack_from(data, offset)
    if xxh3(data[offset : offset + HEAD.size - 8], seed=check) != head_check:
        return False
    return rest <= HEAD.size + int(size) + CHECK.size


# ---- names of files

_NAME: Final = re.compile(r"(\d{5,9})-(\d{5,9})\.cells")


def _name(path: Path) -> tuple[int, int]:
    """Return (rank, number) of a journal file; (-1, -1) for any other name."""
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2])) if match else (-1, -1)


def journal_paths(directory: Path) -> list[Path]:
    """Return the journal files of a directory, ordered by rank and number; none if it does not exist."""
    with explained(f"list {directory}"):
        names = os.listdir(directory) if directory.is_dir() else []
    return sorted((directory / name for name in names if _NAME.fullmatch(name)), key=_name)


def _paths_of(directory: Path, rank: int) -> list[Path]:
    return [path for path in journal_paths(directory) if _name(path)[0] == rank]


def _new_file(directory: Path, rank: int) -> tuple[Path, int]:
    """Create and open the next file of a rank. The newest file is never removed, so no number is used twice."""
    number = max((_name(path)[1] for path in _paths_of(directory, rank)), default=-1) + 1
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
    while True:
        path = directory / f"{rank:05d}-{number:05d}.cells"
        try:
            return path, os.open(path, flags, 0o644)
        except FileExistsError:
            number += 1
