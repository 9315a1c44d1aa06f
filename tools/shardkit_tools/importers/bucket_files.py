"""Sources in S3, Google Cloud Storage and Azure, through the library's own stores and with their credentials.

A file is read in pieces; when it is read front to back the next pieces are already on their way.
"""

from __future__ import annotations

import functools
import io
import os
import re
from concurrent.futures import Future, ThreadPoolExecutor

from shardkit.errors import NotFoundError, SourceError, StoreError
from shardkit.stores.remote import (
    OBJECT_SCHEMES,
    Address,
    ForeignStat,
    ForeignStore,
    open_foreign,
    parse_address,
    split_url,
)
from shardkit.stores.remote.foreign import ForeignBucket
from shardkit_tools.importers.protocol import SourceFile

__all__ = ["BucketFile", "foreign_store", "is_bucket_url", "list_bucket", "stat_file"]

_WILDCARD = re.compile(r"[*?\[]")
_SETTINGS = ("AWS_", "GOOGLE_", "AZURE_")
_PIECE_BYTES = 4 << 20
_AHEAD = 3  # pieces on their way while one is read


def is_bucket_url(url: str) -> bool:
    """Whether a URL is of an object store."""
    return url.partition("://")[0].lower() in OBJECT_SCHEMES


def foreign_store(address: Address) -> ForeignStore:
    """What reads a bucket or folder of somebody else; kept, since a client takes a tenth of a second to be made.

    Raises:
        MissingDependency: a package is not installed that this kind of URL needs.
    """
    settings = hash(tuple(sorted(one for one in os.environ.items() if one[0].startswith(_SETTINGS))))
    return _kept(address, settings)


@functools.lru_cache(maxsize=16)
def _kept(address: Address, settings: int) -> ForeignStore:
    """One for each environment: a process that is given other credentials or another endpoint has other clients."""
    return open_foreign(address)


def list_bucket(url: str) -> tuple[list[SourceFile], bool]:
    """The objects that a URL names, in no particular order, and whether it named a single one.

    Args:
        url: of an object, a folder, or a glob, in which ``*`` and ``?`` stop at a slash and ``**`` does not.

    Raises:
        UsageError: the URL holds a credential.
        NotFoundError: nothing is there.
        SourceError: the store does not answer.
    """
    scheme, _, rest = url.partition("://")
    name, _, key = rest.partition("/")
    key = key.rstrip("/")
    bucket = foreign_store(parse_address(f"{scheme}://{name}"))
    assert isinstance(bucket, ForeignBucket)
    glob = _WILDCARD.search(key)
    try:
        found = None if glob or not key or url.endswith("/") else bucket.stat(key)
        if found is not None:
            return [_file(bucket, key, key.rpartition("/")[0], found)], True
        folder = key[: glob.start()].rpartition("/")[0] if glob else key
        prefix = f"{folder}/" if folder else ""
        wanted = _pattern(key) if glob else None
        files = [
            _file(bucket, name, folder, stat)
            for name, stat in bucket.list_keys(prefix)
            if (wanted is None or wanted.fullmatch(name)) and not _is_hidden(name.removeprefix(prefix))
        ]
    except StoreError as error:
        raise SourceError(f"{url}: cannot be listed ({error})") from error
    if not files:
        raise NotFoundError(f"{url}: no files there; check the URL")
    return files, False


def stat_file(file: SourceFile) -> ForeignStat:
    """What the store says of a file now.

    Raises:
        SourceError: it does not answer, or the file is gone.
    """
    try:
        address, key = split_url(file.path)
        found = foreign_store(address).stat(key)
    except StoreError as error:
        raise SourceError(f"{file.path}: cannot be looked at ({error})") from error
    if found is None:
        raise SourceError(f"{file.path}: it is gone; build from a source that nobody writes to")
    return found


class BucketFile(io.RawIOBase):
    """An object as a file.

    Args:
        file: as it was listed.

    Raises:
        SourceError: it cannot be read, or its size is another.
    """

    def __init__(self, file: SourceFile) -> None:
        found = stat_file(file)
        if found.size != file.size:
            raise SourceError(
                f"{file.path}: changed since it was listed ({file.size} bytes then, {found.size} now)"
            )
        address, self._key = split_url(file.path)
        self._bucket = foreign_store(address)
        self._file = file
        self._position = 0
        self._pieces: dict[int, Future[bytes]] = {}
        self._pool = ThreadPoolExecutor(_AHEAD + 1, thread_name_prefix="shardkit-source")

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """See `io.RawIOBase`."""
        left = self._file.size - self._position
        if left <= 0 or not len(buffer):
            return 0
        number, inside = divmod(self._position, _PIECE_BYTES)
        data = self._piece(number)[inside : inside + len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """See `io.RawIOBase`."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        """See `io.RawIOBase`."""
        return self._position

    def close(self) -> None:
        """Let go of what is on its way."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pieces.clear()
        super().close()

    def _piece(self, number: int) -> bytes:
        is_next = number in self._pieces or number - 1 in self._pieces
        wanted = range(number, number + 1 + (_AHEAD if is_next or not number else 0))
        self._pieces = {
            one: self._pieces.get(one) or self._pool.submit(self._fetch, one)
            for one in wanted
            if one * _PIECE_BYTES < self._file.size
        }
        try:
            return self._pieces[number].result()
        except Exception as error:
            raise SourceError(
                f"{self._file.path}: cannot be read ({error}); check it and the credentials, then try again"
            ) from error

    def _fetch(self, number: int) -> bytes:
        offset = number * _PIECE_BYTES
        return self._bucket.get_range(self._key, offset, min(_PIECE_BYTES, self._file.size - offset))


def _file(bucket: ForeignBucket, key: str, folder: str, found: ForeignStat) -> SourceFile:
    stamp = f"ETag {found.etag}" if found.etag else "unknown"
    return SourceFile(key.removeprefix(folder).lstrip("/"), f"{bucket.url}/{key}", found.size, stamp)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _pattern(glob: str) -> re.Pattern[str]:
    """``*`` and ``?`` within a part, ``**`` over parts, ``[…]`` of one character."""
    text = ""
    for piece in re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]|.", glob, re.DOTALL):
        if piece == "**/":
            text += "(?:.*/)?"
        elif piece == "**":
            text += ".*"
        elif piece == "*":
            text += "[^/]*"
        elif piece == "?":
            text += "[^/]"
        elif len(piece) > 1:
            inside = piece[1:-1].replace("\\", "\\\\")
            text += f"[^{inside[1:]}]" if inside[0] == "!" else f"[{inside}]"
        else:
            text += re.escape(piece)
    return re.compile(text, re.DOTALL)
