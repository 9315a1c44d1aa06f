"""The sources object: the files that a version was built from, and the rows that were left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import FormatError
from shardkit.formats import Texts, pack_columns, unpack_columns

_KIND = "sources"


@dataclass(frozen=True, slots=True)
class SourceDigest:
    """A source file as it was when it was read."""

    name: str  # relative to the source root
    size: int  # in bytes
    sha256: str  # hex, as `sha256sum` prints it


@dataclass(frozen=True, slots=True)
class SourcesObject:
    """What `pack_sources` was given."""

    files: tuple[SourceDigest, ...]  # sorted by name
    # (source name, row, kind of error) of rows that were left out, in source order
    skipped: tuple[tuple[str, int, str], ...] = ()


def pack_sources(sources: SourcesObject) -> bytes:
    """The object's bytes: the same for the same files and rows."""
    files = sources.files
    names = Texts.pack([file.name for file in files])
    digests = b"".join(bytes.fromhex(file.sha256) for file in files)
    meta = {"files": len(files), "skipped": [list(row) for row in sources.skipped]}
    columns: dict[str, NDArray[Any]] = {
        "name_data": names.data,
        "name_offset": names.offsets,
        "size": np.array([file.size for file in files], dtype=np.int64),
        "sha256": np.frombuffer(digests, dtype=np.uint8).reshape(-1, 32),
    }
    return pack_columns(_KIND, meta, columns)


def joined_sources(one: SourcesObject, other: SourcesObject) -> SourcesObject:
    """The files and skipped rows of both; a file that both list as it is appears once."""
    files = {*one.files, *other.files}
    return SourcesObject(
        tuple(sorted(files, key=lambda file: (file.name, file.sha256))), one.skipped + other.skipped
    )


def unpack_sources(data: bytes) -> SourcesObject:
    """Read an object whose digest has been checked.

    Raises:
        FormatError: the bytes are not those of `pack_sources`.
    """
    unpacked = unpack_columns(data, _KIND)
    arrays, meta = unpacked.arrays, unpacked.meta
    if set(arrays) != {"name_data", "name_offset", "size", "sha256"} or set(meta) != {"files", "skipped"}:
        raise FormatError("sources: other columns than names, sizes and digests; do not trust it")
    count = meta["files"]
    names = Texts(arrays["name_data"], arrays["name_offset"])
    names.check("source names", count)
    if arrays["size"].shape != (count,) or arrays["sha256"].shape != (count, 32):
        raise FormatError(
            f"sources: columns do not have one entry for each of {count} files; do not trust it"
        )
    files = tuple(
        SourceDigest(name, size, bytes(digest).hex())
        for name, size, digest in zip(names.to_list(), arrays["size"].tolist(), arrays["sha256"], strict=True)
    )
    return SourcesObject(files, tuple((name, row, kind) for name, row, kind in meta["skipped"]))
