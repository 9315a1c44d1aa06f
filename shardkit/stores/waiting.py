"""Waiting: for a store that does not answer, for the next attempt, and for the rate and hours of background work.

Pauses are exponential with full jitter (Brooker, "Exponential Backoff and Jitter", 2015): one is uniform in [0, bound),
and the bound doubles. Many clients that failed at once then do not come back at once.

A store that does not answer is not a program that does nothing: whoever asks a store over a network, once or until a
deadline, does so within `Waits.waiting`. What has been under way for some seconds is logged, once every so many seconds
for each store, whoever asks: commands and scripts alike. Without any configuration of `logging`, Python prints warnings
of the logger ``shardkit`` to standard error.
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
"""`StoreError.errno` of requests that were refused because credentials have expired; somebody may be renewing them."""


class FirstContact:
    """Limits the wait for the very first answer of a store, which is where a wrong endpoint shows.

    Attributes:
        limit_s: seconds; unlimited in programs, for a loader waits for a network that comes back. Commands set it.
    """

    limit_s: float = math.inf


FIRST_CONTACT: Final = FirstContact()

# Forked processes must not draw the same pauses, hence the system's own source.
_JITTER: Final = random.SystemRandom()


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How long one operation of a store may take.

    Attributes:
        deadline_s: all attempts together.
        attempt_s: one request without any byte arriving, or one connection.
        first_pause_s: bound of the first pause; each next one is twice as long.
        longest_pause_s: largest bound.
    """

    deadline_s: float = 120.0
    attempt_s: float = 30.0
    first_pause_s: float = 0.05
    longest_pause_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("attempt_s", "first_pause_s", "longest_pause_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name}={getattr(self, name)}: more than 0 seconds are expected")
        if self.deadline_s < 0:
            raise ConfigurationError(f"deadline_s={self.deadline_s}: 0 or more seconds are expected")


def pauses(retry: RetryPolicy) -> Iterator[float]:
    """Yield the number of seconds slept before each further attempt; ends at the deadline.

    A `for` loop over it is a retry loop: its first turn comes at once.
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
    """Something that is waited for.

    Attributes:
        where: URL of the store, without credentials.
        doing: what is asked of it.
        since: seconds of the clock.
        deadline_s: seconds after which it is given up.
        problem: what the last attempt met; "" while there was none.
    """

    where: str
    doing: str
    since: float
    deadline_s: float
    problem: str = ""


class Waits:
    """What a process waits for; may be used from any thread, and after a fork.

    Args:
        first_s: Nothing is said of what takes less.
        every_s: Seconds between two lines about one store.
        clock: Seconds.
        tell: Gets each line.
        is_watched: Look every half second, on a thread that ends when nothing is waited for.
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
        self._waits: dict[Wait, None] = {}  # in the order in which they began
        self._told: dict[str, float] = {}
        self._watcher: threading.Thread | None = None

    @contextlib.contextmanager
    def waiting(
        self, where: str, doing: str, deadline_s: float, *, since: float | None = None
    ) -> Iterator[Wait]:
        """While this is open, the store at `where` is waited for; since now, unless an earlier moment is given."""
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
        """Say what is due to be said."""
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
    """Bytes per second of ``200MB/s``."""
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
        """Read ``22:00-06:00``."""
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

    def take(self, num_bytes: int) -> None:
        """Wait until `num_bytes` more may be moved."""
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
