"""Rows of verified blocks as Arrow record batches, field by field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shardkit.errors import FormatError, SampleError

from .arrow_writing import arrow_array
from .block import Block, FixedColumn, VariableColumn
from .row_block import JoinedPayloads, PayloadColumn
from .schema import Schema

__all__ = ["record_batch"]


def record_batch(block: Block, rows: NDArray[np.int64], schema: Schema, arrow: Any) -> Any:
    """Some rows of a block, without their keys.

    Args:
        block: verified; in memory that nobody writes to, for columns may be views of it.
        rows: (n,) int64, ascending, n ≥ 1.
        schema: the fields that are wanted, all of them fields of the block.
        arrow: `arrow_schema` of them.

    Raises:
        FormatError: a text of the block is not UTF-8, or a member is not what its type calls for.
    """
    run = slice(int(rows[0]), int(rows[-1]) + 1)
    which = (
        run if run.stop - run.start == len(rows) else rows
    )  # neighbours need no copy where they lie together
    arrays = []
    for name, kind in schema.items():
        column = block.column(name)
        try:
            if isinstance(column, FixedColumn):
                arrays.append(arrow_array(kind, _fixed(column, which), name))
            else:
                arrays.append(arrow_array(kind, _variable(column, which), name))
        except SampleError as error:
            raise FormatError(str(error)) from None
    return pa.RecordBatch.from_arrays(arrays, schema=arrow)


def _fixed(column: FixedColumn, which: slice | NDArray[np.int64]) -> NDArray[np.uint8]:
    values = np.require(column.values[which], requirements=("C", "A"))
    octets: NDArray[np.uint8] = values.reshape(len(values), -1).view(np.uint8)
    return octets


def _variable(column: VariableColumn, which: slice | NDArray[np.int64]) -> PayloadColumn:
    starts, ends = column.starts[which], column.ends[which]
    if bool((starts[1:] == ends[:-1]).all()):
        data = column.data[starts[0] : ends[-1]]
        return JoinedPayloads(_aligned(data, column.kind.numpy_dtype.itemsize), ends - starts)
    view = column.data.data
    return [view[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def _aligned(data: NDArray[np.uint8], item_bytes: int) -> NDArray[np.uint8]:
    """Readers of Arrow memory may take the address of an item for granted."""
    return data if data.ctypes.data % item_bytes == 0 else data.copy()
