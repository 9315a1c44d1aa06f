"""From what a user types to a store: ``data/cats``, ``file:///data/cats``, ``s3://bucket/cats``."""

from __future__ import annotations

import os
from urllib.parse import unquote

from shardkit.errors import UsageError
from shardkit.stores.local import LocalStore
from shardkit.stores.remote.addresses import OBJECT_SCHEMES, parse_address
from shardkit.stores.remote.fsspec_store import FsspecStore
from shardkit.stores.remote.object_store import ObjectStore
from shardkit.stores.store import Store, scheme_of


def open_store(url: str | os.PathLike[str], *, read_only: bool = False) -> Store:
    """The store at a root.

    Args:
        url: A local path or ``file://`` URL; ``s3://``, ``gs://`` or ``az://`` bucket and prefix, with endpoint,
            region and credentials from the environment (SPEC.md, "Stores beyond the local disk"); or any other URL
            that fsspec knows.
        read_only: Refuse every change.

    Raises:
        UsageError: The URL is malformed or holds a credential.
        MissingDependency: A package is not installed that this kind of URL needs.
    """
    text = os.fspath(url)
    scheme = scheme_of(text)
    if scheme is None:
        return LocalStore(text, read_only=read_only)
    if scheme == "file":
        host, slash, path = text[len("file://") :].partition("/")
        if host not in ("", "localhost") or not slash:
            raise UsageError(f"{text!r}: expected file:///absolute/path")
        return LocalStore(unquote(slash + path), read_only=read_only)
    address = parse_address(text)
    if address.scheme in OBJECT_SCHEMES:
        return ObjectStore(address, read_only=read_only)
    return FsspecStore(address, read_only=read_only)
