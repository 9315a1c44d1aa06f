"""Values as people read them: sizes, counts, times, shares, digests; texts of strangers, escaped.

What comes out of a dataset (keys, class names, text) may hold control characters; they are shown escaped, never sent
to the terminal.
"""

from __future__ import annotations

import re
import unicodedata

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_ID_DIGITS = 12
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def is_terminal() -> bool:
    """Whether a person looks at standard output (TTY_COMPATIBLE=1 says yes where it cannot be seen)."""
    from rich.console import Console  # where it is needed: pages of help need none of rich

    return Console().is_terminal


def clean(text: str) -> str:
    """Text on one line, with what is not printable as a backslash escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        one
        if one.isprintable() and unicodedata.category(one) not in ("Cf", "Co")
        else one.encode("unicode_escape").decode()
        for one in text
    )


def short_ids(text: str) -> str:
    """Text with the digests in it shortened on a terminal."""
    return _DIGEST.sub(lambda found: short_id(found[0]), text)


def short_id(digest: str) -> str:
    """A digest as people read it on a terminal; the whole elsewhere."""
    kind, colon, digits = digest.partition(":")
    return f"{kind}{colon}{digits[:_ID_DIGITS]}…" if is_terminal() and len(digits) > _ID_DIGITS else digest


def bytes_text(size: int) -> str:
    """A size with its unit: 812 bytes, 1.46 MiB, 12.3 GiB, 256 MiB."""
    value, unit = float(size), 0
    while value >= 1024 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    if not unit:
        return f"{size} byte{'s' if size != 1 else ''}"
    digits = f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
    return f"{digits.removesuffix('.00').removesuffix('.0')} {_UNITS[unit]}"


def count_text(count: int, noun: str = "", nouns: str = "") -> str:
    """A number with its thousands set apart, and the noun in its number; ``nouns``: where s is not enough."""
    if not noun:
        return f"{count:,}"
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def duration_text(seconds: float) -> str:
    """A time for people: 12.1 ms, 1.8 s, 42 s, 3:07 min, 5:20 h."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms" if seconds > 0 else "0 s"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = int(seconds) // 60
    return (
        f"{minutes}:{int(seconds) % 60:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"
    )


def share_text(part: int, whole: int) -> str:
    """A share in per cent, with more digits where it is small."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.{1 if share >= 0.95 or not part else 2 if share >= 0.095 else 3}f} %"
