"""Documents that carry their own digest, and what those have in common that stand in a numbered row.

Nothing else names the identity, the newest log entry or the newest table of locations by digest: so each says it
itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from shardkit.errors import IntegrityError
from shardkit.formats.canonical_json import dumps, loads
from shardkit.formats.digest import sha256_digest
from shardkit.manifest.json_fields import Fields

__all__ = ["NUMBERED", "check_seal", "numbered", "read_numbered", "sealed"]

NUMBERED: Final = ("n", "repository", "previous", "txn", "time", "author", "message")
"""Fields of a document that has a number and a predecessor."""

_TXN: Final = re.compile(r"[0-9a-f]{32}")
_TIME: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")


def sealed(body: Mapping[str, object]) -> bytes:
    """Canonical JSON of `body` with the SHA-256 of its canonical JSON in the field ``digest``."""
    return dumps({**body, "digest": sha256_digest(dumps(dict(body)))})


def check_seal(data: bytes, again: bytes, fields: Fields, where: str) -> None:
    """Whether a document is, byte for byte, what its content is written as.

    Args:
        data: that was read.
        again: `sealed` of what it was understood as.
        fields: of `data`.
        where: for the message.

    Raises:
        IntegrityError: it is not.
    """
    if again != data:
        content = loads(again, len(again))["digest"]
        raise IntegrityError(
            f"{where}: its digest is {fields.digest('digest')}, its content has {content}; restore it from a copy of "
            "the root"
        )


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
