"""The ledger of a run: one record per step and one line per event, with a Merkle tree over each.

Files below ``RUN/ledger/`` (SPEC.md): `steps`, `events` and `heads` are only appended to. `state.json` holds their
committed sizes and is replaced atomically, so an interrupted commit has no effect.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.documents import decode_plain, encode, sha256_digest
from shardkit.errors import FormatError, IntegrityError
from shardkit.ledger.events import check_event, convert
from shardkit.ledger.files import open_file, read_file, replace, write
from shardkit.ledger.merkle import Frontier, Tree, leaf_hash
from shardkit.stores.file_operations import explained


class Ledger:
    """The ledger of a run.

    All methods see appended records and events; other processes see them after `commit`.

    Args:
        run: the run directory.
        writing: take the exclusive lock and truncate the files to their committed sizes, in order to append.

    Raises:
        IntegrityError: a file is shorter than its committed size, or `state.json` is damaged or missing.
    """

    def __init__(self, run: Path, *, writing: bool = False) -> None:
        self.run, self.directory = run, run / "ledger"
        self._lock = self._take_lock() if writing else -1
        try:
            self.state = self._load_state(writing)
            self._check_sizes(writing)
            self.steps, self.events = self.state.frontiers()
        except BaseException:
            self.close()
            raise
        self._new_steps, self._new_events = bytearray(), bytearray()
        self._committed_records = self.state.records

    # ---- reading

    @property
    def next_step(self) -> int:
        """The next step to append to the tree."""
        return self.state.first + self.steps.size

    def records(self) -> StepRecords:
        """Return all records in file order, including abandoned branches."""
        data = self._read_committed("steps", len(STEPS_MAGIC) + RECORD_BYTES * self._committed_records)
        new = np.frombuffer(bytes(self._new_steps), dtype=RECORD)
        return np.concatenate([parse_records(data), new])

    def branch_records(self) -> StepRecords:
        """Return the records that are leaves of the tree of steps, in order."""
        records, parts = self.records(), []
        starts = self.state.branch
        if len(starts) == 1 and starts[0][1] == 0 and len(records) == self.steps.size:
            return records
        for place, (step, at) in enumerate(starts):
            until = starts[place + 1][0] if place + 1 < len(starts) else self.next_step
            parts.append(records[at : at + until - step])
        return np.concatenate(parts) if parts else records[:0]

    def event_documents(self) -> list[dict[str, Any]]:
        """Return all events in order, validated by kind."""
        data = self._read_committed("events", self.state.events_bytes) + bytes(self._new_events)
        return list(parse_events(data))

    def digest_of(self, step: int) -> bytes:
        """Return the digest of a step of the current branch."""
        for first, at in reversed(self.state.branch):
            if first <= step < self.next_step:
                return self._record(at + step - first)
        raise IndexError(step)

    def head(self, step: int | None = None) -> dict[str, Any]:
        """Return the heads of both trees. If `step` is given, the tree of steps is cut to the steps before it."""
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
        """Append a step record. `step` must be `next_step` unless the tree is empty."""
        state = self.state
        if not self.steps.size:
            state.first, state.branch = step, [[step, state.records]]
        record, state.check = encode_record(step, rows, plan, digest, state.check)
        self._new_steps += record
        state.records += 1
        self.steps.append(leaf_hash(digest))

    def fork(self, step: int) -> None:
        """Start a new branch at `step`. Records of the abandoned branch stay in the file."""
        state = self.state
        size = max(0, step - state.first)
        leaves = (leaf_hash(one["digest"].tobytes()) for one in self.branch_records()[:size])
        self.steps = Tree(leaves).frontier()
        state.branch = [pair for pair in state.branch if pair[0] < step]
        state.branch.append([step, state.records])

    def add_event(self, document: dict[str, Any]) -> None:
        check_event(document, "ledger/events")
        line, self.state.events_check = encode_line(document, self.state.events_check)
        self._new_events += line
        self.events.append(leaf_hash(line[17:-1]))

    def commit(self) -> None:
        """Commit all appended records and events durably and atomically, by replacing `state.json`."""
        state = self.state
        state.size, state.peaks = self.steps.size, [peak.hex() for peak in self.steps.peaks]
        state.events, state.events_peaks = self.events.size, [peak.hex() for peak in self.events.peaks]
        if not (self._new_steps or self._new_events):
            if read_file(self.directory / "state.json", _MAX_STATE) != state.to_bytes():
                with explained(f"write {self.directory}", writing=True):
                    replace(self.directory / "state.json", state.to_bytes())
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
                    write(self.directory / name, data, os.O_APPEND)
            state.events_bytes += len(self._new_events)
            state.heads_bytes += len(head)
            replace(self.directory / "state.json", state.to_bytes())
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
        data = read_file(self.directory / "state.json", _MAX_STATE)
        if data is not None:
            return LedgerState.from_bytes(data)
        if any(read_file(self.directory / name, _MAX_FILE, size=1) for name in ("steps", "events", "heads")):
            raise IntegrityError(
                f"{self.directory} has records and no state.json, which is written before them: it was removed; "
                "restore it from a copy, or move ledger/ and journal/ aside to begin a new record"
            )
        state = LedgerState()
        if writing:
            with explained(f"write {self.directory}", writing=True):
                replace(self.directory / "state.json", state.to_bytes())
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
            if found > size and writing:  # appended by an interrupted commit
                with explained(f"write {path}", writing=True):
                    os.truncate(path, size)

    def _read_committed(self, name: str, size: int) -> bytes:
        return read_file(self.directory / name, _MAX_FILE, size=size) or b""

    def _record(self, index: int) -> bytes:
        at = (index - self._committed_records) * RECORD_BYTES + 16
        if at >= 0:
            return bytes(self._new_steps[at : at + 32])
        with explained(f"read {self.directory}"), open_file(self.directory / "steps") as descriptor:
            return os.pread(descriptor, 32, len(STEPS_MAGIC) + index * RECORD_BYTES + 16)


STEPS_MAGIC: Final = b"shardkit steps 1\n".ljust(24, b"\0")
"""First bytes of the file `steps`, including the format version."""

RECORD: Final = np.dtype(
    [("step", "<u8"), ("rows", "<u4"), ("plan", "<u4"), ("digest", "u1", 32), ("check", "<u8")]
)
"""A merged step: step number, rows, plan number, step digest, XXH3-64 of these."""

RECORD_BYTES: Final = RECORD.itemsize

_MAX_LINE: Final = 1 << 26
_MAX_FILE: Final = 1 << 33
_MAX_STATE: Final = 1 << 28
_BODY: Final = struct.Struct("<QII32s")
_CHECK: Final = struct.Struct("<Q")
_PREFIX: Final = struct.Struct("<32s32sQ")
_xxh3 = xxhash.xxh3_64_intdigest

StepRecords = NDArray[np.void]
"""(n,) of dtype `RECORD`."""


def step_digest(manifest: str, plan: str, step: int, cells: bytes | bytearray) -> bytes:
    """Return the digest of a step: SHA-256 over manifest id, plan digest, step and cell digests in lane order.

    Args:
        manifest: "sha256:…" of the dataset.
        plan: hex digest of the plan.
        step: number of the step in the run.
        cells: cell digests, 16 bytes per lane.
    """
    raw = bytes.fromhex(manifest.removeprefix("sha256:"))
    return hashlib.sha256(_PREFIX.pack(raw, bytes.fromhex(plan), step) + cells).digest()


def step_digests(manifest: str, plan: str, first: int, cells: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return `step_digest` of consecutive steps from `first` on: uint8 (steps, lanes, 16) → (steps, 32)."""
    digests = (step_digest(manifest, plan, step, row.tobytes()) for step, row in enumerate(cells, first))
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 32)


def encode_record(step: int, rows: int, plan: int, digest: bytes, check: int) -> tuple[bytes, int]:
    """Return (record, checksum of the record). `check` is the previous record's checksum."""
    body = _BODY.pack(step, rows, plan, digest)
    check = _xxh3(body, seed=check)
    return body + _CHECK.pack(check), check


def parse_records(data: bytes) -> StepRecords:
    """Return the complete records of a step file, without verifying checksums."""
    if data[: len(STEPS_MAGIC)] != STEPS_MAGIC[: len(data)]:
        raise FormatError("ledger/steps is not a step file of this version; do not trust it")
    count = max(0, len(data) - len(STEPS_MAGIC)) // RECORD_BYTES
    return np.frombuffer(data, dtype=RECORD, count=count, offset=min(len(data), len(STEPS_MAGIC)))


def damaged_records(records: StepRecords) -> list[int]:
    """Return the indices of records whose checksum does not continue the previous record's."""
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
    """Return (line, checksum of the line). `check` is the previous line's checksum."""
    body = encode(document)
    check = _xxh3(body, seed=check)
    return b"%016x %s\n" % (check, body), check


def parse_lines(data: bytes, name: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield (document, checksum) of each line, skipping an incomplete last line."""
    check = 0
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        body = line[17:]
        check = _xxh3(body, seed=check)
        if line[:17] != b"%016x " % check:
            raise FormatError(
                f"{name}: line {number} is damaged or not the one that was written there: its checksum does not go on "
                "from the line before"
            )
        document = decode_plain(body, max_bytes=_MAX_LINE)
        if not isinstance(document, dict):
            raise FormatError(f"{name}: line {number} is no JSON object; do not trust it")
        yield document, check


def parse_events(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the validated events of the file `events`, skipping an incomplete last line."""
    for number, (document, _) in enumerate(parse_lines(data, "ledger/events"), 1):
        check_event(document, f"ledger/events line {number}")
        yield document


@dataclass
class StartState:
    """The newest start of the run.

    Attributes:
        number: number of the start, counted from 0.
        shape: plan digest, number of ranks and number of workers, common to all attempts of the start.
        lanes: number of lanes of the plan.
        members: (rank, worker) of each attempt of the start.
        told: number of the newest start that has an event.
        owners: the last recorded assignment: its start, packed lanes per rank, and the runs of lanes in its event.
        reached: for each start, the step after the highest recorded step.
    """

    number: int = -1
    shape: list[str | int] = field(default_factory=list)
    lanes: int = 0
    members: list[list[int]] = field(default_factory=list)
    told: int = -1
    owners: list[Any] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)


@dataclass
class LedgerState:
    """Contents of `state.json`: the committed sizes, and the position of the next merge in each journal.

    Attributes:
        records: number of step records in `steps`, including abandoned branches.
        check: checksum of the last step record.
        first: step of the first leaf.
        size: number of leaves of the tree of steps.
        branch: [step, record] pairs; in the current branch, the steps from `step` on are stored from `record` on.
        peaks: peaks of the tree of steps, in hex.
        events: number of events.
        events_bytes: committed bytes of `events`.
        events_check: checksum of the last event.
        events_peaks: peaks of the tree of events, in hex.
        heads_bytes: committed bytes of `heads`.
        heads_check: checksum of the last line of `heads`.
        plans: [manifest id, plan digest] by number.
        journals: file name → (end offset and checksum of the last merged entry, number of the start, end offset of
            the last merged event).
        start: the newest start of the run.
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
    journals: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    start: StartState = field(default_factory=StartState)

    def frontiers(self) -> tuple[Frontier, Frontier]:
        """Return the frontiers of the trees of steps and events."""
        try:
            return (
                Frontier(self.size, map(bytes.fromhex, self.peaks)),
                Frontier(self.events, map(bytes.fromhex, self.events_peaks)),
            )
        except ValueError as error:
            raise IntegrityError(
                f"ledger/state.json contradicts itself: {error}; restore it from a copy"
            ) from None

    def to_bytes(self) -> bytes:
        """Encode as canonical JSON with its digest. Checksums are hex text, since they may exceed int64."""
        body = {name: _as_text(name, value) for name, value in asdict(self).items()}
        body["journals"] = {
            name: [at, f"{check:016x}", *rest] for name, (at, check, *rest) in self.journals.items()
        }
        document = {"format": "shardkit-ledger/1", "state": body, "digest": sha256_digest(encode(body))}
        return encode(document) + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> LedgerState:
        """Decode and validate the contents of `state.json`."""
        try:
            document = decode_plain(data.rstrip(b"\n"), max_bytes=_MAX_STATE)
            body = dict(document["state"])
            if document["format"] != "shardkit-ledger/1" or document["digest"] != sha256_digest(encode(body)):
                raise FormatError("its digest does not fit")
            numbers = {name: int(value, 16) for name, value in body.items() if name.endswith("check")}
            journals = {
                name: [at, int(check, 16), *rest] for name, (at, check, *rest) in body["journals"].items()
            }
            state: LedgerState = convert(body | numbers | {"journals": journals}, cls, "its contents")
            state.check_numbers()
        except (FormatError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise IntegrityError(f"ledger/state.json is damaged: {error}; restore it from a copy") from error
        return state

    def check_numbers(self) -> None:
        """Raise ValueError if the numbers are out of range or contradict each other."""
        numbers = (self.records, self.first, self.size, self.events, self.events_bytes, self.heads_bytes)
        starts = [step for step, _ in self.branch]
        places = [record for _, record in self.branch]
        is_branch = starts[:1] == [self.first] or not self.size
        if min(numbers) < 0 or max(numbers) >= 1 << 62 or not is_branch:
            raise ValueError("it holds impossible numbers")
        ends = [*starts[1:], self.first + self.size][: len(starts)]
        parts = zip(starts, ends, places, strict=True)
        if (
            any(not 0 <= end - step <= self.records - record for step, end, record in parts)
            or min([0, *places]) < 0
        ):
            raise ValueError("its branch is not in the records")


def _as_text(name: str, value: Any) -> Any:
    return f"{value:016x}" if name.endswith("check") else value
