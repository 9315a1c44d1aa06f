"""Strict JSON of foreign files: no NaN, no number beyond float64, and no key twice in an object."""

from __future__ import annotations

import json
import math
from codecs import BOM_UTF8
from typing import NoReturn

from shardkit.errors import SourceError

from .compression import PACKED_HEADS

_HEADS = {
    **{head: f"it is compressed: name it .{suffix}" for head, suffix in PACKED_HEADS.items()},
    b"\xff\xfe": "it is UTF-16: convert it with iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "it is UTF-16: convert it with iconv -f UTF-16 -t UTF-8",
}
"""First bytes of files that are no JSON → advice."""


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
