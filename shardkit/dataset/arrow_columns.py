"""Arrow columns of canonical payloads, for decoded sources and for scratch files.

A record batch of samples has the fields in the Arrow types of a shard (`arrow_schema`), null where a row has
no value. A record batch of scratch has the stored columns without nulls, whose buffers are the canonical
payloads, and four columns with the row's origin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shardkit.formats import FieldType, Schema
from shardkit.formats.arrow_payloads import payload_column
from shardkit.formats.arrow_writing import arrow_array, arrow_schema, arrow_type
from shardkit.formats.block import PayloadColumn

_ORIGIN = (
    ("\0key", pa.large_string()),  # null: made from the row's ordinal
    ("\0original", pa.large_binary()),
    ("\0source", pa.large_string()),
    ("\0row", pa.int64()),
)


def sample_batch(schema: Schema, rows: Sequence[tuple[bytes, ...]]) -> Any:
    """Return a record batch of samples from rows encoded by `Schema.encode`."""
    stored = schema.stored
    arrays = []
    for name, kind in schema.items():
        place = stored.position(name)
        presence = [row[place + 1] for row in rows] if kind.optional else None
        arrays.append(arrow_array(kind, [row[place] for row in rows], name, presence))
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(schema, keys=False))


def index_array(values: NDArray[Any]) -> Any:
    """Return numbers as an int64 array; `pyarrow.array` would import pandas if it is installed."""
    numbers = np.ascontiguousarray(values, np.int64)
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)], null_count=0)


def joined_batch(batches: Sequence[Any], schema: Any) -> Any:
    """Return record batches as one, to take rows of: `Table.take` costs twice as much."""
    found = pa.Table.from_batches(batches, schema).combine_chunks().to_batches()
    return found[0] if found else pa.RecordBatch.from_pylist([], schema=schema)


def numbers_of(array: Any, absent: int) -> NDArray[Any]:
    """Return integers, with `absent` in place of nulls."""
    kind = FieldType("scalar", str(array.type))
    payloads = payload_column(kind, array)
    assert isinstance(payloads, np.ndarray), "integers are of one size"
    numbers = np.ascontiguousarray(payloads).view(kind.numpy_dtype).reshape(-1)
    if not array.null_count:
        return numbers
    return np.where(array.is_valid().to_numpy(zero_copy_only=False), numbers, absent)


def origin_arrays(
    keys: Sequence[str | None],
    originals: Sequence[str | None],
    names: Sequence[str | None],
    rows: Any,
) -> list[Any]:
    """Return the columns key, original key, source name and row of a scratch batch."""
    texts = [
        [None if text is None else text.encode("utf-8", "surrogatepass") for text in column]
        for column in (keys, originals, names)
    ]
    kinds = ("str", "bytes", "str")
    arrays = [_optional(kind, text) for kind, text in zip(kinds, texts, strict=True)]
    return [*arrays, rows]


def optional_rows(rows: Sequence[int | None]) -> Any:
    """Return row numbers as int64; None becomes null."""
    payloads = [(row or 0).to_bytes(8, "little") for row in rows]
    presence = [b"\0" if row is None else b"\1" for row in rows]
    return arrow_array(FieldType("scalar", "int64", optional=True), payloads, "row", presence)


def _optional(kind: str, values: Sequence[bytes | None]) -> Any:
    presence = [b"\0" if value is None else b"\1" for value in values]
    payloads = [value or b"" for value in values]
    return arrow_array(FieldType(kind, optional=True), payloads, "origin", presence)


def spool_schema(schema: Schema) -> Any:
    """Return the Arrow schema of a dataset's scratch files."""
    fields = [pa.field(name, arrow_type(_kind(kind)), nullable=False) for name, kind in schema.stored.items()]
    return pa.schema([*fields, *(pa.field(name, kind) for name, kind in _ORIGIN)])


def spool_array(kind: FieldType, payloads: PayloadColumn, name: str) -> Any:
    """Return the payloads of a stored column as a scratch array; joined payloads share its memory."""
    return arrow_array(_kind(kind), payloads, name)


def _kind(kind: FieldType) -> FieldType:
    """Return the type whose Arrow array has the bytes of the payloads: a bool takes one byte, not one bit."""
    return replace(kind, dtype="uint8" if kind.dtype == "bool" else kind.dtype, optional=False)
