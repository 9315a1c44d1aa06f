"""The bytes of the ledger's files: chained step records and lines, and `state.json`, which commits them (SPEC.md)."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.errors import FormatError, IntegrityError
from shardkit.formats.canonical_json import dumps, loads
from shardkit.formats.digest import sha256_digest

STEPS_MAGIC: Final = b"shardkit steps 1\n".ljust(24, b"\0")
"""Begins the file of merged steps, with its version."""

RECORD: Final = np.dtype(
    [("step", "<u8"), ("rows", "<u4"), ("plan", "<u4"), ("digest", "u1", 32), ("check", "<u8")]
)
"""A merged step: its number, rows, the plan in force, its leaf, and the XXH3-64 of all of these."""

RECORD_BYTES: Final = RECORD.itemsize

SUBSTITUTED: Final = "substituted"
"""Kind of the event of a sample that was handed out in the place of another: `lane`, `slot`, `sample`, `by`."""
MASKED: Final = "masked"
"""Kind of the event of a sample that was handed out as not valid; its cell's digest is the plan's."""
MAX_LINE: Final = 1 << 26
_BODY: Final = struct.Struct("<QII32s")
_CHECK: Final = struct.Struct("<Q")
_PREFIX: Final = struct.Struct("<32s32sQ")
_xxh3 = xxhash.xxh3_64_intdigest

StepRecords = NDArray[np.void]
"""(n,) of dtype `RECORD`."""


def step_digest(manifest: str, plan: str, step: int, cells: bytes | bytearray) -> bytes:
    """Digest of a step: SHA-256 over manifest id, plan digest, step and its cell digests in lane order.

    Args:
        manifest: "sha256:…".
        plan: hex.
        step: counted over the whole run.
        cells: 16 bytes per lane.
    """
    raw = bytes.fromhex(manifest.removeprefix("sha256:"))
    return hashlib.sha256(_PREFIX.pack(raw, bytes.fromhex(plan), step) + cells).digest()


def step_digests(manifest: str, plan: str, first: int, cells: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`step_digest` of consecutive steps from `first` on: (steps, lanes, 16) → (steps, 32), uint8."""
    raw, rest = bytes.fromhex(manifest.removeprefix("sha256:")), bytes.fromhex(plan)
    rows = np.ascontiguousarray(cells).reshape(len(cells), -1)
    out = b"".join(
        hashlib.sha256(_PREFIX.pack(raw, rest, first + offset) + row.tobytes()).digest()
        for offset, row in enumerate(rows)
    )
    return np.frombuffer(out, dtype=np.uint8).reshape(-1, 32)


def encode_record(step: int, rows: int, plan: int, digest: bytes, check: int) -> tuple[bytes, int]:
    """(record, its checksum); `check` is that of the record before."""
    body = _BODY.pack(step, rows, plan, digest)
    check = _xxh3(body, seed=check)
    return body + _CHECK.pack(check), check


def parse_records(data: bytes) -> StepRecords:
    """The whole records of a step file, unchecked; a torn last one is left out.

    Raises:
        FormatError: not a step file of this version.
    """
    if data[: len(STEPS_MAGIC)] != STEPS_MAGIC[: len(data)]:
        raise FormatError("ledger/steps is not a step file of this version; do not trust it")
    count = max(0, len(data) - len(STEPS_MAGIC)) // RECORD_BYTES
    return np.frombuffer(data, dtype=RECORD, count=count, offset=min(len(data), len(STEPS_MAGIC)))


def damaged_records(records: StepRecords) -> list[int]:
    """Indexes of records whose checksum does not go on from the record before."""
    data = records.tobytes()
    bad, check = [], 0
    for index in range(len(records)):
        at = index * RECORD_BYTES
        (found,) = _CHECK.unpack_from(data, at + _BODY.size)
        if _xxh3(data[at : at + _BODY.size], seed=check) != found:
            bad.append(index)
        check = found
    return bad


def encode_line(document: dict[str, Any], check: int) -> tuple[bytes, int]:
    """(line, its checksum); `check` is that of the line before."""
    body = dumps(document)
    check = _xxh3(body, seed=check)
    return b"%016x %s\n" % (check, body), check


def parse_lines(data: bytes, name: str) -> Iterator[tuple[dict[str, Any], int]]:
    """(document, checksum) of each line; a torn last line is left out.

    Raises:
        FormatError: a line is damaged, dropped or out of its place.
    """
    check = 0
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        body = line[17:]
        check = _xxh3(body, seed=check)
        if line[:17] != b"%016x " % check:
            raise FormatError(
                f"{name}: line {number} is damaged or not the one that was written there: its checksum does not go on "
                "from the line before"
            )
        document = loads(body, MAX_LINE)
        if not isinstance(document, dict):
            raise FormatError(f"{name}: line {number} is no JSON object; do not trust it")
        yield document, check


_MAX_STATE: Final = 1 << 28


@dataclass
class LedgerState:
    """What `state.json` holds: how much is committed, and what the next merge goes on from.

    Attributes:
        records: step records in `steps`, abandoned branches included.
        check: checksum of the last of them.
        first: step of the first leaf.
        branch: [step, record] pairs: from which step on the records of the current branch begin where.
        peaks: frontier of the tree of steps; its size is the number of leaves.
        events, events_bytes, events_check, events_peaks: the same of `events`.
        heads_bytes, heads_check: of `heads`.
        plans: (manifest id, plan digest) by number.
        journals: file name → [offset, checksum, start]: what of it is merged.
        start: the newest start of the run, see `merging`.
    """

    records: int = 0
    check: int = 0
    first: int = 0
    size: int = 0
    branch: list[list[int]] = field(default_factory=list)
    peaks: list[str] = field(default_factory=list)
    events: int = 0
    events_bytes: int = 0
    events_check: int = 0
    events_peaks: list[str] = field(default_factory=list)
    heads_bytes: int = 0
    heads_check: int = 0
    plans: list[list[str]] = field(default_factory=list)
    journals: dict[str, list[int]] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Canonical JSON with its own digest; checksums as text, since they may exceed int64."""
        body = {
            name: f"{value:016x}" if name.endswith("check") else value for name, value in vars(self).items()
        }
        body["journals"] = {
            name: [at, f"{check:016x}", start] for name, (at, check, start) in self.journals.items()
        }
        return (
            dumps({"format": "shardkit-ledger/1", "state": body, "digest": sha256_digest(dumps(body))})
            + b"\n"
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> LedgerState:
        """Read it back.

        Raises:
            IntegrityError: damaged.
        """
        try:
            document = loads(data.rstrip(b"\n"), _MAX_STATE)
            body = dict(document["state"])
            if document["format"] != "shardkit-ledger/1" or document["digest"] != sha256_digest(dumps(body)):
                raise FormatError("its digest does not fit")
            for name in list(body):
                body[name] = int(body[name], 16) if name.endswith("check") else body[name]
            body["journals"] = {
                n: [at, int(check, 16), start] for n, (at, check, start) in body["journals"].items()
            }
            return cls(**body)
        except (FormatError, KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"ledger/state.json is damaged: {error}") from error
