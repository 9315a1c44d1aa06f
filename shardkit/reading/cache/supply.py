"""Between a reader and the locations: this machine's cache, those of other nodes, and reading ahead by deadline.

A request costs about as much as some hundred kilobytes, so small blocks that lie near each other come together: those
between two of them come along for nothing as far as `spare` allows, and where blocks can be kept, those around them.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from concurrent.futures import Future as Answer
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ShardkitError
from shardkit.reading.attestations import ReadEvents
from shardkit.reading.cache.block_cache import BlockCache
from shardkit.reading.cache.eviction import Future
from shardkit.reading.located_store import LocatedStore, wanted_block
from shardkit.reading.objects import BlockRequest, Location
from shardkit.reading.read_path import ReadPath, ReadSettings
from shardkit.stores.remote.cache_client import CacheClient

Int64s = NDArray[np.int64]
Uses = Callable[[int], Iterator[tuple[Int64s, Int64s]]]
"""First step → runs of (steps, dataset-wide blocks), in the order in which blocks are first needed in each run."""

Request = Callable[[int], tuple[LocatedStore, BlockRequest] | None]
"""Dataset-wide block → where it is; None for what need not be read: local files, blocks in memory."""
Beside = Callable[[int], range]
"""Dataset-wide block → the blocks of its shard."""

# looked at together for what can be joined: few at first, as the trainer waits for them
_FIRST_BLOCKS: Final = 16
_MOST_BLOCKS: Final = 4096
_SPARE_SHARE: Final = 8  # of the bytes that are asked for, the part that may come for nothing between them
_SPARE_SHARE_CACHED: Final = 32  # a node that caches what it needs fetches little more than that


GRAIN_BYTES: Final = 256 * 2**10
"""A smaller request is worth filling up with what lies around it, if that is needed later anyway."""
MAX_GAP_BYTES: Final = 64 * 2**10
"""Between two blocks of one request: more is not fetched for nothing, whatever may be spared."""
MAX_JOINED_BYTES: Final = 4 * 2**20
"""Of one request for several blocks: the first of them waits for the last."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block to be read ahead."""

    step: int
    """At which it is needed first; -1 where it only comes along."""
    block: int
    """Dataset-wide number."""
    store: LocatedStore
    request: BlockRequest

    @property
    def end(self) -> int:
        """Behind its last byte in the shard."""
        return self.request.offset + self.request.length


def join(wanted: Sequence[Wanted], *, spare: int) -> list[list[Wanted]]:
    """Blocks that come with one request each, in the order in which their first is needed.

    Args:
        wanted: In any order; each block once.
        spare: The most bytes between blocks that may be fetched for nothing, over all requests. The smallest gaps
            are closed first.
    """
    ordered = sorted(wanted, key=lambda one: (one.request.name, one.request.offset))
    gaps: list[tuple[int, int]] = []
    for i in range(1, len(ordered)):
        before, after = ordered[i - 1], ordered[i]
        gap = after.request.offset - before.end
        if before.request.name == after.request.name and 0 <= gap <= MAX_GAP_BYTES:
            gaps.append((gap, i))
    joined: set[int] = set()
    for gap, i in sorted(gaps):
        if gap > spare:
            break
        spare -= gap
        joined.add(i)
    groups: list[list[Wanted]] = []
    for i, one in enumerate(ordered):
        if i in joined and one.end - groups[-1][0].request.offset <= MAX_JOINED_BYTES:
            groups[-1].append(one)
        else:
            groups.append([one])
    first = [min((one.step for one in group if one.step >= 0), default=-1) for group in groups]
    return [groups[i] for i in sorted(range(len(groups)), key=first.__getitem__) if first[i] >= 0]


def neighbours(
    wanted: Sequence[Wanted], beside: Callable[[int], range], may_come: Callable[[int], Wanted | None]
) -> list[Wanted]:
    """Blocks around the wanted ones, within the same aligned stretch of `GRAIN_BYTES` of the shard."""
    taken = {one.block for one in wanted}
    found: list[Wanted] = []
    for one in wanted:
        first = one.request.offset // GRAIN_BYTES * GRAIN_BYTES
        shard = beside(one.block)
        for blocks in (range(one.block - 1, shard.start - 1, -1), range(one.block + 1, shard.stop)):
            for block in blocks:
                if block in taken:
                    continue  # its own surroundings are looked at in their turn
                other = may_come(block)
                if other is None or other.request.offset < first or other.end > first + GRAIN_BYTES:
                    break  # what lies behind a gap is not worth it
                taken.add(block)
                found.append(other)
    return found


class BlockFetcher:
    """What one process and one loader reads blocks by: the cache, other nodes, what was read ahead, then the locations.

    Reading ahead goes through the blocks in the order in which the plan needs them, as far as `ahead_bytes` allow; what
    was read ahead waits in memory until the loader asks for it, and is in the cache too if it is worth that.

    Args:
        cache: Of this machine, None to stream.
        ahead_bytes: Memory for blocks that were read ahead.
        threads: Reads ahead at a time.
        nearby: Caches of other nodes, which are asked before the locations.
        clock: Number of the plan: processes with the same one count the same steps.
    """

    def __init__(
        self,
        cache: BlockCache | None,
        *,
        ahead_bytes: int = 256 << 20,
        threads: int = 16,
        nearby: NearbyCaches | None = None,
        clock: int = 0,
    ) -> None:
        self._nearby = nearby
        self._clock = clock
        self.cache = cache
        self._ahead_bytes = ahead_bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shardkit-ahead")
        self._changed = threading.Condition()
        # place → (bytes on their way, size, step)
        self._waiting: dict[int, tuple[Answer[Any], int, int]] = {}
        self._reading: set[int] = set()  # places that the loader itself is getting
        self._along: dict[int, Answer[Any]] = {}  # place → on its way to the cache, nobody waits for it yet
        self._needed: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)  # places until the horizon, ascending
        self._held = 0
        self._step = 0
        self._turn = 0  # of `follow`; threads of an earlier one end when they see a later
        self._closed = False

    def read(self, store: LocatedStore, request: BlockRequest) -> Any:
        """The block's bytes, verified."""
        with self._changed:
            found, along = self._waiting.pop(request.place, None), self._along.get(request.place)
            self._reading.add(request.place)
            if found is not None:
                self._held -= found[1]
                self._changed.notify_all()
        try:
            if found is not None:
                with contextlib.suppress(ShardkitError, CancelledError):
                    return found[0].result()
            if along is not None:  # on its way to the cache
                with contextlib.suppress(CancelledError):
                    along.result()
            return self._obtain(store, request)
        finally:
            self._reading.discard(request.place)

    def follow(
        self,
        uses: Uses,
        request: Request,
        places: Callable[[Int64s], NDArray[np.uint64]],
        *,
        step: int,
        horizon: int,
        beside: Beside | None = None,
    ) -> None:
        """Read ahead from `step` on, and tell the cache what is needed until `horizon`."""
        with self._changed:
            self._turn += 1
            self._step = step
            self._needed = np.zeros(0, dtype=np.uint64)
            self._drop_past()
            turn = self._turn
            self._changed.notify_all()
        filled = beside if self.cache is not None else None
        if self.cache is not None:
            self.cache.lease.restart(step)
            _start("shardkit-future", lambda: self._look(turn, uses(step), places, step, horizon))
        _start("shardkit-ahead", lambda: self._walk(turn, uses(step), request, filled, horizon - step))

    def advance(self, step: int) -> None:
        """The trainer has been handed `step`."""
        with self._changed:
            self._step = step
            if self._waiting:
                self._drop_past()
            self._changed.notify_all()
        if self.cache is not None:
            self.cache.lease.tick(step)

    def close(self) -> None:
        """Stop reading ahead; may be called twice. What the cache holds stays."""
        with self._changed:
            self._closed = True
            self._turn += 1
            for answer, _, _ in self._waiting.values():
                answer.cancel()
            for answer in list(self._along.values()):
                answer.cancel()
            self._waiting.clear()
            self._held = 0
            self._changed.notify_all()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._nearby is not None:
            self._nearby.close()
        if self.cache is not None:
            self.cache.close()

    def _obtain(self, store: LocatedStore, request: BlockRequest, *, asked: bool = False) -> Any:
        """The block, by way of the cache; `asked`: no neighbour has it."""

        def fetch() -> Any:
            found = None if asked or self._nearby is None else self._nearby.read(request)
            return store.read_block(request) if found is None else found

        return fetch() if self.cache is None else self.cache.fetch(request, fetch)

    def obtain(self, request: BlockRequest, fetch: Callable[[], Any]) -> Any:
        """The verified bytes: those that are kept near, else what `fetch` gives, which are kept then."""

        def found() -> Any:
            data = None if self._nearby is None else self._nearby.read(request)
            return fetch() if data is None else data

        return found() if self.cache is None else self.cache.fetch(request, found)

    def _over(self, turn: int) -> bool:
        return self._closed or turn != self._turn

    # Reading ahead

    def _walk(
        self,
        turn: int,
        uses: Iterator[tuple[Int64s, Int64s]],
        request: Request,
        beside: Beside | None,
        lead: int,
    ) -> None:
        pairs: Iterator[tuple[int, int]] = (
            (int(step), int(block))
            for steps, blocks in uses
            for step, block in zip(steps, blocks, strict=True)
        )
        most, is_end = _FIRST_BLOCKS, False
        while not is_end and not self._over(turn):
            batch: dict[int, Wanted] = {}
            size = 0
            for step, block in pairs:
                if step >= self._step + lead:  # what comes later is not worth the planning yet
                    if batch:
                        pairs = itertools.chain([(step, block)], pairs)
                        break
                    self._wait_until_near(turn, step - lead)
                if self._over(turn):
                    return
                where = request(block) if step >= self._step and block not in batch else None
                if where is not None:
                    batch[block] = Wanted(step, block, *where)
                    size += where[1].length
                    if len(batch) >= most or size >= self._ahead_bytes // 4:
                        break
            else:
                is_end = True
            share = _SPARE_SHARE if self.cache is None else _SPARE_SHARE_CACHED
            found = list(batch.values())
            along = [] if beside is None else neighbours(found, beside, self._asked_for(request))
            # where nodes share, what lies between blocks is another's, who fetches it
            spare = sum(one.request.length for one in found) // share if self._nearby is None else 0
            for group in join([*found, *along], spare=spare):
                self._submit(turn, group)
            most = min(most * 4, _MOST_BLOCKS)

    def _wait_until_near(self, turn: int, step: int) -> None:
        """Until the trainer is past `step`."""
        with self._changed:
            self._changed.wait_for(lambda: self._over(turn) or step < self._step)

    def _asked_for(self, request: Request) -> Callable[[int], Wanted | None]:
        """What may come along: what is needed later, and is neither in the cache nor on its way."""
        cache, needed = self.cache, self._needed
        assert cache is not None

        def ask(block: int) -> Wanted | None:
            where = request(block)
            if where is None or cache.holds(where[1]):
                return None
            place = where[1].place
            i = int(np.searchsorted(needed, np.uint64(place)))
            if i == len(needed) or int(needed[i]) != place or place in self._waiting or place in self._along:
                return None
            return Wanted(-1, block, *where)

        return ask

    def _submit(self, turn: int, group: Sequence[Wanted]) -> None:
        """Start reading blocks of one shard, when there is room for them."""
        size = sum(one.request.length for one in group)
        gaps = max(one.end for one in group) - min(one.request.offset for one in group) - size
        with self._changed:
            self._changed.wait_for(
                lambda: self._over(turn) or self._held + size <= self._ahead_bytes or not self._waiting
            )
            if self._over(turn):
                return
            if self.cache is not None:
                self.cache.lease.advance(min(one.step for one in group if one.step >= 0))
            reads: list[tuple[Wanted, Answer[Any]]] = []
            for one in group:
                place, answer = one.request.place, Answer[Any]()
                if one.step < 0:
                    self._along[place] = answer
                elif place in self._waiting or place in self._reading:
                    continue  # somebody else reads it
                else:
                    self._waiting[place] = (answer, one.request.length, one.step)
                    self._held += one.request.length
                    if place in self._along:  # it is on its way to the cache: from there, then
                        later = [(one, answer)]
                        self._along[place].add_done_callback(lambda _, later=later: self._begin(later, 0))  # type: ignore[misc]
                        continue
                reads.append((one, answer))
            self._begin(reads, gaps)

    def _begin(self, reads: Sequence[tuple[Wanted, Answer[Any]]], gaps: int) -> None:
        """Read blocks of one shard on a thread; at most so many bytes between them for nothing.

        Whatever ends that, an unforeseen error or that it is closed before it begins, ends their answers too: somebody
        may wait for one already, and reads the block himself then.
        """

        def ended(_reading: Answer[None] | None = None) -> None:
            for one, answer in reads:
                if one.step < 0:
                    self._along.pop(one.request.place, None)
                answer.cancel()

        # closed by this thread perhaps: what shutting down cancels ends here, with the pool's lock held
        if self._closed:
            ended()
            return
        try:
            self._pool.submit(self._read_group, reads, gaps).add_done_callback(ended)
        except RuntimeError:  # closed meanwhile
            ended()

    def _read_group(self, reads: Sequence[tuple[Wanted, Answer[Any]]], gaps: int) -> None:
        """Read blocks of one shard: what the cache holds from there, the others together."""
        if self.cache is None:
            self._read_missing(reads, gaps)
        else:
            with self.cache.claimed([one.request for one, _ in reads]) as mine:
                claimed = [one for one, is_mine in zip(reads, mine, strict=True) if is_mine]
                self._read_missing([one for one in claimed if not self.cache.holds(one[0].request)], gaps)
        for one, answer in reads:
            if one.step >= 0 and not answer.done():
                try:
                    answer.set_result(self._obtain(one.store, one.request, asked=True))
                except BaseException as error:  # noqa: BLE001 (the reader asks again itself, and then raises)
                    answer.set_exception(error)

    def _read_missing(self, reads: Sequence[tuple[Wanted, Answer[Any]]], gaps: int) -> None:
        """What neighbours have, one by one; the others together."""
        others = []
        for one, answer in reads:
            data = None if self._nearby is None else self._nearby.read(one.request)
            if data is None:
                others.append((one, answer))
            else:
                self._keep(one, answer, data)
        self._read_joined(others, gaps)

    def _keep(self, one: Wanted, answer: Answer[Any], data: Any) -> None:
        if self.cache is not None:
            data = self.cache.keep(one.request, data)
        if not answer.done():
            answer.set_result(None if one.step < 0 else data)

    def _read_joined(self, reads: Sequence[tuple[Wanted, Answer[Any]]], gaps: int) -> None:
        """With as few requests as may be; one alone, and those that fail, are left to be read one by one.

        Joined again: what others got since the blocks were joined first lies between them now.
        """
        answers = {one.block: answer for one, answer in reads}
        for group in join([one for one, _ in reads], spare=gaps):
            if len(group) < 2:
                continue
            with contextlib.suppress(ShardkitError):
                found = group[0].store.read_blocks([one.request for one in group])
                for one, data in zip(group, found, strict=True):
                    # A copy: a view of one block would keep the bytes of all in memory.
                    self._keep(one, answers[one.block], bytes(data))

    def _drop_past(self) -> None:
        for place, (_, size, step) in list(self._waiting.items()):
            if step < self._step:
                del self._waiting[place]
                self._held -= size

    # The future

    def _look(
        self,
        turn: int,
        uses: Iterator[tuple[Int64s, Int64s]],
        places: Callable[[Int64s], NDArray[np.uint64]],
        step: int,
        horizon: int,
    ) -> None:
        assert self.cache is not None
        found_steps: list[Int64s] = []
        found_places: list[NDArray[np.uint64]] = []
        for steps, blocks in uses:
            if self._over(turn):
                return
            found_steps.append(steps)
            found_places.append(places(blocks))
            if len(steps) and int(steps[-1]) >= horizon:
                break
        if found_steps and not self._over(turn):
            future = Future.of(np.concatenate(found_places), np.concatenate(found_steps))
            self.cache.lease.publish(future, self._clock)
            self._needed = future.places


def _start(name: str, work: Callable[[], None]) -> None:
    """Run a thread whose failure costs speed only: whoever needs the block meets the error itself."""

    def run() -> None:
        with contextlib.suppress(ShardkitError, RuntimeError):
            work()

    threading.Thread(target=run, name=name, daemon=True).start()


Buffer = Any

# a neighbour saves a request to the bucket and is worth no long wait: the first failure leaves it out for a while
_SETTINGS: Final = ReadSettings(deadline_s=4, attempt_s=2, hedge=False, trip_after=1, cool_down_s=10)


class NearbyCaches:
    """Implements the part of the read path that comes before the locations, for one process.

    Args:
        urls: of the cache servers, by number.
        holders: block → the numbers of those that may have it, to be asked in this order.
        read_events: where counts and events go, under the names ``neighbour-0``, ``neighbour-1`` …
    """

    def __init__(
        self, urls: Sequence[str], holders: Callable[[BlockRequest], Sequence[int]], read_events: ReadEvents
    ) -> None:
        self._names = [f"neighbour-{number}" for number in range(len(urls))]
        self._holders = holders
        self._path = ReadPath(
            [Location(name=name, store=CacheClient(url), domain=url, holds="blocks")
             for name, url in zip(self._names, urls, strict=True)],
            settings=_SETTINGS, read_events=read_events,
        )  # fmt: skip

    def read(self, request: BlockRequest) -> Buffer | None:
        """The block's bytes, verified by SHA-256; None where no neighbour that is asked gives them."""
        among = [self._names[number] for number in self._holders(request)]
        if not among:
            return None
        try:
            return self._path.fetch(wanted_block(request)._replace(among=among))
        except ShardkitError:
            return None

    def close(self) -> None:
        """Ask nobody any more; what is under way ends by itself."""
        self._path.close()
