"""Blocks read and hashed, rows copied out of them, while other threads run (block_rows.c)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

class Loads:
    """Blocks to be loaded, in the order in which steps first need them, for threads that hold no interpreter.

    Where the facts of a field say OBJECTS (gather.py) instead of the bytes between rows, its rows are read into bytes
    objects, made once the slot is free; of the block only what lies between them is at the job's address, end to end.

    A job is 11 + `width` int64: file (-1: the caller loads it), offset, bytes (above 240), address, XXH3-64, the step
    up to which its memory is in use, slot, block, address of the layout of Arrow messages (`formats.message_layout`) or
    of a tar's headers (0: there are none), bytes in a zstd frame or in a message of them (0: it is not compressed),
    address of a SHA-256 digest (0: none) that is compared instead of XXH3-64, and its facts: they are the row `slot` of
    the table once it is loaded. Of a message only the rows are given, and the rest is found.

    Args:
        width: of the table.
        timed: whether `take_times` is asked.
        way: of hashing; the widest that this processor knows unless a test says otherwise.
    """

    def __init__(self, width: int, timed: bool = ..., way: int = ...) -> None: ...
    def add_file(self, path: str, size: int, /) -> int:
        """The number of a file, which must have so many bytes when it is read."""

    def set_table(self, facts: Int64s, /) -> None:
        """(slots, width), C-contiguous: takes over what the last one held."""

    def add(self, jobs: Int64s, /) -> int:
        """(n, 11 + width) jobs, behind the others; the number of the first."""

    def work(self) -> tuple[int, int, int] | None:
        """Load, one after the other, until one is the caller's: (job, slot, block).

        That is one without a file, whose bytes are not what was written, or do not hold what the job says. None once
        closed.
        """

    def finish(self, number: int, slot: int, facts: bytes | None, /) -> None:
        """A job that `work` returned is done; None: it has failed."""

    def wait(self, jobs: int, timeout_s: float, /) -> int:
        """Until so many are done without a gap: how many are. -1 if the time is up, -2 if all were dropped."""

    def advance(self, step: int, /) -> None:
        """Steps before it are over: the memory that they used may be written to."""

    def drop(self) -> tuple[int, list[int]]:
        """Forget all jobs: the number of the first that was not begun, and what is `running` at that moment."""

    def running(self) -> list[int]:
        """Slots that forgotten jobs still write to."""

    def longest(self) -> tuple[int, float] | None:
        """(block, seconds) of what has been loading for the longest time."""

    def counts(self) -> tuple[int, int, int, float]:
        """(jobs done without a gap, blocks loaded here, their bytes, seconds of all threads)."""

    def take_times(self) -> bytes:
        """(n, 2) int64: block and nanoseconds of what was loaded since the last call."""

    def gather_rows(
        self,
        targets: list[NDArray[Any]],
        facts: Int64s,
        which: Int64s,
        row: Int64s,
        columns: tuple[int, ...],
        /,
    ) -> int:
        """As the function; threads that have nothing to load copy some of the rows."""

    def release(self, number: int, slot: int, /) -> None:
        """What a job has read is needed no more: objects that are in its slot still are no longer held."""

    def leave(self) -> None:
        """Release all objects that rows were read into; called when no thread works and no rows are being copied."""

    def close(self) -> None:
        """`work` and `wait` return."""

def opens_zstd() -> bool:
    """Whether jobs may be compressed: the system has libzstd."""

def hashes_sha256() -> bool:
    """Return True if jobs may have a SHA-256 digest: this processor has instructions for it."""

def ways() -> int:
    """In how many ways this processor can hash; all give the same hashes."""

def copy_rows(target: NDArray[Any], addresses: Int64s, sizes: Int64s | int, /) -> None:
    """The row at each of (n,) addresses, of `sizes` bytes each or (n,), end to end into `target`, which they fill."""

COPIED: int

def gather_rows(
    targets: list[NDArray[Any]], facts: Int64s, which: Int64s, row: Int64s, columns: tuple[int, ...], /
) -> int:
    """Rows `row`, (n,), of slots `which`, (n,), field by field in order into `targets`, which they fill.

    Each field has as many targets, one after the other.

    `facts`, (slots, 1 + 4 · fields), says of each block how many rows it has and where its fields lie.

    Returns:
        COPIED; anything else where none was: a row is past the end of its block, or a decimal text.
    """

def bytes_at(addresses: Int64s, sizes: Int64s, /) -> list[bytes]:
    """What lies at each address, (n,) and (n,)."""

def objects_of(
    facts: Int64s, which: Int64s, row: Int64s, column: int, text: bool, /
) -> list[bytes] | list[str]:
    """Rows `row`, (n,), of slots `which`, (n,), of a field of variable size: as bytes, or as UTF-8 text.

    Raises:
        UnicodeDecodeError: one is none.
    """

def decimals_at(addresses: Int64s, sizes: Int64s, /) -> bytes | None:
    """Values of the canonical decimals at each address, (n,) int64; None where one is none of up to 18 digits."""
