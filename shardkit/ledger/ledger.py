"""The ledger of a run: one record per step and one line per event, with a Merkle tree over each.

Files below ``RUN/ledger/`` (SPEC.md): steps, events and losses are only appended to. `state.json` holds their committed
sizes and is replaced atomically, so an interrupted commit has no effect.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.documents import decode_plain, encode
from shardkit.errors import FormatError, IntegrityError
from shardkit.ledger.events import check_event
from shardkit.ledger.files import append, read_file, replace
from shardkit.ledger.state import MAX_STATE, LedgerState
from shardkit.stores.file_operations import explained


class Ledger:
    """The ledger of a run.

    All methods see what was appended; other processes see it after `commit`.

    Args:
        run: the run directory.
        writing: take the exclusive lock and truncate the files to their committed sizes, in order to append.

    Attributes:
        head_step: the step of the head that will be asked for; its tree is kept while later steps are appended.

    Raises:
        IntegrityError: a file is shorter than its committed size, or `state.json` is damaged or missing.
        FormatError: an event is damaged.
    """

    def __init__(self, run: Path, *, writing: bool = False) -> None:
        self.run, self.directory = run, run / "ledger"
        self.head_step: int | None = None
        self._kept: tuple[int, Frontier] | None = None  # a step and the tree of the steps before it
        self._lock = self._take_lock() if writing else -1
        try:
            self.state = self._load_state(writing)
            self._committed = self._sizes()
            self._check_sizes(writing)
            self._new = {name: bytearray() for name in self._committed}
            state = self.state
            self.steps = Frontier(state.next_step - state.first, state.peaks)
            self.events = Frontier(state.events, state.events_peaks)
            # checksums of the last records, with which the next ones continue
            ends = {name: self._committed[name] - _CHECK.size for name in ("steps", "losses")}
            self._checks = {
                name: int.from_bytes(self._read(name, end), "little") if end > 0 else 0
                for name, end in ends.items()
            }
            lines = list(parse_events(self._read("events")))
            self._checks["events"] = lines[-1][1] if lines else 0
            self._documents = [document for document, _ in lines]
        except BaseException:
            self.close()
            raise

    # ---- reading

    @property
    def next_step(self) -> int:
        """The next step to append to the tree."""
        return self.state.next_step

    def records(self) -> StepRecords:
        """Return all records in file order, including abandoned branches."""
        return parse_records(self._read("steps"))

    def branch_records(self) -> StepRecords:
        """Return the records that are leaves of the tree of steps, in order."""
        records, starts = self.records(), self.state.branch
        ends = [*(step for step, _ in starts[1:]), self.next_step][: len(starts)]
        parts = [records[at : at + end - step] for (step, at), end in zip(starts, ends, strict=True)]
        return parts[0] if len(parts) == 1 else np.concatenate([records[:0], *parts])

    def event_documents(self) -> list[dict[str, Any]]:
        """Return all events in order, validated by kind."""
        return list(self._documents)

    def loss_records(self, first: int = 0) -> LossRecords:
        """Return the records of losses from `first` on, in the order of merging."""
        return np.frombuffer(self._read("losses", first * LOSS_RECORD.itemsize), LOSS_RECORD)

    def loss_values(self, first: int, end: int) -> bytes:
        """Return the losses [first, end), counted over all records: float32, packed."""
        return self._read("loss_values", 4 * first, 4 * end)

    def _read(self, name: str, first: int = 0, end: int | None = None) -> bytes:
        """Return the bytes [first, end) of a file with what was appended, by default to its end."""
        committed, new = self._committed[name], self._new[name]
        end = committed + len(new) if end is None else end
        size = max(0, min(end, committed) - first)
        data = read_file(self.directory / name, _MAX_FILE, size=size, offset=first) if size else b""
        return (data or b"") + new[max(0, first - committed) : max(0, end - committed)]

    def digest_of(self, step: int) -> bytes:
        """Return the digest of a step of the current branch."""
        first, at = next(pair for pair in reversed(self.state.branch) if pair[0] <= step)
        place = len(STEPS_MAGIC) + (at + step - first) * RECORD_BYTES + 16
        return self._read("steps", place, place + 32)

    def head(self, step: int | None = None) -> dict[str, Any]:
        """Return the heads of both trees. If `step` is given, the tree of steps is cut to the steps before it."""
        steps = self.steps if step is None or step >= self.next_step else self._steps_before(step)
        return {
            "steps": {"first": self.state.first, "size": steps.size, "root": steps.root().hex()},
            "events": {"size": self.events.size, "root": self.events.root().hex()},
        }

    def _steps_before(self, step: int) -> Frontier:
        """Return the frontier of the steps of the branch before a step."""
        if self._kept is not None and self._kept[0] == step:
            return self._kept[1]
        records = self.branch_records()[: max(0, step - self.state.first)]
        return Tree(leaf_hash(one["digest"].tobytes()) for one in records).frontier()

    # ---- appending

    def append(self, step: int, rows: int, plan: int, digest: bytes) -> None:
        """Append a step record. `step` must be `next_step` unless the tree is empty."""
        state = self.state
        if not self.steps.size:
            state.branch = [(step, state.records)]
        if step == self.head_step:
            self._kept = step, Frontier(self.steps.size, self.steps.peaks)
        record, self._checks["steps"] = encode_record(step, rows, plan, digest, self._checks["steps"])
        self._new["steps"] += record if state.records else STEPS_MAGIC + record
        state.records += 1
        self.steps.append(leaf_hash(digest))

    def fork(self, step: int) -> None:
        """Start a new branch at `step`. Records of the abandoned branch stay in the file."""
        self._kept = None
        state, self.steps = self.state, self._steps_before(step)
        state.branch = [pair for pair in state.branch if pair[0] < step]
        state.branch.append((step, state.records))

    def add_event(self, document: dict[str, Any]) -> None:
        check_event(document, "ledger/events")
        line, self._checks["events"] = encode_line(document, self._checks["events"])
        self._new["events"] += line
        self.events.append(leaf_hash(line[17:-1]))
        self._documents.append(decode_plain(line[17:-1], max_bytes=_MAX_LINE))

    def add_losses(self, step: int, plan: int, place: int, values: bytes) -> None:
        """Append the losses of a step's rows at `place` and the following places: float32, packed."""
        state, count = self.state, len(values) // 4
        total = float(np.frombuffer(values, "<f4").sum(dtype=np.float64))
        body = _LOSS_BODY.pack(step, total, plan, place, count)
        check = self._checks["losses"] = loss_check(body, values, self._checks["losses"])
        self._new["losses"] += body + _CHECK.pack(check)
        self._new["loss_values"] += values
        state.losses, state.loss_values = state.losses + 1, state.loss_values + count

    def commit(self) -> None:
        """Commit what was appended durably and atomically, by replacing `state.json`."""
        state = self.state
        state.peaks, state.events, state.events_peaks = self.steps.peaks, self.events.size, self.events.peaks
        state.events_bytes += len(self._new["events"])
        encoded = state.to_bytes()
        if read_file(self.directory / "state.json", MAX_STATE) == encoded:
            return
        with explained(f"write {self.directory}", writing=True):
            for name, data in self._new.items():
                if data:
                    append(self.directory / name, data)
            replace(self.directory / "state.json", encoded)
        self._committed = self._sizes()
        self._new = {name: bytearray() for name in self._committed}

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- files

    def _take_lock(self) -> int:
        with explained(f"write {self.directory}", writing=True):
            self.directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return descriptor

    def _load_state(self, writing: bool) -> LedgerState:
        data = read_file(self.directory / "state.json", MAX_STATE)
        if data is not None:
            return LedgerState.from_bytes(data)
        if any(read_file(self.directory / name, _MAX_FILE, size=1) for name in ("steps", "events")):
            raise IntegrityError(
                f"{self.directory} has records and no state.json, which is written before them: it was removed; "
                "restore it from a copy, or move ledger/ and journal/ aside to begin a new record"
            )
        state = LedgerState()
        if writing:
            with explained(f"write {self.directory}", writing=True):
                replace(self.directory / "state.json", state.to_bytes())
        return state

    def _sizes(self) -> dict[str, int]:
        """Return the committed sizes of the files in bytes, by name."""
        state = self.state
        return {
            "steps": len(STEPS_MAGIC) + RECORD_BYTES * state.records if state.records else 0,
            "events": state.events_bytes,
            "losses": LOSS_RECORD.itemsize * state.losses,
            "loss_values": 4 * state.loss_values,
        }

    def _check_sizes(self, writing: bool) -> None:
        for name, size in self._committed.items():
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


STEPS_MAGIC: Final = b"shardkit steps 1\n".ljust(24, b"\0")
"""First bytes of the file `steps`, including the format version."""

RECORD: Final = np.dtype(
    [("step", "<u8"), ("rows", "<u4"), ("plan", "<u4"), ("digest", "u1", 32), ("check", "<u8")]
)
"""A merged step: step number, rows, plan number, step digest, XXH3-64 of these."""

RECORD_BYTES: Final = RECORD.itemsize

_MAX_LINE: Final = 1 << 26
_MAX_FILE: Final = 1 << 33
LOSS_RECORD: Final = np.dtype(
    [("step", "<i8"), ("total", "<f8"), ("plan", "<u4"), ("place", "<u4"), ("count", "<u4"), ("check", "<u8")]
)
"""Losses of consecutive places of a step: their sum, plan number, first place, number, and `loss_check`."""

_BODY: Final = struct.Struct("<QII32s")
_LOSS_BODY: Final = struct.Struct("<qdIII")
_CHECK: Final = struct.Struct("<Q")
_PREFIX: Final = struct.Struct("<32s32sQ")
_xxh3 = xxhash.xxh3_64_intdigest

StepRecords = NDArray[np.void]
"""(n,) of dtype `RECORD`."""
LossRecords = NDArray[np.void]
"""(n,) of dtype `LOSS_RECORD`."""


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


def consecutive(records: StepRecords) -> list[StepRecords]:
    """Split records into ranges of consecutive steps under one plan."""
    if not len(records):
        return []
    steps, plans = records["step"].astype(np.int64), records["plan"]
    return np.split(records, np.flatnonzero((np.diff(steps) != 1) | (plans[1:] != plans[:-1])) + 1)


def loss_check(body: bytes, values: bytes, check: int) -> int:
    """Return the checksum of a record of losses (`body`) and its values. `check` is the previous record's."""
    return _xxh3(values, seed=_xxh3(body, seed=check))


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


def parse_events(data: bytes) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield (validated event, checksum) of each line of the file `events`, skipping an incomplete last line."""
    for number, (document, check) in enumerate(parse_lines(data, "ledger/events"), 1):
        check_event(document, f"ledger/events line {number}")
        yield document, check


# ---- Merkle trees of RFC 6962 §2.1 (unchanged in RFC 9162 §2.1), so that other libraries can verify their proofs

HASH_BYTES: Final = 32


def leaf_hash(entry: bytes) -> bytes:
    """Return the hash of a leaf. The prefix prevents a leaf from being presented as an inner node."""
    return hashlib.sha256(b"\0" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the hash of the parent of two subtrees."""
    return hashlib.sha256(b"\1" + left + right).digest()


class Frontier:
    """The right edge of a tree, sufficient to append leaves and compute the root.

    Args:
        size: number of leaves.
        peaks: hashes of the complete subtrees, the largest first: one per set bit of `size`.

    Raises:
        ValueError: the number of peaks does not fit the size.
    """

    def __init__(self, size: int = 0, peaks: Iterable[bytes] = ()) -> None:
        self.size, self.peaks = size, list(peaks)
        if len(self.peaks) != size.bit_count():
            raise ValueError(f"{len(self.peaks)} peaks for {size} leaves, expected {size.bit_count()}")

    def append(self, leaf: bytes) -> None:
        """Append a leaf, given its `leaf_hash`. Amortised cost: at most one hash."""
        node, rest = leaf, self.size
        while rest & 1:
            node = node_hash(self.peaks.pop(), node)
            rest >>= 1
        self.peaks.append(node)
        self.size += 1

    def root(self) -> bytes:
        if not self.peaks:
            return hashlib.sha256(b"").digest()
        node = self.peaks[-1]
        for peak in reversed(self.peaks[:-1]):
            node = node_hash(peak, node)
        return node


class Tree:
    """A whole tree in memory, 64 bytes per leaf, with the roots of all its sizes."""

    def __init__(self, leaves: Iterable[bytes] = ()) -> None:
        # level h: hashes of the complete subtrees of 2**h leaves
        self._levels = [b"".join(leaves)]
        while len(below := self._levels[-1]) >= 2 * HASH_BYTES:
            ends = range(2 * HASH_BYTES, len(below) + 1, 2 * HASH_BYTES)
            level = (hashlib.sha256(b"\1" + below[end - 2 * HASH_BYTES : end]).digest() for end in ends)
            self._levels.append(b"".join(level))

    def __len__(self) -> int:
        return len(self._levels[0]) // HASH_BYTES

    def root(self, size: int | None = None) -> bytes:
        """Return the root of the first `size` leaves, by default of all."""
        return self.frontier(size).root()

    def frontier(self, size: int | None = None) -> Frontier:
        """Return the frontier of the first `size` leaves, by default of all."""
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
