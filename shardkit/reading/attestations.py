"""Attestations: results of checks of copies, kept as append-only documents in ``attest/<location>/<day>/`` of a root.

An attestation states that a digest was good, wrong, missing or healed in one location at one time. It is a hint: it is
never trusted, and a copy reported as bad is checked again. A reader writes one document per bad copy, into its run
directory if it may not write to the root. Scrubs and repairs write one document for many results.

`Healer` attests and repairs bad copies that readers meet. `ReadEvents` counts the read events of one process.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from shardkit.documents import Digest, Document, Time, decode, encode, utc_text
from shardkit.errors import FormatError, IntegrityError, NotFoundError, ShardkitError
from shardkit.reading.objects import ROOT_NAME, Location, copy_object
from shardkit.stores.store import EXTENSIONS, Store, object_name, parse_object_name

_MAX_RESULTS: Final = 4_096
_MAX_BYTES: Final = 2**20
_FLUSH_S: Final = 10.0
_Word = Annotated[str, Meta(pattern=r"\A[a-z0-9][a-z0-9._-]{0,39}\Z")]
_Result = Annotated[str, Meta(pattern=r"\A(good|wrong|missing|healed)\Z")]
_Level = Annotated[str, Meta(pattern=r"\A(list|attested|stored|read|decode|block)\Z")]

_WEIGHT: Final = {"good": 0, "wrong": 1, "missing": 1, "healed": 2}
"""Order of results in the same second: the heavier one wins, so a repair overrides the read that found the damage."""


class Attestation(msgspec.Struct, frozen=True):
    """One check of one copy.

    Attributes:
        location: name of the location.
        digest: ``sha256:<hex>`` of the object.
        extension: extension of the object's name.
        result: "good", "wrong", "missing" or "healed".
        level: depth of the check: a level of ``shardkit verify``, or "block" if one block was read.
        by: operation that checked or healed it: "read", "write", "scrub" or "repair".
        time: UTC, ``2026-11-20T19:00:00Z``.
    """

    location: str
    digest: str
    extension: str
    result: str
    level: str
    by: str
    time: str = msgspec.field(default_factory=utc_text)

    @property
    def name(self) -> str:
        """Name of the object."""
        return object_name(self.digest, self.extension)

    @property
    def is_bad(self) -> bool:
        return self.result in ("wrong", "missing")


class _Attestations(Document, frozen=True, tag="shardkit-attestations/1"):
    """Results of one location, level and operation, each as (digest, extension, result, time)."""

    location: _Word
    level: _Level
    by: _Word
    results: Annotated[tuple[tuple[Digest, _Word, _Result, Time], ...], Meta(max_length=_MAX_RESULTS)]


def put_attestations(store: Store, results: Iterable[Attestation]) -> None:
    """Put one document for each location, level and operation."""
    import uuid  # slow to import, and readers do not need it

    groups: dict[tuple[str, str, str], list[tuple[str, str, str, str]]] = {}
    for one in results:
        group = groups.setdefault((one.location, one.level, one.by), [])
        group.append((one.digest, one.extension, one.result, one.time))
    for (location, level, by), found in sorted(groups.items()):
        document = _Attestations(location=location, level=level, by=by, results=tuple(found))
        store.put_new(f"attest/{location}/{utc_text()[:10]}/{uuid.uuid4().hex}.json", encode(document))


class Records:
    """Collector of check results, which it writes to a root every 10 s, and when `flush` is called.

    A killed process loses the results since the last write and must check those copies again.

    Args:
        store: store of the root; None to discard results.
        by: checking operation: "scrub" or "repair".
    """

    def __init__(self, store: Store | None, by: str) -> None:
        self._store, self._by = store, by
        self._waiting: list[Attestation] = []
        self._written_at = time.monotonic()

    def add(self, location: str, name: str, result: str, level: str) -> None:
        """Add the result of checking an object now."""
        if self._store is not None:
            self._waiting.append(Attestation(location, *parse_object_name(name), result, level, self._by))
            if len(self._waiting) >= _MAX_RESULTS or time.monotonic() - self._written_at > _FLUSH_S:
                self.flush()

    def flush(self) -> None:
        """Write pending results durably."""
        if self._store is not None:
            put_attestations(self._store, self._waiting)
        self._waiting.clear()
        self._written_at = time.monotonic()


def record_healed(root: Store, name: str) -> None:
    """Record that a writer, such as a build, replaced a bad object of the root by the same object with good bytes."""
    put_attestations(root, [Attestation(ROOT_NAME, *parse_object_name(name), "healed", "read", "write")])


class HealedObjects:
    """Objects of a root that writers heal from now on, in this process and in others."""

    def __init__(self, root: Store) -> None:
        self._root = root
        self._after = f"attest/{ROOT_NAME}/{utc_text()[:10]}"
        self._before = set(self._names())

    def names(self) -> list[str]:
        """Return the sorted names of objects that were healed since this object was made."""
        new = set(self._names()) - self._before
        return sorted({one.name for one in _read(self._root, new) if one.by == "write"})

    def _names(self) -> Iterator[str]:
        return self._root.list_after(f"attest/{ROOT_NAME}/", self._after)


def read_attestations(stores: Iterable[Store]) -> dict[str, dict[str, Attestation]]:
    """Return the latest attestation of each copy, by location and object name.

    Damaged documents and documents of other kinds are skipped.
    """
    latest: dict[str, dict[str, Attestation]] = {}
    for one in (one for store in stores for one in _read(store, store.list_after("attest/"))):
        held, name = latest.setdefault(one.location, {}), one.name
        if name not in held or _order(one) > _order(held[name]):
            held[name] = one
    return latest


def _order(one: Attestation) -> tuple[str, int]:
    return one.time, _WEIGHT[one.result]


def _read(store: Store, names: Iterable[str]) -> Iterator[Attestation]:
    for name in names:
        with contextlib.suppress(FormatError, IntegrityError, NotFoundError):
            data = store.get(name, max_bytes=_MAX_BYTES)
            found = decode(_Attestations, data, name, max_bytes=_MAX_BYTES)
            for digest, extension, result, when in found.results:
                if extension in EXTENSIONS:
                    yield Attestation(found.location, digest, extension, result, found.level, found.by, when)


COUNTED: Final = (
    "requests",
    "retries",
    "refetches",
    "mismatches",
    "failovers",
    "hedges",
    "hedges_won",
    "missing",
    "throttled",
    "timeouts",
    "circuit_opened",
    "circuit_closed",
    "healed",
    "heal_failed",
    "rebuilt",
    "stale_log",
    "cache_hits",
    "cache_misses",
    "cache_fills",
    "cache_waits",
    "cache_evictions",
    "cache_bypassed",
    "cache_damaged",
    "cache_failed",
)
"""Names of the counters. All exist from the start, so that a zero differs from a misspelled name."""

_SILENT: Final = frozenset({"requests", "cache_hits", "cache_misses", "cache_fills", "cache_evictions"})


class ReadEvent(NamedTuple):
    """One event."""

    time: float
    """Seconds since the epoch."""
    kind: str
    """A name in `COUNTED`."""
    location: str
    details: Mapping[str, object]


class ReadEvents:
    """Counters and events of one process; safe from many threads.

    Attributes:
        sink: Called with each event except routine ones, outside all locks. Its exceptions are dropped: a full disk
            under a log must not stop a read.
    """

    def __init__(self) -> None:
        self.sink: Callable[[ReadEvent], None] | None = None
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def note(self, kind: str, location: str = "", **details: object) -> None:
        """Count an event and pass it to the sink, unless it is routine."""
        assert kind in COUNTED, kind
        with self._lock:
            self._counts[kind] += 1
        if kind not in _SILENT and self.sink is not None:
            # a failing sink must not stop a read
            with contextlib.suppress(Exception):
                self.sink(ReadEvent(time.time(), kind, location, details))

    def add_bytes(self, source: str, num_bytes: int) -> None:
        """Add verified bytes to the total of a source: a location's name, or "cache"."""
        with self._lock:
            self._bytes[source] += num_bytes

    def stats(self) -> dict[str, int]:
        """Return all counters by name, and the bytes read as ``bytes_from_<source>``."""
        with self._lock:
            counts = {
                f"remote_{name}" if not name.startswith("cache_") else name: self._counts[name]
                for name in COUNTED
            }
            return counts | {f"bytes_from_{source}": total for source, total in sorted(self._bytes.items())}


_QUEUED: Final = 10_000


class Healer:
    """Attests each bad copy once and replaces it with good bytes, one object at a time in the background."""

    def __init__(self, locations: Sequence[Location], read_events: ReadEvents) -> None:
        # receives each attestation in place of the location, for readers that may not write there
        self.attest: Callable[[Attestation], None] | None = None
        self._locations = locations
        self._read_events = read_events
        self._lock = threading.Lock()
        self._seen: set[tuple[str, str]] = set()
        self._work: queue.Queue[tuple[Location, str]] = queue.Queue(_QUEUED)
        self._thread: threading.Thread | None = None

    def report(self, location: Location, name: str, result: str) -> None:
        """Record that a reader met a bad copy: "wrong" or "missing"; heal it if the location allows that."""
        with self._lock:
            if (location.name, name) in self._seen:
                return
            self._seen.add((location.name, name))
        try:
            self._record(location, name, result, level="block")
        except FormatError:
            return  # the name has no digest, so a copy cannot be verified
        if location.heal:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="shardkit-heal", daemon=True)
                    self._thread.start()
            with contextlib.suppress(queue.Full):  # a later read reports it again
                self._work.put_nowait((location, name))

    def wait(self) -> None:
        """Wait until all reported copies have been processed."""
        self._work.join()

    def _run(self) -> None:
        while True:
            location, name = self._work.get()
            try:
                copied = copy_object(name, self._locations, location, replace=True)
                if copied.source:
                    self._read_events.note("healed", location.name, what=name)
                    self._record(location, name, "healed", level="read")
                else:
                    reason = str(copied.problem)
                    self._read_events.note("heal_failed", location.name, what=name, reason=reason)
            finally:
                self._work.task_done()

    def _record(self, location: Location, name: str, result: str, *, level: str) -> None:
        found = Attestation(location.name, *parse_object_name(name), result, level, "read")
        # a read must not fail because of an attestation
        with contextlib.suppress(ShardkitError, OSError):
            if self.attest is not None:
                self.attest(found)
            elif location.heal:
                put_attestations(location.store, [found])
