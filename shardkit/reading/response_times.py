"""Response times of a location, by size of the answer."""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["ResponseTimes"]

_KEPT: Final = 128  # response times kept per size class
_ENOUGH: Final = 16  # response times needed for a percentile
_FRESH: Final = 8  # answers after which percentiles are computed again
_QUEUED: Final = 2.0  # answers that take this many times as long as the fastest one have waited for others


class _SizeClass:
    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=_KEPT)
        self.ordered: list[float] = []
        self.unordered = 0  # answers since `ordered` was computed


class ResponseTimes:
    """Recent response times in seconds; not thread-safe."""

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
