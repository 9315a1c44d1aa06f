"""Measure this machine and its stores, in a few seconds per measurement (SPEC.md §1)."""

from __future__ import annotations

import importlib.util
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import shardkit
from shardkit.documents import xxh3
from shardkit.errors import MissingDependency, StoreError, UsageError
from shardkit.extras import install_command
from shardkit.plan.permutation import order
from shardkit.stores.store import Store
from shardkit_tools.tuning.proposing import KIB, MIB, Machine, Ranges, Saving

_FILE_BYTES = 128 * MIB
_RANDOM_BYTES = 128 * KIB
_ROW_BYTES = 4 * KIB
_WINDOWS = tuple(MIB << i for i in range(8))
_THREADS = 8

Tell = Callable[[str], None]


def rate_of(work: Callable[[], int], seconds: float) -> float:
    """Return the median bytes per second of repeated work; the median ignores single outliers.

    Args:
        work: does the work and returns the number of bytes.
        seconds: duration of the measurement; at least 3 repetitions are made.
    """
    work()
    rates: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(rates) < 3:
        begun = time.perf_counter()
        done = work()
        rates.append(done / max(1e-9, time.perf_counter() - begun))
    return statistics.median(rates)


def measure_machine(folder: Path, *, seconds: float, tell: Tell) -> Machine:
    """Measure disk, memory and checksums.

    Args:
        folder: directory on the disk to measure.
        seconds: duration of each measurement.
        tell: called with the name of each measurement.

    Raises:
        StoreError: the directory cannot be written or read.
    """
    tell("disk")
    sequential, random = _disk(folder, seconds)
    tell("memory")
    gather = {size: _gather(size, seconds / 4) for size in _WINDOWS}
    tell("checksums")
    pieces = [memoryview(_text(MIB).tobytes()) for _ in range(8)]

    def check() -> int:
        for piece in pieces:
            xxh3(piece)
        return sum(map(len, pieces))

    return Machine(
        sequential=sequential,
        random=random,
        random_bytes=_RANDOM_BYTES,
        gather=gather,
        xxh3=rate_of(check, seconds / 2),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def _gather(window: int, seconds: float) -> float:
    """Return bytes per second of gathering random rows from a window after a sequential pass, as verification does."""
    rows = np.zeros((window // _ROW_BYTES, _ROW_BYTES // 8), dtype=np.int64)
    chosen = order(window, len(rows))
    out = np.empty_like(rows)

    def work() -> int:
        rows.sum()
        begun = time.perf_counter()
        np.take(rows, chosen, axis=0, out=out)
        spent.append(time.perf_counter() - begun)
        return rows.nbytes

    spent: list[float] = []
    rate_of(work, seconds)
    return rows.nbytes / statistics.median(spent)


def _text(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return bytes that compress about as well as text: words of a small vocabulary."""
    words = order(1, 4096).astype("<u2")
    chosen = words[(np.arange(size // 2, dtype=np.int64) ** 2 >> 7) % len(words)]
    return np.frombuffer(chosen.tobytes(), dtype=np.uint8)


def _disk(folder: Path, seconds: float) -> tuple[float, float]:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".shardkit-tune-") as file:
            piece = _text(MIB).tobytes()
            for _ in range(_FILE_BYTES // MIB):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            number = file.fileno()
            sequential = rate_of(lambda: _read_through(number), seconds)
            with ThreadPoolExecutor(_THREADS) as pool:
                random = rate_of(lambda: _read_at_random(number, pool), seconds)
    except OSError as error:
        raise StoreError(f"{folder} cannot be measured: {error.strerror}; name another with --disk") from None
    return sequential, random


def _forget(number: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)


def _read_through(number: int) -> int:
    _forget(number)
    return sum(len(os.pread(number, MIB, place)) for place in range(0, _FILE_BYTES, MIB))


def _read_at_random(number: int, pool: ThreadPoolExecutor) -> int:
    _forget(number)
    places = order(7, _FILE_BYTES // _RANDOM_BYTES)[:256] * _RANDOM_BYTES
    return sum(pool.map(lambda place: len(os.pread(number, _RANDOM_BYTES, place)), places.tolist()))


def measure_checkpoint(folder: Path, *, tell: Tell) -> Saving:
    """Measure the trainer's saving of a model state in a directory.

    Raises:
        MissingDependency: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency(f"measuring a checkpoint needs torch; run: {install_command('train')}")
    from shardkit_trainer.checkpoints import CheckpointProbe

    tell("checkpoint")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".shardkit-tune-") as place:
        probe = CheckpointProbe(place)
        return Saving(rate_of(probe.copy, 0.1), rate_of(probe.write, 0.5))


_SINGLE = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
_TOGETHER = (256 * KIB, MIB)
_COUNTS = (4, 16, 32)
_LEAST = 3


def measure_ranges(root: str, *, seconds: float, tell: Callable[[str], None]) -> tuple[Ranges, int]:
    """Measure range reads of the largest shard of a version. Return the result and the version's size in bytes.

    Raises:
        UsageError: the largest shard is too small to measure.
    """
    dataset = shardkit.open(root)
    shard = int(np.argmax(dataset.table.size))
    size = int(dataset.table.size[shard])
    store, name = dataset.reader.store_of(shard), dataset.reader.shard_name(shard)
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
    """Return the offsets of all ranges of a shard in pseudorandom order."""
    places: list[int] = (order(size, size // num_bytes) * num_bytes).tolist()
    return places


def _one_at_a_time(store: Store, name: str, size: int, num_bytes: int, seconds: float) -> float:
    """Return the median seconds of single range reads."""
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
    """Return the bytes per second of range reads by `count` threads."""
    places = itertools.cycle(_places(size, num_bytes))
    done, begun = 0, time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        while time.perf_counter() - begun < seconds or not done:
            batch = list(itertools.islice(places, count * 2))
            done += sum(map(len, pool.map(lambda place: store.get_range(name, place, num_bytes), batch)))
    return done / (time.perf_counter() - begun)
