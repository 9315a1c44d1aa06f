"""URLs of stores that are not local paths: what they may hold, and what of them may be printed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

from shardkit.credentials import refuse_credentials
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
_OBJECT_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)/?(.*)", re.DOTALL)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_LONGEST: Final = 4_000
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
    """
    refuse_credentials(url, "the URL")
    if "::" in url.partition("://")[0]:
        raise UsageError(
            f"{url!r} chains file systems; expected one scheme. A cache is a setting of the loader: cache=FOLDER"
        )
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


def split_url(url: str) -> tuple[Address, str]:
    """The place of an object of somebody else, and its key there; what is behind ``://`` is taken as it is written.

    Returns:
        For an object store the bucket and the whole key; for anything else the folder and the file's name.
    """
    refuse_credentials(url, "the URL of an object")
    match = _OBJECT_URL.fullmatch(url)
    if match is None or "::" in url:
        raise UsageError(
            "URL of an object: expected scheme://bucket/key, one scheme and no control characters"
        )
    scheme, host, key = match.groups()
    address = parse_address(f"{scheme}://{host}/")
    if address.scheme in OBJECT_SCHEMES.values():
        check_key(address.url, key)
        return address, key
    address = parse_address(url)  # refuses a query, which is where signatures are
    folder, _, name = key.rpartition("/")
    check_key(address.url, name)
    return Address(address.scheme, address.host, folder), name


def check_key(where: str, key: str) -> None:
    """Refuse what is no key of an object of somebody else; UsageError."""
    if not key or len(key) > _LONGEST or _CONTROL.search(key):
        raise UsageError(
            f"{where}: key {key[:200]!r}, expected 1 to {_LONGEST} characters and no control characters"
        )
    if {"", ".", ".."} & set(key.split("/")):
        raise UsageError(
            f"{where}: key {key[:200]!r} has an empty part, '.' or '..'; give the object another name"
        )
