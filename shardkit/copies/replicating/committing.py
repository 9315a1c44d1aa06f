"""What a commit waits for: the mode of the policy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Final

from shardkit.copies.policy import ROOT_NAME, LocationTable
from shardkit.copies.policy.opening import root_store
from shardkit.copies.replicating.facts import look, open_all
from shardkit.copies.replicating.mirroring import mirror_documents, mirror_log
from shardkit.copies.replicating.needed import find_needed
from shardkit.copies.replicating.pacing import Pace
from shardkit.copies.replicating.protecting import encode_parity
from shardkit.copies.replicating.replicating import begun, copy_missing, finished
from shardkit.errors import ShardkitError, StoreError
from shardkit.repository.repository import Repository

__all__ = ["copy_before_commit", "copy_log"]

_FEW: Final = 2_000


def copy_before_commit(repository: Repository, table: LocationTable, versions: Iterable[str]) -> None:
    """Make the copies that must be there before a commit may name these versions.

    Sync: all that the policy asks for, parity included. Hybrid: those of metadata and of shards with critical strata.
    Async: none beside the root's.

    Raises:
        StoreError: a copy could not be made; nothing was committed.
    """
    mode, chosen = table.policy.mode, list(versions)
    if mode == "async" or not chosen:
        return
    pace = Pace()
    if mode == "sync":
        encode_parity(repository, table, chosen, pace)
    needed = find_needed(repository, table, chosen)
    if mode == "hybrid":
        needed = {name: one for name, one in needed.items() if one.is_critical}
    facts = look(repository, table, needed, listing=len(needed) > _FEW)
    done = begun(table, facts)
    copy_missing(repository, facts, done, pace)
    finished(facts, done)
    if done.lag_after or done.lost or facts.missing:
        bad = [one for one in done.locations if one.lag or one.state != "ok"]
        told = "; ".join(f"{one.name}: {one.problem or one.state}" for one in bad) or ", ".join(done.lost[:3])
        raise StoreError(
            f"{repository.url}: nothing was committed, because {len(facts.missing)} copies could not be made that mode "
            f"{mode!r} waits for ({told}); mend that and run the same command again, or let copies follow later: "
            f"shardkit place {repository.url} --mode async"
        )


def copy_log(repository: Repository, table: LocationTable) -> None:
    """Let the copies have the newest commit too, where they answer; what is missing is lag, not an error.

    The commit stands already: a copy that does not answer now is caught up by `replicate`.
    """
    if table.policy.mode == "async":
        return
    facts = open_all(repository, table.locations)
    root = root_store(repository.store)
    for name, location in facts.stores.items():
        if name != ROOT_NAME:
            with contextlib.suppress(ShardkitError):
                mirror_documents(root, location.store)
                mirror_log(root, location.store)
