"""Collections of garbage: in the log and below ``gc/``, and what a commit checks by that (SPEC.md, "Garbage").

Numbers and names only, no data rests on them. A writer that finds an object in the root does not put it again; were
that object collected meanwhile, the commit would dangle. Collections therefore stand in the log, and commits look
there: no clock is involved.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from shardkit.errors import CommitConflict, FormatError, IntegrityError, NotFoundError, ShardkitError
from shardkit.formats.canonical_json import (
    TIME,
    dumps,
    parse_digest,
    read_document,
    seconds_of,
    sha256_digest,
    utc_text,
)
from shardkit.reading.inventory import walk_versions
from shardkit.repository.log import LogEntry
from shardkit.stores.store import Store, parse_object_name

MAX_NAMES: Final = 100_000
"""Of one document: a collection takes at most so many objects, the next one the rest."""

_SEEN: Final = "gc/seen/"
_LISTS: Final = "gc/lists/"
_LIST: Final = re.compile(r"gc/lists/([0-9a-f]{64})\.json")
_AGES: Final = "gc/ages/"
_AGE: Final = re.compile(r"gc/ages/([0-9]{4}-[0-9]{2}-[0-9]{2})/([0-9a-f]{64})")
_AGED_AT_ONCE: Final = 64
_MAX_BYTES: Final = 32 * 2**20


class Seen(NamedTuple):
    """Objects that a round found unreferenced."""

    document: str
    """Its name in the store."""
    time: int
    """Seconds since 1970, by the clock of who looked."""
    names: frozenset[str]
    """Of the objects."""


def put_seen(store: Store, seconds: int, names: Iterable[str]) -> None:
    """Remember, durably, that objects were unreferenced."""
    ordered = sorted(names)
    for first in range(0, len(ordered), MAX_NAMES):
        data = _document("shardkit-unreferenced/1", seconds, ordered[first : first + MAX_NAMES])
        store.put_new(f"{_SEEN}{uuid.uuid4().hex}.json", data)


def list_seen(store: Store) -> Iterator[Seen]:
    """All that earlier rounds remembered; what is damaged or gone is passed over: it is found again."""
    for name in list(store.list_after(_SEEN)):
        try:
            seconds, names = _read(store.get(name, max_bytes=_MAX_BYTES), "shardkit-unreferenced/1", name)
        except (NotFoundError, FormatError, IntegrityError):
            continue
        yield Seen(name, seconds, frozenset(names))


def put_list(store: Store, seconds: int, names: Sequence[str]) -> str:
    """Put what a collection takes away; the digest by which the log names it."""
    data = _document("shardkit-garbage/1", seconds, sorted(names))
    digest = sha256_digest(data)
    _put_age(store, _list_name(digest), seconds)
    store.put_new(_list_name(digest), data)
    return digest


def read_list(store: Store, digest: str) -> tuple[str, ...]:
    """What a collection takes away; NotFoundError, IntegrityError or FormatError where the list is gone or damaged."""
    name = _list_name(digest)
    data = store.get(name, max_bytes=_MAX_BYTES)
    if sha256_digest(data) != digest:
        raise IntegrityError(
            f"{name} in {store.url}: its SHA-256 is another; restore it from a copy of the root"
        )
    return _read(data, "shardkit-garbage/1", name)[1]


def forget_lists(store: Store, now: int, keep_s: int, keep: Iterable[str]) -> None:
    """Delete lists of collections that ended long ago; no list is read whose age is known (SPEC.md, "Old lists")."""
    kept = {_list_name(digest) for digest in keep}
    lists = {name for name in store.list_after(_LISTS) if _LIST.fullmatch(name)}
    last_day = utc_text(now - keep_s)[:10]
    for age in list(store.list_after(_AGES)):
        match = _AGE.fullmatch(age)
        if match is None:
            continue  # not ours
        name = f"{_LISTS}{match[2]}.json"
        if match[1] < last_day and name not in kept:
            store.delete(name)
            store.delete(age)  # after the list: a killed call leaves a name that says when the rest may go
        lists.discard(name)
    for name in sorted(lists - kept)[:_AGED_AT_ONCE]:
        try:
            seconds, _ = _read(store.get(name, max_bytes=_MAX_BYTES), "shardkit-garbage/1", name)
        except (NotFoundError, FormatError, IntegrityError):
            seconds = now
        _put_age(store, name, seconds)


def _put_age(store: Store, list_name: str, seconds: int) -> None:
    digest = list_name.removeprefix(_LISTS).removesuffix(".json")
    store.put_new(f"{_AGES}{utc_text(seconds)[:10]}/{digest}", b"")


def _list_name(digest: str) -> str:
    return f"{_LISTS}{parse_digest(digest)}.json"


def _document(kind: str, seconds: int, names: Sequence[str]) -> bytes:
    return dumps({"format": kind, "time": utc_text(seconds), "names": list(names)})


def _read(data: bytes, kind: str, where: str) -> tuple[int, tuple[str, ...]]:
    fields = read_document(data, where, kind, ("time", "names"), _MAX_BYTES)
    names = fields.texts("names", maximum=MAX_NAMES)
    for name in names:
        parse_object_name(name)  # nothing but objects is ever deleted by such a list
    return seconds_of(fields.text("time", pattern=TIME)), names


def check_not_collected(
    store: Store,
    commits: Iterable[LogEntry],
    opened: LogEntry,
    head: LogEntry,
    versions: Collection[str],
    problem: ShardkitError | None = None,
) -> None:
    """Refuse a commit that names what is being collected, or what was collected since the writer began."""
    if not versions:
        return
    gone = set(opened.collecting.values())
    for entry in commits if head.collected != opened.collected else ():
        if entry.n <= opened.n:
            break
        gone |= set(entry.collecting.values())
    going = set(head.collecting.values())
    if problem is not None:
        raise CommitConflict(
            f"{store.url}: garbage was collected while this was prepared, which may be why it failed ({problem}); "
            "run the same command again"
        ) from problem
    try:
        lost = {name for digest in sorted(going) for name in read_list(store, digest)}
        doubtful = {name for digest in sorted(gone - going) for name in read_list(store, digest)} - lost
        needed = {name for one in walk_versions(store, versions) for name, _ in one.names()}
    except ShardkitError as error:
        raise CommitConflict(
            f"{store.url}: garbage was collected meanwhile, and what was cannot be compared ({error}); run the "
            "same command again"
        ) from error
    names = sorted(lost & needed)
    names += [name for name in sorted(doubtful & needed) if store.head(name) is None]
    if names:
        raise CommitConflict(
            f"{store.url}: {len(names)} objects that this commit names, such as {names[0]}, are being collected "
            "as garbage; run the same command again when that is done (a collection that was killed is finished by: "
            f"shardkit gc {store.url} --delete)"
        )
