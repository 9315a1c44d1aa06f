"""A root that is lost for good: one of its copies becomes the root."""

from __future__ import annotations

import dataclasses
import os

from shardkit.copies.policy import ROOT_NAME, LocationTable, Policy, commit_table, read_table
from shardkit.copies.policy.opening import COPY_NAME, read_mark
from shardkit.copies.policy.record import absolute_url
from shardkit.errors import NotFoundError, ShardkitError, UsageError
from shardkit.repository.identity import IDENTITY_NAME, MAX_IDENTITY_BYTES, Identity
from shardkit.repository.repository import Repository
from shardkit.stores.store import Store
from shardkit.stores.urls import open_store

__all__ = ["promote"]


def promote(
    url: str | os.PathLike[str], *, copies: int | None = None, message: str = "", author: str = ""
) -> LocationTable:
    """Make a copy the root: commits go there from now on, and `replicate` brings it what it lacks.

    What was committed after the log was last copied is lost with the old root. May be killed and called again.

    Args:
        url: of the copy.
        copies: of the new policy, where the old one needs more failure domains than are left.
        message: why.
        author: who.

    Raises:
        UsageError: it is no copy, or the root answers.
        ConfigurationError: the policy cannot be met without the old root; give fewer copies.
        StoreError: the copy cannot be written.
    """
    store = open_store(url)
    mark = read_mark(store)
    identity = Identity.from_bytes(store.get(IDENTITY_NAME, max_bytes=MAX_IDENTITY_BYTES), store.url)
    table = read_table(store, identity.id)
    if mark is None or table is None:
        raise UsageError(f"{store.url} is no copy of a root; there is nothing to promote")
    if table.root.url != absolute_url(store.url):
        _check_lost(table, store, identity.id)
        own = table.find(mark.location)
        root = dataclasses.replace(
            table.root, url=absolute_url(store.url), domain=own.domain if own else table.root.domain
        )
        others = [one for one in table.others if one.name != mark.location]
        policy: Policy = table.policy if copies is None else table.policy.changed(copies=copies)
        told = message or f"{mark.location} is the root now"
        table = commit_table(store, identity.id, table, policy, [root, *others], message=told, author=author)
    store.delete(COPY_NAME)  # last: until then nobody commits here
    return table


def _check_lost(table: LocationTable, store: Store, repository_id: str) -> None:
    """Two roots of one repository would each have a log of their own."""
    try:
        root = Repository.open(table.root.url, read_only=True)
    except (NotFoundError, ShardkitError):
        return
    if root.id == repository_id and root.url != store.url:
        raise UsageError(
            f"the {ROOT_NAME} at {root.url} answers: it must be gone before a copy takes its place; take it away first"
        )
