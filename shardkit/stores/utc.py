"""Moments as the log, attestations and lists of garbage write them: UTC, to the second."""

from __future__ import annotations

import calendar
import datetime as dt
import time

from shardkit.errors import FormatError

__all__ = ["seconds_of", "utc_text"]

_FORM = "%Y-%m-%dT%H:%M:%SZ"


def utc_text(seconds: float | None = None) -> str:
    """A moment, ``2026-11-20T19:00:00Z``; now by default."""
    moment = time.time() if seconds is None else seconds
    return dt.datetime.fromtimestamp(int(moment), dt.UTC).strftime(_FORM)


def seconds_of(text: str) -> int:
    """Seconds since 1970 of what `utc_text` gave.

    Raises:
        FormatError: there is no such moment.
    """
    try:
        return calendar.timegm(time.strptime(text, _FORM))
    except ValueError:
        raise FormatError(f"{text[:40]!r} is no moment; do not trust whoever wrote it") from None
