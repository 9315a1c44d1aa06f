"""``shardkit.json``: what makes a directory or bucket prefix a repository; written once, never changed."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Final

from shardkit.repository.sealed import check_spelling, sealed, unseal

__all__ = ["FEATURES", "IDENTITY_NAME", "MAX_IDENTITY_BYTES", "SINGLE_WRITER", "Identity"]

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
