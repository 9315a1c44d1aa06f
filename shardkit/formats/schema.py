"""Field types and schemas; conversion of values to canonical payload bytes and back, without silent changes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np

from shardkit.errors import FormatError, SampleError, SchemaError
from shardkit.ranges import shown

from .json_values import decode_json, encode_json
from .values import (
    Logical,
    Unfit,
    check_bools,
    convert_items,
    encode_number,
    exact_integers,
    pack_array,
    pack_list,
    unpack_array,
    unpack_list,
)

MAX_DIMENSIONS = 8
MAX_ITEM_BYTES = 2**31 - 1  # a fixed-size list of Arrow counts its items in an int32
OPAQUE = ("bytes", "str", "json")
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
_LIST = re.compile(r"\Alist\[(str|bytes)\]")
_TYPE = re.compile(r"([a-z]+[0-9]*)(?:\[((?:\*|[0-9]+)(?:,(?:\*|[0-9]+))*)\])?(\??)\Z")

MAX_FIELDS = 256

MAX_FIELD_NAME = 200  # characters

KEY_FIELD = "__key__"
"""Name of the column of keys in an Arrow shard."""

BOUNDARIES = "boundaries"
"""The field in which ``shardkit build --pack`` records, per row, 0 and the end of each document."""

RESERVED_NAMES = frozenset({"step", "samples", KEY_FIELD})
"""Names that batches and shards use themselves; fields cannot have them."""

# Control characters, line ends, bidirectional marks, lone surrogates, and the mark of a URL.
_UNFIT = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]|://")


@lru_cache(maxsize=64)
def _little_endian(name: str) -> np.dtype[Any]:
    return np.dtype(name).newbyteorder("<")


@dataclass(frozen=True, slots=True)
class FieldType:
    """The type of a field: ``bytes``, ``str``, ``json``, a scalar, an array of fixed or varying shape, or a list."""

    kind: str  # bytes, str, json, scalar, array, ragged, varying, list
    dtype: str = ""  # numpy name of the items of scalar, array and ragged
    shape: tuple[int, ...] = ()  # shape of an array; in `items` of a varying array, free dimensions are 0
    optional: bool = False  # a row may have no value (None)
    items: FieldType | None = None  # type of the items of a list or of a varying array
    logical: Logical | None = None  # meaning of an integer scalar, such as a date

    @classmethod
    def parse(cls, text: object) -> FieldType:
        """Parse a type such as ``bytes``, ``int64``, ``uint8[32,32,3]``, ``int32[*]``, ``uint8[*,*,3]`` or ``str[*]``.

        ``*`` is a dimension whose size differs from row to row. A trailing ``?`` makes the field optional. Logical
        types are ``date``, ``time[u]``, ``timestamp[u]``, ``timestamp[u, UTC]``, ``duration[u]`` and ``decimal[9,2]``.

        Raises:
            SchemaError: `text` is not a field type.
        """
        match = _TYPE.match(_LIST.sub(r"\1[*]", text)) if isinstance(text, str) else None
        name, dimensions, mark = match.groups() if match else ("", None, "")
        optional = bool(mark)
        if name in OPAQUE and dimensions is None:
            return cls(name, optional=optional)
        if name in ("bytes", "str") and dimensions == "*":  # also written list[str]
            return cls("list", optional=optional, items=cls(name))
        logical = (
            Logical.parse(text.removesuffix("?")) if isinstance(text, str) and name not in DTYPES else None
        )
        if logical is not None:
            return cls("scalar", logical.dtype, optional=text.endswith("?"), logical=logical)  # type: ignore[attr-defined]  # a str
        if name not in DTYPES:
            raise SchemaError(
                f"field type {text!r} is unknown; expected bytes, str, json or one of {', '.join(DTYPES)}, "
                "optionally with a shape such as int32[2048], int32[*] or uint8[*,*,3] (bytes and str: [*]); or date, "
                "time[us], timestamp[us], timestamp[us, UTC], duration[ms] or decimal[9,2] (units s, ms, us, ns; at "
                "most 18 digits); and ? behind it where rows may have no value"
            )
        if dimensions is None:
            return cls("scalar", name, optional=optional)
        if dimensions == "*":
            return cls("ragged", name, optional=optional)
        shape = tuple(0 if size == "*" else int(size) for size in dimensions.split(","))
        fits = len(shape) <= MAX_DIMENSIONS and shape.count(0) == dimensions.count("*")
        if not fits or prod(size or 1 for size in shape) * np.dtype(name).itemsize > MAX_ITEM_BYTES:
            raise SchemaError(
                f"field type {text!r}: expected 1 to {MAX_DIMENSIONS} dimensions of at least 1 and at most "
                f"{MAX_ITEM_BYTES} bytes in all"
            )
        if ",".join(str(size or "*") for size in shape) != dimensions:
            raise SchemaError(f"field type {text!r}: sizes have leading zeros")
        if 0 in shape:
            return cls("varying", optional=optional, items=cls("array", name, shape))
        return cls("array", name, shape, optional)

    def __str__(self) -> str:
        mark = "?" if self.optional else ""
        if self.kind in OPAQUE:
            return self.kind + mark
        if self.kind == "scalar":
            return str(self.logical or self.dtype) + mark
        if self.kind == "list":
            return f"{self.items}[*]{mark}"
        if self.items is not None:
            return f"{self.items.dtype}[{','.join(str(size or '*') for size in self.items.shape)}]{mark}"
        return f"{self.dtype}[{'*' if self.kind == 'ragged' else ','.join(map(str, self.shape))}]{mark}"

    @property
    def required(self) -> FieldType:
        """The same type, not optional."""
        return replace(self, optional=False) if self.optional else self

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Little-endian numpy dtype of one item; uint8 if `is_opaque`."""
        return _little_endian(self.dtype or "uint8")

    @property
    def is_opaque(self) -> bool:
        """True if payloads are stored as byte strings, not as arrays of items."""
        return not self.dtype

    @property
    def is_packed(self) -> bool:
        """True if values are lists or arrays of varying shape, which are packed into one byte string."""
        return self.items is not None

    @property
    def is_whole(self) -> bool:
        """True if values are single integers or bools, which a tar stores as decimal text."""
        return self.kind == "scalar" and self.numpy_dtype.kind in "biu"

    @property
    def item_bytes(self) -> int | None:
        """Bytes of every payload of this type, or None if sizes vary."""
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
        """Return the schema of a mapping such as ``{"image": "bytes", "label": "int64"}``.

        Raises:
            SchemaError: A name or type is not valid.
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
        """Return ``[[name, type], …]`` in order; JSON objects would lose the order."""
        return [[name, str(kind)] for name, kind in self._ordered]

    @classmethod
    def from_json(cls, value: object) -> Schema:
        """Return the schema written by `to_json`.

        Raises:
            FormatError: `value` is not a list of valid fields.
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
        """Return the canonical payloads of `sample` in the order of `stored`.

        str is encoded as UTF-8, json as canonical JSON, numbers as little-endian bytes in C order.

        Args:
            sample: A value for every field; optional fields may be missing or None.
            where: Name of the sample in messages.

        Raises:
            SampleError: A field is missing or unknown, or a value does not fit its type.
        """
        if type(sample) is not dict and not isinstance(sample, Mapping):
            raise SampleError(f"{where}: {shown(sample)} is no mapping of field to value; give a dict")
        if len(sample) != len(self._fields) or any(name not in sample for name in self._fields):
            self._refuse_fields(sample, where)
        if self.stored is self:
            return tuple([encode_value(kind, sample[name], where, name) for name, kind in self._ordered])
        payloads: list[bytes] = []
        for name, kind in self._ordered:
            value = sample.get(name)
            is_absent = kind.optional and value is None
            payloads.append(
                bytes(kind.item_bytes or 0) if is_absent else encode_value(kind, value, where, name)
            )
            if kind.optional:
                payloads.append(b"\0" if is_absent else b"\1")
        return tuple(payloads)

    def _refuse_fields(self, sample: Mapping[str, object], where: str) -> None:
        missing = [name for name, kind in self._ordered if name not in sample and not kind.optional]
        unknown = [str(name) for name in sample if name not in self._fields]
        parts = [f"missing {', '.join(missing)}"] if missing else []
        parts += [f"unknown {', '.join(unknown)}"] if unknown else []
        if parts:
            raise SampleError(f"{where}: fields {' and '.join(parts)}; the schema has {', '.join(self)}")

    def decode(self, payloads: Sequence[bytes | memoryview]) -> dict[str, object]:
        """Return the values of canonical payloads: Python scalars, str, bytes, parsed JSON and new, writable arrays.

        Raises:
            FormatError: A payload is not valid for its type.
        """
        if len(payloads) != len(self.stored):
            raise FormatError(f"a sample of {len(payloads)} payloads, expected {len(self.stored)}")
        payload_of = dict(zip(self.stored, payloads, strict=True))
        return {
            name: None
            if kind.optional and not payload_of[presence_of(name)][0]
            else decode_payload(kind, payload_of[name], name)
            for name, kind in self._ordered
        }

    @cached_property
    def stored(self) -> Schema:
        """The stored columns; the schema itself if no field is optional.

        Each optional field is followed by a bool column, named by `presence_of`, that is true where the field has a
        value. The payload of a missing value is zeros, or empty if sizes vary.
        """
        if not any(kind.optional for _, kind in self._ordered):
            return self
        columns: dict[str, FieldType] = {}
        for name, kind in self._ordered:
            columns[name] = kind
            if kind.optional:
                columns[presence_of(name)] = FieldType("scalar", "bool")
        made = Schema.__new__(Schema)  # skips the check of names: a presence column contains a NUL
        made.__dict__.update(_fields=columns, _ordered=tuple(columns.items()), stored=made)
        return made

    def position(self, name: str) -> int:
        """Return the position of field `name` in schema order.

        Raises:
            SchemaError: The field is unknown.
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
        """Compare names, types and order: the order is part of the bytes."""
        return self._ordered == other._ordered if isinstance(other, Schema) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._ordered)

    def __repr__(self) -> str:
        return f"Schema({ {name: str(kind) for name, kind in self._ordered} })"

    def __str__(self) -> str:
        return ", ".join(f"{name} {kind}" for name, kind in self._ordered)


def presence_of(name: str) -> str:
    """Return the name of the stored bool column that marks the values of an optional field."""
    return f"{name}\0"


def _check_names(names: Sequence[object]) -> None:
    if not 0 < len(names) <= MAX_FIELDS:
        raise SchemaError(f"a schema has 1 to {MAX_FIELDS} fields, got {len(names)}")
    for name in names:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_FIELD_NAME or _UNFIT.search(name):
            raise SchemaError(
                f"field name {name!r:.80}: expected 1 to {MAX_FIELD_NAME} characters, none of them a control character "
                "or half of one, and no ://"
            )
        if name in RESERVED_NAMES:
            raise SchemaError(f"field name {name!r} is reserved for batches; call it {name}_")


# ---- values and payloads


def encode_value(kind: FieldType, value: object, where: str, name: str) -> bytes:
    """Return the canonical payload of `value` for a field of type `kind`.

    Raises:
        SampleError: The value does not fit the type; `where` and `name` locate it in the message.
    """
    try:
        if value is None and kind.kind != "json":
            raise Unfit(f"there is no value; a field that may have none is of type {kind}?")
        if kind.kind == "bytes":
            if not isinstance(value, (bytes, bytearray, memoryview)):
                raise Unfit("expected bytes, bytearray or memoryview")
            return bytes(value)
        if kind.kind == "str":
            return _encode_text(value)
        if kind.kind == "json":
            return encode_json(value)
        if kind.kind == "list" and kind.items is not None:
            return pack_list(
                [encode_value(kind.items, one, where, name) for one in _as_sequence(value, kind)]
            )
        return _encode_numbers(kind, value if kind.logical is None else _number(kind.logical, value))
    except Unfit as error:
        why = str(error)
    try:
        text = repr(value)
    except RecursionError:
        text = "nested too deep to show"
    text = re.sub(r"\n *", " ", text)  # of an array
    text = text if len(text) <= 80 else text[:77] + "…"
    raise SampleError(f"{where}: field {name!r} ({kind}) cannot take {type(value).__name__} {text}: {why}")


def _number(logical: Logical, value: object) -> int:
    try:
        return logical.number(value)
    except ValueError as error:
        raise Unfit(str(error)) from None


def _encode_text(value: object) -> bytes:
    if not isinstance(value, str):
        raise Unfit("expected str")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise Unfit("it holds a lone surrogate, which UTF-8 cannot carry") from None


def _as_sequence(value: object, kind: FieldType) -> Sequence[object]:
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return list(value)
    raise Unfit(f"expected a list of {kind.items}")


def _array_of(value: object) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise Unfit("some of its items are masked, and their values would be stored; fill them first")
    try:
        return np.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise Unfit(f"no array can be made of it ({error})") from None


def _encode_numbers(kind: FieldType, value: object) -> bytes:
    items = kind.items or kind
    dtype, shape = items.numpy_dtype, items.shape
    if kind.kind == "scalar" and (scalar := encode_number(dtype, value)) is not None:
        return scalar
    array = _array_of(value)
    if kind.kind == "varying":
        expected = f"that of {kind.required}, where * is of any size"
        if array.size == 0 and array.ndim < len(shape):  # empty nested lists have no inner shape
            array = array.reshape(array.shape + shape[array.ndim :])
        fits = array.ndim == len(shape) and all(
            size in (0, n) for size, n in zip(shape, array.shape, strict=True)
        )
    elif kind.kind == "ragged":
        expected, fits = "one dimension of any length", array.ndim == 1
    else:
        expected, fits = f"shape {shape}", array.shape == shape
        if array.ndim == len(shape) > 0:
            free = (str(n) if n == size else "*" for n, size in zip(shape, array.shape, strict=True))
            expected += f"; where sizes vary, the type is {items.dtype}[{','.join(free)}]"
    if not fits:
        raise Unfit(f"its shape is {array.shape}, expected {expected}")
    if array is not value and array.dtype.kind == "f" and not hasattr(value, "__array__"):
        array = exact_integers(dtype, value, array)
    if array.dtype.kind == "b":  # after `view`, a bool may be any byte
        array = np.ascontiguousarray(array).view(np.uint8).reshape(array.shape) != 0
    if array.dtype != dtype:
        array = convert_items(dtype, array)
    array = array.astype(dtype, copy=False)
    if kind.kind != "varying":
        return array.tobytes()
    try:
        return pack_array(array, shape)
    except ValueError as error:
        raise Unfit(str(error)) from None


def decode_payload(kind: FieldType, payload: bytes | memoryview, name: str) -> object:
    """Return the value of a canonical payload; arrays are new and writable.

    Raises:
        FormatError: The payload is not valid for the type.
    """
    if kind.kind == "json":
        return decode_json(payload, name)
    try:
        return _decode(kind, payload)
    except ValueError as error:
        raise FormatError(f"field {name!r}: {len(payload)} bytes are no {kind}: {error}") from None


def _decode(kind: FieldType, payload: bytes | memoryview) -> object:
    if kind.kind == "bytes":
        return bytes(payload)
    if kind.kind == "str":
        return str(payload, "utf-8")
    if kind.items is not None and kind.kind == "varying":
        return unpack_array(payload, kind.items.numpy_dtype, kind.items.shape)
    if kind.items is not None:
        return [_decode(kind.items, one) for one in unpack_list(payload)]
    dtype, size = kind.numpy_dtype, kind.item_bytes
    if len(payload) != size if size is not None else len(payload) % dtype.itemsize:
        raise ValueError("they do not fit")
    array = np.frombuffer(payload, np.uint8)
    check_bools(array, dtype)
    values = array.view(dtype) if len(array) else np.empty(0, dtype)
    if kind.logical is not None:
        return kind.logical.value(values[0].item())
    return values[0].item() if kind.kind == "scalar" else values.reshape(kind.shape or -1).copy()
