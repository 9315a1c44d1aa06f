"""Digests and times as text, and documents whose readers name every field (typed documents: `shardkit.documents`)."""

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
    """Digest text of the 32 bytes of a SHA-256."""
    if len(raw) != 32:
        raise FormatError(f"a SHA-256 has 32 bytes, got {len(raw)}")
    return DIGEST_PREFIX + raw.hex()


def parse_digest(text: object) -> str:
    """The 64 hexadecimal digits of a digest text.

    Raises:
        FormatError: `text` is not ``sha256:`` and 64 lower-case hexadecimal digits.
    """
    if not isinstance(text, str) or DIGEST.fullmatch(text) is None:
        raise FormatError(f"{text!r} is no digest; expected sha256:<64 lower-case hexadecimal digits>")
    return text.removeprefix(DIGEST_PREFIX)


def xxh3(data: bytes | bytearray | memoryview) -> int:
    """XXH3-64 of `data` with seed 0, as an unsigned 64-bit integer."""
    return xxhash.xxh3_64_intdigest(data)


dumps = encode


def loads(data: bytes | bytearray | memoryview, max_bytes: int) -> Any:
    """Parse canonical JSON; anything that `dumps` would not have written is refused."""
    return decode_plain(data, "canonical JSON", max_bytes=max_bytes)


MAX_INTEGER: Final = 2**62
"""Sums of two still fit int64."""

TIME: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")
_TIME_FORM: Final = "%Y-%m-%dT%H:%M:%SZ"


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
        return self.text(key, pattern=DIGEST)

    def optional_digest(self, key: str) -> str | None:
        """A digest, or null."""
        return None if self._values[key] is None else self.digest(key)

    def integer(self, key: str, *, maximum: int = MAX_INTEGER, minimum: int = 0) -> int:
        """An integer in ``minimum … maximum``."""
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
        """A list of at most `maximum` items."""
        value = self._values[key]
        if not isinstance(value, list) or len(value) > maximum:
            self.refuse(f"field {key!r}: expected a list of at most {maximum} items")
        return value

    def objects(self, key: str, keys: Collection[str], what: str, *, maximum: int) -> Iterator[Fields]:
        """The JSON objects of a list, each with exactly these keys; `what` is how messages call one."""
        for number, item in enumerate(self.items(key, maximum=maximum)):
            yield Fields(item, f"{self.where}, {what} {number},", keys)

    def texts(self, key: str, *, maximum: int, longest: int = 1_000) -> tuple[str, ...]:
        """A list of at most `maximum` strings of at most `longest` characters."""
        values = self.items(key, maximum=maximum)
        texts = tuple(value for value in values if isinstance(value, str) and len(value) <= longest)
        if len(texts) < len(values):
            self.refuse(f"field {key!r}: expected strings of at most {longest} characters")
        return texts

    def table(self, key: str, *, maximum: int) -> dict[str, object]:
        """A JSON object of any keys, at most `maximum` of them."""
        value = self._values[key]
        if not isinstance(value, dict) or len(value) > maximum:
            self.refuse(f"field {key!r}: expected an object of at most {maximum} keys")
        return value

    def features(self, known: Collection[str]) -> tuple[str, ...]:
        """The field ``features``: what a reader must know to read the rest."""
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
    """Parse canonical JSON and check its ``format`` field before anything else."""
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
"""Tried in one document: nothing that shardkit writes has more than one such field."""


def sealed(body: Mapping[str, object]) -> bytes:
    """Canonical JSON of `body` with the SHA-256 of its canonical JSON in the field ``digest``."""
    return dumps({**body, "digest": sha256_digest(dumps(dict(body)))})


def unseal(
    data: bytes, where: str, kind: str, keys: Collection[str], max_bytes: int, optional: Collection[str] = ()
) -> Fields:
    """The fields of a sealed document; its digest is checked before any of it is parsed."""
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
    """Whether a document is, byte for byte, what its content is written as: one content has one digest."""
    if again != data:
        fields.refuse("is not spelled as its content is written")


def utc_text(seconds: float | None = None) -> str:
    """A moment, ``2026-11-20T19:00:00Z``; now by default."""
    moment = time.time() if seconds is None else seconds
    return dt.datetime.fromtimestamp(int(moment), dt.UTC).strftime(_TIME_FORM)


def seconds_of(text: str) -> int:
    """Seconds since 1970 of what `utc_text` gave."""
    import calendar  # here, for `strptime` brings it, and few ask

    try:
        return calendar.timegm(time.strptime(text, _TIME_FORM))
    except ValueError:
        raise FormatError(f"{text[:40]!r} is no moment; do not trust whoever wrote it") from None
