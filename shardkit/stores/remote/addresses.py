"""URLs of remote stores, parsed and checked to contain no credentials."""

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
    "abfss": "az",
}
"""Scheme of a URL → kind of object store."""

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^\x00-\x20]*)")
_OBJECT_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)/?(.*)", re.DOTALL)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_LONGEST: Final = 4_000
_PREFIX: Final = re.compile(r"[A-Za-z0-9_=+,.@-]+(?:/[A-Za-z0-9_=+,.@-]+)*")


@dataclass(frozen=True, slots=True)
class Address:
    """Parsed URL of a store. It contains no credential, so it may be printed, logged and pickled."""

    scheme: str
    """Scheme in lower case; a kind of object store, or another scheme for fsspec."""
    host: str
    """Bucket, container, or host with port and user name."""
    path: str
    """Path or prefix of the root, without slashes at its ends."""

    @property
    def url(self) -> str:
        """The normalized URL."""
        return f"{self.scheme}://{self.host}/{self.path}".rstrip("/")


def parse_address(url: str) -> Address:
    """Parse the URL of a root.

    Raises:
        UsageError: The URL is malformed, or has a password, a query or a fragment. URLs are printed, logged and
            pickled; credentials belong in the environment or in the client's configuration.
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
    if at and OBJECT_SCHEMES.get(scheme) == "az" and not (":" in user or parts.query or parts.fragment):
        raise UsageError(
            f"{url!r}: the account is a setting, and the URL names the container; set AZURE_STORAGE_ACCOUNT_NAME="
            f"{host.partition('.')[0]} and give az://{user}{parts.path}"
        )
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
    """Split the URL of an external object into its store and its key; the path is not unquoted.

    Returns:
        For an object store, the bucket and the whole key; for other URLs, the folder and the file name.

    Raises:
        UsageError: The URL or the key is malformed, or the URL contains a credential.
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
    address = parse_address(url)  # refuses a query, which may contain a signature
    folder, _, name = key.rpartition("/")
    check_key(address.url, name)
    return Address(address.scheme, address.host, folder), name


def check_key(where: str, key: str) -> None:
    """Raise UsageError unless `key` is a valid key of an external object."""
    if not key or len(key) > _LONGEST or _CONTROL.search(key):
        raise UsageError(
            f"{where}: key {key[:200]!r}, expected 1 to {_LONGEST} characters and no control characters"
        )
    if {"", ".", ".."} & set(key.split("/")):
        raise UsageError(
            f"{where}: key {key[:200]!r} has an empty part, '.' or '..'; give the object another name"
        )
