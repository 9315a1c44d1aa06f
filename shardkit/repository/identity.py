"""Documents that carry their own digest; the first of them, ``shardkit.json``, makes a root a repository.

Nothing else names the identity, the newest log entry or the newest table of locations by digest: so each says it
itself.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from shardkit.errors import FormatError, IntegrityError
from shardkit.formats.canonical_json import dumps
from shardkit.formats.digest import sha256_digest
from shardkit.manifest.json_fields import Fields, read_document

__all__ = [
    "FEATURES",
    "IDENTITY_NAME",
    "MAX_IDENTITY_BYTES",
    "NUMBERED",
    "SINGLE_WRITER",
    "Identity",
    "check_spelling",
    "numbered",
    "read_numbered",
    "sealed",
    "unseal",
]

NUMBERED: Final = ("n", "repository", "previous", "txn", "time", "author", "message")
"""Fields of a document that has a number and a predecessor."""

_OWN_DIGEST: Final = re.compile(rb'"digest":"(sha256:[0-9a-f]{64})",(?="f)')
"""The field ``digest`` in canonical JSON; ``features`` or ``format`` comes next."""

_MOST_DIGESTS: Final = 4
"""Tried in one document: nothing that shardkit writes has more than one such field."""

_TXN: Final = re.compile(r"[0-9a-f]{32}")
_TIME: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")


def sealed(body: Mapping[str, object]) -> bytes:
    """Canonical JSON of `body` with the SHA-256 of its canonical JSON in the field ``digest``."""
    return dumps({**body, "digest": sha256_digest(dumps(dict(body)))})


def unseal(
    data: bytes,
    where: str,
    kind: str,
    keys: Collection[str],
    max_bytes: int,
    optional: Collection[str] = (),
) -> Fields:
    """The fields of a sealed document; its digest is checked before any of it is parsed.

    Args:
        data: what was read.
        where: for messages.
        kind: what the field ``format`` must hold.
        keys: all keys beside ``format``, ``digest`` among them.
        max_bytes: longest document accepted.
        optional: keys that may be absent.

    Raises:
        IntegrityError: the bytes are not those that were written.
        FormatError: they are, and are no document that this version reads.
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
    """Whether a document is, byte for byte, what its content is written as: one content has one digest.

    Args:
        data: that was read.
        again: `sealed` of what it was understood as.
        fields: of `data`.

    Raises:
        FormatError: it is not.
    """
    if again != data:
        fields.refuse("is not spelled as its content is written")


def numbered(document: Any) -> dict[str, object]:
    """The fields of a log entry or a table of locations that both have."""
    return {name: getattr(document, name) for name in NUMBERED}


def read_numbered(fields: Fields, *, first_has_previous: bool) -> dict[str, Any]:
    """Read them back.

    Args:
        fields: of the document.
        first_has_previous: whether the first of its row has a predecessor too; else its ``previous`` is empty.

    Raises:
        FormatError: they are not what this version writes.
    """
    return {
        "n": fields.integer("n", minimum=1),
        "repository": fields.text("repository", maximum=36),
        "previous": fields.digest("previous") if first_has_previous else fields.text("previous", maximum=80),
        "txn": fields.text("txn", pattern=_TXN),
        "time": fields.text("time", pattern=_TIME),
        "author": fields.text("author", maximum=1_000),
        "message": fields.text("message"),
    }


IDENTITY_NAME: Final = "shardkit.json"
"""Object that makes a root a repository."""

MAX_IDENTITY_BYTES: Final = 64 * 1024

_FORMAT: Final = "shardkit-repository/1"
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
SINGLE_WRITER: Final = "single-writer"
"""Feature of a root on a store without put-if-absent: its writers promised to come one at a time."""
FEATURES: Final[tuple[str, ...]] = (SINGLE_WRITER,)
"""All features that this version knows."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which repository a root holds, and what a program must know to use it."""

    id: str
    """Random UUID: tells two repositories apart, whatever their paths."""
    features: tuple[str, ...] = ()

    @classmethod
    def new(cls, features: tuple[str, ...] = ()) -> Identity:
        """An identity that no other repository has."""
        return cls(str(uuid.uuid4()), features)

    def to_bytes(self) -> bytes:
        """Canonical JSON with the digest of the rest of it inside."""
        body: dict[str, object] = {"format": _FORMAT, "id": self.id, "features": list(self.features)}
        return sealed(body)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Identity:
        """Read and check.

        Raises:
            FormatError: Not an identity that this version reads.
            IntegrityError: The digest inside does not match.
        """
        fields = unseal(
            data, f"{IDENTITY_NAME} of {where}", _FORMAT, ("id", "features", "digest"), MAX_IDENTITY_BYTES
        )
        identity = cls(fields.text("id", pattern=_UUID), fields.features(FEATURES))
        check_spelling(data, identity.to_bytes(), fields)
        return identity
