"""The side of a repository that writes its log: commits, and the beginning and end of collections (SPEC.md §4)."""

from __future__ import annotations

import dataclasses
import random
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from shardkit.copies.policy.opening import root_store
from shardkit.copies.policy.table import read_table
from shardkit.errors import CommitConflict, FormatError, NotFoundError, ShardkitError, UsageError
from shardkit.formats.digest import sha256_digest
from shardkit.repository.changes import Changes
from shardkit.repository.commit_log import CommitLog
from shardkit.repository.identity import Identity
from shardkit.repository.log import LogEntry
from shardkit.stores.objects import object_name
from shardkit.stores.utc import utc_text

if TYPE_CHECKING:
    from shardkit.repository.repository import Repository

__all__ = ["Commits"]

_ATTEMPTS: Final = 1_000
_LONGEST_PAUSE_S: Final = 0.05
# Forked writers must not draw the same pauses, hence the system's own source.
_JITTER: Final = random.SystemRandom()


class Commits:
    """Writes the log of a repository.

    Args:
        repository: whose log it is.
        log: of it.
        identity: of it.
        base: the head before anything could be relied on that the repository holds; None for an empty log.
    """

    def __init__(
        self, repository: Repository, log: CommitLog, identity: Identity, base: LogEntry | None
    ) -> None:
        self._repository, self._log, self._identity, self._base = repository, log, identity, base

    def commit(self, changes: Changes, message: str, author: str) -> LogEntry:
        """Carry out changes; see `Repository.commit`."""
        base = head = self._repository.head()
        table = read_table(root_store(self._repository.store), self._repository.id)
        copied = table if table is not None and table.others else None
        try:
            self._check_manifests(changes)
            if copied is not None:
                from shardkit.copies.replicating.committing import copy_before_commit

                copy_before_commit(self._repository, copied, sorted(changes.manifests))
        except ShardkitError as error:
            self._check_not_collected(self._repository.head(), changes.manifests, error)
            raise

        def change(head: LogEntry | None) -> dict[str, Any]:
            refs, tags = changes.apply(base, head)
            gone = changes.withdrawn(head)
            self._check_not_collected(head, changes.manifests)
            return {"refs": refs, "tags": tags, "withdrawn": gone}

        entry = self._append(message, author, change, head)
        assert entry is not None
        if copied is not None:
            from shardkit.copies.replicating.committing import copy_log

            copy_log(self._repository, copied)
        return entry

    def begin_collection(self, put_list: Callable[[LogEntry | None], str | None]) -> str | None:
        """Announce what is going to be deleted; see `Repository.begin_collection`."""
        identity = uuid.uuid4().hex

        def change(head: LogEntry | None) -> dict[str, Any] | None:
            digest = put_list(head)
            if digest is None:
                return None
            collecting = {**(head.collecting if head else {}), identity: digest}
            return {"collected": (head.collected if head else 0) + 1, "collecting": collecting}

        begun = self._append("garbage: deleting", "", change, self._repository.head())
        return identity if begun is not None else None

    def take_over_collection(self, identity: str) -> str | None:
        """Go on with a collection under another id; see `Repository.take_over_collection`."""
        taken = uuid.uuid4().hex

        def change(head: LogEntry | None) -> dict[str, Any] | None:
            if head is None or identity not in head.collecting:
                return None
            return {
                "collecting": {taken if one == identity else one: to for one, to in head.collecting.items()}
            }

        begun = self._append("garbage: taken over", "", change, self._repository.head())
        return taken if begun is not None else None

    def end_collection(self, identity: str) -> None:
        """Note that a collection is over; see `Repository.end_collection`."""

        def change(head: LogEntry | None) -> dict[str, Any] | None:
            if head is None or identity not in head.collecting:
                return None
            return {"collecting": {name: one for name, one in head.collecting.items() if name != identity}}

        self._append("garbage: deleted", "", change, self._repository.head())

    def _append(
        self,
        message: str,
        author: str,
        change: Callable[[LogEntry | None], dict[str, Any] | None],
        head: LogEntry | None,
    ) -> LogEntry | None:
        """Append an entry that differs from the head in what `change` gives for it; None where it gives None."""
        txn = uuid.uuid4().hex
        for attempt in range(_ATTEMPTS):
            changed = change(head)
            if changed is None:
                return None
            entry = self._next_entry(head, txn, message, author, changed)
            if self._log.append(entry):
                return entry
            time.sleep(_JITTER.uniform(0, min(_LONGEST_PAUSE_S, 0.001 * 2 ** min(attempt, 10))))
            head = self._repository.head()
        raise CommitConflict(
            f"{self._repository.url}: {_ATTEMPTS} other commits came first each time; commit less often, or try again "
            "later"
        )

    def _next_entry(
        self, head: LogEntry | None, txn: str, message: str, author: str, changed: Mapping[str, Any]
    ) -> LogEntry:
        entry = LogEntry(
            n=head.n + 1 if head else 1,
            repository=self._identity.id,
            previous=sha256_digest(head.to_bytes() if head else self._identity.to_bytes()),
            txn=txn,
            time=utc_text(),
            author=author,
            message=message,
            refs=dict(head.refs) if head else {},
            tags=dict(head.tags) if head else {},
            software=f"shardkit {_version()}",
            withdrawn=dict(head.withdrawn) if head else {},
            collected=head.collected if head else 0,
            collecting=dict(head.collecting) if head else {},
        )
        return _checked(dataclasses.replace(entry, **changed))

    def _check_not_collected(
        self, head: LogEntry | None, manifests: Collection[str], problem: ShardkitError | None = None
    ) -> None:
        """Refuse to name what is being deleted, or was since this root was opened; or say that this may be why."""
        began = self._base.collected if self._base else 0
        # A collection that was under way when the root was opened may have ended since.
        under_way = set(self._base.collecting.values()) if self._base else set[str]()
        if head is None or not manifests or not (head.collected != began or head.collecting or under_way):
            return
        from shardkit.repository.collecting.commits import check_not_collected

        since = under_way
        for entry in self._log.newest_first() if head.collected != began else ():
            if self._base is not None and entry.n <= self._base.n:
                break
            since |= set(entry.collecting.values())
        going = set(head.collecting.values())
        check_not_collected(self._repository, manifests, going, since - going, problem)

    def _check_manifests(self, changes: Changes) -> None:
        for manifest in sorted(changes.manifests):
            if self._repository.store.head(object_name(manifest, "manifest")) is None:
                raise NotFoundError(
                    f"manifest {manifest} is not in {self._repository.url}: expected its objects to be put before the "
                    "commit"
                )


def _checked(entry: LogEntry) -> LogEntry:
    try:
        return LogEntry.from_bytes(entry.to_bytes(), "this commit")  # nobody may write what nobody will read
    except FormatError as error:
        raise UsageError(f"the commit cannot be written: {error}") from error


def _version() -> str:
    import importlib.metadata  # takes as long as ten modules of ours, and is asked by writers only

    try:
        return importlib.metadata.version("shardkit")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
