"""What someone found when looking at a copy: "this digest was good, bad or missing here then".

Soft state, append-only, in ``attest/<location>/<day>/<uuid>.json`` of a root, or of a run directory where the reader
has no right to write the root. Scrubs write the good ones, readers the bad ones; `repair --from-run` acts on them.
"""

from __future__ import annotations

import dataclasses
import re
import uuid
from typing import Final

from shardkit.formats.canonical_json import dumps
from shardkit.formats.digest import parse_digest
from shardkit.manifest.json_fields import TIME, read_document, utc_text

MAX_ATTESTATION_BYTES: Final = 16 * 2**10
"""Of one document of a reader."""

_FORMAT: Final = "shardkit-attestation/1"
WORD: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")
"""A name of a location or of who looked."""

RESULT: Final = re.compile(r"good|wrong|missing|healed")

LEVEL: Final = re.compile(r"list|attested|stored|read|decode|block")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attestation:
    """One look at one copy."""

    location: str
    digest: str
    """``sha256:<hex>`` of the object."""
    extension: str
    result: str
    """"good", "wrong", "missing" or "healed"."""
    level: str
    """How closely it was checked: the levels of ``shardkit verify``, or "block" for one block of it."""
    by: str
    """What looked: "read", "scrub", "repair"."""
    time: str = dataclasses.field(default_factory=utc_text)
    """UTC, ``2026-11-20T19:00:00Z``."""

    def new_name(self) -> str:
        """A name that no other attestation has."""
        return f"attest/{self.location}/{self.time[:10]}/{uuid.uuid4().hex}.json"

    def to_bytes(self) -> bytes:
        return dumps({"format": _FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Attestation:
        """Read and check.

        Raises:
            FormatError: Not an attestation.
        """
        names = [one.name for one in dataclasses.fields(cls)]
        fields = read_document(data, where, _FORMAT, names, MAX_ATTESTATION_BYTES)
        digest = fields.digest("digest")
        parse_digest(digest)
        return cls(
            location=fields.text("location", pattern=WORD),
            digest=digest,
            extension=fields.text("extension", pattern=WORD),
            result=fields.text("result", pattern=RESULT),
            level=fields.text("level", pattern=LEVEL),
            time=fields.text("time", pattern=TIME),
            by=fields.text("by", pattern=WORD),
        )
