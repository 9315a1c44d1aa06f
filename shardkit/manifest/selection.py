"""Selections: the rows of a shard that a version holds, as a bitmap with constant-time rank and fast select.

Rank and select use one running count per 64-bit word (Jacobson, Space-efficient static trees and graphs, FOCS 1989,
with one level), vectorised over arrays of queries. The counts, int64 in memory, are as large as the bits.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardkit.documents import Natural, Record, convert, sha256_digest
from shardkit.errors import FormatError, UsageError
from shardkit.formats.columns import pack_columns, unpack_columns

_KIND: Final = "selection"
_OVERHEAD_BYTES: Final = 4_096


class _Meta(Record, frozen=True, kw_only=True):
    rows: Natural
    selected: Natural


class Selection:
    """An immutable set of rows of one shard.

    Args:
        rows: Number of rows of the shard.
        bits: uint8 (⌈rows/8⌉,); row r is bit ``r % 8`` (least significant first) of byte ``r // 8``, and bits after
            the last row are zero. The array is not copied.

    Raises:
        FormatError: `bits` has another shape or dtype, or selects rows after the last.
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
        """Return the selection of the rows whose value in `mask` is true."""
        values = np.asarray(mask, dtype=np.bool_)
        return cls(len(values), np.packbits(values, bitorder="little"))

    def mask(self) -> NDArray[np.bool_]:
        """Return a new array with True for each selected row: (rows,) bool."""
        return np.unpackbits(self.bits, count=self.rows, bitorder="little").astype(np.bool_)

    @cached_property
    def count(self) -> int:
        return int(self._before[-1])

    def rank(self, rows: ArrayLike) -> NDArray[np.int64]:
        """Return the number of selected rows before each of `rows`.

        Args:
            rows: Row numbers 0 … `rows`, in any order and shape.

        Raises:
            UsageError: A row number is out of range.
        """
        numbers = np.asarray(rows, dtype=np.int64)
        if numbers.size and (int(numbers.min()) < 0 or int(numbers.max()) > self.rows):
            raise UsageError(f"row {int(numbers.min())} … {int(numbers.max())}: expected 0 … {self.rows}")
        word, bit = numbers >> 6, (numbers & 63).astype(np.uint64)
        # Row number `rows` may begin a word after the last; `_words` ends in a zero word for it.
        below = self._words[word] & ((np.uint64(1) << bit) - np.uint64(1))
        return np.asarray(self._before[word] + np.bitwise_count(below), dtype=np.int64)

    def select(self, ordinals: ArrayLike) -> NDArray[np.int64]:
        """Return the row of each selected ordinal: the inverse of `rank`.

        Args:
            ordinals: Ordinals 0 … count - 1, in any order and shape.

        Raises:
            UsageError: An ordinal is out of range.
        """
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
        """Return the stored form, which is the same for equal selections."""
        return pack_columns(_KIND, {"rows": self.rows, "selected": self.count}, {"bits": self.bits})

    @classmethod
    def from_bytes(cls, data: bytes, rows: int) -> Selection:
        """Parse a selection of a shard of `rows` rows; its digest has been checked.

        Raises:
            FormatError: The bytes are not a selection of this many rows.
        """
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
        """Number of selected rows before each word, then the total: (words + 1,)."""
        before = np.zeros(len(self._words) + 1, dtype=np.int64)
        np.cumsum(np.bitwise_count(self._words), out=before[1:])
        return before


def max_selection_bytes(rows: int) -> int:
    """Return the maximum stored size in bytes of a selection of a shard of `rows` rows."""
    return -(-rows // 8) + _OVERHEAD_BYTES
