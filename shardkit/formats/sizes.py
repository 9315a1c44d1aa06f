"""Sizes as people write them: ``"256MiB"``, ``"2GB"``, ``4096``."""

from __future__ import annotations

import re

from shardkit.errors import ConfigurationError
from shardkit.ranges import Range

__all__ = ["parse_size"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}
_LONGEST = 40  # characters; Python refuses to read thousands of digits
_SIZE = re.compile(r"\s*(\d+)(?:\.(\d+))?\s*([A-Za-z]*)\s*")


def parse_size(size: int | str) -> int:
    """Bytes of a size; integers pass through. KB, MB … are powers of ten, KiB, MiB … (and K, M …) powers of two.

    Raises:
        ConfigurationError: not a size.
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
