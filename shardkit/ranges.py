"""Numbers, sizes, durations and lists of names in settings: one check and one wording for all configurations."""

from __future__ import annotations

import numbers
import operator
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from shardkit.errors import ConfigurationError, UsageError


@dataclass(frozen=True)
class Range:
    """The range of numbers that a setting accepts."""

    low: float
    high: float
    above: bool = False  # `low` itself is not accepted
    below: bool = False  # `high` itself is not accepted
    zero: bool = False  # 0, which disables something, is accepted too

    def holds(self, value: float) -> bool:
        """Return True if a number is in the range; nan is not."""
        over = value > self.low if self.above else value >= self.low
        under = value < self.high if self.below else value <= self.high
        return (self.zero and value == 0) or (over and under)

    def text(self, kind: type[Any]) -> str:
        """Return the range as text for messages and documentation."""
        what = "a whole number" if kind is int else "a number"
        start = f"above {_number(self.low)}" if self.above else f"from {_number(self.low)}"
        end = f"below {_number(self.high)}" if self.below else _number(self.high)
        if self.above or self.below:
            end = f"and {end}" if self.below else f"and at most {end}"
        else:
            end = f"to {end}"
        return f"{'0, or ' if self.zero else ''}{what} {start} {end}"

    def check(self, name: str, value: object, kind: type[Any] = int) -> Any:
        """Return ``value`` as a number of ``kind``.

        Raises:
            ConfigurationError: The value is not such a number, or is out of range; ``name`` is the setting.
        """
        number = _plain_number(value, kind)
        if number is None:
            raise ConfigurationError(
                f"{name} = {shown(value)}: expected {self.text(kind)}, got {type(value).__name__}"
            )
        if not self.holds(number):
            raise ConfigurationError(f"{name} = {shown(value)}: expected {self.text(kind)}")
        return kind(number)


def _plain_number(value: object, kind: type[Any]) -> Any:
    """Return a Python number for a Python or numpy number, and None for other values, including bools."""
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return float(value) if kind is float and isinstance(value, numbers.Real) else None


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) and value < 2**63 else f"{value:g}"


def shown(value: object) -> str:
    """Return a value as text for a message, cut if it is long."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to print very large integers
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_LONGEST = 40  # characters; Python refuses to parse thousands of digits
_SIZE = re.compile(r"\s*(\d+)(?:\.(\d+))?\s*([A-Za-z]*)\s*")


def parse_size(size: int | str) -> int:
    """Return the bytes of a size such as ``"256MiB"`` or ``"2GB"``; integers are bytes.

    KB, MB … are powers of 1000; KiB, MiB … and K, M … are powers of 1024.

    Raises:
        ConfigurationError: The text is not a size, or the size is out of range.
    """
    if not isinstance(size, str):
        return int(Range(0, 2**63 - 1).check("size in bytes", size))
    match = _SIZE.fullmatch(size)
    if match is None or match[3].upper() not in _UNITS or len(size) > _LONGEST:
        raise ConfigurationError(
            f'size {size[:60]!r}: a number with a unit is expected, such as "256MiB" or "2GB"'
        )
    whole, fraction, unit = int(match[1]), match[2] or "", _UNITS[match[3].upper()]
    return parse_size(whole * unit + (int(fraction) * unit // 10 ** len(fraction) if fraction else 0))


_SECONDS = {
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "": 1,
    "s": 1,
    "m": 60,
    "min": 60,
    "h": 3_600,
    "d": 86_400,
    "w": 604_800,
}
_DURATION = re.compile(r"\s*([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*([a-zµ]*)\s*")


def parse_duration(time: object, what: str = "duration") -> float:
    """Return the seconds of a duration such as ``"30d"``, ``"12h"``, ``"90min"`` or ``"30ms"``; a number is seconds.

    Raises:
        ConfigurationError: The value is not a duration, or is out of range; ``what`` names it.
    """
    if not isinstance(time, str):
        return float(Range(0, 1e30).check(f"{what} in seconds", time, float))
    match = _DURATION.fullmatch(time)
    if match is None or match[2] not in _SECONDS:
        raise ConfigurationError(
            f"{what} {time[:40]!r}: expected a number and a unit, such as 30d, 12h, 90min or 30ms"
        )
    return float(match[1]) * _SECONDS[match[2]]


def duration_text(seconds: int) -> str:
    """Return whole seconds as the shortest text that `parse_duration` reads, without weeks."""
    for unit in ("d", "h", "m"):
        if seconds and seconds % _SECONDS[unit] == 0:
            return f"{seconds // int(_SECONDS[unit])}{unit}"
    return f"{seconds}s"


def names_of(value: object, what: str) -> list[str]:
    """Return the names of a text as `split_names` does, or of a list of texts.

    Raises:
        UsageError: The value is neither; ``what`` names it.
    """
    if isinstance(value, str):
        return split_names(value)
    names: list[Any] = list(value) if isinstance(value, list | tuple | AbstractSet | Mapping) else [value]
    if not all(isinstance(name, str) for name in names):
        raise UsageError(f"{what}={shown(value)}: a name or a list of names is expected")
    return names


def split_names(text: str) -> list[str]:
    """Return the names of ``a,b,"c, d"``: a name with a comma is quoted, as in CSV."""
    import csv  # slow to import, and rarely needed

    try:
        names = next(csv.reader([text], skipinitialspace=True, strict=True), [])
    except csv.Error as error:
        raise UsageError(f'{text!r}: {error}; expected names such as a,b,"c, d"') from None
    return list(map(str.strip, names))
