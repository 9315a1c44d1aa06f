"""Documents: typed structs in canonical JSON, validated while they are decoded; TOML; digests and times as text.

Canonical JSON has sorted keys, no spaces, UTF-8 without escapes, integers below 2**63 in magnitude and no floats. Equal
content has equal bytes, and therefore one digest. The type of a document is a subclass of `Document`, whose annotations
define fields, types and limits; msgspec checks them. A *sealed* document contains its own SHA-256 in the field
``digest``; it is used where no other document refers to it by digest.

Sizes and digests are checked before parsing, types while parsing, and the canonical form after it. A wrong digest is an
`IntegrityError`; any other failure is a `FormatError` that names the document and the field.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import itertools
import re
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, NoReturn, TypeVar, get_args

import msgspec
import xxhash
from msgspec import Meta

from shardkit.errors import ConfigurationError, FormatError, IntegrityError, UsageError
from shardkit.ranges import shown

DIGEST_PREFIX: Final = "sha256:"

DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")

Digest = Annotated[str, Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z")]
"""SHA-256 of an object: ``sha256:`` and 64 lower-case hexadecimal digits."""
Natural = Annotated[int, Meta(ge=0, le=2**62)]
"""A count or a size; the sum of two fits int64."""
Positive = Annotated[int, Meta(ge=1, le=2**62)]
Text = Annotated[str, Meta(max_length=10_000)]
Name = Annotated[str, Meta(min_length=1, max_length=1_000)]
Time = Annotated[str, Meta(pattern=r"\A[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z\Z")]
"""A time in UTC, such as ``2026-11-20T19:00:00Z``."""

MAX_DEPTH: Final = 64
"""Maximum nesting of untyped values, such as the settings of a build."""
_LIMIT: Final = 2**63


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the structs inside a document.

    A field with its default value is not written, so that equal content has equal bytes.
    """


class Document(Record, frozen=True, kw_only=True, tag_field="format"):
    """Base of documents; each subclass has a ``tag="shardkit-NAME/1"``, which is written as the field ``format``."""


T = TypeVar("T", bound=msgspec.Struct)


def _plain(value: Any) -> object:
    """Return the JSON form of a value of a class with `to_json` and `from_json`, such as a schema."""
    if not hasattr(value, "to_json"):
        raise UsageError(f"canonical JSON: {type(value).__name__} value {value!r:.80} is not allowed")
    return value.to_json()


_encoder: Final = msgspec.json.Encoder(order="sorted", enc_hook=_plain)


def sha256_digest(data: bytes | bytearray | memoryview) -> str:
    """Return the SHA-256 of `data` as ``sha256:<hex>``, the form of OCI digests."""
    return DIGEST_PREFIX + hashlib.sha256(data).hexdigest()


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


def encode(value: object) -> bytes:
    """Return the canonical bytes of a document, or of a value of dicts, lists, text, integers, booleans and None.

    Raises:
        UsageError: The value has a float, a lone surrogate, a large integer or another type.
    """
    if not isinstance(value, msgspec.Struct):
        check_plain(value)
    try:
        return _encoder.encode(value)
    except (UnicodeEncodeError, OverflowError, TypeError) as error:
        raise UsageError(f"canonical JSON: {error}") from None


def check_plain(value: object, depth: int = 0) -> None:
    """Raise UsageError if canonical JSON cannot hold an untyped value."""
    if depth > MAX_DEPTH:
        raise UsageError(f"canonical JSON: nested deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, (bool, str)):
        return
    if isinstance(value, int):
        if not -_LIMIT < value < _LIMIT:
            raise UsageError("canonical JSON: an integer is out of range, expected magnitude below 2**63")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UsageError(f"canonical JSON: key {key!r} is no str")
            if type(item) is not str or depth == MAX_DEPTH:  # skips a call for strings, which most items are
                check_plain(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            if type(item) is not str or depth == MAX_DEPTH:
                check_plain(item, depth + 1)
    else:
        raise UsageError(f"canonical JSON: {type(value).__name__} value {value!r:.80} is not allowed")


def decode(kind: type[T], data: bytes | bytearray | memoryview, where: str, *, max_bytes: int) -> T:
    """Decode the canonical bytes of a document.

    Args:
        kind: Type of the document.
        data: Bytes of the document; the caller has checked their digest, if there is one.
        where: Name of the document in messages.
        max_bytes: Size above which nothing is parsed.

    Raises:
        FormatError: The bytes are not the canonical form of a valid document of this type.
    """
    value: T = _decode(decoder_of(kind), data, where, max_bytes)
    return value


def decode_plain(
    data: bytes | bytearray | memoryview, where: str = "canonical JSON", *, max_bytes: int
) -> Any:
    """Decode untyped canonical JSON.

    Raises:
        FormatError: The bytes are not canonical JSON.
    """
    value = _decode(decoder_of(Any), data, where, max_bytes)
    try:
        check_plain(value)
    except UsageError as error:
        raise FormatError(f"{where}: {error}") from None
    return value


def _decode(decoder: Any, data: bytes | bytearray | memoryview, where: str, max_bytes: int) -> Any:
    if len(data) > max_bytes:
        raise FormatError(f"{where}: {len(data)} bytes, expected at most {max_bytes}")
    try:
        value = decoder.decode(data)
        spelling = _encoder.encode(value)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError) as error:
        raise _format_error(where, error) from None
    except (FormatError, UsageError) as error:  # raised by `from_json` and `__post_init__`
        raise FormatError(f"{where}: {error}") from error
    if spelling != data:
        raise FormatError(
            f"{where}: bytes are not in canonical form (order, spaces, escapes, duplicate keys or defaults)"
        )
    return value


def decoder_of(kind: Any) -> Any:
    """Return the decoder of a type, made once.

    One thread at a time makes one: msgspec shares its description of a nested type before it is complete, and a thread
    that decoded with it would end the process. So this comes before any `msgspec.convert` to the type, too.
    """
    found = _decoders.get(kind)
    if found is None:
        with _making_decoder:
            found = _decoders.get(kind)
            if found is None:
                found = msgspec.json.Decoder(kind, dec_hook=_decode_hook, float_hook=_refuse_float)
                _decoders[kind] = found
    return found


_decoders: Final[dict[Any, Any]] = {}
_making_decoder: Final = threading.RLock()  # a finalizer may decode a document while this thread holds it


def _decode_hook(kind: Any, value: object) -> object:
    return kind.from_json(value)


def _refuse_float(text: str) -> NoReturn:
    raise ValueError(f"number {text[:40]} is no integer")


def _format_error(where: str, error: Exception) -> FormatError:
    return FormatError(
        f"{where}: {_reason(error)}; it is damaged, of another kind, or written by a newer shardkit: do not trust it"
    )


def _reason(error: Exception) -> str:
    """Return the message of a msgspec error, with the field as a path such as ``strata[3].rows``."""
    text = str(error)[:300].replace(" - at `$.", " at `").replace(" - at `$", " at `")
    return text.replace("Object", "an object", 1) if text.startswith("Object") else text


def convert(kind: type[T], value: object, where: str) -> T:
    """Convert a value that `decode_plain` or `json` parsed to a struct.

    Raises:
        FormatError: A field is missing, unknown, of another type or too large.
    """
    decoder_of(kind)
    try:
        return msgspec.convert(value, kind, dec_hook=_decode_hook)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _format_error(where, error) from None
    except (FormatError, UsageError) as error:
        raise FormatError(f"{where}: {error}") from error


# ---- Sealed documents

_OWN_DIGEST: Final = re.compile(rb'"digest":"(sha256:[0-9a-f]{64})",')
_MOST_DIGESTS: Final = 4  # matches tried in one document; a valid one has one


def seal(document: msgspec.Struct) -> bytes:
    """Return the canonical bytes of a document with their SHA-256 added as the field ``digest``."""
    body = msgspec.to_builtins(document, enc_hook=_plain, order="deterministic")  # as `encode` orders sets
    return _encoder.encode({**body, "digest": sha256_digest(encode(document))})


def unseal(kind: type[T], data: bytes, where: str, *, max_bytes: int) -> T:
    """Decode a sealed document; its digest is checked before anything is parsed.

    Raises:
        FormatError: The document is too large, or not the canonical form of a valid document.
        IntegrityError: The digest in the document is not the digest of its content.
    """
    if len(data) > max_bytes:
        raise FormatError(f"{where}: {len(data)} bytes, expected at most {max_bytes}; do not trust it")
    found = f"{len(data)} bytes without a digest of their own"
    for match in itertools.islice(_OWN_DIGEST.finditer(data), _MOST_DIGESTS):
        body = data[: match.start()] + data[match.end() :]
        if (content := sha256_digest(body)) == match[1].decode("ascii"):
            document = decode(kind, body, where, max_bytes=max_bytes)
            if seal(document) != data:
                raise FormatError(f"{where}: its digest is not where it belongs; do not trust it")
            return document
        found = f"its digest is {match[1].decode('ascii')}, its content has {content}"
    raise IntegrityError(f"{where}: {found}; it is damaged")


# ---- Configuration


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse a TOML configuration.

    Raises:
        ConfigurationError: The text is not TOML.
    """
    import tomllib  # reading a dataset needs none

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where} is no TOML: {error}") from None


def configure(kind: type[T], values: Mapping[str, object], where: str) -> T:
    """Convert settings to a struct; the error for an unknown key suggests the nearest known one.

    Raises:
        ConfigurationError: A key is unknown, missing, of another type or out of range.
    """
    decoder_of(kind)
    try:
        return msgspec.convert(values, kind, dec_hook=_decode_hook)
    except (msgspec.ValidationError, RecursionError) as error:
        value = _value_at(values, str(error))
        raise ConfigurationError(f"{where}: {value}{_reason(error)}{_nearest(kind, str(error))}") from None


def _value_at(values: Mapping[str, object], message: str) -> str:
    """Return ``name = value: `` of the setting that a msgspec message names; empty if it names none."""
    path = re.search(r" - at `\$\.([\w.-]+)`$", message)
    found: object = values
    for name in path[1].split(".") if path else ():
        if not isinstance(found, Mapping) or name not in found:
            return ""
        found = found[name]
    return f"{path[1]} = {shown(found)}: " if path else ""


def _nearest(kind: type[msgspec.Struct], message: str) -> str:
    unknown = re.search(r"unknown field `(.*?)`", message)
    if unknown is None:
        return ""
    import difflib  # only for this message

    known = sorted({name for one in _structs(kind) for name in one.__struct_encode_fields__})
    near = difflib.get_close_matches(unknown[1], known, 1)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"


def _structs(kind: Any, seen: set[Any] | None = None) -> Iterator[type[msgspec.Struct]]:
    seen = set() if seen is None else seen
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in seen:
        seen.add(kind)
        yield kind
        for one in msgspec.structs.fields(kind):
            yield from _structs(one.type, seen)
    for inner in get_args(kind):
        yield from _structs(inner, seen)


# ---- Times

_TIME_FORM: Final = "%Y-%m-%dT%H:%M:%SZ"


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
