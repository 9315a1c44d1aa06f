"""Where an adopted tar lies, as the root remembers it, and its bytes: from a local file, a bucket, or any URL.

An adopted shard is a tar of somebody else, named by its SHA-256 in the manifest like any shard, that was not copied
into the root. The root remembers its place in one small document, ``locations/<hex of the tar's digest>.json``: like
the place of a part (`storage.locations`) it is configuration, not data, and may be written again when the tar moves.
Nothing is trusted because of it, nor because of a size or a modification time: blocks are verified on every read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shardkit.errors import FormatError, IntegrityError, NotFoundError
from shardkit.formats.canonical_json import dumps
from shardkit.manifest.json_fields import read_document
from shardkit.reading.located_store import find_checked
from shardkit.repository.part_locations import location_name, resolved
from shardkit.repository.repository import Repository
from shardkit.stores.file_operations import explained
from shardkit.stores.remote.addresses import Address
from shardkit.stores.remote.backoff import RetryPolicy
from shardkit.stores.remote.foreign import ForeignStat, ForeignStore, open_foreign, split_url
from shardkit.stores.store import Store, put_over, scheme_of

_FORMAT: Final = "shardkit-adopted/1"
_KEYS: Final = ("digest", "urls")
_MAX_BYTES: Final = 64 * 2**10


def put_adopted(repository: Repository, digest: str, place: str, etag: str = "") -> None:
    """Remember, durably, where an adopted tar lies; a place that was remembered before is replaced.

    Args:
        repository: That adopts it.
        digest: ``sha256:<hex>`` of the tar.
        place: Path of the local file, or URL.
        etag: What the tar's store called these bytes when they were hashed; empty where it has no such thing.

    Raises:
        UsageError: The URL holds a credential.
        StoreError: The root cannot be written.
    """
    if scheme_of(place):
        split_url(place)
        urls = [place]
    else:
        urls = [os.path.abspath(place)]
        if not scheme_of(repository.url):  # so that root and tars may move together
            urls.insert(0, os.path.relpath(urls[0], repository.url))
    fields = {"format": _FORMAT, "digest": digest, "urls": urls}
    put_over(repository.store, location_name(digest), dumps({**fields, "etag": etag} if etag else fields))


@dataclass(frozen=True, slots=True)
class Tar:
    """An adopted tar.

    Attributes:
        digest: ``sha256:<hex>``.
        places: absolute paths and URLs, tried in order.
        etag: that its store had for these bytes; empty where that is not known.
    """

    digest: str
    places: tuple[str, ...]
    etag: str

    @property
    def place(self) -> str:
        """Where it lies, or lay."""
        return next((one for one in self.places if scheme_of(one) or os.path.exists(one)), self.places[-1])

    @property
    def is_far(self) -> bool:
        """Whether it lies behind a URL."""
        return scheme_of(self.place) is not None


def read_tar_place(store: Store, digest: str) -> Tar | None:
    """What a root remembers of an adopted tar; None where it remembers nothing.

    Raises:
        FormatError: The document is damaged.
        StoreError: The root does not answer.
    """

    def parse(data: bytes, where: str) -> Tar:
        fields = read_document(data, where, _FORMAT, _KEYS, _MAX_BYTES, ("etag",))
        places = tuple(resolved(store.url, url) for url in fields.texts("urls", maximum=16, longest=8_000))
        if fields.digest("digest") != digest or not places:
            raise FormatError(f"{where}: it is of another tar; adopt the tar again")
        return Tar(digest, places, fields.text("etag", maximum=1_000) if fields.has("etag") else "")

    return find_checked(store, location_name(digest), parse, max_bytes=_MAX_BYTES)


class TarFiles:
    """Reads adopted tars; may be used from any thread, after a fork, and pickled."""

    def __init__(self, retry: RetryPolicy | None = None) -> None:
        self._retry = retry
        self._stores: dict[Address, ForeignStore] = {}

    def stat(self, tar: Tar) -> ForeignStat | None:
        """What its place says of it; None where nothing is there.

        Raises:
            StoreError: The place does not answer.
            IntegrityError: It is not a file any more.
        """
        if tar.is_far:
            store, key = self._store(tar.place)
            return store.stat(key)
        with explained(f"look at the adopted tar {tar.place}"):
            try:
                found = os.stat(tar.place)
            except FileNotFoundError:
                return None
        if not stat.S_ISREG(found.st_mode):
            raise IntegrityError(f"{tar.place}: not a file any more; put the tar back that was adopted")
        return ForeignStat(found.st_size)

    def read(self, tar: Tar, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Bytes of it, for each (offset, length).

        Raises:
            NotFoundError: It is not there.
            IntegrityError: It is shorter than it was.
            StoreError: Its place does not answer.
        """
        if tar.is_far:
            store, key = self._store(tar.place)
            try:
                return store.get_ranges(key, ranges)
            except IntegrityError:
                last = max(offset + length for offset, length in ranges)
                raise IntegrityError(
                    f"{tar.place}: fewer bytes than the {last} that it had when it was adopted; put the tar back"
                ) from None
        with explained(f"read the adopted tar {tar.place}"):
            try:
                file = os.open(tar.place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except FileNotFoundError:
                raise NotFoundError(f"{tar.place}: no such file") from None
            try:
                size = os.fstat(file).st_size
                return [_read(file, tar.place, size, offset, length) for offset, length in ranges]
            finally:
                os.close(file)

    def _store(self, url: str) -> tuple[ForeignStore, str]:
        address, key = split_url(url)
        found = self._stores.get(address)
        if found is None:
            found = self._stores.setdefault(address, open_foreign(address, retry=self._retry))
        return found, key


def _read(file: int, path: str, size: int, offset: int, length: int) -> bytes:
    """Exactly `length` bytes; the file is somebody else's and may be shorter than it was."""
    if offset + length > size:
        raise IntegrityError(
            f"{path}: {size} bytes, expected at least {offset + length}; it was truncated since it was adopted"
        )
    data = os.pread(file, length, offset)
    if len(data) == length:
        return data
    parts = [data]
    done = len(data)
    while data and done < length:  # the kernel hands out at most 2 GiB at a time
        data = os.pread(file, length - done, offset + done)
        parts.append(data)
        done += len(data)
    if done != length:
        raise IntegrityError(f"{path}: it shrank while it was read; put the tar back that was adopted")
    return b"".join(parts)
