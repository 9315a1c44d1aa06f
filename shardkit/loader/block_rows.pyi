"""Blocks read and hashed, rows copied out of them, while other threads run (block_rows.c)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

def load_blocks(
    jobs: Int64s, objects: tuple[tuple[bytes, ...] | None, ...], way: int = ..., /
) -> tuple[int, bool]:
    """Read, hash and open blocks one after the other, up to one that is wrong or was not in the page cache.

    A job is 13 + `width` int64, named in load_queue.py:

    * descriptor of the file, offset, bytes (above 240), address to load to, XXH3-64,
    * AFTER, slot and block, which the queue uses (an AFTER of 0: the memory may be new),
    * address of the layout of Arrow messages (`formats.message_layout`) or of the headers of a tar (0: neither), bytes
      after decompression (0: not compressed), address of a SHA-256 digest compared instead of XXH3-64 (0: none),
    * bytes of memory at the address, nanoseconds that the load took, which are filled in,
    * `width` facts of the block. Those of a message are filled in; all others are given with offsets in the block, to
      which the address is added.

    If the facts of a field say OBJECTS (gather.py), its rows are read into the job's bytes objects, and only the bytes
    between them to the address, end to end.

    Args:
        jobs: (n, 13 + width).
        objects: for each job the tuple of `make_objects`, or None.
        way: of hashing; by default the widest that this processor has.

    Returns:
        The number of blocks that were loaded, and True if the last of them was not in the page cache.

    Raises:
        ValueError: a number of a job does not fit; nothing was read.
    """

def make_objects(job: Int64s, /) -> tuple[bytes, ...] | None:
    """Return new bytes objects for the rows of a field of a job, and write the tuple's address to its facts.

    None if there is no such field, or if it has more than 256 rows. The content of the objects is arbitrary.
    """

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
