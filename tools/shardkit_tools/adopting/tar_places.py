"""Tars that are to be adopted: which there are, where they are remembered, and whether they are what they were."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from shardkit.errors import IntegrityError, NotFoundError, SourceError, StoreError, UsageError
from shardkit.stores.remote.foreign import split_url
from shardkit.stores.store import ObjectStat
from shardkit_tools.building.source_digests import check_unchanged
from shardkit_tools.importers.protocol import SourceFile
from shardkit_tools.importers.remote_files import foreign_store, stat_file
from shardkit_tools.importers.source_files import is_url, list_source, open_file

BUILD_INSTEAD = "read it into shards of its own instead: shardkit build"
"""What to do with a tar that cannot be adopted."""

_PACKED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x04\x22\x4d\x18": "lz4",
}
_PACKED_NAMES = (".gz", ".tgz", ".zst", ".bz2", ".xz", ".lz4")


def stat_tar(file: SourceFile) -> ObjectStat:
    """A tar as it is now; of a local one the size alone is known.

    Raises:
        SourceError: it is gone, or its store does not answer; or a local one was written to since it was listed.
    """
    if is_url(file.path):
        return stat_file(file)
    check_unchanged(file)
    return ObjectStat(file.size, None)


def place_of(file: SourceFile) -> str:
    """What the root remembers: a URL, or a path without links."""
    return file.path if is_url(file.path) else os.path.realpath(file.path)


def find_tars(tars: Sequence[str | os.PathLike[str]]) -> list[SourceFile]:
    """All tars that paths, globs and URLs name, in this order.

    Raises:
        NotFoundError: there is none.
        SourceError: one is compressed, or cannot be read.
        UsageError: one is named twice, or by a URL that cannot be recorded.
    """
    files: list[SourceFile] = []
    seen: set[str] = set()
    for given in tars:
        for file in _listed(os.fspath(given)):
            _check_kind(file)
            place = place_of(file)
            if place in seen:
                raise UsageError(f"{file.path}: named twice; name it once")
            seen.add(place)
            files.append(file)
    if not files:
        raise NotFoundError("no tars: name at least one")
    return files


def _listed(given: str) -> Iterator[SourceFile]:
    local = given[7:] if given.lower().startswith("file:///") else given
    for file in list_source(local).files:
        if is_url(file.path):
            split_url(file.path)  # it is recorded, and holds no credential
        yield file


def _check_kind(file: SourceFile) -> None:
    head = _first_bytes(file)
    packed = next((name for magic, name in _PACKED.items() if head.startswith(magic)), None)
    if packed is not None or file.name.lower().endswith(_PACKED_NAMES):
        how = f" with {packed}" if packed else ""
        raise SourceError(
            f"{file.path}: compressed{how}, so samples cannot be read out of its middle; {BUILD_INSTEAD}"
        )


def _first_bytes(file: SourceFile) -> bytes:
    """Eight of them, and of a tar behind a URL no more."""
    if not is_url(file.path):
        with open_file(file) as stream:
            return stream.read(8)
    address, key = split_url(file.path)
    try:
        return foreign_store(address).get_range(key, 0, min(8, file.size))
    except (IntegrityError, NotFoundError, StoreError) as error:
        raise SourceError(f"{file.path}: cannot be read ({error}); check it, then try again") from error
