"""Values and their bytes: dates, times and decimals; numbers; arrays of varying shape and lists (SPEC.md §1).

A date, time or decimal is stored and gathered as an integer; samples and tables show the value. A packed value is one
byte string that contains its own shape: an array is a .npy file of version 1.0; a list is its count, its sizes (u64
each) and the concatenated strings. Each value has one encoding. Sizes in a header are compared with the size of the
payload before an array is allocated.
"""

from __future__ import annotations

import datetime as dt
import decimal
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # units per second
_TEXT = re.compile(
    r"(?:(date)|(time|duration|timestamp)\[(s|ms|us|ns)(?:, ?([A-Za-z0-9_+:/-]{1,60}))?\]"
    r"|(decimal)\[([1-9][0-9]?),(0|[1-9][0-9]?)\])\Z"
)
_FRACTION = re.compile(r"[.,](\d{1,9})(?!\d)")  # fraction of a second
_NANOS = {
    **{unit: 10**9 // parts for unit, parts in _UNITS.items()},
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
    "D": 86_400 * 10**9,
    "W": 7 * 86_400 * 10**9,
}
_OFFSET = re.compile(r"([+-])([01][0-9]|2[0-3]):([0-5][0-9])\Z")
_ISO_DURATION = re.compile(r"(-?)PT([0-9]+)(?:\.([0-9]{1,9}))?S\Z")
_EPOCH_DAY = dt.date(1970, 1, 1).toordinal()
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_DOUBLE = struct.Struct("<d")
_MOST_DIGITS = 18  # every decimal with this many digits fits int64


@dataclass(frozen=True, slots=False)
class Logical:
    """The meaning of an integer field.

    ``date`` is days since 1970-01-01 (int32). ``time[unit]`` is units since midnight, int32 for s and ms, otherwise
    int64. The other kinds are int64: ``timestamp[unit]`` counts from 1970 without a zone, ``timestamp[unit, zone]``
    from 1970 UTC and is displayed in an IANA zone or a fixed offset; ``decimal[digits,places]`` is the value times
    10^places.
    """

    kind: str
    unit: str = ""
    zone: str = ""
    digits: int = 0
    places: int = 0

    @classmethod
    def parse(cls, text: str) -> Logical | None:
        """Parse the name of a logical type; return None if `text` is not one."""
        match = _TEXT.match(text)
        if match is None:
            return None
        day, kind, unit, zone, _, digits, places = match.groups()
        if day:
            return cls("date")
        if kind:
            return cls(kind, unit, zone or "") if not zone or kind == "timestamp" else None
        found = cls("decimal", digits=int(digits), places=int(places))
        return found if found.places <= found.digits <= _MOST_DIGITS else None

    def __str__(self) -> str:
        if self.kind == "date":
            return "date"
        if self.kind == "decimal":
            return f"decimal[{self.digits},{self.places}]"
        return f"{self.kind}[{self.unit}{f', {self.zone}' if self.zone else ''}]"

    @property
    def dtype(self) -> str:
        """NumPy name of the dtype of the integer."""
        return (
            "int32" if self.kind == "date" or (self.kind == "time" and self.unit in ("s", "ms")) else "int64"
        )

    def number(self, value: Any) -> int:
        """Return the integer that represents a value.

        Raises:
            ValueError: The value has another type, is not exact in the unit, or is out of range.
        """
        if hasattr(value, "to_numpy") and not isinstance(value, np.generic):
            value = value.to_numpy()  # pandas: Python's types have no nanoseconds
        if isinstance(value, str):
            value = self._from_text(value)
        if self.kind == "decimal":
            number = self._to_unscaled(value)
        elif isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.timedelta64)):
            number = int(value)
        elif isinstance(value, (np.datetime64, np.timedelta64)):
            number = self._from_numpy(value)
        else:
            number = self._from_python(value)
        least, most = self.limits
        if not least <= number <= most:
            is_time = self.kind == "time"
            raise ValueError(
                "a time is at least 00:00 and before 24:00" if is_time else f"it is out of range of {self}"
            )
        return number

    @property
    def limits(self) -> tuple[int, int]:
        """The least and the greatest integer that represent a value."""
        if self.kind == "time":
            return 0, 86_400 * _UNITS[self.unit] - 1
        info = np.iinfo(self.dtype)
        return int(info.min) + 1, int(info.max)  # the least int64 is NumPy's NaT

    def value(self, number: int) -> Any:
        """Return the value of an integer: a date, time, datetime, timedelta or Decimal.

        Nanoseconds, and values outside the range of Python's types, are NumPy's datetime64 and timedelta64. A
        ``time[ns]`` of whole microseconds is a Python time.
        """
        if self.kind == "decimal":
            return decimal.Decimal(number).scaleb(-self.places, _EXACT)
        try:
            if self.kind == "date" and 1 <= _EPOCH_DAY + number <= dt.date.max.toordinal():
                return dt.date.fromordinal(_EPOCH_DAY + number)
            if self.kind == "time" and not self.limits[0] <= number <= self.limits[1]:
                raise ValueError(f"{number} is no {self}")
            if self.unit not in ("", "ns") or (self.kind == "time" and not number % 1000):
                passed = dt.timedelta(microseconds=number * 10**6 // _UNITS[self.unit])
                if self.kind == "duration":
                    return passed
                if self.kind == "time":
                    return (_EPOCH + passed).time()
                when = _EPOCH + passed
                return when.astimezone(_zone(self.zone)) if self.zone else when.replace(tzinfo=None)
        except OverflowError:
            pass
        if self.kind in ("time", "duration"):
            return np.timedelta64(number, self.unit)  # type: ignore[call-overload]  # any unit
        return np.datetime64(number, self.unit or "D")  # type: ignore[call-overload]

    @cached_property
    def arrow_type(self) -> Any:
        """The Arrow type in tables; shards have the same type, except int64 for decimals."""
        import pyarrow as pa

        if self.kind == "date":
            return pa.date32()
        if self.kind == "decimal":
            return pa.decimal128(self.digits, self.places)
        if self.kind == "time":
            return pa.time32(self.unit) if self.unit in ("s", "ms") else pa.time64(self.unit)
        return (
            pa.duration(self.unit) if self.kind == "duration" else pa.timestamp(self.unit, self.zone or None)
        )

    def _from_text(self, text: str) -> Any:
        if self.kind == "decimal":
            try:
                return decimal.Decimal(text)
            except decimal.InvalidOperation:
                raise ValueError("it is no decimal number") from None
        try:
            if self.kind == "date":
                return dt.date.fromisoformat(text)
            if self.kind == "time":
                return dt.time.fromisoformat(text)
        except ValueError as error:
            raise ValueError(f"it is not in ISO 8601: {error}") from None
        if self.kind == "duration":
            match = _ISO_DURATION.match(text)
            if match is None:
                raise ValueError("it is no duration in seconds in ISO 8601, such as PT1.5S")
            sign, seconds, rest = match.groups()
            nanos = int(seconds) * 10**9 + int((rest or "").ljust(9, "0"))
            return self._exact(-nanos if sign else nanos)
        whole = _FRACTION.sub("", text, count=1)
        rest = match[1] if (match := _FRACTION.search(text)) else ""
        try:
            when = dt.datetime.fromisoformat(whole)
        except ValueError as error:
            raise ValueError(f"it is not in ISO 8601: {error}") from None
        return self._exact(_micros(self._utc(when) - _EPOCH) * 1000 + int(rest.ljust(9, "0")))

    def _exact(self, nanos: int) -> int:
        number, rest = divmod(nanos, 86_400 * 10**9 if self.kind == "date" else 10**9 // _UNITS[self.unit])
        if rest:
            raise ValueError(f"it is not exact in {self}")
        return number

    def _utc(self, when: dt.datetime) -> dt.datetime:
        if self.zone and when.tzinfo is None:
            raise ValueError(f"it says no zone, which {self} needs")
        if when.tzinfo is not None and not self.zone:
            raise ValueError(f"it has a zone, which {self} does not keep; take timestamp[{self.unit}, UTC]")
        return when.replace(tzinfo=dt.UTC) if when.tzinfo is None else when

    def _from_numpy(self, value: np.datetime64 | np.timedelta64) -> int:
        wanted = "M" if self.kind in ("date", "timestamp") else "m"
        if np.isnat(value) or value.dtype.kind != wanted:
            raise ValueError(f"expected a {self.kind}")
        unit, count = np.datetime_data(value.dtype)
        if wanted == "M" and unit in ("Y", "M"):
            value, unit, count = value.astype("M8[D]"), "D", 1
        if unit not in _NANOS:
            raise ValueError(f"its unit is {unit}, expected one of {', '.join(_NANOS)}")
        return self._exact(int(value.astype(np.int64)) * count * _NANOS[unit])

    def _from_python(self, value: Any) -> int:
        if self.kind == "date" and isinstance(value, dt.date) and not isinstance(value, dt.datetime):
            return value.toordinal() - _EPOCH_DAY
        if self.kind == "timestamp" and isinstance(value, dt.datetime):
            passed = self._utc(value) - _EPOCH
        elif self.kind == "time" and isinstance(value, dt.time) and value.tzinfo is None:
            passed = dt.datetime.combine(_EPOCH, value, dt.UTC) - _EPOCH
        elif self.kind == "duration" and isinstance(value, dt.timedelta):
            passed = value
        else:
            raise ValueError(f"expected a {self.kind}, its text in ISO 8601, or a whole number")
        return self._exact(_micros(passed) * 1000)

    def _to_unscaled(self, value: Any) -> int:
        if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
            value = decimal.Decimal(int(value))
        if not isinstance(value, decimal.Decimal) or not value.is_finite():
            raise ValueError("expected a Decimal, its text, or a whole number (a float is not exact)")
        if value.adjusted() > _MOST_DIGITS:
            raise ValueError(f"it is out of range of {self}")
        scaled = value.scaleb(self.places, _EXACT)
        if scaled != scaled.to_integral_value() or abs(scaled) >= 10**self.digits:
            raise ValueError(f"it has more digits than {self}")
        return int(scaled)


def _micros(passed: dt.timedelta) -> int:
    return (passed.days * 86_400 + passed.seconds) * 10**6 + passed.microseconds


_EXACT = decimal.Context(prec=200)


def logical_text(value: Any) -> str | None:
    """Return a date, time or decimal as text that `Logical.number` parses, and None for any other value."""
    if isinstance(value, decimal.Decimal):
        return f"{value:f}"
    if isinstance(value, (dt.date, dt.time)):
        return value.isoformat()
    if isinstance(value, np.datetime64):
        return str(value)
    if isinstance(value, dt.timedelta):
        value = np.timedelta64(_micros(value), "us")
    if isinstance(value, np.timedelta64):
        unit, count = np.datetime_data(value.dtype)
        nanos = int(value.astype(np.int64)) * count * _NANOS[unit]
        seconds, rest = divmod(abs(nanos), 10**9)
        part = f".{rest:09d}".rstrip("0") if rest else ""
        return f"{'-' if nanos < 0 else ''}PT{seconds}{part}S"
    return None


@lru_cache(maxsize=256)
def _zone(name: str) -> dt.tzinfo:
    """Return the zone, or UTC if this machine does not know it: the instant is the same."""
    match = _OFFSET.match(name)
    if match is None:
        import zoneinfo  # slow to import, and rarely needed

        try:
            return zoneinfo.ZoneInfo(name)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
            return dt.UTC
    ahead = dt.timedelta(hours=int(match[2]), minutes=int(match[3]))
    return dt.timezone(-ahead if match[1] == "-" else ahead)


_SHAPE = re.compile(rb"'shape': \(([0-9, ]{1,200})\), \}")
_MAX_ITEMS = 2**40  # product of the sizes, 0 counted as 1: NumPy also limits the product for empty arrays
_MAX_EMPTY = 2**16  # lists in an array without items: each takes an offset as an Arrow list
HEAD_BYTES = 320
"""Upper bound of the size of a .npy header, which has at most eight dimensions."""


@lru_cache(maxsize=4096)
def array_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the .npy header of an array in C order, as NumPy writes it; at least 128 bytes."""
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    total = max(-(-(10 + len(text) + 1) // 64) * 64, 128)
    return b"\x93NUMPY\x01\x00" + (total - 10).to_bytes(2, "little") + text.ljust(total - 11) + b"\n"


def pack_array(array: NDArray[Any], sizes: Sequence[int]) -> bytes:
    """Return the .npy file of a little-endian array.

    Raises:
        ValueError: The shape does not match `sizes` (0 is any size) or is too large.
    """
    _check_shape(array.shape, sizes)
    return array_header(array.dtype, array.shape) + array.tobytes()


def array_place(
    head: bytes, size: int, dtype: np.dtype[Any], sizes: Sequence[int]
) -> tuple[tuple[int, ...], int]:
    """Return the shape of an array packed by `pack_array`, and the offset of its items.

    Args:
        head: The first `HEAD_BYTES` of the payload.
        size: Bytes of the whole payload.
        dtype: Little-endian dtype of the items.
        sizes: Sizes of the dimensions; 0 is any size.

    Raises:
        ValueError: The header is not canonical, or shape or size do not match.
    """
    found = _SHAPE.search(head)
    texts = found[1].rstrip(b",").split(b", ") if found else []
    if len(texts) != len(sizes) or any(not text.isdigit() or len(text) > 13 for text in texts):
        raise ValueError("no .npy header of as many dimensions")
    shape = tuple(map(int, texts))
    header = array_header(dtype, shape)
    if not head.startswith(header):
        raise ValueError(f"its .npy header is not that of {dtype.name} in shape {shape}, in C order")
    _check_shape(shape, sizes)
    expected = len(header) + dtype.itemsize * prod(shape)
    if expected != size:
        raise ValueError(f"its header calls for {expected} bytes in shape {shape}")
    return shape, len(header)


def _check_shape(shape: Sequence[int], sizes: Sequence[int]) -> None:
    """Raise ValueError if a shape does not match the type, or would cost a reader memory out of proportion."""
    if any(n != fixed for n, fixed in zip(shape, sizes, strict=True) if fixed):
        raise ValueError(f"its shape is {tuple(shape)}")
    lists = prod(max(n, 1) for n in shape[: max(place for place, size in enumerate(sizes) if not size)])
    if prod(max(n, 1) for n in shape) > _MAX_ITEMS or (0 in shape and lists > _MAX_EMPTY):
        raise ValueError(f"its shape is {tuple(shape)}: an array without items has at most {_MAX_EMPTY} rows")


def unpack_array(payload: bytes | memoryview, dtype: np.dtype[Any], sizes: Sequence[int]) -> NDArray[Any]:
    """Return the array packed by `pack_array` as a new, writable array.

    Raises:
        ValueError: The payload is not canonical; see `array_place`.
    """
    shape, start = array_place(bytes(payload[:HEAD_BYTES]), len(payload), dtype, sizes)
    items = np.frombuffer(payload, np.uint8, offset=start) if len(payload) > start else np.empty(0, np.uint8)
    check_bools(items, dtype)
    return items.copy().view(dtype).reshape(shape)


def check_bools(items: NDArray[Any], dtype: np.dtype[Any]) -> None:
    """Raise ValueError if `dtype` is bool and an item is neither 0 nor 1."""
    if dtype.kind == "b" and bool((items.view(np.uint8) > 1).any()):
        raise ValueError("a bool is neither 0 nor 1")


def pack_list(items: Sequence[bytes]) -> bytes:
    """Return count, sizes and items as one byte string."""
    return b"".join([np.array([len(items), *map(len, items)], "<u8").tobytes(), *items])


def unpack_list(payload: bytes | memoryview) -> list[bytes]:
    """Return the items of a list packed by `pack_list`.

    Raises:
        ValueError: The sizes do not add up to the payload.
    """
    count = int.from_bytes(payload[:8], "little")
    if len(payload) < 8 or count > len(payload) // 8 - 1:
        raise ValueError(f"{len(payload)} bytes cannot hold the sizes of {count} items")
    at = 8 * (count + 1)
    sizes: list[int] = np.frombuffer(payload, "<u8", count, 8).tolist()
    if at + sum(sizes) != len(payload):
        raise ValueError(f"{len(payload)} bytes, but its sizes add up to {at + sum(sizes)}")
    items = []
    for size in sizes:
        items.append(bytes(payload[at : at + size]))
        at += size
    return items


# ---- conversion without silent changes


class Unfit(Exception):
    """The reason why a value cannot be encoded."""


def encode_number(dtype: np.dtype[Any], value: object) -> bytes | None:
    """Encode a Python number without an array, in a quarter of the time; None if it needs conversion."""
    if type(value) is float and dtype.kind == "f" and dtype.itemsize == 8:
        return _DOUBLE.pack(value)
    if type(value) is int and dtype.kind in "iu":
        signed = dtype.kind == "i"
        if (signed or value >= 0) and value.bit_length() <= 8 * dtype.itemsize - signed:
            return value.to_bytes(dtype.itemsize, "little", signed=signed)
    return None


def exact_integers(dtype: np.dtype[Any], value: object, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return exact integers for a list that numpy silently rounded to float64, because one exceeds int64."""
    if not bool((np.abs(array) >= 2.0**53).any()):
        return array
    items = np.asarray(value, object).ravel().tolist()
    if not any(isinstance(item, int) and int(float(item)) != item for item in items):
        return array
    if dtype.kind not in "iu" or any(item != item or item % 1 for item in items):
        raise Unfit(f"a value is not exact in {dtype.name}")
    try:
        return np.array([int(item) for item in items], dtype).reshape(array.shape)
    except OverflowError:
        raise Unfit(f"an integer is out of range of {dtype.name}") from None


def convert_items(dtype: np.dtype[Any], array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Convert `array` to the dtype of the field; only rounding float to float may change a value."""
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise Unfit(f"items are {_item_type(array)}, expected numbers that fit {dtype.name}")
    if array.size == 0:
        return array.astype(dtype)
    if dtype.kind == "b":
        if array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 1:
            raise Unfit("expected False, True, 0 or 1")
        return array.astype(dtype)
    with np.errstate(all="ignore"):
        if dtype.kind in "iu":
            return _to_integers(dtype, array)
        converted = array.astype(dtype)
        if array.dtype.kind == "f":
            if not np.array_equal(np.isfinite(array), np.isfinite(converted)):
                raise Unfit(f"a value overflows {dtype.name}")
        elif array.dtype.kind in "iu":
            bound = 2.0 ** (8 * array.dtype.itemsize - (array.dtype.kind == "i"))
            exact = np.isfinite(converted) & (converted.astype(np.float64) < bound)
            if not (exact.all() and np.array_equal(converted.astype(np.float64).astype(array.dtype), array)):
                raise Unfit(f"an integer is not exact in {dtype.name}")
    return converted


def _to_integers(dtype: np.dtype[Any], array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    info = np.iinfo(dtype)
    if array.dtype.kind == "f":
        if not np.array_equal(np.trunc(array), array):
            raise Unfit("a value is no whole number")
        # float(info.max) rounds up to a power of two for 64 bits, so the bound is strict.
        fits = float(array.min()) >= float(info.min) and float(array.max()) < 2.0 ** info.max.bit_length()
    else:
        fits = array.dtype.kind == "b" or info.min <= int(array.min()) <= int(array.max()) <= info.max
    if not fits:
        raise Unfit(f"out of range, expected {info.min} to {info.max}")
    return array.astype(dtype)


def _item_type(array: np.ndarray[Any, Any]) -> str:
    if array.dtype.kind == "O" and array.size:
        return type(array.flat[0]).__name__
    return "text" if array.dtype.kind in "US" else array.dtype.name
