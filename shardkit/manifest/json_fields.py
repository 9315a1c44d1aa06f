"""Strict reading of the JSON objects that shardkit itself writes: exact keys, exact types, stated limits.

Everything is checked here, once, so that the code behind it works with values of known type and size;
whatever does not fit is a `FormatError` that names the document and the field.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final, NoReturn

from shardkit.errors import FormatError
from shardkit.formats.canonical_json import loads

__all__ = ["DIGEST", "MAX_INTEGER", "Fields", "read_document"]

MAX_INTEGER: Final = 2**62
"""Sums of two still fit int64."""

DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


class Fields:
    """One JSON object with exactly the expected keys.

    Args:
        value: The parsed JSON value.
        where: How messages name it, such as ``"manifest sha256:12…"``.
        keys: All keys that must be there; no others may be.
        optional: Keys that may be there too; what they say when absent must have no other spelling.
    """

    def __init__(
        self, value: object, where: str, keys: Collection[str], optional: Collection[str] = ()
    ) -> None:
        self.where = where
        if not isinstance(value, dict):
            self.refuse(f"is {type(value).__name__}, expected an object")
        if value.keys() - set(optional) != set(keys):
            unknown = sorted(value.keys() - set(keys) - set(optional))
            missing = sorted(set(keys) - value.keys())
            self.refuse(f"has unknown keys {unknown[:5]} and lacks {missing[:5]}")
        self._values: dict[str, object] = value

    def refuse(self, why: str) -> NoReturn:
        """Raise the `FormatError`."""
        raise FormatError(
            f"{self.where} {why}; it was written by something else or by a newer shardkit: do not trust it"
        )

    def has(self, key: str) -> bool:
        """Whether an optional key is there."""
        return key in self._values

    def text(self, key: str, *, maximum: int = 10_000, pattern: re.Pattern[str] | None = None) -> str:
        """A string of at most `maximum` characters that matches `pattern` as a whole."""
        value = self._values[key]
        if not isinstance(value, str) or len(value) > maximum:
            self.refuse(f"field {key!r}: expected a string of at most {maximum} characters")
        if pattern is not None and pattern.fullmatch(value) is None:
            self.refuse(f"field {key!r} is {value[:100]!r}, expected {pattern.pattern}")
        return value

    def digest(self, key: str) -> str:
        """``sha256:<64 hex>``."""
        return self.text(key, pattern=DIGEST)

    def optional_digest(self, key: str) -> str | None:
        """``sha256:<64 hex>`` or null."""
        return None if self._values[key] is None else self.digest(key)

    def integer(self, key: str, *, maximum: int = MAX_INTEGER, minimum: int = 0) -> int:
        """An integer in ``minimum … maximum``."""
        value = self._values[key]
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            self.refuse(f"field {key!r} is {str(value)[:40]}, expected an integer in {minimum} … {maximum}")
        return value

    def boolean(self, key: str) -> bool:
        """True or false."""
        value = self._values[key]
        if not isinstance(value, bool):
            self.refuse(f"field {key!r} is {str(value)[:40]}, expected true or false")
        return value

    def items(self, key: str, *, maximum: int) -> list[object]:
        """A list of at most `maximum` items."""
        value = self._values[key]
        if not isinstance(value, list) or len(value) > maximum:
            self.refuse(f"field {key!r}: expected a list of at most {maximum} items")
        return value

    def texts(self, key: str, *, maximum: int, longest: int = 1_000) -> tuple[str, ...]:
        """A list of at most `maximum` strings of at most `longest` characters."""
        values: list[str] = []
        for value in self.items(key, maximum=maximum):
            if not isinstance(value, str) or len(value) > longest:
                self.refuse(f"field {key!r}: expected strings of at most {longest} characters")
            values.append(value)
        return tuple(values)

    def table(self, key: str, *, maximum: int) -> dict[str, object]:
        """A JSON object of any keys, at most `maximum` of them."""
        value = self._values[key]
        if not isinstance(value, dict) or len(value) > maximum:
            self.refuse(f"field {key!r}: expected an object of at most {maximum} keys")
        return value

    def features(self, known: Collection[str]) -> tuple[str, ...]:
        """The field ``features``: what a reader must know to read the rest.

        Raises:
            FormatError: A feature is not in `known`: an older shardkit must not guess.
        """
        features = self.texts("features", maximum=100, longest=100)
        for feature in features:
            if feature not in known:
                raise FormatError(
                    f"{self.where} needs the feature {feature!r}, which this shardkit does not know: "
                    "install a newer shardkit"
                )
        return features


def read_document(
    data: bytes,
    where: str,
    kind: str,
    keys: Collection[str],
    max_bytes: int,
    optional: Collection[str] = (),
) -> Fields:
    """Parse canonical JSON and check its ``format`` field before anything else.

    Args:
        data: The document; parsed only if it is at most `max_bytes` long.
        where: How messages name it.
        kind: What the field ``format`` must hold, such as ``"shardkit-log/1"``.
        keys: All keys beside ``format``.
        max_bytes: Longest document accepted.
        optional: Keys that may be absent.

    Raises:
        FormatError: Not canonical JSON, of another format or version, or with other keys.
    """
    try:
        value = loads(data, max_bytes)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from error
    found = value.get("format") if isinstance(value, dict) else None
    if found != kind:
        raise FormatError(
            f"{where} has format {str(found)[:60]!r}, expected {kind!r}: "
            "it is another kind of file, is damaged, or needs a newer shardkit"
        )
    return Fields(value, where, {*keys, "format"}, optional)
