"""Faults in the product that the simulation must find: a guard, a check or an order taken out of the real code.

``python -m tests.simulation.run --mutations`` looks for the first seed that finds each. `FOUND_BY` is what it found;
the others were not found in the seeds that were tried.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

import msgspec

from shardkit.copies import collecting, place, placement, replicate, walk
from shardkit.dataset import erasing, removing, store_survey
from shardkit.dataset.rewriting import ErasureJournal
from shardkit.errors import StoreError
from shardkit.formats import reading, sha256_digest
from shardkit.reading import inventory, located_store, objects, read_path
from shardkit.repository import garbage, log
from shardkit.repository import repository as committing
from shardkit.repository.log import entry_name
from shardkit.repository.repository import Repository
from shardkit.stores import file_operations, store
from shardkit.stores.local import LocalStage, LocalStore
from shardkit.stores.remote import object_store
from shardkit.stores.store import object_name

__all__ = ["FOUND_BY", "MUTATIONS", "mutated"]

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


def _replaced(place: Any, name: str, value: Any) -> Patch:
    return lambda: mock.patch.object(place, name, value)


def _answer_taken_for_granted(root: Any, entry: Any) -> bool:
    """A lost answer counts as success."""
    try:
        return bool(root.put_new(entry_name(entry.n), entry.to_bytes()))
    except StoreError:
        return True


def _any_entry_is_ours(root: Any, entry: Any) -> bool:
    """What is read back after an error is not compared with the transaction."""
    try:
        return bool(root.put_new(entry_name(entry.n), entry.to_bytes()))
    except StoreError:
        return root.head(entry_name(entry.n)) is not None


def _put_over(self: Any, name: str, data: bytes) -> bool:
    """Put-if-absent is a plain put."""
    self._try(name, "write", lambda client: client.put(name, data, write_id=None))
    return True


def _unchecked_get(root: Any, digest: str, extension: str, size: int | None = None, **_: Any) -> bytes:
    """An object is taken as it comes."""
    return bytes(root.get(object_name(digest, extension), max_bytes=size or store.MAX_OBJECT_BYTES))


def _unchecked_copy(name: str, sources: Any, target: Any, **_: Any) -> Any:
    """A copy gets its name without a look at its bytes."""
    for source in sources:
        if source.name != target.name:
            data = source.store.get(name, max_bytes=store.MAX_OBJECT_BYTES)
            if not target.store.put_new(name, data):
                target.store.replace(name, data)
            return objects.CopyResult(source.name, len(data))
    return objects.CopyResult(problem=StoreError(name))


def _root_alone(self: Any, repository: Any) -> None:
    """Erasing believes what the root says of its versions, damaged or not."""
    with mock.patch.object(Repository, "open", return_value=repository):
        _SURVEY(self, repository)
    self._named = frozenset()


_SURVEY: Final = store_survey.StoreSurvey.__init__
_COMMIT: Final = erasing._commit
_MARK_LIVE: Final = collecting.mark_live


class _CollectorOfRoot(collecting.Collector):
    """Deletes in the root alone."""

    def __init__(self, repository: Any) -> None:
        super().__init__(repository)
        self.found.stores = {
            name: one for name, one in self.found.stores.items() if name == objects.ROOT_NAME
        }


def _delete_first(repository: Any, plan: Any, report: Any) -> None:
    """Objects are deleted before the commit that lets go of them."""
    for location in placement.Holdings(repository).stores.values():
        for name in report.objects:
            location.store.delete(name)
    _COMMIT(repository, plan, report)


def _publishing(*steps: str) -> Patch:
    """A file gets its name in other steps than file, name, folder."""

    def publish_into(self: Any, folder: Any, name: str, *, replace: bool) -> bool:
        created = True
        for step in steps:
            if step == "file":
                file_operations.active().fsync(self._file)
            elif step == "folder":
                file_operations.active().fsync_directory(folder)
            elif replace:
                file_operations.active().rename(self._folder, self._name, folder, name)
            else:
                created = self._link(folder, name)
        return created

    return _replaced(LocalStage, "publish_into", publish_into)


def _made_unsynced(self: Any, components: Any) -> Any:
    """Folders are made, and may be gone after a power cut with all that is in them."""
    folder = self._make_root()
    for component in components:
        file_operations._make_directory(folder, component)
        folder = file_operations._step(folder, component)
    return folder


def _delete_unsynced(self: Any, name: str) -> None:
    """What was deleted may be back after a power cut."""
    *folders, last = name.split("/")
    with contextlib.suppress(FileNotFoundError), self._directories.opened(folders) as folder:
        file_operations.active().unlink(folder, last)


@contextlib.contextmanager
def _indexes_last() -> Iterator[None]:
    """A version is committed before the indexes of its shards are put."""
    late: list[tuple[Any, bytes, str]] = []
    put, commit = Repository.put_object, Repository.commit

    def put_late(self: Any, data: bytes, extension: str) -> Any:
        if extension != "index":
            return put(self, data, extension)
        late.append((self, data, extension))
        return store.Descriptor(sha256_digest(data), len(data), extension)

    def commit_first(self: Any, *given: Any, **named: Any) -> Any:
        entry = commit(self, *given, **named)
        while late:
            put(*late.pop())
        return entry

    with (
        mock.patch.object(Repository, "put_object", put_late),
        mock.patch.object(Repository, "commit", commit_first),
    ):
        yield


def _mark_refs(repository: Any, log: Any, *given: Any) -> Any:
    """What only tags name is not alive."""
    untagged = (msgspec.structs.replace(entry, tags={}) for entry in log)
    return _MARK_LIVE(repository, untagged, *given)


def _listed(store: Any, name: str, size: int | None, _depth: Any, pace: Any = None) -> Any:
    """That an object is there is enough."""
    return objects.check_object(store, name, size, "list", pace)


def _move_tags(self: Any, tags: dict[str, str]) -> None:
    """A tag is put where the commit wants it."""
    tags.update(self.tags)


def _always(*_: Any, **__: Any) -> bool:
    return True


def _no_reports(_: Any) -> dict[str, Any]:
    return {}


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _marked(kind: str) -> Patch:
    """Garbage is found as if no version needed a kind of objects."""

    def mark_live(*given: Any) -> set[str]:
        return {name for name in _MARK_LIVE(*given) if not name.endswith(kind)}

    return _replaced(collecting, "mark_live", mark_live)


def _marked_by_main(*given: Any) -> set[str]:
    """Only what main needs is alive."""
    main = given[0].resolve("main")
    return {name for one in inventory.walk_versions(given[0].store, [main]) for name, _ in one.names()}


def _needs(kind: str) -> Patch:
    """Replication forgets a kind of objects."""

    def look(repository: Any, table: Any, needed: Any, **named: Any) -> Any:
        some = {name: one for name, one in needed.items() if not name.endswith(kind)}
        return placement.look(repository, table, some, **named)

    return _replaced(replicate, "look", look)


def _placed(kind: str) -> Patch:
    """Repair does not look at a kind of objects."""
    real = walk.CopyWalk.copies
    return _replaced(
        walk.CopyWalk, "copies", lambda self: (one for one in real(self) if not one.name.endswith(kind))
    )


def _unannounced(repository: Any, names: Any, _message: str = "") -> Any:
    """Garbage is deleted without a word in the log."""
    head = repository.head()
    chosen = names(head)
    return garbage.put_list(repository.store, head.n + 1, chosen) if chosen else None


def _last_one_wins(self: Any, _base: Any, head: Any) -> dict[str, Any]:
    """A commit moves its refs whatever became of them meanwhile."""
    refs = {**head.refs, **self.refs}
    return {
        "refs": {name: to for name, to in refs.items() if to},
        "tags": {**head.tags, **self.tags},
        "withdrawn": self._withdrawn(head),
    }


@contextlib.contextmanager
def _blocks_unchecked() -> Iterator[None]:
    """Neither the read path nor the format compares a block with its digest."""

    def want(*given: Any, **named: Any) -> Any:
        return read_path.ReadRequest(*given, **named)._replace(check=_always)

    with (
        mock.patch.object(located_store, "ReadRequest", want),
        mock.patch.object(reading, "verify_block", _nothing),
    ):
        yield


def _moved_at_once(table: Any, found: Any, copies: Any, pace: Any) -> Any:
    """Surplus copies go without a look at those that stay."""
    done = place.Drops()
    for location, name in copies:
        found.stores[location].store.delete(name)
        done.objects += 1
    return done


MUTATIONS: Final[dict[str, Patch]] = {
    "a lost answer counts as a commit": _replaced(committing, "put_entry", _answer_taken_for_granted),
    "any entry counts as ours": _replaced(committing, "put_entry", _any_entry_is_ours),
    "put-if-absent puts over": _replaced(object_store.ObjectStore, "put_new", _put_over),
    "what exists after a lost answer is ours": _replaced(object_store.ObjectStore, "_is_mine", _always),
    "an object's digest is not checked": _replaced(inventory, "read_object", _unchecked_get),
    "a copy is not checked": _replaced(walk, "copy_object", _unchecked_copy),
    "blocks are not checked": _blocks_unchecked,
    "surplus goes without a look at what stays": _replaced(place, "drop_surplus", _moved_at_once),
    "commits do not look at collections": _replaced(committing, "check_not_deleted", _nothing),
    "collections are not announced": _replaced(collecting, "announce_deletion", _unannounced),
    "only main is alive": _replaced(collecting, "mark_live", _marked_by_main),
    "selections are garbage": _marked(".selection"),
    "indexes are garbage": _marked(".index"),
    "erasing trusts the root's versions": _replaced(store_survey.StoreSurvey, "__init__", _root_alone),
    "erasing deletes before it commits": _replaced(erasing, "_commit", _delete_first),
    "erasing forgets the copies": _replaced(erasing, "Collector", _CollectorOfRoot),
    "files are not synced": _publishing("name", "folder"),
    "files are named before they are synced": _publishing("name", "file", "folder"),
    "a file's name is not synced": _publishing("file", "name"),
    "a folder's name is not synced": _replaced(file_operations.Directories, "_make", _made_unsynced),
    "deletions are not synced": _replaced(LocalStore, "delete", _delete_unsynced),
    "a version is committed before its indexes are there": _indexes_last,
    "the last commit wins": _replaced(log.Changes, "apply", _last_one_wins),
    "marking ignores tags": _replaced(collecting, "mark_live", _mark_refs),
    "tags may be moved": _replaced(log.Changes, "_add_tags", _move_tags),
    "repair believes what is there": _replaced(walk, "check_object", _listed),
    "a killed erasure is forgotten": _replaced(removing, "finish_erasures", _no_reports),
    "an erasure begins without a note": _replaced(ErasureJournal, "begin", _nothing),
    "erasing leaves the parity": _replaced(erasing, "delete_parity", _nothing),
    "repair passes over indexes": _placed(".index"),
    "replication forgets pages": _needs(".page"),
}
"""What is taken out → how."""

FOUND_BY: Final[dict[str, int]] = {
    "a lost answer counts as a commit": 19,
    "any entry counts as ours": 2_160,
    "put-if-absent puts over": 21,
    "a copy is not checked": 1,
    "blocks are not checked": 32,
    "only main is alive": 7,
    "selections are garbage": 7,
    "indexes are garbage": 1,
    "erasing deletes before it commits": 4,
    "files are not synced": 6,
    "a file's name is not synced": 6,
    "a folder's name is not synced": 38,
    "a version is committed before its indexes are there": 2,
    "the last commit wins": 4,
    "marking ignores tags": 9,
    "repair believes what is there": 3,
    "a killed erasure is forgotten": 4,
    "tags may be moved": 120,
    "replication forgets pages": 1,
    "repair passes over indexes": 9,
    "what exists after a lost answer is ours": 448,
}
"""Mutation → the first seed that finds it."""


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    """The product with one fault in it."""
    with MUTATIONS[name]():
        yield
