"""The ledger of a run: one record per step and one line per event, each under a Merkle tree, committed in one step.

Files below ``RUN/ledger/`` (SPEC.md): `steps` and `events` and `heads` are only appended to; `state.json` says how much
of each is committed and is replaced in one step, so that a commit that a kill interrupts never happened.

The trees are those of RFC 6962 §2.1 (unchanged in RFC 9162 §2.1), so that any library for these proves what they hold:
`Frontier` appends with a state of one hash per set bit of the size; `Tree` keeps all hashes and every root there was.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.errors import FormatError, IntegrityError
from shardkit.formats.canonical_json import dumps, loads, sha256_digest
from shardkit.stores.file_operations import explained

HASH_BYTES = 32

EMPTY_ROOT = hashlib.sha256(b"").digest()
"""Root of a tree without leaves (RFC 6962 §2.1)."""

_sha256 = hashlib.sha256


def leaf_hash(entry: bytes) -> bytes:
    """Hash of a leaf; the prefix keeps a leaf from being passed off as a node."""
    return _sha256(b"\0" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Hash of two subtrees."""
    return _sha256(b"\1" + left + right).digest()


class Frontier:
    """The right edge of a tree: enough to append to it and to know its root.

    Args:
        size: leaves so far.
        peaks: hashes of the complete subtrees that the leaves make, the largest first: one per set bit of `size`.

    Raises:
        ValueError: another number of peaks than the size has.
    """

    def __init__(self, size: int = 0, peaks: Iterable[bytes] = ()) -> None:
        self.size, self.peaks = size, list(peaks)
        if len(self.peaks) != size.bit_count():
            raise ValueError(f"{len(self.peaks)} peaks for {size} leaves, expected {size.bit_count()}")

    def append(self, leaf: bytes) -> None:
        """Add a leaf by its `leaf_hash`; amortised two hashes."""
        node, rest = leaf, self.size
        while rest & 1:
            node = node_hash(self.peaks.pop(), node)
            rest >>= 1
        self.peaks.append(node)
        self.size += 1

    def root(self) -> bytes:
        if not self.peaks:
            return EMPTY_ROOT
        node = self.peaks[-1]
        for peak in reversed(self.peaks[:-1]):
            node = node_hash(peak, node)
        return node


class Tree:
    """A whole tree in memory, 64 bytes a leaf: the roots of every size it ever had."""

    def __init__(self, leaves: Iterable[bytes] = ()) -> None:
        # level h: hashes of the complete subtrees of 2**h leaves
        self._levels = [b"".join(leaves)]
        while len(below := self._levels[-1]) >= 2 * HASH_BYTES:
            ends = range(2 * HASH_BYTES, len(below) + 1, 2 * HASH_BYTES)
            level = (_sha256(b"\1" + below[end - 2 * HASH_BYTES : end]).digest() for end in ends)
            self._levels.append(b"".join(level))

    def __len__(self) -> int:
        return len(self._levels[0]) // HASH_BYTES

    def root(self, size: int | None = None) -> bytes:
        """Root of the first `size` leaves; of all by default."""
        return self.frontier(size).root()

    def frontier(self, size: int | None = None) -> Frontier:
        """What is needed to append to the first `size` leaves."""
        size = len(self) if size is None else size
        if not 0 <= size <= len(self):
            raise ValueError(f"size {size}: the tree has {len(self)} leaves")
        peaks, first = [], 0
        for height in reversed(range(size.bit_length())):
            if size >> height & 1:
                at = (first >> height) * HASH_BYTES
                peaks.append(self._levels[height][at : at + HASH_BYTES])
                first += 1 << height
        return Frontier(size, peaks)


class Ledger:
    """A run's ledger, loaded to append to it (`writing`) or only to read it.

    What is appended is seen by all methods at once, and by others after `commit`.

    Raises:
        IntegrityError: a file is shorter than what was committed, or `state.json` is damaged or gone.
    """

    def __init__(self, run: Path, *, writing: bool = False) -> None:
        self.run, self.directory = run, run / "ledger"
        self._lock = self._take_lock() if writing else -1
        try:
            self.state = self._load_state(writing)
            self._check_sizes(writing)
        except BaseException:
            self.close()
            raise
        state = self.state
        self.steps = Frontier(state.size, map(bytes.fromhex, state.peaks))
        self.events = Frontier(state.events, map(bytes.fromhex, state.events_peaks))
        self._new_steps, self._new_events = bytearray(), bytearray()
        self._committed_records = state.records

    # ---- reading

    @property
    def next_step(self) -> int:
        """The step that would extend the tree."""
        return self.state.first + self.steps.size

    def records(self) -> StepRecords:
        """All records in the order in which they were written, abandoned branches included."""
        data = self._committed("steps", len(STEPS_MAGIC) + RECORD_BYTES * self._committed_records)
        new = np.frombuffer(bytes(self._new_steps), dtype=RECORD)
        return np.concatenate([parse_records(data), new])

    def branch_records(self) -> StepRecords:
        """The records that are leaves of the tree of steps, in order."""
        records, parts = self.records(), []
        starts = self.state.branch
        for place, (step, at) in enumerate(starts):
            until = starts[place + 1][0] if place + 1 < len(starts) else self.next_step
            parts.append(records[at : at + until - step])
        return np.concatenate(parts) if parts else records[:0]

    def event_documents(self) -> list[dict[str, Any]]:
        data = self._committed("events", self.state.events_bytes) + bytes(self._new_events)
        return [document for document, _ in parse_lines(data, "ledger/events")]

    def digest_of(self, step: int) -> bytes:
        """Digest of a step of the current branch."""
        for first, at in reversed(self.state.branch):
            if first <= step < self.next_step:
                return self._record(at + step - first)
        raise IndexError(step)

    def head(self, step: int | None = None) -> dict[str, Any]:
        """The heads of both trees; of the steps before `step` only, where it is given."""
        size, root = self.steps.size, None
        if step is not None and step < self.next_step:
            size = max(0, step - self.state.first)
            root = Tree(leaf_hash(one["digest"].tobytes()) for one in self.branch_records()[:size]).root()
        root = self.steps.root() if root is None else root
        return {
            "steps": {"first": self.state.first, "size": size, "root": root.hex()},
            "events": {"size": self.events.size, "root": self.events.root().hex()},
        }

    # ---- appending

    def append(self, step: int, rows: int, plan: int, digest: bytes) -> None:
        """Extend the tree of steps; `step` is `next_step`, or the first there is."""
        state = self.state
        if not self.steps.size:
            state.first, state.branch = step, [[step, state.records]]
        record, state.check = encode_record(step, rows, plan, digest, state.check)
        self._new_steps += record
        state.records += 1
        self.steps.append(leaf_hash(digest))

    def fork(self, step: int) -> None:
        """Leave the branch at `step`: what follows is appended from there; the records left behind stay."""
        state = self.state
        size = max(0, step - state.first)
        leaves = (leaf_hash(one["digest"].tobytes()) for one in self.branch_records()[:size])
        self.steps = Tree(leaves).frontier()
        state.branch = [pair for pair in state.branch if pair[0] < step]
        state.branch.append([step, state.records])

    def add_event(self, document: dict[str, Any]) -> None:
        line, self.state.events_check = encode_line(document, self.state.events_check)
        self._new_events += line
        self.events.append(leaf_hash(line[17:-1]))

    def commit(self) -> None:
        """Make everything appended durable, in one step; afterwards `state.json` names it."""
        state = self.state
        state.size, state.peaks = self.steps.size, [peak.hex() for peak in self.steps.peaks]
        state.events, state.events_peaks = self.events.size, [peak.hex() for peak in self.events.peaks]
        if not (self._new_steps or self._new_events):
            if read_file(self.directory / "state.json") != state.to_bytes():
                with explained(f"write {self.directory}", writing=True):
                    _replace(self.directory / "state.json", state.to_bytes())
            return
        head, state.heads_check = encode_line({**self.head(), "records": state.records}, state.heads_check)
        steps = bytes(self._new_steps) if self._committed_records else STEPS_MAGIC + bytes(self._new_steps)
        with explained(f"write {self.directory}", writing=True):
            appended = {
                "steps": steps if self._new_steps else b"",
                "events": bytes(self._new_events),
                "heads": head,
            }
            for name, data in appended.items():
                if data:
                    _write(self.directory / name, data, os.O_APPEND)
            state.events_bytes += len(self._new_events)
            state.heads_bytes += len(head)
            _replace(self.directory / "state.json", state.to_bytes())
        self._committed_records = state.records
        self._new_steps.clear()
        self._new_events.clear()

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    # ---- files

    def _take_lock(self) -> int:
        with explained(f"write {self.directory}", writing=True):
            self.directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return descriptor

    def _load_state(self, writing: bool) -> LedgerState:
        data = read_file(self.directory / "state.json")
        if data is not None:
            return LedgerState.from_bytes(data)
        if any(read_file(self.directory / name) for name in ("steps", "events", "heads")):
            raise IntegrityError(
                f"{self.directory} has records and no state.json, which is written before them: somebody removed it; "
                "restore it from a copy, or move ledger/ and journal/ aside to begin a new record"
            )
        state = LedgerState()
        if writing:
            with explained(f"write {self.directory}", writing=True):
                _replace(self.directory / "state.json", state.to_bytes())
        return state

    def _check_sizes(self, writing: bool) -> None:
        state = self.state
        expected = {
            "steps": len(STEPS_MAGIC) + RECORD_BYTES * state.records if state.records else 0,
            "events": state.events_bytes,
            "heads": state.heads_bytes,
        }
        for name, size in expected.items():
            path = self.directory / name
            found = path.stat().st_size if path.exists() else 0
            if found < size:
                raise IntegrityError(
                    f"{path} was cut: {found} bytes, expected at least {size}; restore it from a copy, or "
                    "move ledger/ and journal/ aside to begin a new record"
                )
            if found > size and writing:  # appended by a commit that never happened
                with explained(f"write {path}", writing=True):
                    os.truncate(path, size)

    def _committed(self, name: str, size: int) -> bytes:
        return (read_file(self.directory / name) or b"")[:size]

    def _record(self, index: int) -> bytes:
        at = (index - self._committed_records) * RECORD_BYTES + 16
        if at >= 0:
            return bytes(self._new_steps[at : at + 32])
        with explained(f"read {self.directory}"), _opened(self.directory / "steps") as descriptor:
            return os.pread(descriptor, 32, len(STEPS_MAGIC) + index * RECORD_BYTES + 16)


def read_file(path: Path) -> bytes | None:
    """The bytes of a file, None where there is none."""
    try:
        with explained(f"read {path}"):
            return path.read_bytes() if path.exists() else None
    except FileNotFoundError:
        return None


@contextmanager
def _opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write(path: Path, data: bytes, flag: int) -> None:
    """Durably; `flag` says whether it is appended or begins the file."""
    with _opened(path, os.O_WRONLY | os.O_CREAT | flag) as descriptor:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    _write(temporary, data, os.O_TRUNC)
    os.replace(temporary, path)
    with _opened(path.parent) as folder:
        os.fsync(folder)


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
    digests = (step_digest(manifest, plan, step, row.tobytes()) for step, row in enumerate(cells, first))
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 32)


def encode_record(step: int, rows: int, plan: int, digest: bytes, check: int) -> tuple[bytes, int]:
    """(record, its checksum); `check` is that of the record before."""
    body = _BODY.pack(step, rows, plan, digest)
    check = _xxh3(body, seed=check)
    return body + _CHECK.pack(check), check


def parse_records(data: bytes) -> StepRecords:
    """The whole records of a step file, unchecked; a torn last one is left out."""
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
    """(document, checksum) of each line; a torn last line is left out."""
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
        """Read it back."""
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
