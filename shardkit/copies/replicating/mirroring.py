"""The log and the small documents of a root, copied so that every location can be opened alone.

Entries are copied in the order of their numbers, after the objects: a copy that was cut short shows an earlier state of
the log, whole.
"""

from __future__ import annotations

from typing import Final

from shardkit.copies.policy.record import SPARES, table_number
from shardkit.errors import FormatError, IntegrityError, NotFoundError
from shardkit.formats.canonical_json import loads
from shardkit.repository.log import LOG_PREFIX, MAX_ENTRY_BYTES, LogEntry
from shardkit.stores.store import Store

__all__ = ["DOCUMENTS", "mirror_documents", "mirror_log"]

DOCUMENTS: Final = ("locations/", "parity/", "erasures/")
"""Folders of small documents; those in the root hold, and are put over others, as long as they are not damaged."""

_MAX_BYTES: Final = 2**30


def mirror_log(root: Store, copy: Store) -> int:
    """Copy the entries that a copy lacks; how many.

    Raises:
        IntegrityError: the copy has an entry that the root has not, or another one of the same number.
        StoreError: one of the two failed.
    """
    entries = list(root.list_after(LOG_PREFIX))
    held = set(copy.list_after(LOG_PREFIX))
    foreign = sorted(held - set(entries))
    if foreign:
        raise IntegrityError(
            f"{copy.url} has {foreign[0]}, which {root.url} has not: it was committed to, or the root was put back to "
            "an earlier state; look at both logs (shardkit log) before anything is copied"
        )
    last = max(held, default="")
    if last and copy.get(last, max_bytes=MAX_ENTRY_BYTES) != root.get(last, max_bytes=MAX_ENTRY_BYTES):
        raise IntegrityError(f"{last} in {copy.url} is another one than in {root.url}; look at both logs")
    missing = sorted(set(entries) - held)
    for name in missing:
        data = root.get(name, max_bytes=MAX_ENTRY_BYTES)
        LogEntry.from_bytes(data, f"{name} in {root.url}")  # a copy gets nothing damaged
        if not copy.put_new(name, data) and copy.get(name, max_bytes=MAX_ENTRY_BYTES) != data:
            raise IntegrityError(f"{name} in {copy.url} is another one than in {root.url}; look at both logs")
    return len(missing)


def mirror_documents(root: Store, copy: Store) -> list[tuple[str, str]]:
    """Copy the documents that a copy lacks or has otherwise.

    Returns:
        (name, "missing" or "wrong") of each.

    Raises:
        StoreError: one of the two failed.
    """
    done: list[tuple[str, str]] = []
    for folder in DOCUMENTS:
        held = set(copy.list_after(folder))
        for name in root.list_after(folder):
            if name.startswith(SPARES) or (name in held and table_number(name) is not None):
                continue  # spares are the root's; tables never change
            try:
                data = root.get(name, max_bytes=_MAX_BYTES)
            except NotFoundError:
                continue  # removed since it was listed
            if name not in held and copy.put_new(name, data):
                done.append((name, "missing"))
            elif (other := copy.get(name, max_bytes=_MAX_BYTES)) != data:
                if not _is_sound(data) and _is_sound(other):
                    root.replace(name, other)
                    continue
                copy.replace(name, data)
                done.append((name, "wrong"))
    return done


def _is_sound(data: bytes) -> bool:
    """Whether a document is one that shardkit writes: what is torn or cut short is not."""
    try:
        loads(data, _MAX_BYTES)
    except FormatError:
        return False
    return True
