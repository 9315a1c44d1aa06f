"""Values to canonical payload bytes and back, one field at a time; nothing is changed silently."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from shardkit.errors import FormatError, SampleError

if TYPE_CHECKING:
    from .schema import FieldType

__all__ = ["MAX_JSON_DEPTH", "decode_json", "decode_payload", "encode_value"]

MAX_JSON_DEPTH = 200
"""Of nested lists and objects in a value of a json field."""


def encode_value(kind: FieldType, value: object, where: str, name: str) -> bytes:
    """Canonical payload of `value` for a field of type `kind`.

    Raises:
        SampleError: the value does not fit the type without loss; names `where`, field and value.
    """
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


def _encode_numbers(kind: FieldType, value: object, where: str, name: str) -> bytes:
    dtype = kind.numpy_dtype
    if isinstance(value, np.ndarray):
        array = value
    else:
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            _refuse(kind, value, where, name, f"no array can be made of it ({error})")
    expected = "one dimension of any length" if kind.kind == "ragged" else f"shape {kind.shape}"
    if array.ndim != 1 if kind.kind == "ragged" else array.shape != kind.shape:
        _refuse(kind, value, where, name, f"its shape is {array.shape}, expected {expected}")
    if array is not value and array.dtype.kind == "f" and not hasattr(value, "__array__"):
        array = _exact_integers(kind, value, array, where, name)
    if array.dtype != dtype:
        array = _convert(kind, array, where, name)
    return array.astype(dtype, copy=False).tobytes()


def _exact_integers(
    kind: FieldType, value: object, array: np.ndarray[Any, Any], where: str, name: str
) -> np.ndarray[Any, Any]:
    """Undo what numpy does to a list that holds integers beyond int64: it rounds them to float64 without a word."""
    if not bool((np.abs(array) >= 2.0**53).any()):
        return array
    items = np.asarray(value, object).ravel().tolist()
    if not any(isinstance(item, int) and int(float(item)) != item for item in items):
        return array
    if kind.numpy_dtype.kind not in "iu" or any(item != item or item % 1 for item in items):
        _refuse(kind, value, where, name, f"a value is not exact in {kind.dtype}")
    try:
        return np.array([int(item) for item in items], kind.dtype).reshape(array.shape)
    except OverflowError:
        _refuse(kind, value, where, name, f"an integer is out of range of {kind.dtype}")


def _convert(kind: FieldType, array: np.ndarray[Any, Any], where: str, name: str) -> np.ndarray[Any, Any]:
    """`array` in the field's dtype; refused where a value would change, except by rounding float to float."""
    dtype = kind.numpy_dtype
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
    dtype = kind.numpy_dtype
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
