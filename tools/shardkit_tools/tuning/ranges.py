"""What a root's store does: ranges of several sizes, several at a time (SPEC.md §1)."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import shardkit
from shardkit.errors import UsageError
from shardkit.plan.permutation import order
from shardkit.stores.store import Store
from shardkit_tools.tuning.proposing import KIB, MIB, Ranges

__all__ = ["measure_ranges"]

_SINGLE = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
_TOGETHER = (256 * KIB, MIB)
_COUNTS = (4, 16, 32)
_LEAST = 3


def measure_ranges(root: str, *, seconds: float, tell: Callable[[str], None]) -> tuple[Ranges, int]:
    """Ranges of the largest shard of a root's version, and the bytes of all its samples.

    Args:
        root: ROOT[@REF].
        seconds: for each of some ten questions.
        tell: gets a line on what is being done.

    Raises:
        UsageError: no shard is large enough to tell anything.
        StoreError: the store does not answer.
    """
    dataset = shardkit.open(root)
    shard = int(np.argmax(dataset.table.size))
    size = int(dataset.table.size[shard])
    store, name = dataset.reader.repository_of(shard).store, dataset.reader.shard_name(shard)
    singles = [b for b in _SINGLE if b * 4 <= size]
    if len(singles) < 2:
        raise UsageError(
            f"{root}: its largest shard has {size} bytes, at least {_SINGLE[1] * 4} are expected to measure ranges; "
            "name a larger dataset, or leave it out"
        )
    single = {}
    for num_bytes in singles:
        tell(f"ranges of {num_bytes // KIB:,} KiB, one at a time")
        single[num_bytes] = _one_at_a_time(store, name, size, num_bytes, seconds)
    rates = {(b, 1): b / s for b, s in single.items()}
    for num_bytes, count in itertools.product([b for b in _TOGETHER if b in single], _COUNTS):
        tell(f"ranges of {num_bytes // KIB:,} KiB, {count} at a time")
        rates[num_bytes, count] = _together(store, name, size, num_bytes, count, seconds)
    is_local = store.local_path(name) is not None
    return Ranges(single, rates, is_local), int(dataset.table.size.sum())


def _places(size: int, num_bytes: int) -> list[int]:
    """Where ranges begin: all over the shard, none twice before all were read."""
    places: list[int] = (order(size, size // num_bytes) * num_bytes).tolist()
    return places


def _one_at_a_time(store: Store, name: str, size: int, num_bytes: int, seconds: float) -> float:
    """Median seconds."""
    took: list[float] = []
    until = time.perf_counter() + seconds
    for place in itertools.cycle(_places(size, num_bytes)):
        begun = time.perf_counter()
        store.get_range(name, place, num_bytes)
        took.append(time.perf_counter() - begun)
        if len(took) >= _LEAST and time.perf_counter() > until:
            return statistics.median(took)
    raise AssertionError("unreachable")


def _together(store: Store, name: str, size: int, num_bytes: int, count: int, seconds: float) -> float:
    """Bytes per second by so many threads."""
    places = itertools.cycle(_places(size, num_bytes))
    done, begun = 0, time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        while time.perf_counter() - begun < seconds or not done:
            batch = list(itertools.islice(places, count * 2))
            done += sum(map(len, pool.map(lambda place: store.get_range(name, place, num_bytes), batch)))
    return done / (time.perf_counter() - begun)
