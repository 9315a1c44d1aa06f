"""Encode samples as rows, by column: payloads, identity, stratum, split, size.

A record batch of samples has the fields in the Arrow types of a shard (`arrow_schema`), null where a row has no value.
A record batch of scratch has the stored columns without nulls, whose buffers are the payloads, and `_ORIGIN`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from shardkit.dataset.layout import MAX_SHARD_BYTES, split_value
from shardkit.dataset.rows import Rows, unwritten_records
from shardkit.errors import ConfigurationError, SampleError
from shardkit.formats import FieldType, Schema, fit_key, max_key_bytes, raw_row_bytes
from shardkit.formats.arrow_writing import arrow_array, arrow_schema, arrow_type
from shardkit.formats.block import PayloadColumn, payload_column, payloads_of, sizes_of
from shardkit.formats.values import logical_text

CLASS_AXIS = "__class__"
"""Axis that stratifies by the class name of the int64 field ``label``, instead of by its number."""

SOURCE_PREFIX = b"s"
"""First bytes of the text whose hash is the identity of a row with a source but no key."""

_MAX_STRATUM_TEXT = 200


@dataclass(eq=False)
class RowEncoder:
    """Encodes samples for one dataset. Thread-safe.

    Raises:
        ConfigurationError: A field to stratify or split by does not exist or has an unsuitable type.
    """

    schema: Schema
    format: str  # format of the shards; limits the length of keys and determines row sizes
    _: KW_ONLY
    stratify: Sequence[str] = ()  # fields (str, int or bool scalars), or `CLASS_AXIS`
    classes: Sequence[str] = ()  # names of the values of `label`
    split_by: str | None = None  # field whose equal values stay in one split; None: each row by itself
    split_folders: Mapping[str, str] | None = None  # first folder in the name of a row's source → its split

    def __post_init__(self) -> None:
        self.classes, self.axes = tuple(self.classes), tuple(self.stratify)
        self.split_axes = () if self.split_by is None else (self.split_by,)
        folders = self.split_folders or {}
        self._split_folders = {folder: split_value(name) for folder, name in folders.items()}
        self._key_limit = max_key_bytes(self.schema, self.format)
        for name in dict.fromkeys([*self.axes, *self.split_axes]):
            _check_field(self.schema, name, self.classes)
        if len(set(self.axes)) != len(self.axes):
            raise ConfigurationError(f"stratify names a field twice: {', '.join(self.axes)}; name each once")

    def check_row(self, payloads: tuple[bytes, ...], key: str | None, where: str) -> None:
        """Raise SampleError if `encode_rows` refuses a row with these payloads of the stored columns."""
        if key is not None:
            self._fit(key, where)
        raw_bytes = raw_row_bytes(self.format, self.schema, tuple(map(len, payloads)))
        if raw_bytes > MAX_SHARD_BYTES:
            raise _too_large(where, raw_bytes)
        for axis in (*self.axes, *self.split_axes):
            name = _field_of(axis)
            payload = payloads[self.schema.stored.position(name)]
            is_text = self.schema[name].kind == "str"
            self.text(
                axis, payload.decode() if is_text else _numbers(self.schema[name], [payload])[0].item(), where
            )

    def _fit(self, key: object, where: str) -> str:
        if not isinstance(key, str) or not key:
            raise SampleError(
                f"{where}: key {key!r} is no text; give a str that is unique in the dataset, or None"
            )
        fitted: str = fit_key(key, self._key_limit)
        return fitted

    def text(self, axis: str, value: Any, where: str) -> str:
        """Return the stored value of a field as the text that names its stratum or split."""
        if axis == CLASS_AXIS:
            number = int(value)
            if not 0 <= number < len(self.classes):
                raise SampleError(
                    f"{where}: label {number} has no class name (there are {len(self.classes)}); "
                    'mend the label, or stratify by "label"'
                )
            return self.classes[number]
        kind = self.schema[axis]
        if kind.kind == "str":
            text = str(value)
        elif kind.dtype == "bool":
            text = "true" if value else "false"
        elif kind.logical is not None:
            text = str(logical_text(kind.logical.value(value)))
        else:
            text = str(int(value))
        if not text or len(text) > _MAX_STRATUM_TEXT:
            raise SampleError(
                f"{where}: field {axis!r} has {len(text)} characters; a field to stratify or split by "
                f"needs 1 to {_MAX_STRATUM_TEXT}"
            )
        return text

    def encode_rows(
        self, columns: Sequence[PayloadColumn], rows: RowOrigin, name_of: Callable[[int], str]
    ) -> tuple[Rows, Any] | dict[int, SampleError]:
        """Encode rows from the payloads of their stored columns.

        Returns:
            The rows, and their record batch of scratch. A row without key and source has the identity (0, 0).
            Or an error for each row that cannot be stored, by its position; call again without these rows.
        """
        errors: dict[int, SampleError] = {}
        sizes: list[Any] = [
            column.shape[1] if isinstance(column, np.ndarray) else sizes_of(column) for column in columns
        ]
        raw_bytes = np.broadcast_to(
            np.asarray(raw_row_bytes(self.format, self.schema, sizes), np.int64), len(rows)
        )
        for row in np.flatnonzero(raw_bytes > MAX_SHARD_BYTES).tolist():
            errors[row] = _too_large(name_of(row), int(raw_bytes[row]))
        axes = (*self.axes, *self.split_axes)
        texts = [self._texts(axis, columns, name_of, errors) for axis in axes]
        if errors:
            return errors
        keys = [None if key is None else self._fit(key, name_of(row)) for row, key in enumerate(rows.keys)]
        strata, stratum = _strata(texts[: len(self.axes)], len(rows))
        split = np.zeros(len(rows), np.uint64)
        if self._split_folders:
            folders = [name.partition("/")[0] for name in rows.source_names]
            split = np.array([self._split_folders[folder] for folder in folders], np.uint64)
        for values, place in texts[len(self.axes) :]:
            split = np.array([split_value(text) for text in values], np.uint64)[place]
        generated = np.array([key is None for key in keys] or np.ones(len(rows)), np.bool_)
        originals = [None if key == fit else key for key, fit in zip(rows.keys, keys, strict=True)]
        batch = spool_batch(
            self.schema,
            columns,
            keys=keys,
            originals=originals,
            source_names=rows.source_names,
            source_rows=rows.source_row,
        )
        table = Rows(
            identity=_identities(rows, keys),
            stratum=stratum,
            raw_bytes=np.ascontiguousarray(raw_bytes),
            strata=strata,
            split=split,
            generated=generated,
            records=unwritten_records(len(rows)),
        )
        return table, batch

    def _texts(
        self,
        axis: str,
        columns: Sequence[PayloadColumn],
        name_of: Callable[[int], str],
        errors: dict[int, SampleError],
    ) -> tuple[list[str], NDArray[np.int64]]:
        """Return the distinct values of a field as texts, and the index of each row's value: (n,) int64."""
        name = _field_of(axis)
        kind, column = self.schema[name], columns[self.schema.stored.position(name)]
        values: Sequence[Any]
        if kind.kind == "str":
            number: dict[bytes, int] = {}
            place = np.array([number.setdefault(bytes(one), len(number)) for one in payloads_of(column)])
            values = [one.decode() for one in number]
        else:
            found, place = np.unique(_numbers(kind, column), return_inverse=True)
            values = found.tolist()
        texts = []
        for index, value in enumerate(values):
            try:
                texts.append(self.text(axis, value, ""))
            except SampleError:
                texts.append("")
                for row in np.flatnonzero(place == index).tolist():
                    try:
                        self.text(axis, value, name_of(row))
                    except SampleError as error:
                        errors.setdefault(row, error)
        return texts, place.astype(np.int64)


def _numbers(kind: FieldType, column: PayloadColumn) -> NDArray[Any]:
    """Return the numbers of a scalar field: (n,)."""
    raw = np.ascontiguousarray(column) if isinstance(column, np.ndarray) else b"".join(payloads_of(column))
    return np.frombuffer(raw, kind.numpy_dtype)


def _too_large(where: str, size: int) -> SampleError:
    return SampleError(
        f"{where}: takes {size} bytes, more than the {MAX_SHARD_BYTES} that a shard can hold (an object of one PUT); "
        "cut the sample into several"
    )


def key_identity(key: str) -> tuple[int, int]:
    """Return the identity of a row with a key."""
    return _identity(b"k" + key.encode("ascii"))


def ordinal_identity(ordinal: int) -> tuple[int, int]:
    """Return the identity of a row without key and source, from its place in the order of adding."""
    return _identity(b"o" + ordinal.to_bytes(8, "little"))


def part_identity(part: str, number: int) -> tuple[int, int]:
    """Return the identity of a row of a named part without key and source, from its place in the part."""
    return _identity(b"r" + number.to_bytes(8, "little") + part.encode("ascii"))


def check_source(source: object, where: str) -> None:
    """Raise SampleError unless a source is (name, row)."""
    match source:
        case (str(name), int(row)) if 0 <= row < 2**63:
            with contextlib.suppress(UnicodeEncodeError):
                name.encode()
                return
    raise SampleError(f"{where}: source {source!r} is not (name, row); give a str and an integer from 0 on")


def _identity(text: bytes) -> tuple[int, int]:
    return divmod(xxhash.xxh3_128_intdigest(text), 2**64)


def _field_of(axis: str) -> str:
    return "label" if axis == CLASS_AXIS else axis


def _check_field(schema: Schema, name: str, classes: tuple[str, ...]) -> None:
    if name == CLASS_AXIS:
        if not classes or "label" not in schema:
            raise ConfigurationError(
                f'cannot stratify by "{CLASS_AXIS}": the samples have no class names; name a field instead'
            )
        return
    if name not in schema:
        raise ConfigurationError(
            f"cannot stratify or split by {name!r}: no such field; the fields are {', '.join(schema)}"
        )
    kind = schema[name]
    if kind.optional:
        raise ConfigurationError(
            f"cannot stratify or split by {name!r}: it is of type {kind}, so that rows may have no value; give every "
            f"row one, and the field the type {kind.required}"
        )
    if kind.kind != "str" and not (kind.kind == "scalar" and not kind.dtype.startswith("float")):
        raise ConfigurationError(
            f"cannot stratify or split by {name!r}: it is of type {kind}; expected str, bool or an integer"
        )


@dataclass(frozen=True, slots=True, eq=False)
class RowOrigin:
    """Origin of rows that are encoded together."""

    source_names: Sequence[str]  # (n,), source file of each row
    source_row: NDArray[np.int64]  # (n,), number in the file; -1 for a row without a source
    keys: Sequence[str | None] = ()  # keys in the source; empty if no row has one
    pieces: Sequence[int] = ()  # number among the samples made from one row; empty if all are 0

    def __len__(self) -> int:
        return len(self.source_row)

    def take(self, places: NDArray[np.int64]) -> RowOrigin:
        """Return the rows at these positions."""
        chosen = places.tolist()
        return RowOrigin(
            [self.source_names[place] for place in chosen],
            self.source_row[places],
            [self.keys[place] for place in chosen] if self.keys else (),
            [self.pieces[place] for place in chosen] if self.pieces else (),
        )


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


def _identities(rows: RowOrigin, keys: Sequence[str | None]) -> NDArray[np.uint64]:
    """Return (n, 2) identities: of the keys, otherwise of file, row and piece; 0 without either."""
    identity = np.zeros((len(rows), 2), np.uint64)
    places: dict[str, list[int]] = {}
    for row, name in enumerate(rows.source_names):
        places.setdefault(name, []).append(row)
    for name, some in places.items():
        identity[some] = _source_identities(name, rows.source_row[some])
    identity[rows.source_row < 0] = 0
    for row, piece in enumerate(rows.pieces):
        if piece:  # pieces of one row are shuffled independently, like other rows
            high, low = identity[row].tolist()
            identity[row] = _identity(b"p%d:%d:%d" % (high, low, piece))
    for row, key in enumerate(keys):
        if key is not None:
            identity[row] = key_identity(key)
    return identity


def _source_identities(name: str, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
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


# ---- Arrow columns of canonical payloads

_ORIGIN = (
    ("\0key", pa.large_string()),  # null: made from the row's ordinal
    ("\0original", pa.large_binary()),
    ("\0source", pa.large_string()),
    ("\0row", pa.int64()),
)


def sample_batch(schema: Schema, rows: Sequence[tuple[bytes, ...]]) -> Any:
    """Return a record batch of samples from rows encoded by `Schema.encode`."""
    arrays = []
    for name, kind in schema.items():
        place = schema.stored.position(name)
        presence = [row[place + 1] for row in rows] if kind.optional else None
        arrays.append(arrow_array(kind, [row[place] for row in rows], name, presence))
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(schema, keys=False))


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


def _optional_texts(kind: str, values: Sequence[str | None], count: int) -> Any:
    """Return texts as an Arrow array of a type such as "str"; None becomes null, and no texts `count` nulls.

    `pyarrow.array` would import pandas if it is installed.
    """
    if not values:
        return pa.nulls(count, arrow_type(FieldType(kind)))
    presence = [b"\0" if value is None else b"\1" for value in values]
    payloads = [b"" if value is None else value.encode("utf-8", "surrogatepass") for value in values]
    return arrow_array(FieldType(kind, optional=True), payloads, "origin", presence)


@lru_cache(maxsize=16)
def spool_schema(schema: Schema) -> Any:
    """Return the Arrow schema of a dataset's scratch files."""
    fields = [pa.field(name, arrow_type(_kind(kind)), nullable=False) for name, kind in schema.stored.items()]
    return pa.schema([*fields, *(pa.field(name, kind) for name, kind in _ORIGIN)])


def spool_batch(
    schema: Schema,
    columns: Sequence[PayloadColumn],
    *,
    keys: Sequence[str | None],
    originals: Sequence[str | None],
    source_names: Sequence[str],
    source_rows: NDArray[np.int64],
) -> Any:
    """Return a record batch of scratch.

    Args:
        schema: schema of the dataset.
        columns: payloads of its stored columns.
        keys: keys in the shard, None if generated from the row's ordinal; empty if all are.
        originals: keys of the caller that `fit_key` changed, otherwise None; empty if no row has one.
        source_names: source file of each row.
        source_rows: (n,) number in the file; -1 for a row without a source.
    """
    stored = zip(schema.stored.items(), columns, strict=True)
    arrays = [spool_array(kind, column, name) for (name, kind), column in stored]
    known = source_rows >= 0
    names = [name if is_known else None for name, is_known in zip(source_names, known.tolist(), strict=True)]
    texts = (("str", keys), ("bytes", originals), ("str", names))
    origin = [_optional_texts(kind, column, len(known)) for kind, column in texts]
    valid = pa.py_buffer(np.packbits(known, bitorder="little"))
    numbers = pa.Array.from_buffers(
        pa.int64(), len(known), [valid, pa.py_buffer(np.ascontiguousarray(source_rows, np.int64))]
    )
    return pa.RecordBatch.from_arrays([*arrays, *origin, numbers], schema=spool_schema(schema))


def spool_array(kind: FieldType, payloads: PayloadColumn, name: str) -> Any:
    """Return the payloads of a stored column as a scratch array; joined payloads share its memory."""
    return arrow_array(_kind(kind), payloads, name)


def _kind(kind: FieldType) -> FieldType:
    """Return the type whose Arrow array has the bytes of the payloads: a bool takes one byte, not one bit."""
    return replace(kind, dtype="uint8" if kind.dtype == "bool" else kind.dtype, optional=False)
