"""From what a user types to a store: ``data/cats``, ``data/cats@val``, ``file:///data/cats@sha256:…``."""

from __future__ import annotations

import os
import re
from typing import Final
from urllib.parse import unquote

from shardkit.errors import UsageError
from shardkit.manifest.json_fields import DIGEST
from shardkit.repository.log import check_ref_name
from shardkit.stores.local import LocalStore
from shardkit.stores.remote import OBJECT_SCHEMES, FsspecStore, ObjectStore, parse_address
from shardkit.stores.store import Store

__all__ = ["open_store", "parse_dataset_url"]

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def parse_dataset_url(url: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Split ``ROOT[@REF]``.

    Only an ``@`` in the last component separates; a root whose own name holds one is written with a slash at
    its end (``data/cats@home/``).

    Returns:
        The root, and the ref, tag or ``sha256:<hex>`` behind the ``@``, None where there is none.

    Raises:
        UsageError: What follows the ``@`` is neither a name nor a digest, or there is no root.
    """
    text = os.fspath(url)
    folder, slash, last = text.rpartition("/")
    name, at, ref = last.rpartition("@")
    if not at:
        root, found = text, None
    else:
        root, found = folder + slash + name, ref
        if DIGEST.fullmatch(ref) is None:
            check_ref_name(ref)
    if not root:
        raise UsageError(f"dataset {text!r} has no root: expected ROOT or ROOT@REF, such as data/cats@val")
    return root, found


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
    match = _SCHEME.match(text)
    if match is None:
        return LocalStore(text, read_only=read_only)
    scheme = match.group(1).lower()
    if scheme == "file":
        host, slash, path = text[match.end() :].partition("/")
        if host not in ("", "localhost") or not slash:
            raise UsageError(f"{text!r}: expected file:///absolute/path")
        return LocalStore(unquote(slash + path), read_only=read_only)
    address = parse_address(text)
    if address.scheme in OBJECT_SCHEMES:
        return ObjectStore(address, read_only=read_only)
    return FsspecStore(address, read_only=read_only)
