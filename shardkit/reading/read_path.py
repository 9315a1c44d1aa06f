"""Read path: verified bytes from locations that may be slow, wrong, overloaded or gone.

One read proceeds as follows (SPEC.md, "The read path"):

1. The nearest healthy location is asked.
2. If its answer takes longer than 95 % of earlier ones, another location is asked as well; the first good answer wins.
3. Wrong bytes are fetched again from the same location, then from the next.
4. After an error, the next location is asked at once.
5. If all locations fail, all are asked again after a pause with jitter, until the deadline.

Only verified bytes are returned.
"""

from __future__ import annotations

import dataclasses
import errno
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

from shardkit.arrays import Buffer
from shardkit.errors import IntegrityError, NotFoundError, ShardkitError, StoreError
from shardkit.extras import shell_word
from shardkit.ranges import Range
from shardkit.reading.attestations import ReadEvents
from shardkit.reading.objects import Location
from shardkit.reading.request_limit import RequestLimit
from shardkit.stores.waiting import EXPIRED, FIRST_CONTACT, WAITS, RetryPolicy, pauses

_HEDGE_SHARE: Final = 0.03  # maximum share of reads that are hedged
_HEDGES_FREE: Final = 4
# an answer above the 95th percentile is not late if all answers take about the same time
_HEDGE_OVER_MEDIAN: Final = 2.0
_LEAST_HEDGE_S: Final = 0.005
_JITTER: Final = random.SystemRandom()
_RENEWAL_S: Final = 60.0  # time to wait for the renewal of expired credentials


@dataclass(frozen=True, kw_only=True)
class ReadSettings:
    """Timeouts and limits of reads.

    Attributes:
        deadline_s: Seconds after which a read without good bytes raises.
        attempt_s: Seconds without an answer after which an attempt counts as failed.
        hedge: Send a second request, to another location if possible, if an answer is later than 95 % of earlier ones.
        first_concurrency, most_concurrency: Initial and maximum number of concurrent requests per location.
        trip_after: Number of consecutive failures after which a location rests.
        cool_down_s: Seconds of its first rest.
    """

    deadline_s: float = 300.0
    attempt_s: float = 30.0
    hedge: bool = True
    first_concurrency: int = 16
    most_concurrency: int = 64
    trip_after: int = 5
    cool_down_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("deadline_s", "attempt_s", "cool_down_s"):
            Range(0, 604_800, above=True).check(name, getattr(self, name), float)
        for name in ("first_concurrency", "most_concurrency", "trip_after"):
            Range(1, 10**6).check(name, getattr(self, name))


class ReadRequest(NamedTuple):
    """One read."""

    what: str
    """Object name and range, for messages."""
    num_bytes: int
    """Approximate size of the answer."""
    read: Callable[[Location], Buffer]
    """Reads from a location, without retrying."""
    check: Callable[[Buffer], bool]
    """Returns whether the bytes are right."""
    name: str
    """Name of the object in a root."""
    rebuild: Callable[[], Buffer | None] | None = None
    """Last resort, such as parity: returns the bytes, or None."""
    root_first: bool = False
    """Ask the first location before nearer ones, because copies may be out of date."""
    among: Sequence[str] | None = None
    """Names of the only locations to ask, in this order. Resting ones are skipped, a failure is not retried, and bytes
    that a location lacks are no event: the caches of other nodes have some of the blocks."""


class _LocationState:
    """State of a location in this process: limit of concurrent requests, circuit breaker.

    A location that only fails rests and is tried again after pauses that double, up to 64 times the first: a circuit
    breaker (Nygard, *Release It!*).
    """

    def __init__(self, location: Location, settings: ReadSettings, read_events: ReadEvents) -> None:
        self.location = location
        self.off = False  # switched off by the operator of the run
        self.limit = RequestLimit(settings.first_concurrency, settings.most_concurrency)
        self._settings, self._read_events = settings, read_events
        self._lock = threading.Lock()  # guards everything below
        self._failures = 0  # consecutive
        self._rests = 0  # consecutive
        self._rests_until = 0.0

    @property
    def is_resting(self) -> bool:
        """True if the location should not be asked now; False for one caller when a trial is due."""
        with self._lock:
            if self._failures < self._settings.trip_after:
                return False
            now = time.monotonic()
            if now < self._rests_until:
                return True
            self._rests_until = now + self._pause()  # others wait for the outcome of this trial
            return False

    def succeeded(self, num_bytes: int, seconds: float) -> None:
        """Record a good answer."""
        self.limit.answered(num_bytes, seconds)
        with self._lock:
            was_resting = self._failures >= self._settings.trip_after
            self._failures = self._rests = 0
        if was_resting:
            self._read_events.note("circuit_closed", self.location.name)

    def failed(self, *, is_overloaded: bool = False) -> None:
        """Record a failed attempt; on overload, halve the limit."""
        if is_overloaded:
            self.limit.overloaded()
        with self._lock:
            self._failures += 1
            rests = self._failures == self._settings.trip_after
            if self._failures >= self._settings.trip_after:
                self._rests += 1
                self._rests_until = time.monotonic() + self._pause()
        if rests:
            self._read_events.note("circuit_opened", self.location.name)

    def _pause(self) -> float:
        doublings = min(6, max(0, self._rests - 1))
        return self._settings.cool_down_s * float(1 << doublings) * _JITTER.uniform(0.75, 1.25)


class ReadPath:
    """Reads over several locations, for one process; threads may share it.

    Args:
        locations: One or more locations; see `Location.rank` for their order.
        settings: Timeouts and limits.
        read_events: Receives counts and events.
        bad_copy: Called with (location, object name, "wrong" or "missing") if a location answered twice with wrong
            bytes, or lacks the object, and the bytes were found elsewhere.
    """

    def __init__(
        self,
        locations: Sequence[Location],
        *,
        settings: ReadSettings,
        read_events: ReadEvents,
        bad_copy: Callable[[Location, str, str], None] | None = None,
    ) -> None:
        self.settings, self.read_events = settings, read_events
        self._known = [_LocationState(location, settings, read_events) for location in locations]
        self._by_name = {known.location.name: known for known in self._known}
        self._bad_copy = bad_copy
        threads = 2 * settings.most_concurrency * len(self._known)
        self._pool = ThreadPoolExecutor(min(512, threads), thread_name_prefix="shardkit-reads")
        self._lock = threading.Lock()  # guards the two counters
        self._reads = self._hedges = 0
        self._has_answer = False  # whether any location has answered

    @property
    def root(self) -> Location:
        """The first location, with this process's client."""
        return self._known[0].location

    @property
    def concurrency(self) -> int:
        """Number of requests that one location may have in flight now, the largest of all locations."""
        return max(known.limit.value for known in self._known)

    def close(self) -> None:
        """Accept no more reads; running ones finish in the background."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def fetch(self, request: ReadRequest) -> Buffer:
        """Return verified bytes.

        Raises:
            NotFoundError: No location has the object.
            IntegrityError: Every location has wrong bytes or lacks the object.
            StoreError: No location gave good bytes before the deadline.
        """
        with self._lock:
            self._reads += 1
        started = time.monotonic()
        problems: dict[str, ShardkitError] = {}
        bad: dict[str, str] = {}
        deadline_s = self.settings.deadline_s
        if not self._has_answer:
            deadline_s = min(deadline_s, FIRST_CONTACT.limit_s)
        retry = RetryPolicy(deadline_s=deadline_s, first_pause_s=0.05, longest_pause_s=5.0)
        with WAITS.waiting(self.root.store.url, f"read {request.what}", deadline_s) as wait:
            for pause in pauses(retry):
                if pause:
                    self.read_events.note("retries", what=request.what, pause_s=round(pause, 3))
                turn = _Turn(self, request, self._order(request), started + deadline_s, problems)
                data = turn.run()
                bad = turn.bad
                if data is not None:
                    self._report_bad(request, bad)
                    return data
                if request.among is not None:
                    break
                wait.problem = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
                if not any(map(_may_pass, problems.values())):
                    break  # all locations have answered; asking again would not change the answers
                if time.monotonic() - started > _RENEWAL_S and all(map(_has_expired, problems.values())):
                    break
        data = None if request.rebuild is None else request.rebuild()
        if data is not None and request.check(data):
            self.read_events.note("rebuilt", what=request.what)
            self._report_bad(request, bad)
            return data
        raise _summary(request, problems, self.root.store.url)

    def _order(self, request: ReadRequest) -> list[_LocationState]:
        """Return the locations in the order to ask; resting ones come last, in case all others fail."""
        if request.among is not None:
            named = (self._by_name[name] for name in request.among)
            return [known for known in named if not known.is_resting]

        def nearness(known: _LocationState) -> tuple[bool, bool, int, float]:
            typical = known.limit.quantile(request.num_bytes, 0.5)
            is_later = request.root_first and known is not self._known[0]
            return known.is_resting, is_later, known.location.rank, typical or 0.0

        on = [known for known in self._known if not known.off] or self._known
        return on if len(on) == 1 else sorted(on, key=nearness)

    def tune(self, name: str, *, rank: int | None = None, off: bool | None = None) -> None:
        """Change a location's rank, or switch it off or on, from the next read on.

        Switching off has no effect while no other location is on.
        """
        for known in self._known:
            if known.location.name == name:
                if rank is not None:
                    known.location = dataclasses.replace(known.location, rank=rank)
                if off is not None:
                    known.off = off

    def tuning_of(self, name: str) -> tuple[int, bool]:
        """Return (rank of a location, True if it is switched off)."""
        return next((known.location.rank, known.off) for known in self._known if known.location.name == name)

    def may_hedge(self) -> bool:
        """Take one hedge from the budget; return False if hedging is off or the budget is spent."""
        with self._lock:
            if not self.settings.hedge or self._hedges >= _HEDGES_FREE + _HEDGE_SHARE * self._reads:
                return False
            self._hedges += 1
            return True

    def start(self, known: _LocationState, request: ReadRequest, patience_s: float) -> Future[Buffer]:
        """Wait for a free request slot, and start one attempt at one location, on a thread that may outlive the read.

        The caller waits, not the attempt: its time would count as the location's.
        """
        if not known.limit.acquire(patience_s):
            future: Future[Buffer] = Future()
            text = f"{known.location.store.url}: too many requests are under way; try again later"
            future.set_exception(StoreError(text))
            return future
        self.read_events.note("requests", known.location.name)
        try:
            future = self._pool.submit(self._attempt, known, request)
        except BaseException:
            known.limit.release()
            raise
        future.add_done_callback(lambda _: known.limit.release())  # also if it is cancelled before it begins
        return future

    def _attempt(self, known: _LocationState, request: ReadRequest) -> Buffer:
        begun = time.monotonic()
        try:
            data = request.read(known.location)
            if not request.check(data):
                raise IntegrityError(f"{request.what}: wrong bytes")
        except IntegrityError:
            self._has_answer = True
            known.failed()
            raise
        except NotFoundError:
            self._has_answer = True
            raise
        except StoreError as error:
            known.failed(is_overloaded=error.errno == errno.EBUSY)
            if error.errno == errno.EBUSY:
                self.read_events.note("throttled", known.location.name, what=request.what)
            elif error.errno == errno.ETIMEDOUT:
                self.read_events.note("timeouts", known.location.name, what=request.what)
            raise
        self._has_answer = True
        known.succeeded(request.num_bytes, time.monotonic() - begun)
        self.read_events.add_bytes(known.location.name, memoryview(data).nbytes)
        return data

    def _report_bad(self, request: ReadRequest, bad: dict[str, str]) -> None:
        if self._bad_copy is not None:
            for known in self._known:
                if known.location.name in bad:
                    self._bad_copy(known.location, request.name, bad[known.location.name])


class _Turn:
    """One turn over all locations, for one read."""

    def __init__(
        self,
        path: ReadPath,
        request: ReadRequest,
        order: list[_LocationState],
        deadline: float,
        problems: dict[str, ShardkitError],
    ) -> None:
        self._path, self._request, self._left, self._deadline = path, request, order, deadline
        self._earlier, self._problems = problems.copy(), problems  # of the turn before, and of this one
        self._problems.clear()
        self._running: dict[Future[Buffer], tuple[_LocationState, float]] = {}
        self._done: SimpleQueue[Future[Buffer]] = SimpleQueue()
        self._hedged: set[Future[Buffer]] = set()
        self._refetched: set[str] = set()
        self.bad: dict[str, str] = {}
        """Location name → "wrong" or "missing"."""

    def run(self) -> Buffer | None:
        """Return good bytes; or None, with each location's error in `problems`."""
        self._start_next()
        try:
            while self._running:
                try:
                    future = self._done.get(timeout=self._wait_s())
                except Empty:
                    self._wake()
                    continue
                if future in self._running:  # otherwise it has timed out
                    data = self._settle(future)
                    if data is not None:
                        return data
            return None
        finally:
            for future in self._running:  # started attempts finish in the background
                future.cancel()

    def _start_next(self, *, hedging: bool = False) -> None:
        if self._left:
            self._start(self._left.pop(0), hedging=hedging)

    def _start(self, known: _LocationState, *, hedging: bool = False) -> None:
        patience_s = min(self._deadline - time.monotonic(), self._path.settings.attempt_s)
        # a read that waited here would not notice the end of its other attempts
        future = self._path.start(known, self._request, 0.0 if self._running else max(0.0, patience_s))
        self._running[future] = (known, time.monotonic())
        future.add_done_callback(self._done.put)
        if hedging:
            self._hedged.add(future)
            self._path.read_events.note("hedges", known.location.name, what=self._request.what)

    def _wait_s(self) -> float:
        """Return the seconds until a hedge or a timeout is due."""
        now = time.monotonic()
        known, begun = next(reversed(self._running.values()))
        oldest = min(begun for _, begun in self._running.values())
        due = min(self._deadline, oldest + self._path.settings.attempt_s)
        late = self._late_after(known)
        if late is not None and not self._hedged:
            due = min(due, begun + late)
        return max(0.0, due - now)

    def _late_after(self, known: _LocationState) -> float | None:
        late = known.limit.quantile(self._request.num_bytes, 0.95)
        typical = known.limit.quantile(self._request.num_bytes, 0.5)
        if late is None or typical is None or not self._path.settings.hedge:
            return None
        return max(_LEAST_HEDGE_S, late, _HEDGE_OVER_MEDIAN * typical)

    def _wake(self) -> None:
        """Fail attempts that have timed out, and hedge one that is late if the budget allows."""
        now = time.monotonic()
        limit = self._path.settings.attempt_s
        for future, (known, begun) in list(self._running.items()):
            if now - begun >= limit or now >= self._deadline:
                del self._running[future]
                known.failed(is_overloaded=True)
                self._path.read_events.note("timeouts", known.location.name, what=self._request.what)
                silence = StoreError(f"{known.location.store.url}: silent for {now - begun:.1f} s")
                # an attempt that the deadline cut says less than the one before
                earlier = self._earlier.get(known.location.name) if now - begun < limit else None
                self._fail(known, earlier or silence)
        if self._running and not self._hedged and self._may_hedge():
            if self._left:
                self._start_next(hedging=True)
            else:
                self._start(next(iter(self._running.values()))[0], hedging=True)
        elif self._running and not self._hedged:
            self._hedged.add(next(iter(self._running)))  # over budget: do not ask for this read again

    def _may_hedge(self) -> bool:
        known = self._left[0] if self._left else next(iter(self._running.values()))[0]
        return known.limit.has_slot and self._path.may_hedge()

    def _settle(self, future: Future[Buffer]) -> Buffer | None:
        known, _ = self._running.pop(future)
        name = known.location.name
        try:
            data = future.result()
        except IntegrityError as error:
            self._path.read_events.note("mismatches", name, what=self._request.what)
            if name not in self._refetched:
                self._refetched.add(name)
                self._path.read_events.note("refetches", name, what=self._request.what)
                self._start(known)
                return None
            self.bad[name] = "wrong"
            self._fail(known, IntegrityError(f"{self._request.what} in {known.location.store.url}: {error}"))
            return None
        except NotFoundError as error:
            if self._request.among is None:
                self._path.read_events.note("missing", name, what=self._request.what)
                self.bad[name] = "missing"
            self._fail(known, error)
            return None
        except StoreError as error:
            self._fail(known, error)
            return None
        if future in self._hedged and self._running:
            self._path.read_events.note("hedges_won", name, what=self._request.what)
        return data

    def _fail(self, known: _LocationState, error: ShardkitError) -> None:
        """Record a location's error and start the next location."""
        self._problems[known.location.name] = error
        if self._left and time.monotonic() < self._deadline:
            if self._request.among is None:
                self._path.read_events.note(
                    "failovers", known.location.name, what=self._request.what, reason=str(error)
                )
            self._start_next()


def _may_pass(problem: ShardkitError) -> bool:
    """Return True if asking again later may help; it does not if the location denies access."""
    return type(problem) is StoreError and problem.errno not in (errno.EACCES, errno.EINVAL)


def _has_expired(problem: ShardkitError) -> bool:
    return isinstance(problem, StoreError) and problem.errno == EXPIRED


def _summary(request: ReadRequest, problems: dict[str, ShardkitError], root: str) -> ShardkitError:
    told = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
    kinds = {type(problem) for problem in problems.values()}
    if kinds == {NotFoundError}:
        return NotFoundError(told)
    if len(problems) == 1:
        return next(iter(problems.values()))
    if kinds <= {NotFoundError, IntegrityError}:
        return IntegrityError(
            f"no location has the right bytes of {request.what} ({told}); run: shardkit repair {shell_word(root)}"
        )
    return StoreError(
        f"no location gave good bytes of {request.what} in time ({told}); look at them, then run it again"
    )
