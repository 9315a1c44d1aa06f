"""What one rank consumed, as it happened: an append-only file, one entry per step or event (SPEC.md, "Journal").

Written without a collective and without a wait: one `write` per step. Each entry's checksum goes on from the one
before: read back, torn tails are left out and every other change is found.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.errors import FormatError, StoreError
from shardkit.formats.canonical_json import dumps, loads
from shardkit.stores.file_operations import explained

ROTATE_BYTES: Final = 1 << 20
"""A rank goes on in a new file from here on, so that files whose steps are merged can be removed."""

_sha256 = hashlib.sha256


class Journal:
    """Appends what a rank handed to its trainer.

    Args:
        directory: ``journal/`` of a run directory; made if absent. Every start of a rank writes files of its own,
            ``<rank>-<number>.cells``, so that nothing written earlier is ever touched again.
        manifest: "sha256:…" of the dataset.
        plan: hex digest of the plan.
        lanes: lanes of the plan, by which it is known when a step is complete; 0 if unknown (such steps are never
            merged).
        meta: written once at the start: what somebody needs to make the plan again.
        worker, workers: this process records the steps ≡ worker modulo workers.
    """

    def __init__(
        self,
        directory: Path,
        *,
        manifest: str,
        plan: str,
        rank: int,
        world: int,
        lanes: int = 0,
        meta: Mapping[str, Any] | None = None,
        worker: int = 0,
        workers: int = 1,
    ) -> None:
        self._directory = directory
        self._header = Header(manifest, plan, rank, world, lanes, worker, workers, 0, time.time_ns())
        self._guard = threading.Lock()  # events come from the thread that prepares steps
        self._packed: tuple[tuple[int, ...], bytes] = ((), b"")
        with explained(f"write a journal in {directory}", writing=True):
            directory.mkdir(parents=True, exist_ok=True)
        self._descriptor = -1
        self._size = self._check = 0
        self._open()
        if meta is not None:
            self._append(0, META, dumps({**meta, BINDINGS: 1}))

    def record_step(
        self, step: int, lanes: Sequence[int], counts: Sequence[int], samples: NDArray[np.int64]
    ) -> None:
        """Append one step, in one write: about 0.8 microseconds a cell.

        Args:
            step: counted over the whole run.
            lanes: ascending.
            counts: rows of each lane's cell.
            samples: int64[sum(counts)], sample numbers as gathered, cell after cell, without empty slots.

        Raises:
            StoreError: the disk is full or gone; training must not go on unrecorded.
        """
        key = tuple(lanes)
        if self._packed[0] != key:
            self._packed = (key, struct.pack(f"<{len(key)}I", *key))
        data = _little_endian(samples).data.cast("B")
        digests, first = [self._packed[1], struct.pack(f"<{len(counts)}I", *counts)], 0
        for count in counts:
            last = first + 8 * count
            digests.append(_sha256(data[first:last]).digest()[:16])
            first = last
        self._append(step, CELLS, b"".join(digests))

    def event(self, step: int, kind: str, **details: Any) -> None:
        """Append an event: what happened at a step that somebody who checks the run should know.

        Args:
            step: the step that it belongs to.
            kind: such as "failover", "substituted", "masked", "repair"; see SPEC.md.
            details: integers, strings, lists and objects of these.
        """
        text = {name: _unicode(value) if isinstance(value, str) else value for name, value in details.items()}
        self._append(step, EVENT, dumps({"kind": kind, **text}))

    def close(self) -> None:
        """Sync and close; may be called twice."""
        if self._descriptor >= 0:
            with explained(f"close {self.path}", writing=True):
                os.fsync(self._descriptor)
                os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, step: int, kind: int, body: bytes) -> None:
        with self._guard:
            if self._size >= ROTATE_BYTES:
                self.close()
                self._header = self._header._replace(part=self._header.part + 1)
                self._open()
            head = HEAD.pack(step, kind, len(body), 0)[:-8]
            head_check = xxh3(head, seed=self._check)
            self._check = xxh3(body, seed=head_check)
            self._write(b"".join((head, CHECK.pack(head_check), body, CHECK.pack(self._check))))

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
            # Held as long as this process lives: a file whose lock is free is never written again (SPEC.md).
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._size = 0
        packed = HEADER.pack(MAGIC, _raw(header.manifest), _raw(header.plan), *header[2:], 0)[:-8]
        self._check = xxh3(packed)
        self._write(packed + CHECK.pack(self._check))


def _little_endian(samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """The buffer that is hashed; a view wherever it can be one."""
    if samples.dtype != np.int64 or sys.byteorder != "little":
        return samples.astype("<i8")
    return np.ascontiguousarray(samples)


def _unicode(text: str) -> str:
    """Text without lone surrogates, which file names may hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def _raw(digest: str) -> bytes:
    return bytes.fromhex(digest.removeprefix("sha256:"))


def _new_file(directory: Path, rank: int) -> tuple[Path, int]:
    """A new file of the rank, numbered after all it has had; removed ones leave no number free (SPEC.md)."""
    numbers = [int(match[2]) for name in os.listdir(directory) if (match := FILE_NAME.fullmatch(name))
               and int(match[1]) == rank]  # fmt: skip
    number = max(numbers, default=-1) + 1
    while True:
        path = directory / f"{rank:05d}-{number:05d}.cells"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            return path, os.open(path, flags, 0o644)
        except FileExistsError:
            number += 1


BINDINGS: Final = "bindings"
"""Key of the event of a plan: the version that recorded it binds every checkpoint."""

MAGIC: Final = b"shardkit cells 2\n"
"""Begins every journal of cells, with its version."""

HEADER: Final = struct.Struct("<24s32s32sIIIIIIQQ")
"""Magic, manifest, plan, then rank, world, lanes and what else is fixed for a file (SPEC.md)."""

HEAD: Final = struct.Struct("<QIIQ")
"""Of an entry: step, kind, bytes of the body, XXH3 of these three."""

CHECK: Final = struct.Struct("<Q")
"""XXH3-64 of the body of an entry, behind it."""

CELL_BYTES: Final = 24
"""Of a cell in the body of an entry: lane, rows and digest."""

FILE_NAME: Final = re.compile(r"(\d{5,})-(\d{5,})\.cells")
"""Name of a journal: rank and number of the session."""

_MAX_BODY: Final = 1 << 26

CELLS, EVENT, META = 0, 1, 2
"""Kinds of entries."""

xxh3 = xxhash.xxh3_64_intdigest
"""XXH3-64 as a number."""


class CellRecord(NamedTuple):
    """One consumed cell."""

    step: int
    lane: int
    rows: int
    digest: str  # hex, 32 characters


class Header(NamedTuple):
    """What a journal file says of itself."""

    manifest: str  # "sha256:…"
    plan: str  # hex
    rank: int
    world: int
    lanes: int  # of the plan
    worker: int  # this process hands out the steps ≡ worker modulo workers
    workers: int
    part: int  # number of this file in the attempt's sequence
    started: int  # when the attempt began: nanoseconds since 1970


class Entry(NamedTuple):
    """One entry of a journal file.

    Attributes:
        step: counted over the whole run.
        kind: CELLS, EVENT or META.
        body: CELLS: lanes (u32 each), rows (u32 each), digests (16 bytes each); else canonical JSON.
        end: offset of the byte after the entry.
        check: its checksum, from which the next one goes on.
    """

    step: int
    kind: int
    body: bytes
    end: int
    check: int

    def cells(self) -> tuple[bytes, bytes, bytes]:
        """(lanes, rows, digests) of a CELLS entry."""
        count = len(self.body) // CELL_BYTES
        return self.body[: 4 * count], self.body[4 * count : 8 * count], self.body[8 * count :]

    def document(self) -> dict[str, Any]:
        """The JSON object of an EVENT or META entry."""
        value = loads(self.body, _MAX_BODY)
        if not isinstance(value, dict):
            raise FormatError(f"journal entry of step {self.step}: expected a JSON object; do not trust it")
        return value


class JournalFile:
    """A journal file as it was when it was opened.

    Args:
        path: of the file.
        settled: (offset, checksum) where reading goes on; what lies before it is not read again.

    Raises:
        FormatError: not a journal of this version, its header is damaged, or it ends before `settled`.
    """

    def __init__(self, path: Path, settled: tuple[int, int] | None = None) -> None:
        self.path = path
        self.torn_bytes = 0
        self.header: Header | None = None
        """None where the file was killed while it was made."""
        with explained(f"read {path}"), path.open("rb") as file:
            head = file.read(HEADER.size)
            if len(head) == HEADER.size:
                self.header, check = _read_header(head, path)
                self.start = (HEADER.size, check) if settled is None else settled
                """(offset, checksum) from which the first entry goes on."""
                file.seek(self.start[0])
            else:
                self.start, self.torn_bytes = (len(head), 0), len(head)
            self._data = file.read()
            size = os.fstat(file.fileno()).st_size
        if size < self.start[0]:
            raise FormatError(
                f"{path} ends at byte {size}, and {self.start[0]} bytes of it were merged before: it was cut"
            )

    def entries(self) -> Iterator[Entry]:
        """The whole entries; what a kill tore is counted in `torn_bytes`."""
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
                    "there: its checksum does not go on from the entry before"
                )
            offset, check = entry.end, entry.check
            yield entry._replace(end=before + offset)


def _read_header(head: bytes, path: Path) -> tuple[Header, int]:
    magic, manifest, plan, *numbers, check = HEADER.unpack(head)
    if magic.rstrip(b"\0") != MAGIC or xxh3(head[:-8]) != check:
        raise FormatError(f"{path} is not a cell journal of this version, or its header is damaged")
    return Header("sha256:" + manifest.hex(), plan.hex(), *numbers), int(check)


def journal_paths(directory: Path) -> list[Path]:
    """The journal files of a run, by rank and number."""
    found = []
    with explained(f"list {directory}"):
        for name in os.listdir(directory) if directory.is_dir() else ():
            match = FILE_NAME.fullmatch(name)
            if match:
                found.append((int(match[1]), int(match[2]), directory / name))
    return [path for _, _, path in sorted(found)]


def read_journal(path: Path) -> Iterator[CellRecord]:
    """The cells of a journal file in the order in which they were handed out; what a kill tore is left out.

    Raises:
        FormatError: not a journal, or damaged.
    """
    for entry in JournalFile(path).entries():
        if entry.kind == CELLS:
            lanes, rows, digests = entry.cells()
            numbers = zip(
                unpack_numbers(lanes), unpack_numbers(rows), range(0, len(digests), 16), strict=True
            )
            for lane, count, at in numbers:
                yield CellRecord(entry.step, lane, count, digests[at : at + 16].hex())


def unpack_numbers(packed: bytes) -> tuple[int, ...]:
    """u32 little-endian."""
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def _entry(data: memoryview, offset: int, check: int) -> Entry | None:
    """The entry at `offset`, None where there is none whose checksum goes on from `check`."""
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
    return Entry(step, kind, bytes(body), end, tail)


def _is_torn(data: memoryview, offset: int, check: int) -> bool:
    """Whether what follows is the beginning of an entry that was never written to its end."""
    rest = len(data) - offset
    if rest < HEAD.size or not any(data[offset:]):
        return True  # zeros: a power cut kept the size and lost the bytes
    _, _, size, head_check = HEAD.unpack_from(data, offset)
    if xxh3(data[offset : offset + HEAD.size - 8], seed=check) != head_check:
        return False
    return rest <= HEAD.size + int(size) + CHECK.size
