"""Between a reader and the locations: the cache of this machine, and reading ahead by deadline."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from concurrent.futures import Future as Answer
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ShardkitError
from shardkit.storage.cache.block_cache import BlockCache
from shardkit.storage.cache.future import Future
from shardkit.storage.reading import BlockRequest, LocatedStore

__all__ = ["Supply", "Uses"]

Int64s = NDArray[np.int64]
Uses = Callable[[int], Iterator[tuple[Int64s, Int64s]]]
"""First step → runs of (steps, dataset-wide blocks), in the order in which blocks are first needed in each run."""

_BATCH: Final = 16  # blocks looked at together for ranges that can be joined


class Supply:
    """Implements `blocks.BlockSupply` for one process and one loader.

    Reading ahead goes through the blocks in the order in which the plan needs them, as far as `ahead_bytes` allow; what
    was read ahead waits in memory until the loader asks for it, and is in the cache too if it is worth that.

    Args:
        cache: Of this machine, None to stream.
        ahead_bytes: Memory for blocks that were read ahead.
        threads: Reads ahead at a time.
        clock: Number of the plan: processes with the same one count the same steps.
    """

    def __init__(
        self, cache: BlockCache | None, *, ahead_bytes: int = 256 << 20, threads: int = 16, clock: int = 0
    ) -> None:
        self._clock = clock
        self.cache = cache
        self._ahead_bytes = ahead_bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shardkit-ahead")
        self._changed = threading.Condition()
        self._waiting: dict[
            int, tuple[Answer[Any], int, int]
        ] = {}  # place → (bytes on their way, size, step)
        self._reading: set[int] = set()  # places that the loader itself is getting
        self._held = 0
        self._step = 0
        self._turn = 0  # of `follow`; threads of an earlier one end when they see a later
        self._closed = False

    def read(self, store: LocatedStore, request: BlockRequest) -> Any:
        """The block's verified bytes."""
        with self._changed:
            found = self._waiting.pop(request.place, None)
            self._reading.add(request.place)
            if found is not None:
                self._held -= found[1]
                self._changed.notify_all()
        try:
            if found is not None:
                with contextlib.suppress(ShardkitError, CancelledError):
                    return found[0].result()
            return self._obtain(store, request)
        finally:
            self._reading.discard(request.place)

    def follow(
        self,
        uses: Uses,
        request: Callable[[int], tuple[LocatedStore, BlockRequest] | None],
        places: Callable[[Int64s], NDArray[np.uint64]],
        *,
        step: int,
        horizon: int,
    ) -> None:
        """Read ahead from `step` on, and tell the cache what is needed until `horizon`.

        Args:
            uses: What the plan needs when.
            request: Dataset-wide block → where it is; None for blocks that are local files.
            places: Dataset-wide blocks → `place_ids`.
            step: The first step.
            horizon: The last step that counts for the cache, exclusive.
        """
        with self._changed:
            self._turn += 1
            self._step = step
            self._drop_past()
            turn = self._turn
        if self.cache is not None:
            self.cache.lease.restart(step)
        for name, work in (
            ("shardkit-ahead", lambda: self._walk(turn, uses(step), request)),
            ("shardkit-future", lambda: self._look(turn, uses(step), places, step, horizon)),
        ):
            if name == "shardkit-ahead" or self.cache is not None:
                threading.Thread(target=_quietly, args=(work,), name=name, daemon=True).start()

    def advance(self, step: int) -> None:
        """The trainer has been handed `step`."""
        self._step = step
        if self._waiting:
            with self._changed:
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
            self._waiting.clear()
            self._held = 0
            self._changed.notify_all()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self.cache is not None:
            self.cache.close()

    def _obtain(self, store: LocatedStore, request: BlockRequest) -> Any:
        if self.cache is None:
            return store.read_block(request)
        return self.cache.fetch(request, lambda: store.read_block(request))

    def _over(self, turn: int) -> bool:
        return self._closed or turn != self._turn

    # Reading ahead

    def _walk(
        self,
        turn: int,
        uses: Iterator[tuple[Int64s, Int64s]],
        request: Callable[[int], tuple[LocatedStore, BlockRequest] | None],
    ) -> None:
        pairs = (
            (int(step), int(block))
            for steps, blocks in uses
            for step, block in zip(steps, blocks, strict=True)
        )
        while not self._over(turn):
            batch: list[tuple[int, LocatedStore, BlockRequest]] = []
            for step, block in itertools.islice(pairs, _BATCH):
                where = request(block)
                if where is not None and step >= self._step:
                    batch.append((step, *where))
            if not batch and next(pairs, None) is None:
                return
            for group in _groups(batch):
                self._submit(turn, group)

    def _submit(self, turn: int, group: Sequence[tuple[int, LocatedStore, BlockRequest]]) -> None:
        """Start reading blocks of one shard, when there is room for them."""
        size = sum(request.length for _, _, request in group)
        with self._changed:
            self._changed.wait_for(
                lambda: self._over(turn) or self._held + size <= self._ahead_bytes or not self._waiting
            )
            if self._over(turn):
                return
            if self.cache is not None:
                self.cache.lease.advance(group[0][0])
            answers: list[Answer[Any]] = []
            for step, _, request in group:
                if request.place not in self._waiting and request.place not in self._reading:
                    answer: Answer[Any] = Answer()
                    answers.append(answer)
                    self._waiting[request.place] = (answer, request.length, step)
                    self._held += request.length
                else:
                    answers.append(_taken())
            self._pool.submit(self._read_group, [one[1] for one in group], [one[2] for one in group], answers)

    def _read_group(
        self, stores: list[LocatedStore], requests: list[BlockRequest], answers: list[Answer[Any]]
    ) -> None:
        cache = self.cache
        if any(answer.cancelled() for answer in answers):  # somebody else reads some of them
            left = [i for i, answer in enumerate(answers) if not answer.cancelled()]
            stores, requests = [stores[i] for i in left], [requests[i] for i in left]
            answers = [answers[i] for i in left]
        if len(requests) > 1 and not (cache is not None and any(cache.holds(one.sha256) for one in requests)):
            with contextlib.suppress(ShardkitError):
                for request, answer, data in zip(
                    requests, answers, stores[0].read_blocks(requests), strict=True
                ):
                    kept = data if cache is None else cache.fetch(request, functools.partial(bytes, data))
                    if not answer.done():
                        answer.set_result(kept)
                return
        for store, request, answer in zip(stores, requests, answers, strict=True):
            if not answer.done():
                try:
                    answer.set_result(self._obtain(store, request))
                except BaseException as error:  # noqa: BLE001 (the reader asks again itself, and then raises)
                    answer.set_exception(error)

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


def _taken() -> Answer[Any]:
    """An answer that nobody waits for: somebody else reads the block."""
    answer: Answer[Any] = Answer()
    answer.cancel()
    return answer


def _groups(
    batch: list[tuple[int, LocatedStore, BlockRequest]],
) -> list[list[tuple[int, LocatedStore, BlockRequest]]]:
    """Runs of blocks that lie end to end in a shard, in the order in which their first is needed."""
    groups: list[list[tuple[int, LocatedStore, BlockRequest]]] = []
    by_end: dict[tuple[str, int], list[tuple[int, LocatedStore, BlockRequest]]] = {}
    for one in batch:
        request = one[2]
        group = by_end.pop((request.name, request.offset), None)
        if group is None:
            group = []
            groups.append(group)
        group.append(one)
        by_end[request.name, request.offset + request.length] = group
    return groups


def _quietly(work: Callable[[], None]) -> None:
    """Run a thread whose failure costs speed only: whoever needs the block meets the error itself."""
    with contextlib.suppress(ShardkitError, RuntimeError):
        work()
