"""The side of a commit: what it names must not be going away.

A writer that finds an object in the root does not put it again; were that object collected meanwhile, the commit would
dangle. Collections therefore stand in the log, and commits look there (SPEC.md, "Garbage"): no clock is involved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardkit.errors import CommitConflict, ShardkitError
from shardkit.repository.collecting.documents import read_list
from shardkit.repository.inventory import walk_versions

if TYPE_CHECKING:
    from shardkit.repository.repository import Repository

__all__ = ["check_not_collected"]


def check_not_collected(
    repository: Repository,
    versions: Iterable[str],
    going: Iterable[str],
    gone: Iterable[str],
    problem: ShardkitError | None = None,
) -> None:
    """Refuse a commit that names what is being collected, or what was collected since the writer began.

    Args:
        repository: that commits.
        versions: manifest ids that it names.
        going: digests of the lists of collections that are not finished.
        gone: of those that began since the writer opened the root, and are finished.
        problem: what the writer met that may come from that.

    Raises:
        CommitConflict: it does; the same work done again puts what is missing.
    """
    if problem is not None:
        raise CommitConflict(
            f"{repository.url}: garbage was collected while this was prepared, which may be why it failed ({problem}); "
            "run the same command again"
        ) from problem
    try:
        lost = {name for digest in sorted(going) for name in read_list(repository.store, digest)}
        doubtful = {name for digest in sorted(gone) for name in read_list(repository.store, digest)} - lost
        needed = _needed(repository, versions)
    except ShardkitError as error:
        raise CommitConflict(
            f"{repository.url}: garbage was collected meanwhile, and what was cannot be compared ({error}); run the "
            "same command again"
        ) from error
    names = sorted(lost & needed)
    names += [name for name in sorted(doubtful & needed) if repository.store.head(name) is None]
    if names:
        raise CommitConflict(
            f"{repository.url}: {len(names)} objects that this commit names, such as {names[0]}, are being collected "
            "as garbage; run the same command again when that is done (a collection that was killed is finished by: "
            f"shardkit gc {repository.url} --delete)"
        )


def _needed(repository: Repository, versions: Iterable[str]) -> set[str]:
    return {name for _, inventory in walk_versions(repository, versions) for name, _ in inventory.names()}
