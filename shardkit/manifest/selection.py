"""Selections: which rows of a shard a version holds, as a bitmap with constant-time rank and fast select.

Rank and select over a plain bitmap with one running count per 64-bit word (Jacobson, Space-efficient static
trees and graphs, FOCS 1989, with one level): 12.5 % on top of the bits, and vectorised here over whole arrays
of queries.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardkit.documents import Natural, Record, convert
from shardkit.errors import FormatError, UsageError
from shardkit.formats.canonical_json import sha256_digest
from shardkit.formats.columns import pack_columns, unpack_columns

_KIND: Final = "selection"
_OVERHEAD_BYTES: Final = 4_096


class _Meta(Record, frozen=True, kw_only=True):
    rows: Natural
    selected: Natural


class Selection:
    """Some rows of one shard; immutable.

    Args:
        rows: Rows of the shard.
        bits: uint8[⌈rows/8⌉], row r is bit ``r % 8`` (least significant first) of byte ``r // 8``; bits past
            the last row are zero. Kept, not copied.
    """

    def __init__(self, rows: int, bits: NDArray[np.uint8]) -> None:
        if rows < 0 or bits.dtype != np.uint8 or bits.shape != (-(-rows // 8),):
            raise FormatError(
                f"selection of {rows} rows with {bits.shape} bytes of {bits.dtype}: expected {-(-rows // 8)}"
            )
        if rows % 8 and int(bits[-1]) >> (rows % 8):
            raise FormatError(f"selection of {rows} rows selects rows past the end")
        self.rows = rows
        self.bits = bits.view()
        self.bits.flags.writeable = False

    def __len__(self) -> int:
        return self.count

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Selection) and self.rows == other.rows and np.array_equal(self.bits, other.bits)
        )

    def __hash__(self) -> int:
        return hash((self.rows, self.bits.tobytes()))

    def __repr__(self) -> str:
        return f"Selection({self.count} of {self.rows} rows)"

    @classmethod
    def from_mask(cls, mask: ArrayLike) -> Selection:
        """From one truth value per row."""
        values = np.asarray(mask, dtype=np.bool_)
        return cls(len(values), np.packbits(values, bitorder="little"))

    def mask(self) -> NDArray[np.bool_]:
        """(rows,) one truth value per row; freshly made."""
        return np.unpackbits(self.bits, count=self.rows, bitorder="little").astype(np.bool_)

    @cached_property
    def count(self) -> int:
        return int(self._before[-1])

    def rank(self, rows: ArrayLike) -> NDArray[np.int64]:
        """How many selected rows lie before each of `rows` (0 … rows, any order and shape)."""
        numbers = np.asarray(rows, dtype=np.int64)
        if numbers.size and (int(numbers.min()) < 0 or int(numbers.max()) > self.rows):
            raise UsageError(f"row {int(numbers.min())} … {int(numbers.max())}: expected 0 … {self.rows}")
        word, bit = numbers >> 6, (numbers & 63).astype(np.uint64)
        # Row number `rows` may begin a word that is not there: a zero word stands for it.
        below = self._words[word] & ((np.uint64(1) << bit) - np.uint64(1))
        return np.asarray(self._before[word] + np.bitwise_count(below), dtype=np.int64)

    def select(self, ordinals: ArrayLike) -> NDArray[np.int64]:
        """The row of each selected ordinal (0 … count - 1, any order and shape): the inverse of `rank`."""
        numbers = np.asarray(ordinals, dtype=np.int64)
        if numbers.size and (int(numbers.min()) < 0 or int(numbers.max()) >= self.count):
            raise UsageError(
                f"selected row {int(numbers.min())} … {int(numbers.max())}: expected 0 … {self.count - 1}"
            )
        word = np.searchsorted(self._before, numbers, side="right") - 1
        bits = self._words[word]
        left = (numbers - self._before[word]).astype(np.uint64)
        row = word.astype(np.int64) << 6
        for width in (32, 16, 8, 4, 2, 1):  # halve the word until one bit is left
            low = bits & np.uint64((1 << width) - 1)
            inside = np.bitwise_count(low).astype(np.uint64)
            high = left >= inside
            left = np.where(high, left - inside, left)
            bits = np.where(high, bits >> np.uint64(width), low)
            row = row + np.where(high, np.int64(width), np.int64(0))
        return row

    def to_bytes(self) -> bytes:
        """The object's bytes: the same for the same rows."""
        return pack_columns(_KIND, {"rows": self.rows, "selected": self.count}, {"bits": self.bits})

    @classmethod
    def from_bytes(cls, data: bytes, rows: int) -> Selection:
        """Read an object whose digest has been checked."""
        where = f"selection {sha256_digest(data)}"
        try:
            columns = unpack_columns(data, _KIND, max_raw_bytes=-(-rows // 8))
            if columns.arrays.keys() != {"bits"}:
                raise FormatError(f"columns {sorted(columns.arrays)[:5]}, expected bits")
            selection = cls(rows, columns.arrays["bits"])
            meta = convert(_Meta, columns.meta, "header")
            if (meta.rows, meta.selected) != (rows, selection.count):
                raise FormatError(f"{selection.count} of {rows} rows, the header says {columns.meta}")
        except FormatError as error:
            raise FormatError(f"{where}: {error}") from error
        return selection

    @cached_property
    def _words(self) -> NDArray[np.uint64]:
        padded = np.zeros((self.rows // 64 + 1) * 8, dtype=np.uint8)
        padded[: len(self.bits)] = self.bits
        return padded.view("<u8").astype(np.uint64, copy=False)

    @cached_property
    def _before(self) -> NDArray[np.int64]:
        """(words + 1,) selected rows before each word; the last is the count."""
        before = np.zeros(len(self._words) + 1, dtype=np.int64)
        np.cumsum(np.bitwise_count(self._words), out=before[1:])
        return before


def max_selection_bytes(rows: int) -> int:
    """The most bytes that the selection of a shard of `rows` rows can have as an object."""
    return -(-rows // 8) + _OVERHEAD_BYTES
