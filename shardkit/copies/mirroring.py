"""Copy documents and the log from the root to a copy, and from a copy to a lost root."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

from shardkit.copies.documents import HealedCopy, repository_id
from shardkit.documents import decode_plain
from shardkit.errors import FormatError, IntegrityError, NotFoundError, ShardkitError
from shardkit.reading.adopted_places import group_name, location_name
from shardkit.reading.file_groups import MAX_GROUP_BYTES, FileGroup
from shardkit.reading.inventory import MAX_RECORD_BYTES, parse_version_record, version_record_name
from shardkit.reading.objects import ROOT_NAME
from shardkit.reading.parity.sets import SetRecord
from shardkit.repository.locations import (
    SPARES,
    TABLES,
    LocationRecord,
    LocationTable,
    find_sibling_copies,
    location_of,
    read_mark,
    read_table,
)
from shardkit.repository.log import (
    LOG,
    MAX_ENTRY_BYTES,
    LogEntry,
)
from shardkit.stores.local import check_vacant
from shardkit.stores.store import Store

_MAX_ERASURE_BYTES: Final = 2**28


_MAX_PLACE_BYTES: Final = 2**20


_MIRRORED: Final = ("locations/", "parity/", "erasures/")
"""Folders of small documents that copies get from the root."""


def log_conflict(root: Store, copy: Store) -> str:
    """Return why a copy's log is not the beginning of the root's, "" if it is."""
    return _compare_logs(root, copy)[0]


def log_conflicts(root: Store, table: LocationTable) -> Iterator[str]:
    """Yield the conflicts of the logs of all copies. Copies that do not answer or have no mark are skipped."""
    for record in table.others:
        with contextlib.suppress(ShardkitError):
            copy = location_of(record).store
            conflict = log_conflict(root, copy) if read_mark(copy) is not None else ""
            if conflict:
                yield conflict


def _compare_logs(root: Store, copy: Store) -> tuple[str, list[str]]:
    """Return the conflict between two logs, "" if there is none, and the names of the entries that the copy lacks.

    The copy is listed first, because a concurrent commit reaches the root before it reaches a copy.
    """
    held, own = set(copy.list_after(LOG.prefix)), set(root.list_after(LOG.prefix))
    foreign, last = sorted(held - own), max(held, default="")
    conflict = ""
    if foreign:
        conflict = f"{copy.url} has {foreign[0]}, which {root.url} does not have"
    elif last and copy.get(last, max_bytes=MAX_ENTRY_BYTES) != root.get(last, max_bytes=MAX_ENTRY_BYTES):
        conflict = f"{last} in {copy.url} is not the one in {root.url}"
    if conflict:
        conflict += f": the root lost entries of its log; run: shardkit repair {root.url}"
    return conflict, sorted(own - held)


def mirror_log(root: Store, copy: Store) -> int:
    """Copy the log entries that a copy lacks and return their number.

    Raises:
        IntegrityError: The copy's log is not the beginning of the root's, or a new entry is damaged.
    """
    conflict, missing = _compare_logs(root, copy)
    if conflict:
        raise IntegrityError(conflict)
    for name in missing:
        data = root.get(name, max_bytes=MAX_ENTRY_BYTES)
        LogEntry.from_bytes(data, f"{name} in {root.url}")  # do not copy a damaged entry
        if not copy.put_new(name, data) and copy.get(name, max_bytes=MAX_ENTRY_BYTES) != data:
            raise IntegrityError(f"{name} in {copy.url} is another one; run: shardkit repair {root.url}")
    return len(missing)


def mirror_documents(root: Store, copy: Store) -> list[tuple[str, str]]:
    """Copy the documents that a copy lacks or that differ. A damaged document of the root is restored from the copy.

    Returns:
        (name, "missing" or "wrong") of each document copied to the copy.
    """
    done: list[tuple[str, str]] = []
    for folder in _MIRRORED:
        held = set(copy.list_after(folder))
        for name in root.list_after(folder):
            if name.startswith(SPARES.prefix) or (name in held and TABLES.number(name) is not None):
                continue  # spares are the root's; tables never change
            data, other = _sound_bytes(root, name), _sound_bytes(copy, name) if name in held else None
            if data is None:
                if other is not None and root.head(name) is not None:
                    root.replace(name, other)
            elif data != other:
                if name in held:
                    copy.replace(name, data)
                elif not copy.put_new(name, data):
                    continue  # another process copies it
                done.append((name, "wrong" if name in held else "missing"))
    return done


def _sound_bytes(store: Store, name: str) -> bytes | None:
    """Return the bytes of a document that fits its name; None if it is damaged, missing or another document."""
    limit = _MAX_PLACE_BYTES
    if name.startswith("parity/"):
        limit = MAX_RECORD_BYTES
    elif name.startswith("erasures/"):
        limit = _MAX_ERASURE_BYTES
    elif _is_group(name):
        limit = MAX_GROUP_BYTES
    with contextlib.suppress(ShardkitError):
        data = store.get(name, max_bytes=limit)
        check_document(name, data)
        return data
    return None


def _is_group(name: str) -> bool:
    return name.startswith("locations/") and name.endswith(".files")


def check_document(name: str, data: bytes) -> None:
    """Raise FormatError if a document is damaged or belongs to another set, part or tar than its name says."""
    said = name
    if name.startswith("parity/sets/"):
        said = SetRecord.from_bytes(data, name).set.record_name
    elif name.startswith("parity/versions/"):
        said = version_record_name(parse_version_record(data, name)[0])
    elif _is_group(name):
        said = group_name(FileGroup.from_bytes(data, name).digest)
    elif name.startswith("locations/") and TABLES.number(name) is None:
        value = decode_plain(data, max_bytes=_MAX_PLACE_BYTES)
        table = value if isinstance(value, dict) else {}
        said = location_name(str(table.get("manifest", table.get("digest"))))
    elif name.startswith("locations/"):
        LocationTable.from_bytes(data, name)
    else:
        decode_plain(data, max_bytes=_MAX_ERASURE_BYTES)
    if said != name:
        raise FormatError(f"{name} is the document of {said}")


def restore_lost_root(root: Store, more: Sequence[LocationRecord]) -> list[HealedCopy]:
    """Copy the documents of a copy to a root that has neither identity nor log nor tables, the tables last.

    The usual repair then restores the rest. If `more` is empty, copies are looked for in folders next to the root.
    """
    if repository_id(root):
        return []
    done: list[HealedCopy] = []
    for record in more or find_sibling_copies(root):
        with contextlib.suppress(NotFoundError, IntegrityError, FormatError):
            copy = location_of(record).store
            mark = read_mark(copy)
            table = read_table(copy, mark.repository) if mark else None
            if table is None:
                continue
            check_vacant(root.url, "dataset")
            for folder in reversed(_MIRRORED):
                for name in sorted(copy.list_after(folder), reverse=True):
                    data = _sound_bytes(copy, name)
                    if data is not None and root.put_new(name, data):
                        done.append(HealedCopy(ROOT_NAME, name, "missing", record.name, len(data)))
            break
    return done
