"""Schemas: which fields a sample has, and of which type."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from shardkit.errors import FormatError, SampleError, SchemaError

from .encoding import decode_payload, encode_value

__all__ = ["MAX_FIELDS", "MAX_FIELD_NAME", "RESERVED_NAMES", "FieldType", "Schema"]

MAX_FIELDS = 256

MAX_FIELD_NAME = 40

MAX_DIMENSIONS = 8
MAX_ITEM_BYTES = 2**31 - 1  # a fixed-size list of Arrow counts its items in an int32
RESERVED_NAMES = frozenset({"step", "samples", "weight", "__key__"})
"""What a batch and a shard hold beside the fields: no field may be called so."""

OPAQUE = ("bytes", "str", "json")
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_TYPE = re.compile(r"([a-z]+[0-9]*)(?:\[(\*|[0-9]+(?:,[0-9]+)*)\])?\Z")


@dataclass(frozen=True, slots=True)
class FieldType:
    """The type of one field: ``bytes``, ``str``, ``json``, a scalar, a fixed array or a ragged one.

    `kind` is one of bytes, str, json, scalar, array, ragged; `dtype` is the numpy name of the item ("" for
    the first three); `shape` is the shape of a fixed array, else ().
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: object) -> FieldType:
        """The type written as ``bytes``, ``int64``, ``int32[2048]``, ``uint8[32,32,3]`` or ``int32[*]``.

        Raises:
            SchemaError: `text` is none of the types of shardkit, or its size is out of range.
        """
        match = _TYPE.match(text) if isinstance(text, str) else None
        name, dimensions = match.groups() if match else ("", None)
        if name in OPAQUE and dimensions is None:
            return cls(name)
        if name not in DTYPES:
            raise SchemaError(
                f"field type {text!r} is unknown; expected bytes, str, json or one of {', '.join(DTYPES)}, "
                "optionally with a shape such as int32[2048] or int32[*]"
            )
        if dimensions is None:
            return cls("scalar", name)
        if dimensions == "*":
            return cls("ragged", name)
        shape = tuple(int(size) for size in dimensions.split(","))
        fits = len(shape) <= MAX_DIMENSIONS and all(size > 0 for size in shape)
        if not fits or prod(shape) * np.dtype(name).itemsize > MAX_ITEM_BYTES:
            raise SchemaError(
                f"field type {text!r}: expected 1 to {MAX_DIMENSIONS} dimensions of at least 1 and at most "
                f"{MAX_ITEM_BYTES} bytes in all"
            )
        if ",".join(map(str, shape)) != dimensions:
            raise SchemaError(f"field type {text!r}: sizes have leading zeros")
        return cls("array", name, shape)

    def __str__(self) -> str:
        if self.kind in OPAQUE:
            return self.kind
        if self.kind == "scalar":
            return self.dtype
        return f"{self.dtype}[{'*' if self.kind == 'ragged' else ','.join(map(str, self.shape))}]"

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Little-endian numpy type of one item; uint8 for bytes, str and json."""
        return np.dtype(self.dtype or "uint8").newbyteorder("<")

    @property
    def is_whole(self) -> bool:
        """Whether a value is one whole number, or a bool: a tar holds it as a decimal text."""
        return self.kind == "scalar" and self.numpy_dtype.kind in "biu"

    @property
    def item_bytes(self) -> int | None:
        """Bytes of every payload of this type, or None where they vary."""
        if self.kind in ("scalar", "array"):
            return self.numpy_dtype.itemsize * prod(self.shape)
        return None


class Schema(Mapping[str, FieldType]):
    """Immutable, ordered mapping of field names to types."""

    def __init__(self, fields: Mapping[str, FieldType]) -> None:
        _check_names(list(fields))
        self._fields = dict(fields)
        self._ordered = tuple(fields.items())

    @classmethod
    def parse(cls, fields: Mapping[str, object] | Schema) -> Schema:
        """A schema from ``{"image": "bytes", "label": "int64"}``.

        Raises:
            SchemaError: a name or a type cannot be written (names the field).
        """
        if isinstance(fields, Schema):
            return fields
        if not isinstance(fields, Mapping):
            raise SchemaError(f"a schema is a mapping of field names to types, got {type(fields).__name__}")
        parsed: dict[str, FieldType] = {}
        for name, text in fields.items():
            try:
                parsed[name] = text if isinstance(text, FieldType) else FieldType.parse(text)
            except SchemaError as error:
                raise SchemaError(f"field {name!r}: {error}") from None
        return cls(parsed)

    def to_json(self) -> list[list[str]]:
        """``[[name, type], …]`` in order; JSON objects would lose the order."""
        return [[name, str(kind)] for name, kind in self._ordered]

    @classmethod
    def from_json(cls, value: object) -> Schema:
        """The schema that `to_json` wrote.

        Raises:
            FormatError: `value` is no such list.
        """
        if not isinstance(value, list) or len(value) > MAX_FIELDS:
            raise FormatError(f"schema: expected a list of at most {MAX_FIELDS} [name, type] pairs")
        fields: dict[str, str] = {}
        for pair in value:
            if not (
                isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
            ):
                raise FormatError(f"schema: {pair!r:.100} is no [name, type] pair")
            if pair[0] in fields:
                raise FormatError(f"schema: field {pair[0]!r} appears twice")
            fields[pair[0]] = pair[1]
        try:
            return cls.parse(fields)
        except SchemaError as error:
            raise FormatError(f"schema: {error}") from None

    def encode(self, sample: Mapping[str, object], *, where: str) -> tuple[bytes, ...]:
        """Canonical payloads of `sample`, in schema order.

        bytes as they are, str as UTF-8, json as canonical compact JSON, numbers as little-endian C-order
        bytes.

        Args:
            sample: Field name to value: numbers, numpy arrays, lists, or anything with ``__array__``.
            where: What to call the sample in messages, such as ``data.jsonl row 17``.

        Raises:
            SampleError: a field is missing, unknown, or its value does not fit its type without loss.
        """
        if len(sample) != len(self._fields) or any(name not in sample for name in self._fields):
            _refuse_fields(sample, self._fields, where)
        return tuple([encode_value(kind, sample[name], where, name) for name, kind in self._ordered])

    def decode(self, payloads: Sequence[bytes | memoryview]) -> dict[str, object]:
        """Values of canonical payloads: Python scalars, str, bytes, parsed JSON, fresh writable arrays.

        Raises:
            FormatError: a payload is not what `encode` writes for its type.
        """
        if len(payloads) != len(self._ordered):
            raise FormatError(f"a sample of {len(payloads)} payloads, expected {len(self._ordered)}")
        return {
            name: decode_payload(kind, payload, name)
            for (name, kind), payload in zip(self._ordered, payloads, strict=True)
        }

    def position(self, name: str) -> int:
        """Place of field `name` in schema order.

        Raises:
            SchemaError: there is no such field.
        """
        try:
            return self._positions[name]
        except KeyError:
            raise SchemaError(
                f"field {name!r} is unknown; the fields are {', '.join(self._fields)}"
            ) from None

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self._fields)}

    def __getitem__(self, name: str) -> FieldType:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __eq__(self, other: object) -> bool:
        """Equal in names, types and order: the order is part of the bytes."""
        return self._ordered == other._ordered if isinstance(other, Schema) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._ordered)

    def __repr__(self) -> str:
        return f"Schema({ {name: str(kind) for name, kind in self._ordered} })"


def _check_names(names: Sequence[object]) -> None:
    if not 0 < len(names) <= MAX_FIELDS:
        raise SchemaError(f"a schema has 1 to {MAX_FIELDS} fields, got {len(names)}")
    seen: dict[str, str] = {}
    for name in names:
        if not isinstance(name, str) or not _NAME.match(name) or len(name) > MAX_FIELD_NAME:
            raise SchemaError(
                f"field name {name!r}: expected a letter or underscore, then letters, digits, underscores, "
                f"at most {MAX_FIELD_NAME}"
            )
        if name.lower() in RESERVED_NAMES:
            raise SchemaError(f"field name {name!r} is reserved for batches; call it {name}_")
        if name.lower() in seen:
            raise SchemaError(
                f"field names {seen[name.lower()]!r}, {name!r} differ only in case, which WebDataset drops"
            )
        seen[name.lower()] = name


def _refuse_fields(sample: Mapping[str, object], fields: Mapping[str, FieldType], where: str) -> None:
    missing = [name for name in fields if name not in sample]
    unknown = [str(name) for name in sample if name not in fields]
    parts = [f"missing {', '.join(missing)}"] if missing else []
    parts += [f"unknown {', '.join(unknown)}"] if unknown else []
    raise SampleError(f"{where}: fields {' and '.join(parts)}; the schema has {', '.join(fields)}")
