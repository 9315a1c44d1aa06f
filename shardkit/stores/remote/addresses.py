"""URLs of stores that are not local paths: what they may hold, and what of them may be printed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

from shardkit.errors import UsageError

OBJECT_SCHEMES: Final = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "azure": "az",
    "abfs": "az",
}
"""Schemes of object stores → the store's kind."""

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^\x00-\x20]*)")
_PREFIX: Final = re.compile(r"[A-Za-z0-9_=+,.@-]+(?:/[A-Za-z0-9_=+,.@-]+)*")


@dataclass(frozen=True, slots=True)
class Address:
    """A URL taken apart. It holds no credential, so it may be printed, logged and pickled."""

    scheme: str
    """Lower case."""
    host: str
    """Bucket, container, or host with port and user name."""
    path: str
    """Prefix below it, without slashes at its ends."""

    @property
    def url(self) -> str:
        """The URL, in one spelling."""
        return f"{self.scheme}://{self.host}/{self.path}".rstrip("/")


def parse_address(url: str) -> Address:
    """Take a URL apart, refusing those that hold a credential.

    A URL is printed, logged and pickled; passwords and signatures belong into the environment or into the
    client's own configuration.

    Raises:
        UsageError: Not a URL, no bucket, or a password, query or fragment in it.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise UsageError("store URL: expected scheme://bucket/prefix without spaces or control characters")
    scheme = match.group(1).lower()
    parts = urlsplit(f"{scheme}://{match.group(2)}")
    user, at, host = parts.netloc.rpartition("@")
    if ":" in user or (at and scheme in OBJECT_SCHEMES) or parts.query or parts.fragment:
        raise UsageError(
            f"{scheme}:// URL with a password, a query or a fragment (not printed here); put credentials "
            "into the environment or into the configuration of the client, and only bucket and prefix into the URL"
        )
    scheme, path = OBJECT_SCHEMES.get(scheme, scheme), unquote(parts.path).strip("/")
    if scheme in OBJECT_SCHEMES.values():
        if not host:
            raise UsageError(f"{url!r} names no bucket; expected {scheme}://bucket/prefix")
        if path and (_PREFIX.fullmatch(path) is None or ".." in path.split("/") or "." in path.split("/")):
            raise UsageError(
                f"{url!r}: expected a prefix of [A-Za-z0-9_=+,.@-] between slashes; choose another"
            )
    return Address(scheme, f"{user}{at}{host}", path)
