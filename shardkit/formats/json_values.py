"""Values of json fields and their bytes."""

from __future__ import annotations

import json
from typing import NoReturn

from shardkit.errors import FormatError

from .values import Unfit

MAX_JSON_DEPTH = 200
"""Maximum nesting of lists and objects in a value of a json field."""


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


# made once: `json.dumps` and `json.loads` with such settings make one for each value
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def encode_json(value: object, *, is_parsed: bool = False) -> bytes:
    """Return a value as JSON; raise Unfit if it cannot be read back unchanged.

    `is_parsed`: the value was parsed from JSON, so that it is not read back to find out.
    """
    try:
        text = _ENCODER.encode(value)
        payload = text.encode()
        # A round trip in C proves cheaply that no key was converted to text; tuples need the slower check.
        is_unsure = not is_parsed and json.loads(text) != value
        if is_unsure or payload.count(b"[") + payload.count(b"{") > MAX_JSON_DEPTH:
            _check_json(value)
    except RecursionError:
        raise Unfit(f"it nests deeper than {MAX_JSON_DEPTH}") from None
    except (TypeError, ValueError, OverflowError) as error:
        if "Out of range float" in str(error):
            raise Unfit("JSON has no NaN and no infinity; store null, or text (a type such as str)") from None
        raise Unfit(str(error)) from None
    return payload


def _check_json(value: object) -> None:
    level: list[object] = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                bad = next((key for key in item if not isinstance(key, str)), None)
                if bad is not None:
                    raise TypeError(f"JSON keys are str, got {bad!r}")
                inner.extend(item.values())
            elif isinstance(item, (list, tuple)):
                inner.extend(item)
        if not inner:
            return
        level = inner
    raise ValueError(f"it nests deeper than {MAX_JSON_DEPTH}")


def decode_json(payload: bytes | memoryview, name: str) -> object:
    """Return the value of a json payload.

    Raises:
        FormatError: The payload is not JSON, or nested too deep.
    """
    try:
        return _DECODER.decode(str(payload, "utf-8"))
    except RecursionError:
        raise FormatError(
            f"field {name!r}: JSON is nested too deep, expected at most {MAX_JSON_DEPTH}"
        ) from None
    except ValueError as error:
        raise FormatError(f"field {name!r}: no JSON: {error}") from None
