"""Objects of somebody else, by URL: listed, looked at and read, never written: adopted tars, and sources of builds.

They have whatever names their owner gave them, not those that a store of ours takes; otherwise they are read by the
same clients, with the same repetitions and the same care that no message holds a credential.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from shardkit.errors import UsageError
from shardkit.stores.remote.addresses import OBJECT_SCHEMES, Address, parse_address
from shardkit.stores.remote.object_store import ObjectStore
from shardkit.stores.store import ObjectStat

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)/?(.*)", re.DOTALL)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_LONGEST: Final = 4_000


class ForeignStore(ObjectStore):
    """A whole bucket, or a folder behind another URL, under any keys but those with empty parts, ``.`` or ``..``."""

    def _check_name(self, name: str) -> None:
        _check_key(self.url, name)

    def list_keys(self, prefix: str) -> Iterator[tuple[str, ObjectStat]]:
        """Keys below the folder `prefix` (empty, or ending in ``/``), in byte order.

        Raises:
            StoreError: The store does not answer.
        """
        # boto3 lists every key there is; obstore stops at one that has an empty part
        for found in self._list(prefix, "", self._attesting):
            if not found.name.endswith("/"):  # the marker of a folder
                yield found.name, ObjectStat(found.size, None, found.etag)


def split_url(url: str) -> tuple[Address, str]:
    """The place of an object of somebody else, and its key there; what is behind ``://`` is taken as it is written.

    Returns:
        For an object store the bucket and the whole key; for anything else the folder and the file's name.

    Raises:
        UsageError: Not such a URL, or it holds a credential.
    """
    match = _URL.fullmatch(url)
    if match is None or "::" in url:
        raise UsageError(
            "URL of an object: expected scheme://bucket/key, one scheme and no control characters"
        )
    scheme, host, key = match.groups()
    address = parse_address(f"{scheme}://{host}/")
    if address.scheme in OBJECT_SCHEMES.values():
        _check_key(address.url, key)
        return address, key
    address = parse_address(url)  # refuses a query, which is where signatures are
    folder, _, name = key.rpartition("/")
    _check_key(address.url, name)
    return Address(address.scheme, address.host, folder), name


def _check_key(where: str, key: str) -> None:
    if not key or len(key) > _LONGEST or _CONTROL.search(key):
        raise UsageError(
            f"{where}: key {key[:200]!r}, expected 1 to {_LONGEST} characters and no control characters"
        )
    if {"", ".", ".."} & set(key.split("/")):
        raise UsageError(
            f"{where}: key {key[:200]!r} has an empty part, '.' or '..'; give the object another name"
        )
