"""The hook by which a commit waits for the copies that the policy asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from shardkit.reading.located_store import root_store
from shardkit.repository.repository import Repository
from shardkit.repository.table_commits import read_table

__all__ = ["copies_of_commit"]


def copies_of_commit(repository: Repository, versions: Sequence[str]) -> Callable[[], None]:
    """Make the copies that must be there before a commit names these versions; lets copies have the log afterwards.

    Raises:
        StoreError: a copy could not be made; nothing was committed.
    """
    table = read_table(root_store(repository.store), repository.id)
    if table is None or not table.others:
        return lambda: None
    from shardkit.copies.replicate import copy_before_commit, copy_log  # most roots have no copies

    copy_before_commit(repository, table, versions)
    return functools.partial(copy_log, repository, table)
