"""The bytes of a journal file: header and entries (SPEC.md, "Journal")."""

from __future__ import annotations

import re
import struct
from typing import Any, Final, NamedTuple

import xxhash

from shardkit.errors import FormatError
from shardkit.formats.canonical_json import loads

__all__ = [
    "CELLS",
    "CELL_BYTES",
    "CHECK",
    "EVENT",
    "FILE_NAME",
    "HEAD",
    "HEADER",
    "MAGIC",
    "META",
    "CellRecord",
    "Entry",
    "Header",
    "xxh3",
]

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
