"""Sources at a URL: object stores through shardkit's clients, HTTP and other protocols through fsspec.

Credentials come from the environment, as each protocol's package expects. A URL with credentials is refused,
because URLs appear in messages. Files are read in pieces; for sequential reads of an object store, the next
pieces are requested ahead.
"""

from __future__ import annotations

import functools
import io
import os
import re
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, cast

from shardkit.credentials import redact, refuse_credentials
from shardkit.errors import MissingDependency, NotFoundError, SourceError, StoreError, UsageError
from shardkit.extras import install_command
from shardkit.stores.remote.addresses import OBJECT_SCHEMES, Address, check_key, parse_address, split_url
from shardkit.stores.remote.object_store import ForeignStore
from shardkit.stores.store import ObjectStat
from shardkit_tools.importers.protocol import SourceFile

_WILDCARD = re.compile(r"[*?\[]")
_SETTINGS = ("AWS_", "GOOGLE_", "AZURE_")
_PIECE_BYTES = 4 << 20
_AHEAD = 3  # pieces requested ahead
_BUFFER_BYTES = 1 << 20
_PACKAGES = {"hf": "huggingface_hub"}  # packages that fsspec does not name in its error
_STAMPS = (
    "ETag",
    "etag",
    "md5Hash",
    "blob_id",
    "content_md5",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "created",
)


Chooser = Callable[[Iterable[str], bool], Collection[str]]
"""Returns the names of samples among names relative to the source, given whether they are a whole folder."""


def list_url(
    url: str, choose: Chooser, left_out: dict[str, str], *, skip: bool
) -> tuple[list[SourceFile], bool]:
    """Return the files below a URL that `choose` returns, unordered, and whether the URL named one file.

    Keys of a bucket that cannot be read are refused, or with `skip` added to `left_out`.

    Raises:
        NotFoundError: There are no files.
        SourceError: The URL cannot be listed.
    """
    _check_harmless(url)
    if _is_bucket(url):
        return _list_bucket(url, choose, left_out, skip=skip)
    system, root = _system(url)
    try:
        wildcard = _WILDCARD.search(root)
        if system.isfile(root):  # its name may hold wildcards
            return [_file(system, root, root.rpartition("/")[0], system.info(root))], True
        if wildcard and not system.isdir(root):
            listed = system.glob(root, detail=True)
            found = {path: info for path, info in listed.items() if info["type"] == "file"}
            root = root[: wildcard.start()].rpartition("/")[0]
        else:
            found = system.find(root, detail=True)
        if not found and url.startswith("http"):  # isfile and find are silent about errors
            system.info(root)
    except SourceError:
        raise
    except Exception as error:  # every protocol has its own exceptions
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise SourceError(
            f"{url}: cannot be listed ({_brief(cause)}); check the URL and the credentials"
        ) from error
    names = {path: path.removeprefix(root).lstrip("/") for path in found}
    chosen = set(choose(names.values(), not wildcard))
    files = [_file(system, path, root, info) for path, info in found.items() if names[path] in chosen]
    if not found:
        raise NotFoundError(f"{url}: no files there; check the URL")
    return files, False


def pinned_url(url: str) -> str:
    """Return a URL whose content does not move: for the Hugging Face Hub, one of the commit that a branch names now."""
    if not url.startswith("hf://"):
        return url
    _check_harmless(url)
    system, path = _system(url)
    try:
        from huggingface_hub import HfApi

        found, api = system.resolve_path(path), HfApi(endpoint=system.endpoint, token=system.token)
        commit = api.repo_info(found.repo_id, revision=found.revision, repo_type=found.repo_type).sha
    except Exception as error:  # every protocol has its own exceptions
        raise SourceError(
            f"{url}: cannot be found ({_brief(error)}); check the URL and the credentials"
        ) from error
    kind = "" if found.repo_type == "model" else f"{found.repo_type}s/"
    return f"hf://{kind}{found.repo_id}@{commit}/{found.path_in_repo}".rstrip("/")


def open_url(file: SourceFile) -> BinaryIO:
    """Open a file, buffered and seekable; errors name it."""
    read: Callable[[int, int], bytes]
    if _is_bucket(file.path):
        size = stat_file(file).size
        address, key = split_url(file.path)
        read, ahead = functools.partial(foreign_store(address).get_range, key), _AHEAD
    else:
        system, path = _system(file.path)
        try:
            size = system.size(path)
        except Exception as error:
            raise _unreadable(file, error) from error
        read, ahead = lambda offset, length: system.cat_file(path, offset, offset + length), 0
    if size != file.size:
        raise SourceError(f"{file.path}: changed since it was listed ({file.size} bytes then, {size} now)")
    return cast(BinaryIO, io.BufferedReader(_Pieces(file, read, ahead), _BUFFER_BYTES))


class _Pieces(io.RawIOBase):
    """A file read in pieces, some of them ahead; errors name the file."""

    def __init__(self, file: SourceFile, read: Callable[[int, int], bytes], ahead: int) -> None:
        self._file, self._read, self._ahead = file, read, ahead
        self._position = 0
        self._pieces: dict[int, Future[bytes]] = {}
        self._pool = ThreadPoolExecutor(ahead + 1, thread_name_prefix="shardkit-source")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        left = self._file.size - self._position
        if left <= 0 or not len(buffer):
            return 0
        number, inside = divmod(self._position, _PIECE_BYTES)
        data = self._piece(number)[inside : inside + len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        """Cancel pending reads and close."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pieces.clear()
        super().close()

    def _piece(self, number: int) -> bytes:
        is_next = number in self._pieces or number - 1 in self._pieces
        wanted = range(number, number + 1 + (self._ahead if is_next or not number else 0))
        self._pieces = {
            one: self._pieces.get(one) or self._pool.submit(self._fetch, one)
            for one in wanted
            if one * _PIECE_BYTES < self._file.size
        }
        try:
            return self._pieces[number].result()
        except Exception as error:
            raise _unreadable(self._file, error) from error

    def _fetch(self, number: int) -> bytes:
        offset = number * _PIECE_BYTES
        length = min(_PIECE_BYTES, self._file.size - offset)
        data = self._read(offset, length)
        if len(data) > length:
            raise OSError("the server sends whole files where a range is asked for; download the file")
        if len(data) != length:
            raise OSError(f"{len(data)} bytes of {length} from byte {offset} on")
        return data


def _check_harmless(url: str) -> None:
    refuse_credentials(url, "the URL of a source")
    if "=" in url.rpartition("?")[2].partition("#")[0] and "?" in url:
        shown = url.partition("://")[0]
        raise UsageError(f"a {shown}:// URL with a query in it, which is recorded: give a URL without one")


def _system(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise MissingDependency(f"a source at a URL needs fsspec; run: {install_command('s3')}") from error
    try:
        system, path = url_to_fs(url)
    except ImportError as error:
        package = _PACKAGES.get(url.partition(":")[0])
        raise MissingDependency(
            f"{url}: its file system is that of {package}; run: pip install {package}"
            if package
            else f"{url}: {error}; install that package"
        ) from error
    except ValueError as error:
        raise UsageError(f"{url}: {error}") from error
    return system, str(path)


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
    """Return a client's error on one line, without credentials: it may contain a signed URL."""
    return redact(" ".join(f"{type(error).__name__}: {error}".split()))[:300]


def _is_bucket(url: str) -> bool:
    return url.partition("://")[0].lower() in OBJECT_SCHEMES


def foreign_store(address: Address) -> ForeignStore:
    """Return a cached client of a foreign bucket or folder; creating one takes a tenth of a second."""
    settings = hash(tuple(sorted(one for one in os.environ.items() if one[0].startswith(_SETTINGS))))
    return _store_for(address, settings)


@functools.lru_cache(maxsize=16)
def _store_for(address: Address, settings: int) -> ForeignStore:
    """Cached per environment: other credentials or another endpoint need another client."""
    return ForeignStore(address, read_only=True)


def _list_bucket(
    url: str, choose: Chooser, left_out: dict[str, str], *, skip: bool
) -> tuple[list[SourceFile], bool]:
    """Do `list_url` for an object store; in a glob, ``*`` and ``?`` stop at a slash and ``**`` does not.

    Names of objects and folders that hold wildcards go before globs.
    """
    scheme, _, rest = url.partition("://")
    name, _, key = rest.partition("/")
    key = key.rstrip("/")
    bucket = foreign_store(parse_address(f"{scheme}://{name}"))
    try:
        found = None if not key or url.endswith("/") else bucket.head(key)
        if found is not None:
            return [_object(bucket, key, key.rpartition("/")[0], found)], True
        folder = _literal_folder(bucket, key)
        prefix = f"{folder}/" if folder else ""
        wanted = _pattern(url, prefix, key) if folder != key else None
        listed = dict(bucket.list_keys(prefix))
        names = {n.removeprefix(prefix): n for n in listed if wanted is None or wanted.fullmatch(n)}
        files = [
            _object(bucket, names[name], folder, listed[names[name]])
            for name in choose(names, wanted is None)
            if _is_readable(bucket.url, names[name], left_out if skip else None)
        ]
    except StoreError as error:
        raise SourceError(f"{url}: cannot be listed ({error})") from error
    if not files:
        raise NotFoundError(f"{url}: no files there; check the URL")
    return files, False


def _is_readable(url: str, key: str, left_out: dict[str, str] | None) -> bool:
    """Return False if no client reads a key, such as ``a//b``; it is refused, or added to `left_out`."""
    try:
        check_key(url, key)
    except UsageError as error:
        if left_out is None:
            raise SourceError(f"{error}, or leave it out: --on-error skip") from None
        left_out[key] = "what has a key that cannot be read"
        return False
    return True


def stat_file(file: SourceFile) -> ObjectStat:
    """Return the current state of a file in an object store, or at another URL whose server answers ranges."""
    try:
        address, key = split_url(file.path)
        found = foreign_store(address).head(key)
        if found is not None and found.size and not _is_bucket(file.path):
            foreign_store(address).get_range(key, found.size - 1, 1)
    except StoreError as error:
        raise SourceError(f"{file.path}: cannot be looked at ({error})") from error
    if found is None:
        raise SourceError(f"{file.path}: it is gone; build from a source that nobody writes to")
    return found


def _object(bucket: ForeignStore, key: str, folder: str, found: ObjectStat) -> SourceFile:
    stamp = f"ETag {found.etag}" if found.etag else "unknown"
    return SourceFile(key.removeprefix(folder).lstrip("/"), f"{bucket.url}/{key}", found.size, stamp)


def _literal_folder(bucket: ForeignStore, key: str) -> str:
    """Return the leading folders of a key or glob: a folder may be called ``v[1]``."""
    parts = key.split("/")
    for number, part in enumerate(parts):
        folder = "/".join(parts[: number + 1])
        is_glob = _WILDCARD.search(part) and ("*" in part or not any(bucket.list_keys(f"{folder}/")))
        if is_glob:
            return "/".join(parts[:number])
    return key


def _pattern(url: str, prefix: str, key: str) -> re.Pattern[str]:
    from fsspec.utils import glob_translate

    try:
        return re.compile(re.escape(prefix) + glob_translate(key.removeprefix(prefix)))
    except ValueError as error:
        raise UsageError(f"{url}: {error}") from None
