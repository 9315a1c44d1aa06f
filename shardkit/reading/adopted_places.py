"""Documents of the root that say where adopted files are."""

from __future__ import annotations

import os
from typing import Annotated, Final, NamedTuple
from urllib.parse import unquote

import msgspec
from msgspec import Meta

from shardkit.documents import Digest, Document, Natural, decode, encode, parse_digest
from shardkit.errors import FormatError, NotFoundError, UsageError
from shardkit.reading.file_groups import MAX_GROUP_BYTES, FileGroup
from shardkit.stores.store import Store, find_checked, put_over, scheme_of

_MAX_BYTES: Final = 64 * 2**10


class _Place(Document, frozen=True, kw_only=True, tag="shardkit-adopted/1"):
    digest: Digest
    urls: Annotated[tuple[Annotated[str, Meta(max_length=8_000)], ...], Meta(min_length=1, max_length=16)]
    etag: Annotated[str, Meta(max_length=1_000)] = ""
    files: Natural = 0


def location_name(digest: str) -> str:
    """Return the name of the document with the place of a part (given its manifest id) or of an adopted file."""
    return f"locations/{parse_digest(digest)}.json"


def group_name(digest: str) -> str:
    """Return the name of the document of a `FileGroup`, given the digest of its shard."""
    return f"locations/{parse_digest(digest)}.files"


def resolved(root: str, place: str) -> str:
    """Return the path or URL of a recorded place; relative paths are relative to the root."""
    if place.lower().startswith("file:///"):
        return unquote(place[len("file://") :])
    joined = place if scheme_of(place) else os.path.join(root, place)
    return joined if scheme_of(joined) else os.path.normpath(joined)


def put_adopted(
    root: Store, digest: str, place: str, etag: str = "", *, group: FileGroup | None = None
) -> None:
    """Record the place of an adopted file, or the folder of a group of files, durably; replace any earlier record.

    Raises:
        UsageError: The document of the group is too large.
    """
    if group is not None:
        document = group.to_bytes()
        if len(document) > MAX_GROUP_BYTES:
            raise UsageError(
                f"{place}: {len(document)} bytes of names and values for {len(group)} files, expected at most "
                f"{MAX_GROUP_BYTES}; read them into shards instead: shardkit build"
            )
        put_over(root, group_name(digest), document)
    _put_place(
        root, _Place(digest=digest, urls=(), etag=etag, files=0 if group is None else len(group)), place
    )


def move_adopted(root: Store, digest: str, folder: str) -> bool:
    """Record where the folder of a group of files is now; return False if the root knows no such group."""
    known = read_adopted_place(root, digest)
    if known is None or not known.files:
        return False
    _put_place(root, _Place(digest=digest, urls=(), files=known.files), folder)
    return True


def _put_place(root: Store, record: _Place, place: str) -> None:
    if scheme_of(place):
        from shardkit.stores.remote.addresses import split_url

        split_url(place)
        urls = [place]
    else:
        urls = [os.path.abspath(place)]
        if not scheme_of(root.url):  # so that root and files may move together
            urls.insert(0, os.path.relpath(urls[0], root.url))
    put_over(root, location_name(record.digest), encode(msgspec.structs.replace(record, urls=tuple(urls))))


class AdoptedFile(NamedTuple):
    """An adopted file.

    Attributes:
        digest: ``sha256:<hex>``.
        places: absolute paths and URLs, tried in order.
        etag: ETag of the file in its store when it was adopted; empty if unknown.
        files: number of files of a group, whose folder the places are; 0 for a single file.
    """

    digest: str
    places: tuple[str, ...]
    etag: str
    files: int = 0

    @property
    def place(self) -> str:
        """The first place that is a URL or an existing file; otherwise the last one."""
        return next((one for one in self.places if scheme_of(one) or os.path.exists(one)), self.places[-1])

    @property
    def is_far(self) -> bool:
        """True if the file is read from a URL."""
        return scheme_of(self.place) is not None

    def gone(self, root: str) -> NotFoundError:
        """Return the error for a file that is missing from all its places."""
        return NotFoundError(
            f"adopted file {self.digest} is gone from where it was ({', '.join(dict.fromkeys(self.places))}); put it "
            f"back, or name where it is now: shardkit adopt SOURCE… {root}"
        )


def read_adopted_place(store: Store, digest: str) -> AdoptedFile | None:
    """Return the recorded place of an adopted file, or None if the root has no record of it."""

    def parse(data: bytes, where: str) -> AdoptedFile:
        place = decode(_Place, data, where, max_bytes=_MAX_BYTES)
        if place.digest != digest:
            raise FormatError(f"{where}: it is of another file; adopt that file again")
        return AdoptedFile(
            digest, tuple(resolved(store.url, url) for url in place.urls), place.etag, place.files
        )

    return find_checked(store, location_name(digest), parse, max_bytes=_MAX_BYTES)
