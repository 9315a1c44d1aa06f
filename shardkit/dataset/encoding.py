"""From samples to encoded rows, one by one or as columns of many: payloads, identity, stratum, split, size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.dataset.layout import MAX_SHARD_BYTES, split_value
from shardkit.errors import ConfigurationError, SampleError
from shardkit.formats import Schema, fit_key, max_key_bytes, raw_row_bytes
from shardkit.formats.values import logical_text

CLASS_AXIS = "__class__"
"""Stratify by the name of the class that the int64 field ``label`` numbers, instead of by the number."""

SOURCE_PREFIX = b"s"
"""Of the text whose hash is the identity of a row that comes from a source."""

_MAX_STRATUM_TEXT = 200
_MAX_SIZES = 4096


class EncodedRow(NamedTuple):
    """A row on its way to scratch."""

    key: str | None  # as it will stand in the shard, None where it is generated from the row's ordinal
    original_key: str | None  # the caller's key where it had to be made to fit
    source: tuple[str, int] | None  # (source name, row in it) where known
    payloads: tuple[bytes, ...]  # canonical bytes per stored column, in their order
    # 128-bit hash of the key, else of the source, as (high, low); None where there is neither
    identity: tuple[int, int] | None
    stratum: tuple[str, ...]  # texts of the values by which the dataset is stratified
    split: int | None  # 64-bit hash of the value that decides the split; None where the identity decides
    raw_bytes: int  # bytes of the row in a shard before compression


@dataclass(eq=False)
class RowEncoder:
    """Encodes samples for one dataset; threads may share it.

    Raises:
        ConfigurationError: a field to stratify or split by does not exist or is of another type.
    """

    schema: Schema
    format: str  # of the shards; it limits the length of keys and gives the size of a row
    _: KW_ONLY
    stratify: Sequence[str] = ()  # fields (str, int or bool scalars), or `CLASS_AXIS`
    classes: Sequence[str] = ()  # names of the values of `label`
    split_by: str | None = (
        None  # a field whose equal values stay in one split; None: rows are split by themselves
    )
    split_folders: Mapping[str, str] | None = None  # first folder in the name of a row's source → its split

    def __post_init__(self) -> None:
        self.classes, self.axes = tuple(self.classes), tuple(self.stratify)
        self.split_axes = () if self.split_by is None else (self.split_by,)
        self._fields_of_axes = [(axis, _field_of(axis)) for axis in self.axes]
        folders = self.split_folders or {}
        self._split_folders = {folder: split_value(name) for folder, name in folders.items()}
        self._sizes: dict[tuple[int, ...], int] = {}
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
            raise SampleError(
                f"{where}: takes {raw_bytes} bytes, more than the {MAX_SHARD_BYTES} that a shard can hold "
                "(an object of one PUT); cut the sample into several"
            )
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

    def raw_bytes(self, sizes: tuple[int, ...]) -> int:
        """`raw_row_bytes`, remembered: rows of one dataset have few different sizes, or only one."""
        found = self._sizes.get(sizes)
        if found is None:
            if len(self._sizes) >= _MAX_SIZES:
                self._sizes.clear()
            found = self._sizes[sizes] = raw_row_bytes(self.format, self.schema, sizes)
        return found

    def _fit(self, key: object, where: str) -> str:
        if not isinstance(key, str) or not key:
            raise SampleError(
                f"{where}: key {key!r} is no text; give a str that is unique in the dataset, or None"
            )
        fitted: str = fit_key(key, self._key_limit)
        return fitted

    def text(self, axis: str, value: Any, where: str, *, is_stored: bool = False) -> str:
        """The value of a field as the name of a stratum."""
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


def key_identity(key: str) -> tuple[int, int]:
    """Identity of a row that has a key: equal for equal keys only."""
    return _identity(b"k" + key.encode("ascii"))


def ordinal_identity(ordinal: int) -> tuple[int, int]:
    """Identity of a row that has neither key nor source: its place in the order of adding."""
    return _identity(b"o" + ordinal.to_bytes(8, "little"))


def part_identity(part: str, number: int) -> tuple[int, int]:
    """Identity of a row of a named part that has neither key nor source: its place in the part."""
    return _identity(b"r" + number.to_bytes(8, "little") + part.encode("ascii"))


def generated_key(ordinal: int) -> str:
    """The key of a row that came without one."""
    return f"{ordinal:010d}"


def generated_keys(ordinals: Sequence[int]) -> list[str]:
    """`generated_key` of many ordinals."""
    return [f"{ordinal:010d}" for ordinal in ordinals]  # a call for each would take as long again


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
class EncodedRows:
    """Rows on their way to scratch; like as many `EncodedRow` without keys."""

    columns: tuple[NDArray[np.uint8], ...]  # canonical payloads per stored column, in order: uint8 (n, bytes)
    source_name: str  # of all rows
    source_row: NDArray[np.int64]  # (n,)
    identity: NDArray[np.uint64]  # (n, 2)
    split: NDArray[np.uint64]  # (n,), zeros where the identity decides
    strata: tuple[tuple[str, ...], ...]  # texts that `stratum`, int32[n], indexes
    stratum: NDArray[np.int32]
    raw_bytes: int  # of each row, in a shard before compression

    def __len__(self) -> int:
        return len(self.source_row)


def encode_columns(
    encoder: RowEncoder, columns: Mapping[str, NDArray[Any]], source_name: str, first_row: int
) -> EncodedRows | None:
    """Encode samples that are rows of arrays.

    Returns:
        None where they have to be encoded one by one.
    """
    schema = encoder.schema.stored
    if columns.keys() != schema.keys() or not columns:
        return None
    rows = len(next(iter(columns.values())))
    payloads = []
    for name, kind in schema.items():
        column = columns[name]
        if kind.item_bytes is None or column.dtype != kind.numpy_dtype or column.shape != (rows, *kind.shape):
            return None
        payloads.append(np.ascontiguousarray(column).view(np.uint8).reshape(rows, kind.item_bytes))
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
        source_name=source_name,
        source_row=source_row,
        identity=_identities(source_name, source_row),
        split=split,
        strata=strata,
        stratum=stratum,
        raw_bytes=raw_bytes,
    )


def _texts_of(
    encoder: RowEncoder, axis: str, columns: Mapping[str, NDArray[Any]]
) -> tuple[list[str], NDArray[np.int64]] | None:
    """The different values of a field as texts, and which of them each row has; None for a wrong label."""
    values, place = np.unique(columns[_field_of(axis)], return_inverse=True)
    try:
        return [encoder.text(axis, value, "", is_stored=True) for value in values.tolist()], place
    except SampleError:
        return None


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
