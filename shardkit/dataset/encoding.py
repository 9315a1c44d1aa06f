"""Encode samples as rows, singly or as columns of many: payloads, identity, stratum, split, size.

A record batch of samples has the fields in the Arrow types of a shard (`arrow_schema`), null where a row has no value.
A record batch of scratch has the stored columns without nulls, whose buffers are the payloads, and `_ORIGIN`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from shardkit.dataset.layout import MAX_SHARD_BYTES, split_value
from shardkit.dataset.rows import Rows, unwritten_records
from shardkit.errors import ConfigurationError, SampleError
from shardkit.formats import FieldType, Schema, fit_key, max_key_bytes, raw_row_bytes
from shardkit.formats.arrow_writing import arrow_array, arrow_schema, arrow_type, index_array
from shardkit.formats.block import PayloadColumn, payload_column, payloads_of, sizes_of
from shardkit.formats.values import logical_text

CLASS_AXIS = "__class__"
"""Axis that stratifies by the class name of the int64 field ``label``, instead of by its number."""

SOURCE_PREFIX = b"s"
"""First bytes of the text whose hash is the identity of a row with a source but no key."""

_MAX_STRATUM_TEXT = 200


class EncodedRow(NamedTuple):
    """An encoded row, ready for scratch."""

    key: str | None  # key in the shard; None if it is generated from the row's ordinal
    original_key: str | None  # the caller's key if `fit_key` changed it
    source: tuple[str, int] | None  # (source name, row in it) if known
    payloads: tuple[bytes, ...]  # canonical bytes per stored column, in order
    # 128-bit hash of the key, otherwise of the source, as (high, low); None without either
    identity: tuple[int, int] | None
    stratum: tuple[str, ...]  # values of the stratify fields as texts
    split: int | None  # 64-bit hash of the value that decides the split; None if the identity decides
    raw_bytes: int  # size in a shard before compression


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
        self._fields_of_axes = [(axis, _field_of(axis)) for axis in self.axes]
        folders = self.split_folders or {}
        self._split_folders = {folder: split_value(name) for folder, name in folders.items()}
        self._key_limit = max_key_bytes(self.schema, self.format)
        for name in dict.fromkeys([*self.axes, *self.split_axes]):
            _check_field(self.schema, name, self.classes)
        if len(set(self.axes)) != len(self.axes):
            raise ConfigurationError(f"stratify names a field twice: {', '.join(self.axes)}; name each once")

    def encode(
        self,
        sample: Mapping[str, object],
        key: str | None,
        source: tuple[str, int] | None,
        *,
        where: str,
    ) -> EncodedRow:
        """Encode one sample."""
        payloads = self.schema.encode(sample, where=where)
        fitted = None if key is None else self._fit(key, where)
        raw_bytes = self.raw_bytes(tuple(map(len, payloads)))
        if raw_bytes > MAX_SHARD_BYTES:
            raise _too_large(where, raw_bytes)
        if source is not None:
            _check_source(source, where)
        if fitted is not None:
            identity: tuple[int, int] | None = key_identity(fitted)
        else:
            identity = None if source is None else _source_identity(source)
        return EncodedRow(
            key=fitted,
            original_key=None if fitted == key else key,
            source=source,
            payloads=payloads,
            identity=identity,
            stratum=tuple([self.text(axis, sample[name], where) for axis, name in self._fields_of_axes]),
            split=self._split(sample, source, where),
            raw_bytes=raw_bytes,
        )

    def _split(self, sample: Mapping[str, object], source: tuple[str, int] | None, where: str) -> int | None:
        if self._split_folders and source is not None:
            return self._split_folders[source[0].partition("/")[0]]
        return split_value(self.text(self.split_by, sample[self.split_by], where)) if self.split_by else None

    @cached_property
    def raw_bytes(self) -> Callable[[tuple[int, ...]], int]:
        """`raw_row_bytes`, cached: rows of one dataset have few different sizes."""
        return lru_cache(maxsize=4096)(partial(raw_row_bytes, self.format, self.schema))

    def _fit(self, key: object, where: str) -> str:
        if not isinstance(key, str) or not key:
            raise SampleError(
                f"{where}: key {key!r} is no text; give a str that is unique in the dataset, or None"
            )
        fitted: str = fit_key(key, self._key_limit)
        return fitted

    def text(self, axis: str, value: Any, where: str, *, is_stored: bool = False) -> str:
        """Return the value of a field as the text that names its stratum or split."""
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
            number = value if is_stored else kind.logical.number(value)
            text = str(logical_text(kind.logical.value(number)))
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
        """Encode rows of one source file from the payloads of their stored columns.

        Returns:
            The rows, and their record batch of scratch; or an error for each row that cannot be stored, by its
            position. The caller then encodes the remaining rows.
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
            source_rows=index_array(rows.source_row),
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
            numbers = np.ascontiguousarray(column).view(kind.numpy_dtype).reshape(-1)
            found, place = np.unique(numbers, return_inverse=True)
            values = found.tolist()
        texts = []
        for index, value in enumerate(values):
            try:
                texts.append(self.text(axis, value, "", is_stored=True))
            except SampleError:
                texts.append("")
                for row in np.flatnonzero(place == index).tolist():
                    try:
                        self.text(axis, value, name_of(row), is_stored=True)
                    except SampleError as error:
                        errors.setdefault(row, error)
        return texts, place.astype(np.int64)


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


def _check_source(source: object, where: str) -> None:
    match source:
        case (str(), int(row)) if 0 <= row < 2**63:
            return
    raise SampleError(f"{where}: source {source!r} is not (name, row); give a str and an integer from 0 on")


def _source_identity(source: tuple[str, int]) -> tuple[int, int]:
    name, row = source
    return _identity(SOURCE_PREFIX + row.to_bytes(8, "little") + name.encode("utf-8"))


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
    source_row: NDArray[np.int64]  # (n,), number in the file
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


def join_encoded(schema: Schema, rows: Sequence[EncodedRow]) -> tuple[Rows, Any]:
    """Return rows that were encoded singly, at least one, with identities, as `RowEncoder.encode_rows` does."""
    keys, originals, sources, payloads, identities, strata, splits, raw_bytes = zip(*rows, strict=True)
    places = [source or (None, None) for source in sources]
    number = {values: place for place, values in enumerate(dict.fromkeys(strata))}
    batch = spool_batch(
        schema,
        list(map(list, zip(*payloads, strict=True))),
        keys=keys,
        originals=originals,
        source_names=[name for name, _ in places],
        source_rows=optional_numbers([row for _, row in places]),
    )
    table = Rows(
        identity=np.array(identities, np.uint64),
        stratum=np.array([number[values] for values in strata], np.int32),
        raw_bytes=np.array(raw_bytes, np.int64),
        strata=tuple(number),
        split=np.array([split or 0 for split in splits], np.uint64),
        generated=np.array([key is None for key in keys], np.bool_),
        records=unwritten_records(len(rows)),
    )
    return table, batch


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
    """Return (n, 2) identities: of the keys, otherwise of file, row and piece."""
    names = rows.source_names
    if len(set(names)) == 1:
        identity = _source_identities(names[0], rows.source_row)
    else:
        sources = zip(names, rows.source_row.tolist(), strict=True)
        identity = np.array([_source_identity(source) for source in sources], np.uint64).reshape(-1, 2)
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
    """Return texts as an Arrow array of a type such as "str"; None becomes null, and no texts `count` nulls."""
    if not values:
        return pa.nulls(count, arrow_type(FieldType(kind)))
    presence = [b"\0" if value is None else b"\1" for value in values]
    payloads = [b"" if value is None else value.encode("utf-8", "surrogatepass") for value in values]
    return arrow_array(FieldType(kind, optional=True), payloads, "origin", presence)


def optional_numbers(values: Sequence[int | None]) -> Any:
    """Return numbers as an int64 Arrow array; None becomes null."""
    payloads = [(value or 0).to_bytes(8, "little") for value in values]
    presence = [b"\0" if value is None else b"\1" for value in values]
    return arrow_array(FieldType("scalar", "int64", optional=True), payloads, "row", presence)


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
    source_names: Sequence[str | None],
    source_rows: Any,
) -> Any:
    """Return a record batch of scratch.

    Args:
        schema: schema of the dataset.
        columns: payloads of its stored columns.
        keys: see `EncodedRow`; empty if no row has one.
        originals: keys of the caller, see `EncodedRow`; empty if no row has one.
        source_names: source file of each row, None if unknown; empty if all are.
        source_rows: int64 Arrow array, number in the file; null if unknown.
    """
    stored = zip(schema.stored.items(), columns, strict=True)
    arrays = [spool_array(kind, column, name) for (name, kind), column in stored]
    texts = (("str", keys), ("bytes", originals), ("str", source_names))
    origin = [_optional_texts(kind, column, len(source_rows)) for kind, column in texts]
    return pa.RecordBatch.from_arrays([*arrays, *origin, source_rows], schema=spool_schema(schema))


def spool_array(kind: FieldType, payloads: PayloadColumn, name: str) -> Any:
    """Return the payloads of a stored column as a scratch array; joined payloads share its memory."""
    return arrow_array(_kind(kind), payloads, name)


def _kind(kind: FieldType) -> FieldType:
    """Return the type whose Arrow array has the bytes of the payloads: a bool takes one byte, not one bit."""
    return replace(kind, dtype="uint8" if kind.dtype == "bool" else kind.dtype, optional=False)
