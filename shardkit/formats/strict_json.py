"""Strict JSON of foreign files: no NaN, no number beyond float64, and no key twice in an object."""

from __future__ import annotations

import json
import math
from codecs import BOM_UTF8
from collections.abc import Iterable
from typing import Any, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardkit.errors import SourceError

from .compression import PACKED_HEADS

_HEADS = {
    **{head: f"it is compressed: name it .{suffix}" for head, suffix in PACKED_HEADS.items()},
    b"\xff\xfe": "it is UTF-16: convert it with iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "it is UTF-16: convert it with iconv -f UTF-16 -t UTF-8",
}
"""First bytes of files that are no JSON → advice."""

_FAST_DECODER = msgspec.json.Decoder()
_NESTED = (dict, list)
_MAX_SPACES = 64  # spaces or backslashes in sequence that are looked at without parsing the line


def parse_json(data: bytes, where: str) -> object:
    """Parse UTF-8 JSON.

    Duplicate keys are refused: parsers keep the first or the last, so a value would be lost silently.
    """
    try:
        return JSON_DECODER.decode(data.removeprefix(BOM_UTF8).decode())
    except UnicodeDecodeError as error:
        advice = next(
            (text for head, text in _HEADS.items() if data.startswith(head)), "convert the file to UTF-8"
        )
        raise SourceError(f"{where}: not UTF-8 (byte {error.start}); {advice}") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where}: not valid JSON ({error}); mend or remove it") from error


def parse_objects(data: bytes) -> list[dict[str, object]] | None:
    """Return the objects of lines that are one object each, parsed together; None if a line may be anything else.

    The values equal the values of `parse_json`. After None, `parse_json` tells good lines from bad ones.
    """
    if not data:
        return []
    octets = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(octets == ord("\n"))
    if not len(ends) or ends[-1] != len(data) - 1:
        ends = np.append(ends, len(data))
    starts = np.append(0, ends[:-1] + 1)
    if (ends == starts).any() or (octets[starts] != ord("{")).any() or (octets[ends - 1] != ord("}")).any():
        return None
    try:
        objects: list[dict[str, object]] = _FAST_DECODER.decode_lines(data)
    except (ValueError, RecursionError):  # numbers beyond a double and half characters among them
        return None
    # A string holds no line end, and "}" is never followed by "{" inside a value: values end where lines end.
    if len(objects) != len(ends):
        return None
    keys = _key_ends(octets)
    if keys is None:
        return None
    if len(keys) != sum(map(len, objects)) and len(keys) != _count_keys(objects):
        counts = np.diff(np.searchsorted(keys, np.append(starts, len(data)))).tolist()
        for row, (count, one) in enumerate(zip(counts, objects, strict=True)):
            if count != _count_keys([one]):
                try:
                    parse_json(data[starts[row] : ends[row]], "")
                except SourceError:
                    return None
    return objects


def _key_ends(octets: NDArray[np.uint8]) -> NDArray[np.int64] | None:
    """Return the offsets of colons that may follow a key, all that do among them; None if it takes long to say.

    Such a colon follows a quote that no backslash escapes, with or without spaces. So does a colon at the beginning
    of a string.
    """
    colons = np.flatnonzero(octets == ord(":"))
    before = _skip_back(octets, colons - 1, b" \t\r")
    if before is None:
        return None
    is_quote = octets[before] == ord('"')
    colons, quotes = colons[is_quote], before[is_quote]
    start = _skip_back(octets, quotes - 1, b"\\")
    return None if start is None else colons[(quotes - 1 - start) % 2 == 0]


def _skip_back(
    octets: NDArray[np.uint8], places: NDArray[np.int64], skipped: bytes
) -> NDArray[np.int64] | None:
    """Return for each place the last one, at or before it, that has another byte; None if some are far away."""
    is_skipped = np.zeros(256, np.bool_)
    is_skipped[list(skipped)] = True
    moving = np.flatnonzero(is_skipped[octets[places]])
    for _ in range(_MAX_SPACES):
        if not len(moving):
            return places
        places[moving] -= 1
        moving = moving[is_skipped[octets[places[moving]]]]
    return None


def _count_keys(objects: Iterable[Any]) -> int:
    """Return the number of keys of objects, and of the objects in them."""
    count, level = 0, list(objects)
    while level:
        count += sum([len(one) for one in level if type(one) is dict])
        level = [
            value
            for one in level
            for value in (one.values() if type(one) is dict else one)
            if type(value) in _NESTED
        ]
    return count


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return result


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is beyond float64")
    return number


JSON_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
"""Decoder of strict JSON, for parsers that read value by value."""
