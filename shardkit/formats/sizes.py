"""Sizes as people write them: ``"256MiB"``, ``"2GB"``, ``4096``."""

from __future__ import annotations

import re

from shardkit.errors import ConfigurationError

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
_SIZE = re.compile(r"\s*(\d+)(?:\.(\d+))?\s*([A-Za-z]*)\s*")


def parse_size(size: int | str) -> int:
    """Bytes of a size; integers pass through. KB, MB … are powers of ten, KiB, MiB … (and K, M …) powers of two.

    Raises:
        ConfigurationError: not a size.
    """
    if isinstance(size, int):
        if size < 0:
            raise ConfigurationError(f"size {size}: a number of bytes from 0 on is expected")
        return size
    match = _SIZE.fullmatch(size)
    if match is None or match[3].upper() not in _UNITS:
        raise ConfigurationError(
            f'size {size!r}: a number with a unit is expected, such as "256MiB" or "2GB"'
        )
    whole, fraction, unit = int(match[1]), match[2] or "", _UNITS[match[3].upper()]
    return whole * unit + (int(fraction) * unit // 10 ** len(fraction) if fraction else 0)
