"""Rows of numbered documents: put if absent, never changed, each naming its predecessor (SPEC.md §4)."""

from __future__ import annotations

import abc
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final, Generic, TypeVar

from shardkit.errors import (
    CommitUnknown,
    FormatError,
    IntegrityError,
    NotFoundError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
)
from shardkit.manifest.json_fields import TIME, Fields
from shardkit.stores.store import Store, read_checked

_DIGITS: Final = re.compile(r"[0-9]{20}")
_TXN: Final = re.compile(r"[0-9a-f]{32}")
_PUT_ATTEMPTS: Final = 3


@dataclass(frozen=True, slots=True)
class Numbered(abc.ABC):
    """What all numbered documents say."""

    n: int
    """1 for the first; a row is numbered without gaps."""
    repository: str
    """Id of the repository, so that a document of another one is refused."""
    previous: str
    """SHA-256 of the predecessor's bytes."""
    txn: str
    """Random id, by which its writer knows it again after a lost answer."""
    time: str
    """UTC, for people: nothing depends on it."""
    author: str
    message: str

    @abc.abstractmethod
    def to_bytes(self) -> bytes:
        """Canonical JSON with the digest of the rest of it inside."""

    def numbered(self) -> dict[str, object]:
        """These fields as JSON."""
        return {name: getattr(self, name) for name in NUMBERED}


NUMBERED: Final = tuple(field.name for field in fields(Numbered))


def read_numbered(given: Fields, *, first_has_previous: bool) -> dict[str, Any]:
    """The fields of `Numbered`; the first of a row either has a `previous` as all others, or an empty one."""
    return {
        "n": given.integer("n", minimum=1),
        "repository": given.text("repository", maximum=36),
        "previous": given.digest("previous") if first_has_previous else given.text("previous", maximum=80),
        "txn": given.text("txn", pattern=_TXN),
        "time": given.text("time", pattern=TIME),
        "author": given.text("author", maximum=1_000),
        "message": given.text("message"),
    }


Document_co = TypeVar("Document_co", bound=Numbered, covariant=True)


@dataclass(frozen=True, slots=True)
class Row(Generic[Document_co]):
    """A folder of numbered documents.

    Attributes:
        prefix: the folder, with a slash at its end.
        parse: (bytes, how messages name them) → the document.
        max_bytes: longest document accepted.
    """

    prefix: str
    parse: Callable[[bytes, str], Document_co]
    max_bytes: int

    def name(self, number: int) -> str:
        """``<prefix><20 digits>.json``: byte order is number order."""
        return f"{self.prefix}{number:020d}.json"

    def number(self, name: str) -> int | None:
        """The number in a document's name, None for any other name."""
        digits = name[len(self.prefix) : -len(".json")]
        is_ours = _DIGITS.fullmatch(digits) is not None and self.name(int(digits)) == name
        return int(digits) if is_ours else None

    def read(self, store: Store, number: int, repository: str | None) -> tuple[Document_co, bytes]:
        """A document and its bytes, read as `read_checked` does.

        Args:
            store: of the root.
            number: which.
            repository: whose it must be; None takes its own word for it.

        Raises:
            NotFoundError, IntegrityError, FormatError, StoreError: see `read_checked`.
        """

        def parse(data: bytes, where: str) -> tuple[Document_co, bytes]:
            found = self.parse(data, where)
            if found.n != number or repository not in (None, found.repository):
                raise IntegrityError(
                    f"{where} is number {found.n} of repository {found.repository}, expected {number} of {repository}; "
                    f"run: shardkit repair {store.url}"
                )
            return found, data

        return read_checked(store, self.name(number), parse, max_bytes=self.max_bytes)

    def put(self, store: Store, document: Numbered, *, what: str, then: str) -> bool:
        """Put the next document: True when it is durably there, False when another has its number.

        After an error it is read back and compared, never guessed at: each holds random bits that no other has. Ours
        is put again: that it exists then also says that it is durable.

        Args:
            store: of the root.
            document: to be put.
            what: how messages name the change.
            then: what messages say is to be done once the store or disk was looked at.

        Raises:
            CommitUnknown: the store failed and does not say whether it landed.
            StoreError: the store refused; nothing was changed.
        """
        name, data = self.name(document.n), document.to_bytes()
        failure: StoreError | None = None
        found: bytes | None = None
        for _ in range(_PUT_ATTEMPTS):
            try:
                if store.put_new(name, data):
                    return True
                failure = None
            except StoreError as error:
                failure = error
            try:
                found = self.read(store, document.n, document.repository)[1]
            except NotFoundError:
                found = None
            except (StoreError, IntegrityError, FormatError) as error:
                raise CommitUnknown(
                    f"{what}: writing {name} failed ({failure}) and it cannot be read back ({error}); look at the "
                    f"store, then {then}"
                ) from error
            if found is not None and found != data:
                return False
            if found is not None and failure is None:
                return True
            if found is None and isinstance(failure, (StoreFullError, StoreReadOnlyError)):
                break  # asking again does not help
        if found is None and failure is not None:
            raise failure  # it is not there, and the store says why
        raise CommitUnknown(
            f"{what}: {name} is there but may not survive a power cut; look at the disk, then {then}"
        ) from failure
