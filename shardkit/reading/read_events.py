"""What did not go the straight way: counted always, the latest kept, each handed to whoever listens."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

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
    "coalesced",
)
"""Names of the counters; all are there from the beginning, so that a zero can be told from a misspelling."""

_KEPT: Final = 1_000
_SILENT: Final = frozenset(
    {"requests", "cache_hits", "cache_misses", "cache_fills", "cache_evictions", "coalesced"}
)


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

    Args:
        sink: Called with each event that is no everyday one, outside all locks; what it raises is dropped, because a
            full disk under a log must not stop a read.
    """

    def __init__(self, sink: Callable[[ReadEvent], None] | None = None) -> None:
        self.sink = sink
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._events: deque[ReadEvent] = deque(maxlen=_KEPT)

    def note(self, kind: str, location: str = "", **details: object) -> None:
        """Count, and record unless it is an everyday event."""
        assert kind in COUNTED, kind
        event = None
        with self._lock:
            self._counts[kind] += 1
            if kind not in _SILENT:
                event = ReadEvent(time.time(), kind, location, details)
                self._events.append(event)
        if event is not None and self.sink is not None:
            try:
                self.sink(event)
            except Exception:  # noqa: BLE001 (a listener's fault is not the reader's)
                return

    def add_bytes(self, source: str, num_bytes: int) -> None:
        """Verified bytes that came from a source: a location's name, or "cache"."""
        with self._lock:
            self._bytes[source] += num_bytes

    @property
    def events(self) -> list[ReadEvent]:
        """The latest events, oldest first."""
        with self._lock:
            return list(self._events)

    def stats(self) -> dict[str, int]:
        """All counters by name, and ``bytes_from_<source>``."""
        with self._lock:
            counts = {
                f"remote_{name}" if not name.startswith("cache_") else name: self._counts[name]
                for name in COUNTED
            }
            return counts | {f"bytes_from_{source}": total for source, total in sorted(self._bytes.items())}
