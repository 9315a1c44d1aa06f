"""Content-addressed names: an object is called by the SHA-256 of its bytes, as ``sha256sum`` prints it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shardkit.errors import FormatError, UsageError
from shardkit.formats.digest import parse_digest

__all__ = ["EXTENSIONS", "Descriptor", "object_name", "parse_object_name"]

EXTENSIONS: Final = (
    "tar",
    "tar.zst",
    "arrow",
    "index",
    "page",
    "manifest",
    "selection",
    "parity",
    "sources",
    "about",
    "lookup",
    "tensor",
    "checkpoint",
)
"""Kinds of object; the extension is for people and foreign tools, the digest alone identifies."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What is needed to fetch an object and know that it is the right one."""

    digest: str
    """``sha256:<64 hex>`` of the bytes."""
    size: int
    """Bytes; compared before anything is read."""
    extension: str

    @property
    def name(self) -> str:
        """Where the object lies in a store."""
        return object_name(self.digest, self.extension)


def object_name(digest: str, extension: str) -> str:
    """``objects/sha256/ab/<hex>.<extension>``.

    Raises:
        FormatError: `digest` is not ``sha256:<64 hex>``.
        UsageError: The extension is not one of `EXTENSIONS`.
    """
    if extension not in EXTENSIONS:
        raise UsageError(f"object extension {extension!r}: expected one of {', '.join(EXTENSIONS)}")
    hexadecimal = parse_digest(digest)
    return f"objects/sha256/{hexadecimal[:2]}/{hexadecimal}.{extension}"


def parse_object_name(name: str) -> tuple[str, str]:
    """(digest, extension) of an object's name in a store.

    Raises:
        FormatError: The name is not one that `object_name` gives.
    """
    hexadecimal, _, extension = name.rpartition("/")[2].partition(".")
    digest = f"sha256:{hexadecimal}"
    if extension not in EXTENSIONS or object_name(digest, extension) != name:
        raise FormatError(
            f"{name!r} is not the name of an object; remove it from objects/, nothing refers to it"
        )
    return digest, extension
