"""What a process knows of a location: how fast it answers, how much it takes at once, and whether to ask it at all.

And what did not go the straight way: counted always, the latest kept, each handed to whoever listens.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

_JITTER: Final = random.SystemRandom()


class Latencies:
    """Recent response times, by size of the answer; enough of them give a 95th percentile."""

    _KEPT: Final = 128
    _ENOUGH: Final = 16

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=self._KEPT))

    def add(self, num_bytes: int, seconds: float) -> None:
        with self._lock:
            self._recent[_size_class(num_bytes)].append(seconds)

    def quantile(self, num_bytes: int, share: float) -> float | None:
        """Seconds within which a `share` of recent answers of about this size came; None before there are enough."""
        with self._lock:
            recent = sorted(self._recent[_size_class(num_bytes)])
        if len(recent) < self._ENOUGH:
            return None
        return recent[min(len(recent) - 1, int(share * len(recent)))]


def _size_class(num_bytes: int) -> int:
    """64 KiB, 256 KiB, 1 MiB, …: within a class the time to answer is about the same."""
    return max(0, (max(num_bytes, 1).bit_length() - 15) // 2)


class Budget:
    """How many requests may be under way at once: grows by answers, halves when the location is overloaded.

    Additive increase, multiplicative decrease (Chiu and Jain 1989), as in TCP: many clients of one location find a fair
    share without knowing of each other.
    """

    def __init__(self, *, first: int, most: int) -> None:
        self._changed = threading.Condition()
        self._limit, self._most = float(first), most
        self._running = 0
        self._last_cut = 0.0

    def acquire(self, timeout_s: float) -> bool:
        """Take a place; False where none became free in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._running < int(self._limit), timeout_s):
                return False
            self._running += 1
            return True

    def release(self) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify()

    def succeeded(self) -> None:
        """An answer came: one more at a time after a whole round of them."""
        with self._changed:
            # an unused allowance says nothing about what the location takes
            if self._running * 2 >= self._limit:
                self._limit = min(self._most, self._limit + 1 / self._limit)
                self._changed.notify()

    def overloaded(self) -> None:
        """The location asked for fewer requests, or did not answer in time: halve, once per round of requests."""
        with self._changed:
            now = time.monotonic()
            if now - self._last_cut > 0.5:
                self._limit = max(1.0, self._limit / 2)
                self._last_cut = now


class Breaker:
    """Stops asking a location that only fails, and tries it again now and then (Nygard, *Release It!*).

    Args:
        trip_after: Failures in a row that open it.
        cool_down_s: First pause; doubles with each failed trial, at most 64 times as long.
        changed: Called with True when it opens, False when it closes.
    """

    def __init__(self, *, trip_after: int, cool_down_s: float, changed: Callable[[bool], None]) -> None:
        self._trip_after, self._cool_down_s, self._changed = trip_after, cool_down_s, changed
        self._lock = threading.Lock()
        self._failures = 0
        self._opened = 0  # times in a row
        self._closed_until_trial = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the location should not be asked now; one caller is let through when a trial is due."""
        with self._lock:
            if self._failures < self._trip_after:
                return False
            now = time.monotonic()
            if now < self._closed_until_trial:
                return True
            self._closed_until_trial = now + self._pause()  # others wait for the outcome of this trial
            return False

    def succeeded(self) -> None:
        """Good bytes came."""
        with self._lock:
            closed = self._failures >= self._trip_after
            self._failures = self._opened = 0
        if closed:
            self._changed(False)

    def failed(self) -> None:
        """No answer, an error, or wrong bytes."""
        with self._lock:
            self._failures += 1
            opened = self._failures == self._trip_after
            if self._failures >= self._trip_after:
                self._opened += 1
                self._closed_until_trial = time.monotonic() + self._pause()
        if opened:
            self._changed(True)

    def _pause(self) -> float:
        doublings = min(6, max(0, self._opened - 1))
        return self._cool_down_s * float(1 << doublings) * _JITTER.uniform(0.75, 1.25)


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
