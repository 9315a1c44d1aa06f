"""Digests and times as text, and untyped documents in canonical JSON (typed documents: `shardkit.documents`)."""

from __future__ import annotations

import datetime as dt
import itertools
import re
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, NoReturn

import xxhash

from shardkit.documents import DIGEST_PREFIX, decode_plain, encode, sha256_digest
from shardkit.errors import FormatError, IntegrityError

__all__ = [
    "DIGEST", "MAX_INTEGER", "TIME", "Fields", "check_spelling", "dumps", "format_digest", "loads", "parse_digest",
    "read_document", "sealed", "seconds_of", "sha256_digest", "unseal", "utc_text", "xxh3",
]  # fmt: skip

DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


def format_digest(raw: bytes) -> str:
    """Return the text of a SHA-256 digest of 32 bytes.

    Raises:
        FormatError: `raw` does not have 32 bytes.
    """
    if len(raw) != 32:
        raise FormatError(f"a SHA-256 has 32 bytes, got {len(raw)}")
    return DIGEST_PREFIX + raw.hex()


def parse_digest(text: object) -> str:
    """Return the 64 hexadecimal digits of a digest text.

    Raises:
        FormatError: `text` is not ``sha256:`` and 64 lower-case hexadecimal digits.
    """
    if not isinstance(text, str) or DIGEST.fullmatch(text) is None:
        raise FormatError(f"{text!r} is no digest; expected sha256:<64 lower-case hexadecimal digits>")
    return text.removeprefix(DIGEST_PREFIX)


def xxh3(data: bytes | bytearray | memoryview) -> int:
    """Return the XXH3-64 of `data` with seed 0, as an unsigned 64-bit integer."""
    return xxhash.xxh3_64_intdigest(data)


dumps = encode


def loads(data: bytes | bytearray | memoryview, max_bytes: int) -> Any:
    """Parse canonical JSON.

    Raises:
        FormatError: `data` is not what `dumps` writes, or has more than `max_bytes` bytes.
    """
    return decode_plain(data, "canonical JSON", max_bytes=max_bytes)


MAX_INTEGER: Final = 2**62
"""Maximum integer in a document; the sum of two fits int64."""

TIME: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")
_TIME_FORM: Final = "%Y-%m-%dT%H:%M:%SZ"


class Fields:
    """One JSON object with exactly the expected keys.

    Args:
        value: The parsed JSON value.
        where: Name of the object in messages, such as ``"manifest sha256:12…"``.
        keys: Required keys.
        optional: Keys that may be absent; the meaning of an absent key must have no other spelling.

    Raises:
        FormatError: `value` is not an object, or a key is missing or unknown. Every accessor raises it too, if the
            value is not of the expected type or size.
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
        raise FormatError(
            f"{self.where} {why}; it was written by something else or by a newer shardkit: do not trust it"
        )

    def has(self, key: str) -> bool:
        """Return True if an optional key is present."""
        return key in self._values

    def text(self, key: str, *, maximum: int = 10_000, pattern: re.Pattern[str] | None = None) -> str:
        """Return a string of at most `maximum` characters that matches all of `pattern`."""
        value = self._values[key]
        if not isinstance(value, str) or len(value) > maximum:
            self.refuse(f"field {key!r}: expected a string of at most {maximum} characters")
        if pattern is not None and pattern.fullmatch(value) is None:
            self.refuse(f"field {key!r} is {value[:100]!r}, expected {pattern.pattern}")
        return value

    def digest(self, key: str) -> str:
        return self.text(key, pattern=DIGEST)

    def optional_digest(self, key: str) -> str | None:
        """Return a digest, or None for null."""
        return None if self._values[key] is None else self.digest(key)

    def integer(self, key: str, *, maximum: int = MAX_INTEGER, minimum: int = 0) -> int:
        """Return an integer in ``minimum … maximum``."""
        value = self._values[key]
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            self.refuse(f"field {key!r} is {str(value)[:40]}, expected an integer in {minimum} … {maximum}")
        return value

    def boolean(self, key: str) -> bool:
        value = self._values[key]
        if not isinstance(value, bool):
            self.refuse(f"field {key!r} is {str(value)[:40]}, expected true or false")
        return value

    def items(self, key: str, *, maximum: int) -> list[object]:
        """Return a list of at most `maximum` items."""
        value = self._values[key]
        if not isinstance(value, list) or len(value) > maximum:
            self.refuse(f"field {key!r}: expected a list of at most {maximum} items")
        return value

    def objects(self, key: str, keys: Collection[str], what: str, *, maximum: int) -> Iterator[Fields]:
        """Yield the JSON objects of a list, each with exactly these keys; `what` names one in messages."""
        for number, item in enumerate(self.items(key, maximum=maximum)):
            yield Fields(item, f"{self.where}, {what} {number},", keys)

    def texts(self, key: str, *, maximum: int, longest: int = 1_000) -> tuple[str, ...]:
        """Return a list of at most `maximum` strings of at most `longest` characters."""
        values = self.items(key, maximum=maximum)
        texts = tuple(value for value in values if isinstance(value, str) and len(value) <= longest)
        if len(texts) < len(values):
            self.refuse(f"field {key!r}: expected strings of at most {longest} characters")
        return texts

    def table(self, key: str, *, maximum: int) -> dict[str, object]:
        """Return a JSON object with at most `maximum` keys of any name."""
        value = self._values[key]
        if not isinstance(value, dict) or len(value) > maximum:
            self.refuse(f"field {key!r}: expected an object of at most {maximum} keys")
        return value

    def features(self, known: Collection[str]) -> tuple[str, ...]:
        """Return the field ``features``, which lists the features that a reader must know.

        Raises:
            FormatError: A feature is not in `known`.
        """
        features = self.texts("features", maximum=100, longest=100)
        unknown = next((feature for feature in features if feature not in known), None)
        if unknown is not None:
            raise FormatError(
                f"{self.where} needs the feature {unknown!r}, which this shardkit does not know: "
                "install a newer shardkit"
            )
        return features


def read_document(
    data: bytes, where: str, kind: str, keys: Collection[str], max_bytes: int, optional: Collection[str] = ()
) -> Fields:
    """Parse canonical JSON and compare its field ``format`` before the other fields.

    Args:
        data: The document.
        where: Name of the document in messages.
        kind: Expected value of ``format``.
        keys: Required keys besides ``format``.
        max_bytes: Size above which nothing is parsed.
        optional: Keys that may be absent.

    Raises:
        FormatError: The bytes are not such a document.
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


_OWN_DIGEST: Final = re.compile(rb'"digest":"(sha256:[0-9a-f]{64})",(?="f)')
"""The field ``digest`` in canonical JSON; ``features`` or ``format`` comes next."""

_MOST_DIGESTS: Final = 4
"""Matches tried in one document; documents of shardkit have one such field."""


def sealed(body: Mapping[str, object]) -> bytes:
    """Return the canonical JSON of `body` with its SHA-256 added as the field ``digest``."""
    return dumps({**body, "digest": sha256_digest(dumps(dict(body)))})


def unseal(
    data: bytes, where: str, kind: str, keys: Collection[str], max_bytes: int, optional: Collection[str] = ()
) -> Fields:
    """Return the fields of a sealed document; its digest is checked before anything is parsed.

    The arguments are those of `read_document`.

    Raises:
        FormatError: The document is too large, or not valid.
        IntegrityError: The digest in the document is not the digest of its content.
    """
    if len(data) > max_bytes:
        raise FormatError(f"{where}: {len(data)} bytes, expected at most {max_bytes}; do not trust it")
    found = ""
    for match in itertools.islice(_OWN_DIGEST.finditer(data), _MOST_DIGESTS):
        content = sha256_digest(data[: match.start()] + data[match.end() :])
        if content == match[1].decode("ascii"):
            return read_document(data, where, kind, keys, max_bytes, optional)
        found = f"its digest is {match[1].decode('ascii')}, its content has {content}"
    raise IntegrityError(
        f"{where}: {found or f'{len(data)} bytes without a digest of their own'}; it is damaged or of something else: "
        "run shardkit repair, or restore it from a copy of the root"
    )


def check_spelling(data: bytes, again: bytes, fields: Fields) -> None:
    """Raise FormatError if a document differs from `again`, its content encoded again: one content, one digest."""
    if again != data:
        fields.refuse("is not spelled as its content is written")


def utc_text(seconds: float | None = None) -> str:
    """Return a time in seconds since 1970, by default the current time, as ``2026-11-20T19:00:00Z``."""
    moment = time.time() if seconds is None else seconds
    return dt.datetime.fromtimestamp(int(moment), dt.UTC).strftime(_TIME_FORM)


def seconds_of(text: str) -> int:
    """Return the seconds since 1970 of a text from `utc_text`.

    Raises:
        FormatError: The text is not such a time.
    """
    import calendar  # rarely needed

    try:
        return calendar.timegm(time.strptime(text, _TIME_FORM))
    except ValueError:
        raise FormatError(f"{text[:40]!r} is no moment; do not trust whoever wrote it") from None
