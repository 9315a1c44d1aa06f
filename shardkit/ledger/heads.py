"""The head of a run's ledger, for checkpoints: merge, commit, remove what is merged."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Any, Final

from shardkit.ledger.ledger import Ledger
from shardkit.ledger.merging import Merge, Source
from shardkit.stores.os_errors import explained

__all__ = ["ledger_head"]

KEEP_BYTES: Final = 1 << 24
"""Merged journals that stay, for those who want to look at single cells; beyond, the oldest are removed."""


def ledger_head(run: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
    """Merge the journals into the ledger, durably, and return its heads: to be stored in a checkpoint.

    To be called by one process, at a checkpoint after `step` steps, when all ranks have been handed those steps.
    Journal files that are merged and will not be written again are removed, where there is much of them.

    Returns:
        ``{"steps": {"first", "size", "root"}, "events": {"size", "root"}}``, roots in hex; of the steps before
        `step` where it is given.

    Raises:
        IntegrityError: the ledger was cut or damaged.
        StoreError: it cannot be written.
    """
    with Ledger(Path(run), writing=True) as ledger:
        merge = Merge(ledger, step)
        head = ledger.head(step)
        ledger.commit()
        _prune(merge)
    return head


def _prune(merge: Merge) -> None:
    """Remove journal files that are merged whole, have a successor, and whose writer is gone; the oldest first."""
    newest: dict[int, str] = {}
    for source in merge.sources:
        newest[source.header.rank] = max(newest.get(source.header.rank, ""), source.name)
    excess = sum(source.settled[0] for source in merge.sources) - KEEP_BYTES
    for source in sorted(merge.sources, key=lambda one: one.header.started):
        if excess <= 0:
            return
        if source.name != newest[source.header.rank] and _remove(source):
            excess -= source.settled[0]


def _remove(source: Source) -> bool:
    path = source.file.path
    with explained(f"remove {path}", writing=True), contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_size == source.settled[0]:
                os.unlink(path)
                return True
        except BlockingIOError:
            pass  # still written to
        finally:
            os.close(descriptor)
    return False
