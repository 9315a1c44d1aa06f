"""Quantities as people write them: durations, sizes, rates, counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from shardkit.errors import ConfigurationError
from shardkit.ranges import Range, parse_size, shown

__all__ = ["parse_bytes", "parse_count", "parse_duration", "parse_number", "parse_rate"]

_SECONDS: Final = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zµ]+)\s*")
_BITS: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)bit/s\s*")
_COUNT: Final = re.compile(r"\s*(\d[\d_,]*(?:\.\d+)?(?:[eE]\d+)?)\s*([kMG]?)\s*")
_THOUSANDS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}

_MANY: Final = Range(0, 1e30)

Value = object


def parse_duration(value: Value) -> float:
    """Seconds: ``"30ms"``, ``"2h"``; a number is seconds."""
    if _is_number(value):
        return float(_MANY.check("seconds", value, float))
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None or found[2] not in _SECONDS:
        raise ConfigurationError(f'{value!r}: a duration is expected, such as "30ms", "2s", "20min" or "3h"')
    return float(_MANY.check("seconds", float(found[1]) * _SECONDS[found[2]], float))


def parse_bytes(value: Value) -> int:
    """Bytes: ``"2TB"``, ``"64GiB"``; a number is bytes."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigurationError(f'{value!r}: a size is expected, such as "500GB" or "2TiB"')
    return parse_size(value)


def parse_rate(value: Value) -> float:
    """Bytes per second: ``"6GB/s"``, ``"100Gbit/s"``; 0 and ``"unlimited"`` give inf."""
    if value in ("0", "unlimited"):
        return float("inf")
    if isinstance(value, str):
        bits = _BITS.fullmatch(value)
        if bits is not None:
            return float(bits[1]) * _THOUSANDS[bits[2]] / 8
        if not value.endswith("/s"):
            raise ConfigurationError(f'{value!r}: a rate is expected, such as "6GB/s" or "100Gbit/s"')
        return float(parse_size(value.removesuffix("/s")))
    if _is_number(value):
        return _MANY.check("bytes per second", value, float) or float("inf")
    raise ConfigurationError(f'{value!r}: a rate is expected, such as "6GB/s" or "100Gbit/s"')


def parse_count(value: Value) -> int:
    """A whole number: 8192, ``"1e9"``, ``"100k"``, ``"1_000_000"``."""
    if _is_number(value) and (number := _MANY.check("count", value, float)) == int(number):
        return int(number)
    found = _COUNT.fullmatch(value) if isinstance(value, str) else None
    number = float(found[1].replace(",", "").replace("_", "")) * _THOUSANDS[found[2]] if found else -1.0
    if found is None or not _MANY.holds(number) or number != int(number):
        raise ConfigurationError(f'{value!r}: a whole number is expected, such as 64, "1e9" or "100k"')
    return int(number)


def parse_number(value: Value) -> float:
    """A number from 0 on."""
    try:
        return float(_MANY.check("number", float(value) if isinstance(value, str) else value, float))
    except ValueError as error:
        raise ConfigurationError(f"{shown(value)}: a number from 0 on is expected") from error


def _is_number(value: Value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


Parser = Callable[[Value], object]
