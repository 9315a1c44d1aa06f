"""Marks and deletion lists of garbage, and the check that a commit makes against them.

A writer that finds an object in the root does not put it again. If the object were deleted before the commit, a version
would name a missing object. So a deletion is announced in the log first, and a commit that names one of its objects is
refused (SPEC.md, "Garbage"). This does not depend on clocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from shardkit.documents import (
    Document,
    Name,
    Record,
    Time,
    decode,
    encode,
    seconds_of,
    sha256_digest,
    utc_text,
)
from shardkit.errors import CommitConflict, FormatError, IntegrityError, NotFoundError, ShardkitError
from shardkit.extras import shell_word
from shardkit.reading.inventory import walk_versions
from shardkit.repository.log import Deletion, LogEntry
from shardkit.stores.store import Store, parse_object_name, put_over

MAX_NAMES: Final = 100_000
"""Maximum number of objects that one call marks or deletes; the next call continues."""

_MARKS: Final = "gc/marked.json"
_LISTS: Final = "gc/lists/"
_MAX_LISTS: Final = 64
_MAX_BYTES: Final = 32 * 2**20

_Names = Annotated[tuple[Name, ...], Meta(max_length=MAX_NAMES)]


class _Round(Record, frozen=True):
    """Objects that were marked at the same time."""

    time: Time
    names: _Names


class _Marks(Document, frozen=True, tag="shardkit-marked/1"):
    rounds: Annotated[tuple[_Round, ...], Meta(max_length=MAX_NAMES)]


class _Garbage(Document, frozen=True, tag="shardkit-garbage/1"):
    """Names of the objects of a deletion."""

    names: _Names


def read_marks(store: Store) -> dict[str, int]:
    """Return the time of each object's mark, in seconds since 1970.

    If the marks are damaged or missing, the result is empty: the objects are marked again, with a new grace period.
    """
    try:
        data = store.get(_MARKS, max_bytes=_MAX_BYTES)
        marks = decode(_Marks, data, _MARKS, max_bytes=_MAX_BYTES)
        return {name: seconds_of(one.time) for one in marks.rounds for name in one.names}
    except (NotFoundError, FormatError, IntegrityError):
        return {}


def write_marks(store: Store, marks: Mapping[str, int]) -> None:
    """Replace the marks. If two callers race, the last one wins, and the next round marks the rest again."""
    rounds: dict[int, list[str]] = {}
    for name, seconds in sorted(marks.items())[:MAX_NAMES]:
        rounds.setdefault(seconds, []).append(name)
    listed = tuple(_Round(utc_text(seconds), tuple(names)) for seconds, names in sorted(rounds.items()))
    put_over(store, _MARKS, encode(_Marks(listed)))


def read_list(store: Store, deletion: Deletion) -> tuple[str, ...]:
    """Return the names of the objects of a deletion.

    Raises:
        NotFoundError: The list is missing.
        IntegrityError: The list is damaged.
        FormatError: The list is not valid.
    """
    name = _list_name(deletion)
    data = store.get(name, max_bytes=_MAX_BYTES)
    if sha256_digest(data) != deletion.names:
        raise IntegrityError(
            f"{name} in {store.url}: its SHA-256 is another; run: shardkit repair {shell_word(store.url)}"
        )
    names = decode(_Garbage, data, name, max_bytes=_MAX_BYTES).names
    for one in names:
        parse_object_name(one)  # a list may name only objects
    return names


def forget_lists(store: Store, head: LogEntry) -> None:
    """Delete all but the newest lists. A commit that needs an older list is a conflict."""
    current = _list_name(head.deletion) if head.deletion else ""
    for name in sorted(store.list_after(_LISTS))[:-_MAX_LISTS]:
        if name != current:
            store.delete(name)


def _list_name(deletion: Deletion) -> str:
    return f"{_LISTS}{deletion.begun:020d}-{deletion.names.removeprefix('sha256:')}.json"


def put_list(store: Store, begun: int, names: Iterable[str]) -> Deletion:
    """Put the list of objects of the deletion that log entry `begun` will announce."""
    data = encode(_Garbage(tuple(sorted(names))))
    deletion = Deletion(begun, sha256_digest(data))
    store.put_new(_list_name(deletion), data)
    return deletion


def check_not_deleted(
    store: Store,
    commits: Iterable[LogEntry],
    opened: LogEntry,
    newest: Deletion,
    versions: Collection[str],
    problem: ShardkitError | None = None,
) -> None:
    """Refuse a commit that names an object that is being deleted, or was deleted since its writer began.

    Args:
        store: Store of the root.
        commits: Newest first.
        opened: Head when the writer opened the repository; it looked for objects only after that.
        newest: Newest deletion in the log.
        versions: Manifest ids that the commit names.
        problem: Why the commit failed; a deletion may be the reason.

    Raises:
        CommitConflict: The writer must put the objects again.
    """
    found = {opened.deletion} if opened.deletion and not opened.deletion.is_ended else set[Deletion]()
    if newest.begun > opened.n:
        for entry in commits:
            if entry.n <= opened.n:
                break
            if entry.deletion is not None and entry.deletion.begun > opened.n:
                found.add(msgspec.structs.replace(entry.deletion, is_ended=False))
    if not found and newest.is_ended:
        return
    if problem is not None:
        raise CommitConflict(
            f"{store.url}: garbage was deleted while this was prepared, which may be why it failed ({problem}); "
            "run the same command again"
        ) from problem
    under_way = None if newest.is_ended else newest
    try:
        going = set(read_list(store, under_way)) if under_way else set[str]()
        ended = sorted((one for one in found if one != under_way), key=lambda one: one.begun)
        gone = {name for one in ended for name in read_list(store, one)} - going
        needed = {name for one in walk_versions(store, versions) for name, _ in one.names()}
    except ShardkitError as error:
        raise CommitConflict(
            f"{store.url}: garbage was deleted meanwhile, and its list cannot be compared ({error}); run the same "
            "command again"
        ) from error
    names = sorted(going & needed)
    names += [name for name in sorted(gone & needed) if store.head(name) is None]
    if names:
        raise CommitConflict(
            f"{store.url}: {len(names)} objects that this commit names, such as {names[0]}, are being deleted as "
            "garbage; run the same command again when that is done (a deletion that was killed is finished by: "
            f"shardkit gc {shell_word(store.url)} --delete --grace 0s)"
        )
