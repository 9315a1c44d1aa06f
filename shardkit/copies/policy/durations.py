"""Durations as people write them: ``30d``, ``12h``, ``90m``."""

from __future__ import annotations

import re
from typing import Final

from shardkit.errors import ConfigurationError

__all__ = ["duration_text", "parse_duration"]

_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_TEXT: Final = re.compile(r"([0-9]{1,9})([smhdw]?)")


def parse_duration(text: str, what: str) -> int:
    """Seconds.

    Args:
        text: a number and one of s, m, h, d, w; a bare number is seconds.
        what: how messages name it.

    Raises:
        ConfigurationError: it is none.
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(
            f"{what} {text[:40]!r}: expected a number and a unit, such as 30d, 12h or 90m"
        )
    return int(match[1]) * _SECONDS[match[2] or "s"]


def duration_text(seconds: int) -> str:
    """The shortest spelling that `parse_duration` reads back, without weeks."""
    for unit in ("d", "h", "m"):
        if seconds and seconds % _SECONDS[unit] == 0:
            return f"{seconds // _SECONDS[unit]}{unit}"
    return f"{seconds}s"
