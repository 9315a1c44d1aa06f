"""The `Store` protocol, valid names in a store, and names of content-addressed objects.

The name of an object contains the SHA-256 of its bytes, as ``sha256sum`` prints it. The suite in
`shardkit.testing.store_conformance` tests all implementations.
"""

from __future__ import annotations

import abc
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

from shardkit.documents import parse_digest, sha256_digest
from shardkit.errors import (
    FormatError,
    IntegrityError,
    NotFoundError,
    ShardkitError,
    StoreError,
    StoreReadOnlyError,
    UsageError,
)
from shardkit.extras import shell_word
from shardkit.ranges import shown
from shardkit.stores.file_operations import explained

_Result = TypeVar("_Result")

Parse: TypeAlias = Callable[[bytes, str], _Result]
"""Parses (bytes, name for messages); raises IntegrityError or FormatError if the bytes are damaged."""

_MAX_NAME: Final = 512  # bytes; all object stores and file systems accept this

MAX_OBJECT_BYTES: Final = 5 * 2**30
"""Maximum size of an object in bytes: the largest single upload that object stores accept."""

_COMPONENT: Final = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}"
_NAME: Final = re.compile(rf"[a-z0-9][A-Za-z0-9._-]{{0,199}}(?:/{_COMPONENT})*")
_PRIVATE: Final = "tmp/"
_SCHEME: Final = re.compile(r"((?:[A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*)://")


class ObjectStat(NamedTuple):
    """Properties of an object that a store reports without reading it."""

    size: int
    """Size in bytes."""
    sha256: str | None
    """Hex digest that the store itself keeps; None if it keeps none, as for local files."""
    etag: str = ""
    """Changes whenever the bytes change; empty if the store has none."""


class Stage(abc.ABC):
    """Object being written to a store in pieces; counted and hashed, and visible only after it is published.

    Args:
        path: path of the temporary file, for messages.
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
        """True if a write failed, so that the stage can only be dropped."""
        return self._broken

    @property
    def digest(self) -> str:
        """SHA-256 of the bytes written so far, as hex."""
        return self._hash.hexdigest()

    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        """Append all of `data` and return its length; after an error the stage can only be dropped."""
        rest = memoryview(data).cast("B")
        length = len(rest)
        check_size(self._size + length)
        with explained(f"write {self._path}", writing=True):
            self._check_whole()
            self._broken = True
            while len(rest):  # a full disk writes a part without an error; only the next call reports one
                written = self._append(rest)
                self._hash.update(rest[:written])
                rest = rest[written:]
            self._broken = False
        self._size += length
        return length

    def sync(self) -> None:  # noqa: B027 (most have nothing to do)
        """Make the bytes written so far durable, if the store can."""

    @abc.abstractmethod
    def publish(self, name: str, *, replace: bool = False) -> bool:
        """Publish the bytes under a name, durably and atomically.

        Args:
            name: the final name.
            replace: overwrite an existing object; for healing, with bytes of the name's digest.

        Returns:
            True if this call created or replaced the object; False if the name existed and was left as it is.
        """

    @abc.abstractmethod
    def _append(self, data: memoryview) -> int:
        """Write at least a part of `data` and return the number of bytes written."""

    def _check_whole(self) -> None:
        if self._broken:
            raise StoreError(f"{self._path}: an earlier write failed, the file is incomplete; start it again")


@runtime_checkable
class Store(Protocol):
    """A root that holds immutable objects under names.

    All implementations raise `StoreError` or a subclass if the store does not answer or refuses, `NotFoundError` for a
    missing name, `IntegrityError` for an unexpected size, and `UsageError` for an invalid name. An object that is
    listed or read is always complete.
    """

    @property
    def url(self) -> str:
        """Path or URL of the store, without credentials."""

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """Return the whole object; raise IntegrityError, before reading, if it is larger than `max_bytes`."""

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`; raise IntegrityError if the object is shorter."""

    def put_new(self, name: str, data: bytes) -> bool:
        """Create an object durably without overwriting.

        After an error the name is either absent or complete; read it back to find out.

        Returns:
            True if this call created the object; False if the name existed, in which case that object is durable.
        """

    def replace(self, name: str, data: bytes) -> None:
        """Overwrite an object durably and atomically; for healing, with bytes of its digest."""

    def head(self, name: str) -> ObjectStat | None:
        """Return size and stored checksum of an object, or None if the name does not exist."""

    def list_after(self, prefix: str, after: str = "") -> Iterator[str]:
        """Yield names in the folder `prefix` (``""`` or ending in ``/``) and below, after `after`, in byte order."""

    def delete(self, name: str) -> None:
        """Remove an object durably; no error if the name does not exist."""

    def stage(self, suffix: str = "") -> AbstractContextManager[Stage]:
        """Write a large object in pieces; the stage is dropped at the end of the context unless published."""

    def local_path(self, name: str) -> Path | None:
        """Return the object's file, or None if it does not exist or is not a local file."""


class DirectStore(abc.ABC):
    """Base class of stores that hold the bytes themselves; checks sizes, ranges and access."""

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
                f"{name} in {self.url}: {size} bytes, expected at most {max_bytes}; run: "
                f"shardkit verify {shell_word(self.url)}"
            )

    def _check_length(self, name: str, found: int, expected: int) -> None:
        if found != expected:
            raise IntegrityError(
                f"{name} in {self.url}: {found} bytes came, {expected} were expected; run: "
                f"shardkit repair {shell_word(self.url)}"
            )

    def _check_range(self, name: str, offset: int, length: int, size: int | None = None) -> None:
        """Raise UsageError for a negative range, IntegrityError for one past the end of an object of `size` bytes."""
        if offset < 0 or length < 0:
            raise UsageError(
                f"{name}: range ({offset}, {length}): expected an offset and a length of 0 or more"
            )
        if size is not None and offset + length > size:
            raise IntegrityError(
                f"{name} in {self.url}: {size} bytes, expected at least {offset + length}; run: shardkit repair "
                f"{shell_word(self.url)}"
            )


class StoreAround(abc.ABC):
    """Base class of stores that wrap another store and change how it is read; other calls are passed through.

    May be used from any thread, after a fork, and pickled.
    """

    @property
    @abc.abstractmethod
    def inner(self) -> Store:
        """The wrapped store."""

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
    """Return the components of a valid name.

    Names consist of ASCII letters, digits, ``. _ -``, and ``/`` between components. No component starts with a dot or a
    dash, so no name contains ``..`` or looks like an option of a tool.

    Raises:
        UsageError: The name is invalid.
    """
    if len(name) > _MAX_NAME or _NAME.fullmatch(name) is None or name.startswith(_PRIVATE) or name == "tmp":
        raise UsageError(
            f"store name {name[:200]!r}: expected at most {_MAX_NAME} of [A-Za-z0-9._/-], starting with a lower-case "
            f'letter or digit, no component starting with "." or "-", not below "{_PRIVATE}"; use another '
            "name"
        )
    return tuple(name.split("/"))


def is_name(name: str) -> bool:
    """Return True if a listed name is valid; temporaries and foreign objects are not listed."""
    try:
        check_name(name)
    except UsageError:
        return False
    return True


def check_prefix(prefix: str) -> tuple[str, ...]:
    """Return the components of a folder prefix: ``""`` or a name followed by ``/``.

    Raises:
        UsageError: The prefix is invalid.
    """
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
    "rows",
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
"""Kinds of object. The extension helps people and other tools; the digest alone identifies an object."""


class Descriptor(NamedTuple):
    """Digest, size and kind of an object: enough to fetch and verify it."""

    digest: str
    """``sha256:<64 hex>`` of the bytes."""
    size: int
    """Size in bytes; compared before the object is read."""
    extension: str

    @property
    def name(self) -> str:
        """Name of the object in a store."""
        return object_name(self.digest, self.extension)


def object_name(digest: str, extension: str) -> str:
    """Return the name of an object: ``objects/sha256/ab/<hex>.<extension>``.

    Raises:
        FormatError: `digest` is not ``sha256:<64 hex>``.
        UsageError: The extension is not one of `EXTENSIONS`.
    """
    if extension not in EXTENSIONS:
        raise UsageError(f"object extension {extension!r}: expected one of {', '.join(EXTENSIONS)}")
    hexadecimal = parse_digest(digest)
    return f"objects/sha256/{hexadecimal[:2]}/{hexadecimal}.{extension}"


def parse_object_name(name: str) -> tuple[str, str]:
    """Return (digest, extension) of an object's name.

    Raises:
        FormatError: The name is not one that `object_name` returns.
    """
    hexadecimal, _, extension = name.rpartition("/")[2].partition(".")
    digest = f"sha256:{hexadecimal}"
    if extension not in EXTENSIONS or object_name(digest, extension) != name:
        raise FormatError(
            f"{name!r} is not the name of an object; remove it from objects/, nothing refers to it"
        )
    return digest, extension


def check_size(size: int) -> None:
    """Raise UsageError if an object is larger than stores accept."""
    if size > MAX_OBJECT_BYTES:
        raise UsageError(f"object of {size} bytes: expected at most {MAX_OBJECT_BYTES}; use smaller samples")


def read_object(
    store: Store, digest: str, extension: str, size: int | None = None, *, max_bytes: int = MAX_OBJECT_BYTES
) -> bytes:
    """Read an object and verify it; wrong bytes are read once more.

    Args:
        store: store of the object.
        digest: ``sha256:<hex>``.
        extension: one of `EXTENSIONS`.
        size: exact size in bytes; None if unknown.
        max_bytes: maximum size if `size` is unknown.

    Raises:
        IntegrityError: The bytes have another digest or size.
        NotFoundError: There is no such object.
    """
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
                f"run: shardkit repair {shell_word(store.url)}"
            )
        return data

    return asked_twice(ask)


def asked_twice(ask: Callable[[], _Result]) -> _Result:
    """Return the result of `ask`, which is called once more after an IntegrityError or a FormatError."""
    try:
        return ask()
    except (IntegrityError, FormatError):
        return ask()


def add_advice(error: ShardkitError, root: Store) -> ShardkitError:
    """Return the error of a damaged document with the command that repairs it."""
    told = str(error)
    return error if "run: " in told else type(error)(f"{told}; run: shardkit repair {shell_word(root.url)}")


def read_checked(
    store: Store, name: str, parse: Parse[_Result], *, max_bytes: int, is_optional: bool = False
) -> _Result:
    """Read and parse a document that has no digest in its name, such as the identity, the log or a parity document.

    Args:
        store: store of the document.
        name: name of the document.
        parse: parses and validates the bytes; damaged bytes are read again.
        max_bytes: maximum size.
        is_optional: whether a missing document is expected, so that a store of several locations asks only its root.

    Raises:
        NotFoundError: There is no such document.
    """
    if isinstance(store, StoreAround):
        return store.read_checked(name, parse, max_bytes=max_bytes, is_optional=is_optional)
    try:
        return asked_twice(lambda: parse(store.get(name, max_bytes=max_bytes), f"{name} in {store.url}"))
    except IntegrityError as error:
        raise add_advice(error, store) from None


def find_checked(store: Store, name: str, parse: Parse[_Result], *, max_bytes: int) -> _Result | None:
    """Read an optional document as `read_checked` does; return None if it does not exist."""
    try:
        return read_checked(store, name, parse, max_bytes=max_bytes, is_optional=True)
    except NotFoundError:
        return None


def root_store(store: Store) -> Store:
    """Return the root's own store, unwrapped from every `StoreAround`."""
    while isinstance(store, StoreAround):
        store = store.inner
    return store


def put_over(store: Store, name: str, data: bytes) -> None:
    """Write a small document, replacing one with other content."""
    if store.put_new(name, data):
        return
    try:
        is_same = store.get(name, max_bytes=len(data)) == data
    except (IntegrityError, NotFoundError):
        is_same = False
    if not is_same:
        store.replace(name, data)


def place_text(place: object, what: str) -> str:
    """Return a path or URL as text.

    Raises:
        UsageError: The value is no path, ``what`` names it, or begins with ``~``, which a shell has not expanded.
    """
    text = place if isinstance(place, str) else os.fspath(place) if isinstance(place, os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:
        raise UsageError(f"{what}: {shown(place)} is no path or URL; give text such as data/cats")
    if text == "~" or text.startswith("~/"):
        raise UsageError(f"{text!r}: only a shell expands ~; write the path, here {os.path.expanduser(text)}")
    return text


def absolute_path(place: str | os.PathLike[str]) -> str:
    """Return a path as an absolute one, or raise NotFoundError: it is relative, and the current folder was removed."""
    try:
        return os.path.abspath(place)
    except FileNotFoundError:
        raise NotFoundError(
            "the current folder no longer exists; change to another one, then run it again"
        ) from None


def scheme_of(place: str) -> str | None:
    """Return the scheme of a URL in lower case, including chained ones (``a::b``); None for a local path."""
    match = _SCHEME.match(place)
    return match[1].lower() if match else None
