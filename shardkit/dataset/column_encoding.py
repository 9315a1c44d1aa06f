"""Many samples of one source encoded at once, where every field is of a fixed size and nothing has to be converted.

The same rows as `RowEncoder.encode` makes of them one by one; what it would have to look at one by one (keys, text,
other types) is left to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.dataset.encoding import CLASS_AXIS, SOURCE_PREFIX, RowEncoder
from shardkit.dataset.extents import IN_SOURCE, WATCHED, ExtentColumn
from shardkit.dataset.layout import MAX_SHARD_BYTES
from shardkit.dataset.splits import split_value

__all__ = ["EncodedRows", "encode_columns"]


@dataclass(frozen=True, slots=True, eq=False)
class EncodedRows:
    """Rows on their way to scratch; like as many `EncodedRow` without keys.

    Attributes:
        columns: one per field, in schema order: uint8 (n, bytes), canonical payloads, or packed extents.
        sizes: of each field's payloads, as the header of a record has them.
        source_name: of all rows. source_row: int64[n].
        identity: uint64[n, 2]. split: uint64[n], zeros where the identity decides.
        strata: texts that ``stratum``, int32[n], indexes.
        raw_bytes: of each row, in a shard before compression.
    """

    columns: tuple[NDArray[np.uint8], ...]
    sizes: tuple[int, ...]
    source_name: str
    source_row: NDArray[np.int64]
    identity: NDArray[np.uint64]
    split: NDArray[np.uint64]
    strata: tuple[tuple[str, ...], ...]
    stratum: NDArray[np.int32]
    raw_bytes: int

    def __len__(self) -> int:
        return len(self.source_row)


def encode_columns(
    encoder: RowEncoder, columns: Mapping[str, NDArray[Any] | ExtentColumn], source_name: str, first_row: int
) -> EncodedRows | None:
    """Encode samples that are rows of arrays.

    Args:
        encoder: of the dataset.
        columns: field → array (n, *shape of the field), or where such rows are in the source; not of a field by which
            rows are stratified or split.
        source_name: where they come from.
        first_row: of the first of them, there.

    Returns:
        None where they have to be encoded one by one.
    """
    schema = encoder.schema
    if columns.keys() != schema.keys() or not columns:
        return None
    rows = len(next(iter(columns.values())))
    payloads = []
    sizes = []
    for name, kind in schema.items():
        column = columns[name]
        if isinstance(column, ExtentColumn):
            if column.size != kind.item_bytes or len(column) != rows:
                return None
            payloads.append(column.packed())
            sizes.append(column.size | IN_SOURCE | WATCHED)
            continue
        if kind.item_bytes is None or column.dtype != kind.numpy_dtype or column.shape != (rows, *kind.shape):
            return None
        payloads.append(np.ascontiguousarray(column).view(np.uint8).reshape(rows, kind.item_bytes))
        sizes.append(kind.item_bytes)
    raw_bytes = encoder.raw_bytes(tuple(kind.item_bytes or 0 for kind in schema.values()))
    texts = [_texts_of(encoder, axis, columns) for axis in (*encoder.axes, *encoder.split_axes)]
    if not rows or raw_bytes > MAX_SHARD_BYTES or any(found is None for found in texts):
        return None
    known = [found for found in texts if found is not None]
    strata, stratum = _strata(known[: len(encoder.axes)], rows)
    split = np.zeros(rows, np.uint64)
    for values, place in known[len(encoder.axes) :]:
        split = np.array([split_value(text) for text in values], np.uint64)[place]
    source_row = np.arange(first_row, first_row + rows, dtype=np.int64)
    return EncodedRows(
        columns=tuple(payloads),
        sizes=tuple(sizes),
        source_name=source_name,
        source_row=source_row,
        identity=_identities(source_name, source_row),
        split=split,
        strata=strata,
        stratum=stratum,
        raw_bytes=raw_bytes,
    )


def _texts_of(
    encoder: RowEncoder, axis: str, columns: Mapping[str, NDArray[Any] | ExtentColumn]
) -> tuple[list[str], NDArray[np.int64]] | None:
    """The different values of a field as texts, and which of them each row has; None for a wrong label."""
    column = columns["label" if axis == CLASS_AXIS else axis]
    if isinstance(column, ExtentColumn):
        return None
    values, place = np.unique(column, return_inverse=True)
    if axis == CLASS_AXIS:
        if values[0] < 0 or values[-1] >= len(encoder.classes):
            return None
        return [encoder.classes[value] for value in values.tolist()], place
    if column.dtype == np.bool_:
        return ["true" if value else "false" for value in values.tolist()], place
    return [str(value) for value in values.tolist()], place


def _strata(
    axes: list[tuple[list[str], NDArray[np.int64]]], rows: int
) -> tuple[tuple[tuple[str, ...], ...], NDArray[np.int32]]:
    if not axes:
        return ((),), np.zeros(rows, np.int32)
    different, stratum = np.unique(
        np.stack([place for _, place in axes], axis=1), axis=0, return_inverse=True
    )
    strata = tuple(
        tuple(texts[place] for (texts, _), place in zip(axes, places, strict=True))
        for places in different.tolist()
    )
    return strata, stratum.reshape(-1).astype(np.int32)


def _identities(name: str, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    before, after = SOURCE_PREFIX, name.encode("utf-8")
    size = len(before) + 8 + len(after)
    texts = np.empty((len(rows), size), np.uint8)
    texts[:, : len(before)] = np.frombuffer(before, np.uint8)
    texts[:, len(before) : len(before) + 8] = rows.astype("<i8").view(np.uint8).reshape(-1, 8)
    texts[:, len(before) + 8 :] = np.frombuffer(after, np.uint8)
    flat = texts.reshape(-1).data
    digests = [xxhash.xxh3_128_digest(flat[at : at + size]) for at in range(0, len(flat), size)]
    identity: NDArray[np.uint64] = (
        np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2).astype(np.uint64)  # high, low
    )
    return identity
