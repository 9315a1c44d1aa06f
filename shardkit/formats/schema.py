"""Which fields a sample has and of which type; values to canonical payload bytes and back, nothing changed silently."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NoReturn

import numpy as np

from shardkit.errors import FormatError, SampleError, SchemaError

from .packed import pack_array, pack_list, unpack_array, unpack_list

MAX_FIELDS = 256

MAX_FIELD_NAME = 200
"""Characters."""

MAX_DIMENSIONS = 8
MAX_ITEM_BYTES = 2**31 - 1  # a fixed-size list of Arrow counts its items in an int32
RESERVED_NAMES = frozenset({"step", "samples", "__key__"})
"""What a batch and a shard hold beside the fields: no field may be called so."""

OPAQUE = ("bytes", "str", "json")
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
# Control characters, ends of lines, marks that turn the direction of text, lone surrogates; and what makes a URL.
_UNFIT = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]|://")
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}\Z")
_NOT_PLAIN = frozenset({*RESERVED_NAMES, "weight"})
_TYPE = re.compile(r"([a-z]+[0-9]*)(?:\[((?:\*|[0-9]+)(?:,(?:\*|[0-9]+))*)\])?(\??)\Z")


MAX_JSON_DEPTH = 200
"""Of nested lists and objects in a value of a json field."""


@dataclass(frozen=True, slots=True)
class FieldType:
    """The type of one field: ``bytes``, ``str``, ``json``, a scalar, an array of fixed or varying shape, a list.

    `kind` is one of bytes, str, json, scalar, array, ragged, varying, list; `dtype` is the numpy name of the item of
    scalar, array and ragged, else ""; `shape` is the shape of a fixed array, else (). An `optional` field may have no
    value: None. `items` says what one byte string of a varying array or a list holds: an array type whose free
    dimensions are 0, or bytes or str.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    optional: bool = False
    items: FieldType | None = None

    @classmethod
    def parse(cls, text: object) -> FieldType:
        """The type written as ``bytes``, ``int64``, ``uint8[32,32,3]``, ``int32[*]``, ``uint8[*,*,3]`` or ``str[*]``.

        ``*`` is a dimension of any size in each row. With ``?`` behind it, a row may have no value.

        Raises:
            SchemaError: `text` is none of the types of shardkit, or its size is out of range.
        """
        match = _TYPE.match(text) if isinstance(text, str) else None
        name, dimensions, mark = match.groups() if match else ("", None, "")
        optional = bool(mark)
        if name in OPAQUE and dimensions is None:
            return cls(name, optional=optional)
        if name in ("bytes", "str") and dimensions == "*":
            return cls("list", optional=optional, items=cls(name))
        if name not in DTYPES:
            raise SchemaError(
                f"field type {text!r} is unknown; expected bytes, str, json or one of {', '.join(DTYPES)}, "
                "optionally with a shape such as int32[2048], int32[*] or uint8[*,*,3] (bytes and str: [*]), and ? "
                "behind it where rows may have no value"
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
            return self.dtype + mark
        if self.kind == "list":
            return f"{self.items}[*]{mark}"
        if self.items is not None:
            return f"{self.items.dtype}[{','.join(str(size or '*') for size in self.items.shape)}]{mark}"
        return f"{self.dtype}[{'*' if self.kind == 'ragged' else ','.join(map(str, self.shape))}]{mark}"

    @property
    def required(self) -> FieldType:
        """The same type where every row has a value."""
        return replace(self, optional=False) if self.optional else self

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Little-endian numpy type of one item; uint8 where `is_opaque`."""
        return np.dtype(self.dtype or "uint8").newbyteorder("<")

    @property
    def is_opaque(self) -> bool:
        """Whether a payload is a byte string to all that stores, moves and counts it, and not an array of items."""
        return not self.dtype

    @property
    def is_packed(self) -> bool:
        """Whether a value is an array of varying shape or a list, which lie packed in one byte string."""
        return self.items is not None

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
        """Canonical payloads of `sample`, in the order of `stored`.

        bytes as they are, str as UTF-8, json as canonical compact JSON, numbers as little-endian C-order
        bytes.

        Args:
            sample: Field name to value: numbers, numpy arrays, lists, or anything with ``__array__``. An optional
                field may be missing or None.
            where: What to call the sample in messages, such as ``data.jsonl row 17``.

        Raises:
            SampleError: a field is missing, unknown, or its value does not fit its type without loss.
        """
        if len(sample) != len(self._fields) or any(name not in sample for name in self._fields):
            _refuse_fields(sample, self._fields, where)
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

    def decode(self, payloads: Sequence[bytes | memoryview]) -> dict[str, object]:
        """Values of canonical payloads: Python scalars, str, bytes, parsed JSON, fresh writable arrays.

        Raises:
            FormatError: a payload is not what `encode` writes for its type.
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
        """The columns whose payloads are stored; itself where no field is optional.

        They are the fields, and behind each optional one a bool that says whether it has a value (`presence_of` names
        it). The payload of a field that has none is zeros, or empty.
        """
        if not any(kind.optional for _, kind in self._ordered):
            return self
        columns: dict[str, FieldType] = {}
        for name, kind in self._ordered:
            columns[name] = kind
            if kind.optional:
                columns[presence_of(name)] = FieldType("scalar", "bool")
        made = Schema.__new__(Schema)  # no user may give a field such a name
        made.__dict__.update(_fields=columns, _ordered=tuple(columns.items()), stored=made)
        return made

    @property
    def has_plain_names(self) -> bool:
        """Whether shardkit 0.1 takes them: letters, digits, underscores, at most 40, no two alike but for case."""
        lower = {name.lower() for name in self._fields}
        return (
            len(lower) == len(self._fields)
            and lower.isdisjoint(_NOT_PLAIN)
            and all(_PLAIN.match(name) for name in self._fields)
        )

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


def presence_of(name: str) -> str:
    """The stored column that says whether an optional field has a value."""
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


def _refuse_fields(sample: Mapping[str, object], fields: Mapping[str, FieldType], where: str) -> None:
    missing = [name for name, kind in fields.items() if name not in sample and not kind.optional]
    unknown = [str(name) for name in sample if name not in fields]
    parts = [f"missing {', '.join(missing)}"] if missing else []
    parts += [f"unknown {', '.join(unknown)}"] if unknown else []
    if not parts:
        return  # optional ones are missing
    raise SampleError(f"{where}: fields {' and '.join(parts)}; the schema has {', '.join(fields)}")


def encode_value(kind: FieldType, value: object, where: str, name: str) -> bytes:
    """Canonical payload of `value` for a field of type `kind`.

    Raises:
        SampleError: the value does not fit the type without loss; names `where`, field and value.
    """
    if value is None and kind.kind != "json":
        _refuse(kind, value, where, name, f"there is no value; a field that may have none is of type {kind}?")
    if kind.kind == "bytes":
        if isinstance(value, bytes):
            return value
        if isinstance(value, (bytearray, memoryview)):
            return bytes(value)
        _refuse(kind, value, where, name, "expected bytes, bytearray or memoryview")
    if kind.kind == "str":
        if not isinstance(value, str):
            _refuse(kind, value, where, name, "expected str")
        try:
            return value.encode()
        except UnicodeEncodeError:
            _refuse(kind, value, where, name, "it holds a lone surrogate, which UTF-8 cannot carry")
    if kind.kind == "json":
        return _encode_json(kind, value, where, name)
    if kind.kind == "list":
        return _encode_list(kind, value, where, name)
    return _encode_numbers(kind, value, where, name)


def decode_payload(kind: FieldType, payload: bytes | memoryview, name: str) -> object:
    """Value of a canonical payload; arrays are fresh and writable.

    Raises:
        FormatError: the payload is not what `encode_value` writes.
    """
    if kind.kind == "bytes":
        return bytes(payload)
    if kind.kind == "str":
        try:
            return str(payload, "utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(
                f"field {name!r}: text is not UTF-8 ({error.reason} at byte {error.start})"
            ) from None
    if kind.kind == "json":
        return decode_json(payload, name)
    if kind.items is not None:
        return _decode_packed(kind.items, kind, payload, name)
    dtype = kind.numpy_dtype
    size = kind.item_bytes
    if len(payload) != size if size is not None else len(payload) % dtype.itemsize:
        raise FormatError(f"field {name!r}: {len(payload)} bytes do not fit {kind}")
    array = np.frombuffer(payload, np.uint8)
    if dtype.kind == "b" and bool((array > 1).any()):
        raise FormatError(f"field {name!r}: a bool is neither 0 nor 1")
    values = array.view(dtype) if len(array) else np.empty(0, dtype)
    return values[0].item() if kind.kind == "scalar" else values.reshape(kind.shape or -1).copy()


def decode_json(payload: bytes | memoryview, name: str) -> object:
    """The value of a json payload.

    Raises:
        FormatError: no JSON, NaN or Infinity, a number too long, or nested too deep.
    """
    try:
        return json.loads(str(payload, "utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise FormatError(
            f"field {name!r}: JSON is nested too deep, expected at most {MAX_JSON_DEPTH}"
        ) from None
    except ValueError as error:
        raise FormatError(f"field {name!r}: no JSON: {error}") from None


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _encode_json(kind: FieldType, value: object, where: str, name: str) -> bytes:
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        payload = text.encode()
        # A round trip in C is the cheap proof that no key was turned into text; tuples need the slower look.
        if json.loads(text) != value or _may_be_deep(payload):
            _check_json(value)
    except RecursionError:
        _refuse(kind, value, where, name, f"it nests deeper than {MAX_JSON_DEPTH}")
    except (TypeError, ValueError, OverflowError) as error:
        _refuse(kind, value, where, name, str(error))
    return payload


def _may_be_deep(payload: bytes) -> bool:
    return payload.count(b"[") + payload.count(b"{") > MAX_JSON_DEPTH


def _check_json(value: object) -> None:
    level: list[object] = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                bad = next((key for key in item if not isinstance(key, str)), None)
                if bad is not None:
                    raise TypeError(f"JSON keys are str, got {bad!r}")
                inner.extend(item.values())
            elif isinstance(item, (list, tuple)):
                inner.extend(item)
        if not inner:
            return
        level = inner
    raise ValueError(f"it nests deeper than {MAX_JSON_DEPTH}")


def _encode_list(kind: FieldType, value: object, where: str, name: str) -> bytes:
    if not isinstance(value, (list, tuple)) and not (isinstance(value, np.ndarray) and value.ndim == 1):
        _refuse(kind, value, where, name, f"expected a list of {kind.items}")
    assert kind.items is not None, "lists have items"
    return pack_list([encode_value(kind.items, one, where, name) for one in value])


def _decode_packed(items: FieldType, kind: FieldType, payload: bytes | memoryview, name: str) -> object:
    try:
        if kind.kind == "varying":
            return unpack_array(payload, items.numpy_dtype, items.shape)
        found = unpack_list(payload)
    except ValueError as error:
        raise FormatError(f"field {name!r}: {len(payload)} bytes are no {kind}: {error}") from None
    return found if items.kind == "bytes" else [decode_payload(items, one, name) for one in found]


def _encode_numbers(kind: FieldType, value: object, where: str, name: str) -> bytes:
    items = kind.items or kind
    dtype = items.numpy_dtype
    if isinstance(value, np.ndarray):
        array = value
    else:
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            _refuse(kind, value, where, name, f"no array can be made of it ({error})")
    expected = "one dimension of any length" if kind.kind == "ragged" else f"shape {items.shape}"
    if kind.kind == "varying":
        expected = f"that of {kind.required}, where * is of any size"
        if array.size == 0 and array.ndim < len(
            items.shape
        ):  # nested lists cannot say what is inside of nothing
            array = array.reshape(array.shape + items.shape[array.ndim :])
        fits = array.ndim == len(items.shape) and all(
            size in (0, n) for size, n in zip(items.shape, array.shape, strict=True)
        )
    else:
        fits = array.ndim == 1 if kind.kind == "ragged" else array.shape == kind.shape
    if not fits:
        _refuse(kind, value, where, name, f"its shape is {array.shape}, expected {expected}")
    if array is not value and array.dtype.kind == "f" and not hasattr(value, "__array__"):
        array = _exact_integers(kind, value, array, where, name)
    if array.dtype != dtype:
        array = _convert(kind, array, where, name)
    array = array.astype(dtype, copy=False)
    if kind.kind != "varying":
        return array.tobytes()
    try:
        return pack_array(array, items.shape)
    except ValueError as error:
        _refuse(kind, value, where, name, str(error))


def _exact_integers(
    kind: FieldType, value: object, array: np.ndarray[Any, Any], where: str, name: str
) -> np.ndarray[Any, Any]:
    """Undo what numpy does to a list that holds integers beyond int64: it rounds them to float64 without a word."""
    if not bool((np.abs(array) >= 2.0**53).any()):
        return array
    items = np.asarray(value, object).ravel().tolist()
    if not any(isinstance(item, int) and int(float(item)) != item for item in items):
        return array
    if (kind.items or kind).numpy_dtype.kind not in "iu" or any(item != item or item % 1 for item in items):
        _refuse(kind, value, where, name, f"a value is not exact in {(kind.items or kind).dtype}")
    try:
        return np.array([int(item) for item in items], (kind.items or kind).dtype).reshape(array.shape)
    except OverflowError:
        _refuse(kind, value, where, name, f"an integer is out of range of {(kind.items or kind).dtype}")


def _convert(kind: FieldType, array: np.ndarray[Any, Any], where: str, name: str) -> np.ndarray[Any, Any]:
    """`array` in the field's dtype; refused where a value would change, except by rounding float to float."""
    dtype = (kind.items or kind).numpy_dtype
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        _refuse(
            kind, array, where, name, f"items are {_item_type(array)}, expected numbers that fit {dtype.name}"
        )
    if array.size == 0:
        return array.astype(dtype)
    low, high = array.min(), array.max()
    if dtype.kind == "b":
        if array.dtype.kind not in "iu" or low < 0 or high > 1:
            _refuse(kind, array, where, name, "expected False, True, 0 or 1")
        return array.astype(dtype)
    with np.errstate(all="ignore"):
        if dtype.kind in "iu":
            return _to_integers(kind, array, where, name)
        converted = array.astype(dtype)
        if array.dtype.kind == "f":
            if not np.array_equal(np.isfinite(array), np.isfinite(converted)):
                _refuse(kind, array, where, name, f"a value overflows {dtype.name}")
        elif array.dtype.kind in "iu":
            bound = 2.0 ** (8 * array.dtype.itemsize - (array.dtype.kind == "i"))
            exact = np.isfinite(converted) & (converted.astype(np.float64) < bound)
            if not (exact.all() and np.array_equal(converted.astype(np.float64).astype(array.dtype), array)):
                _refuse(kind, array, where, name, f"an integer is not exact in {dtype.name}")
    return converted


def _to_integers(kind: FieldType, array: np.ndarray[Any, Any], where: str, name: str) -> np.ndarray[Any, Any]:
    dtype = (kind.items or kind).numpy_dtype
    info = np.iinfo(dtype)
    if array.dtype.kind == "f":
        if not np.array_equal(np.trunc(array), array):
            _refuse(kind, array, where, name, "a value is no whole number")
        # float(info.max) rounds up to a power of two for 64 bits, hence the strict bound.
        if float(array.min()) < float(info.min) or float(array.max()) >= 2.0 ** info.max.bit_length():
            _refuse(kind, array, where, name, f"out of range, expected {info.min} to {info.max}")
    elif array.dtype.kind != "b" and not info.min <= int(array.min()) <= int(array.max()) <= info.max:
        _refuse(kind, array, where, name, f"out of range, expected {info.min} to {info.max}")
    return array.astype(dtype)


def _item_type(array: np.ndarray[Any, Any]) -> str:
    if array.dtype.kind == "O" and array.size:
        return type(array.flat[0]).__name__
    return "text" if array.dtype.kind in "US" else array.dtype.name


def _refuse(kind: FieldType, value: object, where: str, name: str, why: str) -> NoReturn:
    try:
        shown = repr(value)
    except RecursionError:
        shown = "nested too deep to show"
    shown = shown if len(shown) <= 80 else shown[:77] + "…"
    raise SampleError(
        f"{where}: field {name!r} ({kind}) cannot take {type(value).__name__} {shown}: {why}"
    ) from None
