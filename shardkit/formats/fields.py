"""Field types; conversion of values to canonical payload bytes and back, without silent changes."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NoReturn

import numpy as np

from shardkit.errors import FormatError, SampleError, SchemaError

from .values import Logical, check_bools, pack_array, pack_list, unpack_array, unpack_list

MAX_DIMENSIONS = 8
MAX_ITEM_BYTES = 2**31 - 1  # a fixed-size list of Arrow counts its items in an int32
OPAQUE = ("bytes", "str", "json")
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
_LIST = re.compile(r"\Alist\[(str|bytes)\]")
_TYPE = re.compile(r"([a-z]+[0-9]*)(?:\[((?:\*|[0-9]+)(?:,(?:\*|[0-9]+))*)\])?(\??)\Z")


_DOUBLE = struct.Struct("<d")
MAX_JSON_DEPTH = 200
"""Maximum nesting of lists and objects in a value of a json field."""


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


class _Unfit(Exception):
    """The reason why a value cannot be encoded."""


def encode_value(kind: FieldType, value: object, where: str, name: str) -> bytes:
    """Return the canonical payload of `value` for a field of type `kind`.

    Raises:
        SampleError: The value does not fit the type; `where` and `name` locate it in the message.
    """
    try:
        if value is None and kind.kind != "json":
            raise _Unfit(f"there is no value; a field that may have none is of type {kind}?")
        if kind.kind == "bytes":
            if not isinstance(value, (bytes, bytearray, memoryview)):
                raise _Unfit("expected bytes, bytearray or memoryview")
            return bytes(value)
        if kind.kind == "str":
            return _encode_text(value)
        if kind.kind == "json":
            return _encode_json(value)
        if kind.kind == "list" and kind.items is not None:
            return pack_list(
                [encode_value(kind.items, one, where, name) for one in _as_sequence(value, kind)]
            )
        return _encode_numbers(kind, value if kind.logical is None else _number(kind.logical, value))
    except _Unfit as error:
        why = str(error)
    try:
        shown = repr(value)
    except RecursionError:
        shown = "nested too deep to show"
    shown = shown if len(shown) <= 80 else shown[:77] + "…"
    raise SampleError(f"{where}: field {name!r} ({kind}) cannot take {type(value).__name__} {shown}: {why}")


def _number(logical: Logical, value: object) -> int:
    try:
        return logical.number(value)
    except ValueError as error:
        raise _Unfit(str(error)) from None


def _encode_text(value: object) -> bytes:
    if not isinstance(value, str):
        raise _Unfit("expected str")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise _Unfit("it holds a lone surrogate, which UTF-8 cannot carry") from None


def _as_sequence(value: object, kind: FieldType) -> Sequence[object]:
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return list(value)
    raise _Unfit(f"expected a list of {kind.items}")


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


def decode_json(payload: bytes | memoryview, name: str) -> object:
    """Return the value of a json payload.

    Raises:
        FormatError: The payload is not JSON, or nested too deep.
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


def _encode_json(value: object) -> bytes:
    try:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        payload = text.encode()
        # A round trip in C proves cheaply that no key was converted to text; tuples need the slower check.
        if json.loads(text) != value or payload.count(b"[") + payload.count(b"{") > MAX_JSON_DEPTH:
            _check_json(value)
    except RecursionError:
        raise _Unfit(f"it nests deeper than {MAX_JSON_DEPTH}") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise _Unfit(str(error)) from None
    return payload


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


def _encode_plain(dtype: np.dtype[Any], value: object) -> bytes | None:
    """Encode a Python number without an array, in a quarter of the time; None if it needs conversion."""
    if type(value) is float and dtype.kind == "f" and dtype.itemsize == 8:
        return _DOUBLE.pack(value)
    if type(value) is int and dtype.kind in "iu":
        signed = dtype.kind == "i"
        if (signed or value >= 0) and value.bit_length() <= 8 * dtype.itemsize - signed:
            return value.to_bytes(dtype.itemsize, "little", signed=signed)
    return None


def _encode_numbers(kind: FieldType, value: object) -> bytes:
    items = kind.items or kind
    dtype, shape = items.numpy_dtype, items.shape
    if kind.kind == "scalar" and (scalar := _encode_plain(dtype, value)) is not None:
        return scalar
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise _Unfit(f"no array can be made of it ({error})") from None
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
    if not fits:
        raise _Unfit(f"its shape is {array.shape}, expected {expected}")
    if array is not value and array.dtype.kind == "f" and not hasattr(value, "__array__"):
        array = _exact_integers(dtype, value, array)
    if array.dtype.kind == "b":  # after `view`, a bool may be any byte
        array = np.ascontiguousarray(array).view(np.uint8).reshape(array.shape) != 0
    if array.dtype != dtype:
        array = _convert(dtype, array)
    array = array.astype(dtype, copy=False)
    if kind.kind != "varying":
        return array.tobytes()
    try:
        return pack_array(array, shape)
    except ValueError as error:
        raise _Unfit(str(error)) from None


def _exact_integers(dtype: np.dtype[Any], value: object, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return exact integers for a list that numpy silently rounded to float64, because one exceeds int64."""
    if not bool((np.abs(array) >= 2.0**53).any()):
        return array
    items = np.asarray(value, object).ravel().tolist()
    if not any(isinstance(item, int) and int(float(item)) != item for item in items):
        return array
    if dtype.kind not in "iu" or any(item != item or item % 1 for item in items):
        raise _Unfit(f"a value is not exact in {dtype.name}")
    try:
        return np.array([int(item) for item in items], dtype).reshape(array.shape)
    except OverflowError:
        raise _Unfit(f"an integer is out of range of {dtype.name}") from None


def _convert(dtype: np.dtype[Any], array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Convert `array` to the dtype of the field; only rounding float to float may change a value."""
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise _Unfit(f"items are {_item_type(array)}, expected numbers that fit {dtype.name}")
    if array.size == 0:
        return array.astype(dtype)
    if dtype.kind == "b":
        if array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 1:
            raise _Unfit("expected False, True, 0 or 1")
        return array.astype(dtype)
    with np.errstate(all="ignore"):
        if dtype.kind in "iu":
            return _to_integers(dtype, array)
        converted = array.astype(dtype)
        if array.dtype.kind == "f":
            if not np.array_equal(np.isfinite(array), np.isfinite(converted)):
                raise _Unfit(f"a value overflows {dtype.name}")
        elif array.dtype.kind in "iu":
            bound = 2.0 ** (8 * array.dtype.itemsize - (array.dtype.kind == "i"))
            exact = np.isfinite(converted) & (converted.astype(np.float64) < bound)
            if not (exact.all() and np.array_equal(converted.astype(np.float64).astype(array.dtype), array)):
                raise _Unfit(f"an integer is not exact in {dtype.name}")
    return converted


def _to_integers(dtype: np.dtype[Any], array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    info = np.iinfo(dtype)
    if array.dtype.kind == "f":
        if not np.array_equal(np.trunc(array), array):
            raise _Unfit("a value is no whole number")
        # float(info.max) rounds up to a power of two for 64 bits, so the bound is strict.
        fits = float(array.min()) >= float(info.min) and float(array.max()) < 2.0 ** info.max.bit_length()
    else:
        fits = array.dtype.kind == "b" or info.min <= int(array.min()) <= int(array.max()) <= info.max
    if not fits:
        raise _Unfit(f"out of range, expected {info.min} to {info.max}")
    return array.astype(dtype)


def _item_type(array: np.ndarray[Any, Any]) -> str:
    if array.dtype.kind == "O" and array.size:
        return type(array.flat[0]).__name__
    return "text" if array.dtype.kind in "US" else array.dtype.name
