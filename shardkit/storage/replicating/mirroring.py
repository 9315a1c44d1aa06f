"""The log and the small documents of a root, copied so that every location can be opened alone.

Entries are copied in the order of their numbers, after the objects: a copy that was cut short shows an earlier state of
the log, whole.
"""

from __future__ import annotations

from typing import Final

from shardkit.errors import IntegrityError, NotFoundError, StoreError
from shardkit.storage.log import LOG_PREFIX, MAX_ENTRY_BYTES
from shardkit.storage.store import Store

__all__ = ["DOCUMENTS", "mirror_documents", "mirror_log"]

DOCUMENTS: Final = ("locations/", "parity/", "erasures/")
"""Folders of small documents; those in the root hold, and are put over others."""

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
        if not copy.put_new(name, data) and copy.get(name, max_bytes=MAX_ENTRY_BYTES) != data:
            raise IntegrityError(f"{name} in {copy.url} is another one than in {root.url}; look at both logs")
    return len(missing)


def mirror_documents(root: Store, copy: Store) -> int:
    """Copy the documents that a copy lacks or has otherwise; how many.

    Raises:
        StoreError: one of the two failed.
    """
    done = 0
    for folder in DOCUMENTS:
        held = set(copy.list_after(folder))
        for name in root.list_after(folder):
            if name in held and _is_immutable(name):
                continue
            try:
                data = root.get(name, max_bytes=_MAX_BYTES)
            except NotFoundError:
                continue  # removed since it was listed
            if name not in held:
                done += copy.put_new(name, data)
            elif copy.get(name, max_bytes=_MAX_BYTES) != data:
                copy.replace(name, data)
                done += 1
    return done


def _is_immutable(name: str) -> bool:
    """Location tables: numbered, never changed."""
    return len(name) == len("locations/.json") + 20


def log_lag(root: Store, copy: Store) -> int:
    """How many entries a copy lacks.

    Raises:
        StoreError: one of the two failed.
    """
    try:
        held = set(copy.list_after(LOG_PREFIX))
    except NotFoundError as error:
        raise StoreError(str(error)) from error
    return len(set(root.list_after(LOG_PREFIX)) - held)
