"""The bytes of a journal file and how they are read: torn tails are left out, every other change is found (SPEC.md)."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import xxhash

from shardkit.errors import FormatError
from shardkit.formats.canonical_json import loads
from shardkit.stores.file_operations import explained

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
        """The whole entries; what a kill tore is counted in `torn_bytes`.

        Raises:
            FormatError: an entry is damaged, dropped or out of its place; says at which byte.
        """
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


def read_journal(path: Path, *, manifest: str | None = None, plan: str | None = None) -> Iterator[CellRecord]:
    """The cells of a journal file in the order in which they were handed out; what a kill tore is left out.

    Raises:
        FormatError: not a journal, of another dataset or plan than asked for, or damaged.
    """
    file = JournalFile(path)
    if file.header is None:
        return  # killed while it was being made: nothing was consumed yet
    for what, expected, got in (
        ("manifest", manifest, file.header.manifest),
        ("plan", plan, file.header.plan),
    ):
        if expected is not None and expected != got:
            raise FormatError(f"{path} was written for {what} {got[:19]}…, expected {expected[:19]}…")
    for entry in file.entries():
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
