"""Limit of concurrent requests to a location, which follows its response times."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Final

__all__ = ["RequestLimit", "ResponseTimes"]

_KEPT: Final = 128  # response times kept per size class
_ENOUGH: Final = 16  # response times needed for a percentile
_FRESH: Final = 8  # answers after which percentiles are computed again
_QUEUED: Final = 2.0  # answers that take this many times as long as the fastest one have waited for others
_BETWEEN_CUTS_S: Final = 0.5


class RequestLimit:
    """Slots for concurrent requests, for all threads of a process.

    The limit grows with good answers and halves on overload: additive increase, multiplicative decrease (Chiu and Jain
    1989), as in TCP, so that the clients of one location reach fair shares without coordination. It does not grow while
    answers take twice as long as the fastest one: more requests would then only wait for each other (Brakmo and
    Peterson 1995, TCP Vegas).
    """

    def __init__(self, first: int, most: int) -> None:
        self._changed = threading.Condition()  # guards everything below
        self._limit, self._most, self._running = float(first), most, 0
        self._last_cut = 0.0
        self._times = ResponseTimes()

    def quantile(self, num_bytes: int, share: float) -> float | None:
        """Return a quantile of recent response times in seconds for this size; None while there are too few."""
        with self._changed:
            return self._times.quantile(num_bytes, share)

    @property
    def value(self) -> int:
        """Number of requests that may run at once now."""
        return int(self._limit)

    @property
    def has_slot(self) -> bool:
        """True if another request may start now."""
        with self._changed:
            return self._running < int(self._limit)

    def acquire(self, timeout_s: float) -> bool:
        """Wait for a free slot and take it; return False after the timeout."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._running < int(self._limit), timeout_s):
                return False
            self._running += 1
            return True

    def release(self) -> None:
        """Give a slot back."""
        with self._changed:
            self._running -= 1
            self._changed.notify()

    def answered(self, num_bytes: int, seconds: float) -> None:
        """Record a good answer; the limit grows by one per round of good answers that did not wait for others."""
        with self._changed:
            self._times.note(num_bytes, seconds)
            # a limit that is not reached does not show how much load the location bears
            if self._running * 2 >= self._limit and not self._times.is_queued(num_bytes, seconds):
                self._limit = min(self._most, self._limit + 1 / self._limit)
                self._changed.notify()

    def overloaded(self) -> None:
        """Halve the limit, at most once per 0.5 s."""
        with self._changed:
            now = time.monotonic()
            if now - self._last_cut > _BETWEEN_CUTS_S:
                self._limit = max(1.0, self._limit / 2)
                self._last_cut = now


class _SizeClass:
    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=_KEPT)
        self.ordered: list[float] = []
        self.unordered = 0  # answers since `ordered` was computed


class ResponseTimes:
    """Recent response times in seconds, by size of the answer; not thread-safe."""

    def __init__(self) -> None:
        self._classes: dict[int, _SizeClass] = {}

    def note(self, num_bytes: int, seconds: float) -> None:
        """Record an answer of a size."""
        one = self._of(num_bytes)
        one.recent.append(seconds)
        one.unordered += 1

    def quantile(self, num_bytes: int, share: float) -> float | None:
        """Return a quantile for answers of this size, up to 7 answers old; None while there are fewer than 16."""
        one = self._of(num_bytes)
        if len(one.recent) < _ENOUGH:
            return None
        if one.unordered >= _FRESH or len(one.ordered) < _ENOUGH:
            one.ordered, one.unordered = sorted(one.recent), 0
        return one.ordered[min(len(one.ordered) - 1, int(share * len(one.ordered)))]

    def is_queued(self, num_bytes: int, seconds: float) -> bool:
        """Return True if an answer took twice as long as the fastest recent one of its size."""
        fastest = self.quantile(num_bytes, 0.0)
        return fastest is not None and seconds > _QUEUED * fastest

    def _of(self, num_bytes: int) -> _SizeClass:
        """Return the size class (64 KiB, 256 KiB, 1 MiB, …); response times within a class are similar."""
        number = max(0, (max(num_bytes, 1).bit_length() - 15) // 2)
        return self._classes.setdefault(number, _SizeClass())
