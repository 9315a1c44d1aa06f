"""The one protocol that every store implements, and the names in a store: those it accepts, and those of objects.

An object is called by the SHA-256 of its bytes, as ``sha256sum`` prints it. The suite in
`shardkit.testing.store_conformance` is run on all implementations.
"""

from __future__ import annotations

import abc
import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

from shardkit.errors import (
    FormatError,
    IntegrityError,
    NotFoundError,
    StoreError,
    StoreReadOnlyError,
    UsageError,
)
from shardkit.formats.canonical_json import parse_digest, sha256_digest
from shardkit.stores.file_operations import explained

_Result = TypeVar("_Result")

Parse: TypeAlias = Callable[[bytes, str], _Result]
"""(bytes, how messages name them) → what they say; IntegrityError, FormatError: they are not what was written."""

_MAX_NAME: Final = 512  # bytes: every object store and every file system takes it

MAX_OBJECT_BYTES: Final = 5 * 2**30
"""The largest single upload that object stores take, and so the largest object."""

_COMPONENT: Final = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}"
_NAME: Final = re.compile(rf"[a-z0-9][A-Za-z0-9._-]{{0,199}}(?:/{_COMPONENT})*")
_PRIVATE: Final = "tmp/"
_SCHEME: Final = re.compile(r"((?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*)://")


class ObjectStat(NamedTuple):
    """What a store knows of an object without reading it."""

    size: int
    """Bytes."""
    sha256: str | None
    """Hex digest that the store itself keeps of the bytes, None where it keeps none (local files)."""
    etag: str = ""
    """Another one as soon as the bytes are others; empty where the store has none."""


class Stage(abc.ABC):
    """An object on its way into a store: written piece by piece, counted and hashed, visible only once published.

    Args:
        path: of the file that holds it meanwhile, for messages.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._size = 0
        self._hash = hashlib.sha256()
        self._broken = False

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._size

    @property
    def is_broken(self) -> bool:
        """Whether a write failed, so that the stage can only be dropped."""
        return self._broken

    @property
    def digest(self) -> str:
        """SHA-256 of what was written so far, as hex."""
        return self._hash.hexdigest()

    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        """Append all of `data`; returns its length. After an error the stage can only be dropped."""
        rest = memoryview(data).cast("B")
        length = len(rest)
        check_size(self._size + length)
        with explained(f"write {self._path}", writing=True):
            self._check_whole()
            self._broken = True
            while len(rest):  # a full disk takes a part and reports no error: only the next call does
                written = self._append(rest)
                self._hash.update(rest[:written])
                rest = rest[written:]
            self._broken = False
        self._size += length
        return length

    def sync(self) -> None:  # noqa: B027 (most have nothing to do)
        """Make durable what was written so far, where the store can."""

    @abc.abstractmethod
    def publish(self, name: str, *, replace: bool = False) -> bool:
        """Give the bytes their name, durably and all at once.

        Returns:
            True where this call created the name, False where it existed (which is then left as it is, unless
            `replace`: for healing, with bytes of the same digest).
        """

    @abc.abstractmethod
    def _append(self, data: memoryview) -> int:
        """Write at least a part of `data`; how much."""

    def _check_whole(self) -> None:
        if self._broken:
            raise StoreError(f"{self._path}: an earlier write failed, the file is incomplete; start it again")


@runtime_checkable
class Store(Protocol):
    """A root that holds immutable objects under names.

    Errors of every implementation: `StoreError` and its kinds when the store does not answer or refuses,
    `NotFoundError` for a name that does not exist, `IntegrityError` for bytes of another size than expected,
    `UsageError` for a name that no store takes. A name that is listed or read is always complete.
    """

    @property
    def url(self) -> str:
        """Where the store is, without credentials."""

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """The whole object, after its size has been compared with `max_bytes`."""

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; IntegrityError where the object is shorter."""

    def put_new(self, name: str, data: bytes) -> bool:
        """Create durably, never overwrite: True if this call created the name, False if it existed.

        False also promises that the object that was there is durable. After an error the name is either
        absent or complete: read it back to know.
        """

    def replace(self, name: str, data: bytes) -> None:
        """Put bytes over an object, durably and in one step: for healing, with bytes of its digest."""

    def head(self, name: str) -> ObjectStat | None:
        """Size and stored checksum, None where the name does not exist."""

    def list_after(self, prefix: str, after: str = "") -> Iterator[str]:
        """Names under the folder `prefix` (``""`` or ending in ``/``) after `after`, in byte order."""

    def delete(self, name: str) -> None:
        """Remove durably; no error where the name does not exist."""

    def stage(self, suffix: str = "") -> AbstractContextManager[Stage]:
        """Write a large object piece by piece; what is not published when the context ends is dropped."""

    def local_path(self, name: str) -> Path | None:
        """The file that holds the object, None where it is not a local file or does not exist."""


class DirectStore(abc.ABC):
    """What stores that hold the bytes themselves share: names, sizes, ranges and rights are checked in one way."""

    _read_only: bool

    @property
    @abc.abstractmethod
    def url(self) -> str: ...

    @property
    def read_only(self) -> bool:
        return self._read_only

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, read_only={self._read_only})"

    def _check_writable(self, name: str) -> None:
        if self._read_only:
            raise StoreReadOnlyError(
                f"cannot write {name}: {self.url} was opened for reading only; open it for writing"
            )

    def _check_size(self, name: str, size: int, max_bytes: int) -> None:
        if size > max_bytes:
            raise IntegrityError(
                f"{name} in {self.url}: {size} bytes, expected at most {max_bytes}; run: shardkit verify {self.url}"
            )

    def _check_length(self, name: str, found: int, expected: int) -> None:
        if found != expected:
            raise IntegrityError(
                f"{name} in {self.url}: {found} bytes came, {expected} were expected; run: shardkit repair {self.url}"
            )

    def _check_range(self, name: str, offset: int, length: int, size: int | None = None) -> None:
        """Refuse a range below zero (UsageError) and one past the end of an object of `size` bytes."""
        if offset < 0 or length < 0:
            raise UsageError(
                f"{name}: range ({offset}, {length}): expected an offset and a length of 0 or more"
            )
        if size is not None and offset + length > size:
            raise IntegrityError(
                f"{name} in {self.url}: {size} bytes, expected at least {offset + length}; run: shardkit repair "
                f"{self.url}"
            )


class StoreAround(abc.ABC):
    """A store that reads another one in its own way; what is listed, written and deleted there goes through.

    May be used from any thread, after a fork, and pickled.
    """

    @property
    @abc.abstractmethod
    def inner(self) -> Store:
        """The store below."""

    @property
    def url(self) -> str:
        return self.inner.url

    def read_checked(
        self, name: str, parse: Parse[_Result], *, max_bytes: int, is_optional: bool = False
    ) -> _Result:
        return read_checked(self.inner, name, parse, max_bytes=max_bytes, is_optional=is_optional)

    def list_after(self, prefix: str, after: str = "") -> Iterator[str]:
        return self.inner.list_after(prefix, after)

    def local_path(self, name: str) -> Path | None:
        return self.inner.local_path(name)

    def put_new(self, name: str, data: bytes) -> bool:
        return self.inner.put_new(name, data)

    def replace(self, name: str, data: bytes) -> None:
        self.inner.replace(name, data)

    def delete(self, name: str) -> None:
        self.inner.delete(name)

    def stage(self, suffix: str = "") -> AbstractContextManager[Stage]:
        return self.inner.stage(suffix)


def check_name(name: str) -> tuple[str, ...]:
    """The components of a valid name.

    Names are plain: ASCII letters, digits, ``. _ -`` and ``/`` between components; no component starts with a
    dot or a dash, so neither ``..`` nor an option of some tool can be spelled.
    """
    if len(name) > _MAX_NAME or _NAME.fullmatch(name) is None or name.startswith(_PRIVATE) or name == "tmp":
        raise UsageError(
            f"store name {name[:200]!r}: expected at most {_MAX_NAME} of [A-Za-z0-9._/-], starting with a lower-case "
            f'letter or digit, no component starting with "." or "-", not below "{_PRIVATE}"; use another '
            "name"
        )
    return tuple(name.split("/"))


def is_name(name: str) -> bool:
    """Whether a listed name is an object's: temporaries and foreign objects are not ours to show."""
    try:
        check_name(name)
    except UsageError:
        return False
    return True


def check_prefix(prefix: str) -> tuple[str, ...]:
    """The components of a folder prefix: ``""`` or a name followed by ``/``; UsageError for any other."""
    if not prefix:
        return ()
    if not prefix.endswith("/"):
        raise UsageError(
            f'store prefix {prefix[:200]!r}: expected "" or a folder ending in "/"; add the slash'
        )
    return check_name(prefix[:-1])


EXTENSIONS: Final = (
    "tar",
    "arrow",
    "index",
    "page",
    "manifest",
    "selection",
    "parity",
    "sources",
    "about",
    "lookup",
    "cost",
    "tensor",
    "checkpoint",
)
"""Kinds of object; the extension is for people and foreign tools, the digest alone identifies."""


class Descriptor(NamedTuple):
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


def check_size(size: int) -> None:
    """Refuse more bytes than any store takes in one piece; UsageError."""
    if size > MAX_OBJECT_BYTES:
        raise UsageError(f"object of {size} bytes: expected at most {MAX_OBJECT_BYTES}; use smaller samples")


def read_object(
    store: Store, digest: str, extension: str, size: int | None = None, *, max_bytes: int = MAX_OBJECT_BYTES
) -> bytes:
    """The bytes of an object, verified."""
    name = object_name(digest, extension)
    if size is not None and not 0 <= size <= MAX_OBJECT_BYTES:
        raise UsageError(f"{name}: size {size}, expected 0 to {MAX_OBJECT_BYTES}")

    def ask() -> bytes:
        data = store.get(name, max_bytes=max_bytes if size is None else size)
        found = sha256_digest(data)
        problem = "" if found == digest else f"SHA-256 mismatch (got {found})"
        if size is not None and len(data) != size:
            problem = f"{len(data)} bytes, expected {size}"
        if problem:
            raise IntegrityError(
                f"{name} in {store.url}: {problem}; the bytes are not those that were written; "
                f"run: shardkit repair {store.url}"
            )
        return data

    return asked_twice(ask)


def asked_twice(ask: Callable[[], _Result]) -> _Result:
    """What `ask` gives; asked once more where what came was not what was written."""
    try:
        return ask()
    except (IntegrityError, FormatError):
        return ask()


def read_checked(
    store: Store, name: str, parse: Parse[_Result], *, max_bytes: int, is_optional: bool = False
) -> _Result:
    """What has no digest in its name, as `parse` understands it: the identity, the log, tables, documents of parity."""
    if isinstance(store, StoreAround):
        return store.read_checked(name, parse, max_bytes=max_bytes, is_optional=is_optional)
    return asked_twice(lambda: parse(store.get(name, max_bytes=max_bytes), f"{name} in {store.url}"))


def find_checked(store: Store, name: str, parse: Parse[_Result], *, max_bytes: int) -> _Result | None:
    """`read_checked` for a document that need not be there: None where it is not."""
    try:
        return read_checked(store, name, parse, max_bytes=max_bytes, is_optional=True)
    except NotFoundError:
        return None


def root_store(store: Store) -> Store:
    """The store of the root itself, below those that read it in their own way."""
    while isinstance(store, StoreAround):
        store = store.inner
    return store


def put_over(store: Store, name: str, data: bytes) -> None:
    """Make a small document say `data`: put where there is none, and over one that says something else."""
    if store.put_new(name, data):
        return
    try:
        is_same = store.get(name, max_bytes=len(data)) == data
    except (IntegrityError, NotFoundError):
        is_same = False
    if not is_same:
        store.replace(name, data)


def scheme_of(place: str) -> str | None:
    """Return the scheme of a URL in lower case, with those chained before it; None for a local path."""
    match = _SCHEME.match(place)
    return match[1].lower() if match else None
