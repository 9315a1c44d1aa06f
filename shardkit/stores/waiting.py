"""Retry pauses, reports of slow stores, and limits on the rate and hours of background work.

Pauses grow exponentially with full jitter (Brooker, "Exponential Backoff and Jitter", 2015): a pause is uniform in
[0, bound), and the bound doubles. So clients that failed together do not retry together.

Requests to remote stores run within `Waits.waiting`. Requests that take longer than some seconds are logged at
intervals, one line per store, so that a user sees why a program stands still. Unless `logging` is configured, Python
prints warnings of the logger ``shardkit`` to standard error.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from shardkit.errors import ConfigurationError
from shardkit.ranges import parse_size

EXPIRED: Final = errno.EAGAIN
"""`StoreError.errno` of requests that were refused because credentials have expired; they may be renewed soon."""


class FirstContact:
    """Limit on the wait for the first answer of a store, so that a wrong endpoint fails early."""

    # limit in seconds. Commands set it; in other programs it is unlimited, as a loader waits for a network to
    # come back.
    limit_s: float = math.inf


FIRST_CONTACT: Final = FirstContact()

# The system's random source, because forked processes must not draw the same pauses.
_JITTER: Final = random.SystemRandom()


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Time limits of one operation of a store, in seconds."""

    deadline_s: float = 120.0  # limit for all attempts together
    attempt_s: float = 30.0  # limit for connecting, and for a request during which no byte arrives
    first_pause_s: float = 0.05  # bound of the first pause; it doubles for each further one
    longest_pause_s: float = 5.0  # maximum bound

    def __post_init__(self) -> None:
        for name in ("attempt_s", "first_pause_s", "longest_pause_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name}={getattr(self, name)}: more than 0 seconds are expected")
        if self.deadline_s < 0:
            raise ConfigurationError(f"deadline_s={self.deadline_s}: 0 or more seconds are expected")


def pauses(retry: RetryPolicy) -> Iterator[float]:
    """Sleep between attempts, and yield the seconds slept before each; end at the deadline.

    A `for` loop over it is a retry loop whose first turn starts at once.
    """
    started = time.monotonic()
    bound = retry.first_pause_s
    yield 0.0
    while True:
        pause = _JITTER.uniform(0, bound)
        if time.monotonic() + pause - started > retry.deadline_s:
            return
        time.sleep(pause)
        yield pause
        bound = min(retry.longest_pause_s, bound * 2)


_LOOK_S: Final = 0.5
_LOG: Final = logging.getLogger("shardkit.stores")


@dataclass(eq=False)
class Wait:
    """One running request."""

    where: str  # URL of the store, without credentials
    doing: str  # operation and name, such as "read NAME"
    since: float  # time of the clock at which it started, in seconds
    deadline_s: float  # limit in seconds from then
    problem: str = ""  # problem of the last attempt; "" if there was none


class Waits:
    """Running requests of a process, reported when they are slow; may be used from any thread, and after a fork.

    Args:
        first_s: Seconds after which a request is reported.
        every_s: Seconds between two lines about one store.
        clock: Returns the time in seconds.
        tell: Called with each line.
        is_watched: Check every half second, on a thread that ends when no request is running.
    """

    def __init__(
        self,
        *,
        first_s: float = 5.0,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] = _LOG.warning,
        is_watched: bool = True,
    ) -> None:
        self._first_s, self._every_s, self._clock, self._tell = first_s, every_s, clock, tell
        self._is_watched = is_watched
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._waits: dict[Wait, None] = {}  # in order of start
        self._told: dict[str, float] = {}
        self._watcher: threading.Thread | None = None

    @contextlib.contextmanager
    def waiting(
        self, where: str, doing: str, deadline_s: float, *, since: float | None = None
    ) -> Iterator[Wait]:
        """Register a request to the store at `where` for the duration of the block.

        Args:
            where: URL of the store, without credentials.
            doing: operation and name, such as "read NAME".
            deadline_s: limit in seconds.
            since: time of the clock at which it started; default now.
        """
        wait = Wait(where, doing, self.now() if since is None else since, deadline_s)
        with self._lock:
            self._waits[wait] = None
            if self._is_watched and self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="storage-waits", daemon=True)
                self._watcher.start()
        try:
            yield wait
        finally:
            with self._lock:
                self._waits.pop(wait, None)

    def now(self) -> float:
        return self._clock()

    def tell_due(self) -> None:
        """Report the slowest request of each store for which a line is due."""
        lines: list[str] = []
        with self._lock:
            now = self._clock()
            slowest: dict[str, Wait] = {}
            for wait in sorted(self._waits, key=lambda one: one.since):
                slowest.setdefault(wait.where, wait)
            self._told = {where: told for where, told in self._told.items() if where in slowest}
            for where, wait in slowest.items():
                passed = now - wait.since
                if passed < self._first_s or now - self._told.get(where, -self._every_s) < self._every_s:
                    continue
                self._told[where] = now
                ends = math.isfinite(wait.deadline_s)
                limit = f"at most {wait.deadline_s:.0f} s" if ends else "as long as its client waits"
                last = f"; last: {wait.problem}" if wait.problem else ""
                lines.append(f"still waiting for {where} to {wait.doing}: {passed:.0f} s, {limit}{last}")
        for line in lines:
            self._tell(line)

    def _watch(self) -> None:
        while True:
            time.sleep(min(_LOOK_S, self._first_s / 2))
            with self._lock:
                if not self._waits:
                    self._watcher = None
                    return
            self.tell_due()


WAITS: Final = Waits()


_HOURS: Final = re.compile(r"([0-9]{1,2}):([0-9]{2})-([0-9]{1,2}):([0-9]{2})")
_DAY: Final = 24 * 60
_LONGEST_WAIT_S: Final = 30.0


def parse_bandwidth(text: str) -> int:
    """Parse a rate such as ``200MB/s`` into bytes per second."""
    try:
        found = parse_size(text.strip().removesuffix("/s").removesuffix("ps"))
    except ConfigurationError:
        found = 0
    if found < 1024:
        raise ConfigurationError(f"bandwidth {text[:40]!r}: expected at least 1KiB/s, such as 200MB/s")
    return found


@dataclass(frozen=True, slots=True)
class Hours:
    """A part of the day, in local time; it may include midnight."""

    start: int  # start in minutes after midnight
    end: int  # end in minutes after midnight, exclusive

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Parse a range of times such as ``22:00-06:00``."""
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
        """Return the seconds from a minute of the day until the hours begin; 0 within them."""
        inside = (
            self.start <= minute < self.end
            if self.start < self.end
            else minute >= self.start or minute < self.end
        )
        return 0 if inside else (self.start - minute) % _DAY * 60 - second


class RateLimiter:
    """Limits the rate and the hours of work that threads share.

    Args:
        bandwidth: bytes per second over all threads; None for no limit.
        hours: hours in which work is allowed; None for always.
        clock: returns monotonic time in seconds.
        now: returns (minute of the day, second) in local time.
        wait: sleeps for the given seconds, or until `stop` is called.
        waiting: called with the seconds that remain until the hours begin.
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
        """Make running and later calls of `take` raise KeyboardInterrupt."""
        self._stop.set()

    def take(self, num_bytes: int) -> None:
        """Wait until `num_bytes` more may be transferred.

        Raises:
            KeyboardInterrupt: `stop` was called.
        """
        while self._hours is not None and (left := self._hours.wait_s(*self._now())):
            if self._waiting is not None:
                self._waiting(left)
            self._pause(min(left, _LONGEST_WAIT_S))
        if self._bandwidth is not None:
            with self._lock:  # bytes are reserved in turn, so the rate holds over all threads
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
