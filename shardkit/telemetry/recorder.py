"""Writers of a run directory: records of sources, which are also the heartbeat, and events (SPEC.md §1, §2)."""

from __future__ import annotations

import heapq
import math
import os
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from shardkit.errors import StoreError
from shardkit.ranges import Range
from shardkit.telemetry.records import (
    MAX_LINE_BYTES,
    NEWEST_BYTES,
    Record,
    append_document,
    append_line,
    read_run,
    record_path,
)

if TYPE_CHECKING:
    from shardkit.telemetry.diagnosis import Anomaly
    from shardkit.telemetry.pages import PageServer

Source: TypeAlias = Callable[[], Mapping[str, float]]
"""Function that returns numbers by name; called for each record."""

TableSource: TypeAlias = Callable[[], Sequence[Sequence[Any]]]
"""Function that returns the rows of a short table; called for each record."""


class Telemetry:
    """Registry of sources; thread-safe. It stores functions, not numbers, and starts no thread.

    Args:
        rank, world, worker: rank, world size and DataLoader worker of this process.
        lanes: function that returns the present lanes of the rank.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        world: int = 1,
        worker: int = 0,
        lanes: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        self.rank, self.world, self.worker = rank, world, worker
        self.session = os.urandom(6).hex()
        self._lanes = lanes or tuple
        self._lock = threading.RLock()  # reentrant: garbage collection may call back in the same thread
        self._sources: dict[str, Source] = {"process": _process_numbers}
        self._tables: dict[str, TableSource] = {}
        self._errors = 0

    def add_source(self, name: str, read: Source) -> None:
        """Add a source whose numbers are named ``name.…``; it replaces an earlier source of that name."""
        with self._lock:
            self._sources[name] = read

    def add_table(self, name: str, read: TableSource) -> None:
        """Add a table of at most 64 rows of texts and numbers."""
        with self._lock:
            self._tables[name] = read

    def remove_source(self, name: str) -> None:
        """Remove the source and the table of this name, if any."""
        with self._lock:
            self._sources.pop(name, None)
            self._tables.pop(name, None)

    def read(self, *, state: str = "running", interval_s: float = 2.0) -> Record:
        with self._lock:
            sources, tables = list(self._sources.items()), list(self._tables.items())
        values = {
            f"{source}.{name}": float(value)
            for source, read in sources
            for name, value in (self._poll(read) or {}).items()
            if math.isfinite(value)
        }
        rows = {name: self._poll(read_rows) or [] for name, read_rows in tables}
        lanes = tuple(self._poll(self._lanes) or ())
        values["telemetry.errors"] = float(self._errors)
        return Record(
            time=time.time(), rank=self.rank, world=self.world, worker=self.worker, host=os.uname().nodename[:200],
            pid=os.getpid(), session=self.session, state=state, interval_s=interval_s, lanes=lanes, values=values,
            tables=rows,
        )  # fmt: skip

    def _poll(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Exception:  # noqa: BLE001  a source that fails must not end the watch
            self._errors += 1
            return None


def _process_numbers() -> dict[str, float]:
    used = os.times()
    try:
        with open("/proc/self/statm", "rb") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        resident = 0  # no /proc: not Linux
    return {"cpu_s": used.user + used.system, "resident_bytes": float(resident)}


@dataclass(frozen=True, kw_only=True)
class TelemetrySettings:
    """Settings of the telemetry of a run."""

    interval_s: float = 2.0  # seconds between two records
    most_bytes: int = 4 << 20  # size at which a file is rotated; a rank keeps up to two files
    listen: str | None = None
    """``host:port`` at which the first rank of a node serves /metrics and /healthz; None to serve neither."""
    control: bool = True  # apply `RUN/control.toml`

    def __post_init__(self) -> None:
        Range(0.01, 86_400).check("interval_s", self.interval_s, float)
        Range(MAX_LINE_BYTES, 1 << 40).check("most_bytes", self.most_bytes)


class Recorder:
    """Thread that polls sources, writes records and calls hooks until it is closed.

    An error in a file or a hook affects only that record, because telemetry must not stop the training.

    Args:
        telemetry: registry to poll.
        run: directory of the run.
        settings: settings of the telemetry.
        hooks: functions called with each record after it is written.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        run: Path,
        settings: TelemetrySettings,
        hooks: Sequence[Callable[[Record], None]] = (),
    ) -> None:
        self._telemetry, self._settings, self._hooks = telemetry, settings, tuple(hooks)
        self._path = record_path(run, telemetry.rank, telemetry.worker)
        self._process = os.getpid()
        self._closing = threading.Event()
        self._write_lock = threading.RLock()  # reentrant: garbage collection may call back in the same thread
        self._failures = 0
        telemetry.add_source("recorder", lambda: {"failures": float(self._failures)})
        self._thread = threading.Thread(target=self._run, name="shardkit-telemetry", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        return self._path

    def close(self) -> None:
        """Write the last record and join the thread; can be called twice, and does nothing in a forked child."""
        if self._process != os.getpid() or self._closing.is_set():
            return
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._record("ended")

    def _run(self) -> None:
        self._record("running")
        while not self._closing.wait(self._settings.interval_s):
            record = self._record("running")
            for hook in self._hooks:
                if self._closing.is_set():
                    return
                try:
                    hook(record)
                except Exception:  # noqa: BLE001  a rule that fails must not end the heartbeat
                    self._failures += 1

    def _record(self, state: str) -> Record:
        record = self._telemetry.read(state=state, interval_s=self._settings.interval_s)
        line = record.to_line()
        if len(line) > MAX_LINE_BYTES:
            self._failures += 1
            return record
        try:
            with self._write_lock:
                if append_line(self._path, line) > self._settings.most_bytes:
                    self._path.replace(self._path.with_name(self._path.name + ".1"))
        except OSError:
            self._failures += 1  # a full disk stops the telemetry, not the training
        return record


def write_stacks(path: Path) -> None:
    """Replace a file by the present stacks of all threads of this process, without values of variables."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"process {os.getpid()} at {time.strftime('%Y-%m-%d %H:%M:%S')}\n"]
    for ident, frame in sorted(sys._current_frames().items()):  # noqa: SLF001  documented for this very use
        stack = traceback.StackSummary.extract(traceback.walk_stack(frame), capture_locals=False)
        parts.append(f"\nthread {names.get(ident, ident)} (innermost call first):\n{''.join(stack.format())}")
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(parts), encoding="utf-8")
    temporary.replace(path)


class EventLog:
    """Writer of `events.jsonl`, which the ranks of a run share; the file is created with the first event.

    Args:
        directory: directory of the run; None to record nothing.
        rank: rank named in each event; None for events of the whole run.
    """

    def __init__(self, directory: Path | None, rank: int | None) -> None:
        self._directory = directory
        self._rank: dict[str, object] = {} if rank is None else {"rank": rank}

    def record(self, kind: str, **details: object) -> None:
        """Append one event.

        Raises:
            StoreError: the file cannot be written.
        """
        if self._directory is None:
            return
        event = {"time": round(time.time(), 3), "event": kind, **self._rank, **details}
        try:
            append_document(self._directory / "events.jsonl", event)
        except OSError as error:
            raise StoreError(
                f"events in {self._directory} cannot be written: {error.strerror}; make room and resume"
            ) from error


# ---- hooks that watch a run from one of its processes

_LOOK_INTERVALS: Final = 5
_SHARE_OF_TIME: Final = 1 / 200
_OWN_RECORDS: Final = 400
_MOST_TOLD: Final = 8  # anomalies of one kind reported at a time: a failed switch stalls a thousand ranks


@dataclass
class AnomalyWatch:
    """Recorder hook of rank 0 that records anomalies of all ranks as events."""

    _run: Path  # directory of the run, with the records of other ranks
    _record_event: Callable[..., None]  # appends an event to the run
    _own: deque[Record] = field(default_factory=lambda: deque(maxlen=_OWN_RECORDS))
    _open: dict[tuple[str, int], float] = field(default_factory=dict)  # (kind, rank) → first seen
    _next_look: float = 0.0

    def __call__(self, record: Record) -> None:
        """Keep the record, and apply the rules if it is time to."""
        self._own.append(record)
        started = time.monotonic()
        if started < self._next_look:
            return
        from shardkit.telemetry.diagnosis import find_anomalies  # most processes do not need it

        ranks: dict[int, Sequence[Record]] = dict(read_run(self._run, tail_bytes=NEWEST_BYTES).ranks)
        ranks[record.rank] = list(self._own)
        self.settle(find_anomalies(ranks, record.time), record.time)
        took = time.monotonic() - started
        self._next_look = started + max(_LOOK_INTERVALS * record.interval_s, took / _SHARE_OF_TIME)

    def settle(self, found: Sequence[Anomaly], now: float) -> None:
        """Record an event for each new anomaly and for each one that has ended."""
        told: Counter[str] = Counter()
        for one in found:
            if one.key not in self._open and told[one.kind] < _MOST_TOLD:  # report more the next time
                told[one.kind] += 1
                self._open[one.key] = now
                details = one.to_json()
                self._record_event("anomaly", anomaly=details.pop("kind"), **details)
        present = {one.key for one in found}
        for kind, rank in [key for key in self._open if key not in present]:
            seconds = round(now - self._open.pop((kind, rank)), 1)
            self._record_event("anomaly_over", anomaly=kind, rank=rank, seconds=seconds)


_BETWEEN_STACKS_S: Final = 60.0


class RunWatch:
    """Telemetry thread of a loader: records, stacks, anomalies, and the HTTP server of its node."""

    def __init__(
        self,
        run: Path,
        telemetry: Telemetry,
        settings: TelemetrySettings,
        events: EventLog,
        more_hooks: Sequence[Callable[[Record], None]] = (),
    ) -> None:
        self._stacks = record_path(run, telemetry.rank, telemetry.worker).with_suffix(".stacks.txt")
        self._stalls, self._next_stacks = 0.0, 0.0
        hooks: list[Callable[[Record], None]] = [self._note_stalls]
        if telemetry.rank == 0 and telemetry.worker == 0:
            hooks.append(AnomalyWatch(run, events.record))
        self._server: PageServer | None = None
        if settings.listen is not None and telemetry.worker == 0 and os.environ.get("LOCAL_RANK", "0") == "0":
            from shardkit.telemetry.serving import serve_health  # imports http.server

            try:
                self._server = serve_health(run, settings.listen)
            except StoreError as error:  # the port is taken, for example by another run: training continues
                events.record("health_not_served", reason=str(error))
        self._recorder = Recorder(telemetry, run, settings, [*hooks, *more_hooks])

    @property
    def port(self) -> int | None:
        """Port of /metrics and /healthz, or None if they are not served."""
        return None if self._server is None else self._server.port

    def _note_stalls(self, record: Record) -> None:
        """Write the stacks of all threads if the watchdog reported a stall since the last record."""
        stalls, self._stalls = self._stalls, record.value("loader.stalls")
        if self._stalls > stalls and time.monotonic() >= self._next_stacks:
            self._next_stacks = time.monotonic() + _BETWEEN_STACKS_S
            write_stacks(self._stacks)

    def close(self) -> None:
        """Write the last record and stop; can be called twice."""
        self._recorder.close()
        server, self._server = self._server, None
        if server is not None:
            server.close()


# ---- statistics of loaded blocks

_SLOWEST: Final = 16
_HOTTEST: Final = 24
_LANES: Final = 64
_EXPECTED: Final = 1 << 16


@dataclass
class BlockTimes:
    """Loads by shard and by lane, and the slowest loads. Thread-safe; takes about 1 µs per block.

    A block that is loaded again, because it was evicted or because lanes moved, counts for the same lane.
    """

    _name: Callable[[int], str]  # returns the name of a shard for people
    _is_local: Callable[[int], bool]  # returns True if a shard is a local file
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _shards: dict[int, list[int]] = field(default_factory=dict)  # shard → [loads, bytes]
    # heap of (seconds, time, shard, block)
    _slowest: list[tuple[float, float, int, int]] = field(default_factory=list)
    _lanes: dict[int, list[float]] = field(default_factory=dict)  # lane → [loads, seconds, bytes]
    # block of the dataset → lane that needs it first, for the blocks named last
    _expected: dict[int, int] = field(default_factory=dict)

    def expect(self, blocks: Iterable[int], lanes: Iterable[int]) -> None:
        """Set the lane that needs each block of the dataset first; call it before the blocks are loaded."""
        with self._lock:
            for block, lane in zip(blocks, lanes, strict=True):
                self._expected.pop(block, None)  # an entry that is set again becomes the newest
                self._expected[block] = lane
            for block in list(islice(self._expected, max(0, len(self._expected) - _EXPECTED))):
                del self._expected[block]

    def note(self, shard: int, block: int, seconds: float, num_bytes: int, number: int = -1) -> None:
        """Count a block that has been loaded, verified and decompressed."""
        with self._lock:
            lane = self._expected.get(number)  # kept: after a rebalance, a block may be loaded twice
            if lane is not None:
                cost = self._lanes.setdefault(lane, [0, 0.0, 0])
                cost[0] += 1
                cost[1] += seconds
                cost[2] += num_bytes
            counts = self._shards.setdefault(shard, [0, 0])
            counts[0] += 1
            counts[1] += num_bytes
            if len(self._slowest) < _SLOWEST:
                heapq.heappush(self._slowest, (seconds, time.time(), shard, block))
            elif seconds > self._slowest[0][0]:
                heapq.heapreplace(self._slowest, (seconds, time.time(), shard, block))

    def hot_shards(self) -> list[list[object]]:
        """Return rows of (shard, loads, bytes), most bytes first."""
        return [[self._name(shard), *counts] for shard, counts in self._most(self._shards, _HOTTEST)]

    def lane_loads(self) -> list[list[object]]:
        """Return rows of (lane, loads, seconds, bytes), most seconds first."""
        most = self._most(self._lanes, _LANES)
        return [[lane, loads, round(seconds, 6), num_bytes] for lane, (loads, seconds, num_bytes) in most]

    def _most(self, counts: Mapping[int, Sequence[float]], number: int) -> list[tuple[int, list[float]]]:
        """Return copies of the entries with the largest second count."""
        with self._lock:
            largest = heapq.nlargest(number, counts.items(), key=lambda item: (item[1][1], -item[0]))
            return [(one, list(found)) for one, found in largest]

    def slowest(self) -> list[list[object]]:
        """Return rows of (seconds, time, shard, block), slowest first."""
        with self._lock:
            found = sorted(self._slowest, reverse=True)
        return [
            [round(seconds, 6), round(at, 3), self._name(shard), block] for seconds, at, shard, block in found
        ]

    def numbers(self) -> dict[str, float]:
        """Return the number of shards read so far, and the bytes of blocks from local files."""
        with self._lock:
            counts = list(self._shards.items())
        local = sum(one[1] for shard, one in counts if self._is_local(shard))
        return {"shards": float(len(counts)), "local_bytes": float(local)}
