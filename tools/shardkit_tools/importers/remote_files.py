"""Sources behind a URL: object stores by the library's own clients, ``https://host/rows.jsonl`` and others by fsspec.

Credentials come from the environment, as each protocol's package looks for them: a URL that holds one is refused, for
the URL appears in messages.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from shardkit.errors import MissingDependency, NotFoundError, SourceError, UsageError
from shardkit_tools.importers.bucket_files import BucketFile, is_bucket_url, list_bucket
from shardkit_tools.importers.protocol import SourceFile

__all__ = ["is_url", "list_url", "open_url"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?:::[A-Za-z][A-Za-z0-9+.-]*)*://")
_WILDCARDS = frozenset("*?[")
_BUFFER_BYTES = 1 << 20
_STAMPS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "created",
)


def is_url(source: str) -> bool:
    """Whether a source is a URL and not a path."""
    return _URL.match(source) is not None


def list_url(url: str) -> tuple[list[SourceFile], bool]:
    """The files below a URL, in no particular order, and whether the URL named one file.

    Raises:
        UsageError: the URL holds a credential.
        MissingDependency: the package for its protocol is not installed.
        NotFoundError: nothing is there.
        SourceError: the listing fails.
    """
    _check_harmless(url)
    if is_bucket_url(url):
        return list_bucket(url)
    system, root = _system(url)
    try:
        is_glob = bool(_WILDCARDS.intersection(url))
        if is_glob:
            found = {
                path: info for path, info in system.glob(root, detail=True).items() if info["type"] == "file"
            }
            root = root[: min(root.index(sign) for sign in _WILDCARDS if sign in root)].rpartition("/")[0]
        elif system.isfile(root):
            found, root = {root: system.info(root)}, root.rpartition("/")[0]
            return [_file(system, path, root, info) for path, info in found.items()], True
        else:
            found = system.find(root, detail=True)
    except Exception as error:  # every protocol raises its own
        raise SourceError(
            f"{url}: cannot be listed ({_brief(error)}); check the URL and the credentials"
        ) from error
    if not found:
        raise NotFoundError(f"{url}: no files there; check the URL")
    return list(_files(system, found, root)), False


def open_url(file: SourceFile) -> BinaryIO:
    """Open a file, buffered and seekable; errors name it.

    Raises:
        SourceError: it cannot be opened, or its size is no longer the listed one.
    """
    if is_bucket_url(file.path):
        return cast(BinaryIO, io.BufferedReader(BucketFile(file), _BUFFER_BYTES))
    system, path = _system(file.path)
    try:
        inner = system.open(path, "rb")
        size = inner.seek(0, io.SEEK_END)
        inner.seek(0)
    except Exception as error:
        raise _unreadable(file, error) from error
    if size != file.size:
        inner.close()
        raise SourceError(f"{file.path}: changed since it was listed ({file.size} bytes then, {size} now)")
    return cast(BinaryIO, io.BufferedReader(_Remote(inner, file), _BUFFER_BYTES))


class _Remote(io.RawIOBase):
    """A remote stream whose errors name the file."""

    def __init__(self, inner: Any, file: SourceFile) -> None:
        self._inner = inner
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            data = self._inner.read(len(buffer))
        except Exception as error:
            raise _unreadable(self._file, error) from error
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return int(self._inner.seek(offset, whence))

    def tell(self) -> int:
        return int(self._inner.tell())

    def close(self) -> None:
        self._inner.close()
        super().close()


def _check_harmless(url: str) -> None:
    authority = url.partition("://")[2].partition("/")[0]
    if "@" in authority or (
        "?" in url and not url.rpartition("?")[2].startswith("*") and "=" in url.rpartition("?")[2]
    ):
        shown = url.partition("://")[0]
        raise UsageError(
            f"a {shown}:// URL with a user, password or query in it: give credentials by the environment"
        )


def _system(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise MissingDependency(
            "a source behind a URL needs fsspec; run: pip install 'shardkit[s3]'"
        ) from error
    try:
        system, path = url_to_fs(url)
    except ImportError as error:
        raise MissingDependency(f"{url}: {error}; install that package") from error
    except ValueError as error:
        raise UsageError(f"{url}: {error}") from error
    return system, str(path)


def _files(system: Any, found: dict[str, Any], root: str) -> Iterator[SourceFile]:
    for path, info in found.items():
        name = path.removeprefix(root).lstrip("/")
        if not any(part.startswith(".") for part in name.split("/")):
            yield _file(system, path, root, info)


def _file(system: Any, path: str, root: str, info: dict[str, Any]) -> SourceFile:
    name = path.removeprefix(root).lstrip("/")
    size = info.get("size")
    if ".." in name.split("/"):
        raise SourceError(f"{path}: a name with '..' in it; rename it at its source")
    if size is None:
        raise SourceError(f"{path}: the server does not say its size; download it and build from the copy")
    stamp = next((f"{key} {info[key]}" for key in _STAMPS if info.get(key)), "unknown")
    return SourceFile(name, str(system.unstrip_protocol(path)), int(size), stamp)


def _unreadable(file: SourceFile, error: Exception) -> SourceError:
    return SourceError(
        f"{file.path}: cannot be read ({_brief(error)}); check it and the credentials, then try again"
    )


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]
