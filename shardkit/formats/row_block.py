"""The rows of one block, field by field: what encoders take, so that nothing is done row by row that need not be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import SampleError

from .rows import Row

__all__ = ["JoinedPayloads", "PayloadColumn", "RowBlock", "payloads_of", "sizes_of"]


@dataclass(frozen=True, slots=True, eq=False)
class JoinedPayloads:
    """Payloads that lie one behind the other already.

    Attributes:
        data: uint8 (sum of the sizes,), contiguous.
        sizes: int64 (rows,).
    """

    data: NDArray[np.uint8]
    sizes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.sizes)


PayloadColumn = Sequence[bytes | memoryview] | NDArray[np.uint8] | JoinedPayloads
"""Canonical payloads of one field: one buffer per row, uint8 (rows, bytes) whose rows are contiguous, or joined."""


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """Rows on their way into a shard.

    Buffers are borrowed until the block is written.

    Attributes:
        keys: of the rows.
        columns: one per field, in schema order.
        originals: (place, the source's key) of the rows whose key had to be rewritten.
        source_names: that ``source_id`` indexes; empty where no row has a source.
        source_id: int32[n], -1 for none. source_row: int64[n], 0 for none.
        stratum: int32[n], -1 for none; None where no row has one.
    """

    keys: Sequence[str]
    columns: Sequence[PayloadColumn]
    originals: Sequence[tuple[int, str]] = ()
    source_names: tuple[str, ...] = ()
    source_id: NDArray[np.int32] | None = None
    source_row: NDArray[np.int64] | None = None
    stratum: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def of(cls, rows: Sequence[Row], num_fields: int) -> RowBlock:
        """The same rows, field by field.

        Raises:
            SampleError: a row has another number of payloads.
        """
        for row in rows:
            if len(row.payloads) != num_fields:
                raise SampleError(f"key {row.key!r}: {len(row.payloads)} payloads for {num_fields} fields")
        names = tuple(dict.fromkeys(row.source[0] for row in rows if row.source is not None))
        number = {name: place for place, name in enumerate(names)}
        has_stratum = any(row.stratum is not None for row in rows)
        return cls(
            keys=[row.key for row in rows],
            columns=[[row.payloads[place] for row in rows] for place in range(num_fields)],
            originals=[
                (place, row.original_key) for place, row in enumerate(rows) if row.original_key is not None
            ],
            source_names=names,
            source_id=np.array([-1 if r.source is None else number[r.source[0]] for r in rows], np.int32),
            source_row=np.array([0 if row.source is None else row.source[1] for row in rows], np.int64),
            stratum=np.array([-1 if row.stratum is None else row.stratum for row in rows], np.int32)
            if has_stratum
            else None,
        )


def payloads_of(column: PayloadColumn) -> Sequence[bytes | memoryview]:
    """One buffer per row."""
    if isinstance(column, JoinedPayloads):
        stops = np.cumsum(column.sizes)
        view = column.data.data
        starts = (stops - column.sizes).tolist()
        return [view[start:stop] for start, stop in zip(starts, stops.tolist(), strict=True)]
    if not isinstance(column, np.ndarray):
        return column
    flat, size = np.ascontiguousarray(column).reshape(-1).data, column.shape[1]
    return [flat[start : start + size] for start in range(0, len(column) * size, size)]


def sizes_of(column: PayloadColumn) -> NDArray[np.int64]:
    """Bytes of each row's payload: int64[n]."""
    if isinstance(column, JoinedPayloads):
        return column.sizes
    if isinstance(column, np.ndarray):
        return np.full(len(column), column.shape[1], np.int64)
    return np.fromiter(map(len, column), np.int64, len(column))
