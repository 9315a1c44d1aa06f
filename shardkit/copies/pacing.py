"""How fast background work may go, and at what time of day."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from shardkit.errors import ConfigurationError
from shardkit.ranges import parse_size

_HOURS: Final = re.compile(r"([0-9]{1,2}):([0-9]{2})-([0-9]{1,2}):([0-9]{2})")
_DAY: Final = 24 * 60
_LONGEST_WAIT_S: Final = 30.0


def parse_bandwidth(text: str) -> int:
    """Bytes per second of ``200MB/s``.

    Raises:
        ConfigurationError: it is none, or less than 1 KiB/s.
    """
    try:
        found = parse_size(text.strip().removesuffix("/s").removesuffix("ps"))
    except ConfigurationError:
        found = 0
    if found < 1024:
        raise ConfigurationError(f"bandwidth {text[:40]!r}: expected at least 1KiB/s, such as 200MB/s")
    return found


@dataclass(frozen=True, slots=True)
class Hours:
    """A part of the day, in local time; it may go over midnight.

    Attributes:
        start: minutes after midnight.
        end: likewise; work stops here.
    """

    start: int
    end: int

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Read ``22:00-06:00``.

        Raises:
            ConfigurationError: it is not of that form.
        """
        match = _HOURS.fullmatch(text.strip())
        numbers = [int(part) for part in match.groups()] if match else []
        if not match or numbers[0] > 24 or numbers[2] > 24 or max(numbers[1], numbers[3]) > 59:
            raise ConfigurationError(f"between {text[:40]!r}: expected times of day such as 22:00-06:00")
        start, end = (numbers[0] * 60 + numbers[1]) % _DAY, (numbers[2] * 60 + numbers[3]) % _DAY
        if start == end:
            raise ConfigurationError(
                f"between {text[:40]!r}: that is no time at all; leave it out for always"
            )
        return cls(start, end)

    def wait_s(self, minute: int, second: int = 0) -> int:
        """Seconds from a minute of the day until the hours begin; 0 within them."""
        inside = (
            self.start <= minute < self.end
            if self.start < self.end
            else minute >= self.start or minute < self.end
        )
        return 0 if inside else (self.start - minute) % _DAY * 60 - second


class RateLimiter:
    """Lets work go on at a rate, within hours, until it is stopped; shared by threads.

    Args:
        bandwidth: bytes per second over all threads; None: as fast as it goes.
        hours: None: always.
        clock: seconds that only grow.
        now: (minute of the day, second), local.
        waiting: told how many seconds remain until the hours begin.
    """

    def __init__(
        self,
        bandwidth: int | None = None,
        hours: Hours | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], tuple[int, int]] | None = None,
        wait: Callable[[float], bool] | None = None,
        waiting: Callable[[int], None] | None = None,
    ) -> None:
        self._bandwidth, self._hours = bandwidth, hours
        self._clock, self._now, self._waiting = clock, now or _local_time, waiting
        self._stop = threading.Event()
        self._wait = wait or self._stop.wait
        self._lock = threading.Lock()
        self._free_at = 0.0

    def stop(self) -> None:
        """End what waits and what asks."""
        self._stop.set()

    @property
    def is_stopped(self) -> bool:
        return self._stop.is_set()

    def take(self, num_bytes: int) -> None:
        """Wait until `num_bytes` more may be moved.

        Raises:
            KeyboardInterrupt: stopped.
        """
        while self._hours is not None and (left := self._hours.wait_s(*self._now())):
            if self._waiting is not None:
                self._waiting(left)
            self._pause(min(left, _LONGEST_WAIT_S))
        if self._bandwidth is not None:
            with self._lock:  # bytes are booked one after the other: the rate holds over all threads together
                start = max(self._free_at, self._clock())
                self._free_at = start + num_bytes / self._bandwidth
            while (left_s := start - self._clock()) > 0:
                self._pause(left_s)
        self._check()

    def _pause(self, seconds: float) -> None:
        self._check()
        self._wait(seconds)
        self._check()

    def _check(self) -> None:
        if self._stop.is_set():
            raise KeyboardInterrupt


def _local_time() -> tuple[int, int]:
    now = time.localtime()
    return now.tm_hour * 60 + now.tm_min, now.tm_sec
