"""What a commit changes, and the log: read with its chain verified, added to without ever guessing (SPEC.md §4)."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from shardkit.errors import (
    CommitConflict,
    FormatError,
    IntegrityError,
    NotFoundError,
    UsageError,
)
from shardkit.formats.digest import parse_digest, sha256_digest
from shardkit.manifest.json_fields import utc_text
from shardkit.repository.log import LOG, MAX_NAMES, NO_COMMIT, LogEntry, check_ref_name, check_succession
from shardkit.repository.opening import IDENTITY_NAME, Identity
from shardkit.stores.store import Store

Change = Callable[[LogEntry | None], Mapping[str, Any] | None]
"""Head, None for an empty log → the fields in which the next entry differs from it; None for no entry at all."""

_ATTEMPTS: Final = 1_000
_LONGEST_PAUSE_S: Final = 0.05
# Forked writers must not draw the same pauses, hence the system's own source.
_JITTER: Final = random.SystemRandom()
_MAX_UNLISTED: Final = 1_000


@dataclass(frozen=True, slots=True)
class Changes:
    """Refs to set or drop, tags to add or withdraw, and what must hold before."""

    refs: Mapping[str, str | None]
    """Name → manifest id, None to drop the ref."""
    tags: Mapping[str, str]
    expected: Mapping[str, str | None]
    """Name → what the ref must point at when the commit lands, None for "must not exist"."""
    withdraw: Mapping[str, str]
    """Tag → the manifest id that it has: the tag goes, for good, and the log says so."""

    def __post_init__(self) -> None:
        for names in (self.refs, self.tags, self.expected, self.withdraw):
            for name, manifest in names.items():
                check_ref_name(name)
                if manifest is not None:
                    parse_digest(manifest)
        both = sorted(self.refs.keys() & self.tags.keys())
        if both:
            raise UsageError(
                f"{both[0]!r} is to become a ref and a tag: a name can be one of them; use two names"
            )

    @property
    def manifests(self) -> set[str]:
        """Manifests that must be in the repository before the commit."""
        return {manifest for manifest in (*self.refs.values(), *self.tags.values()) if manifest is not None}

    def apply(self, base: LogEntry | None, head: LogEntry | None) -> dict[str, dict[str, str]]:
        """The tables of refs, tags and withdrawn tags after this commit.

        Args:
            base: The head when the commit began.
            head: The head now: the commit is rebased onto it where it touches other refs.

        Raises:
            CommitConflict: A ref is not where it was expected, or was moved since `base`; or a tag exists, or is to go
                and names something else, or the name is that of a withdrawn one.
        """
        head = head or NO_COMMIT
        refs, tags, gone = dict(head.refs), dict(head.tags), self._withdrawn(head)
        self._set_refs(refs, (base or NO_COMMIT).refs)
        self._add_tags(tags)
        again = sorted((tags.keys() | refs.keys()) & gone.keys() - self.withdraw.keys())
        if again:
            raise CommitConflict(
                f"{again[0]!r} was a tag of {gone[again[0]]}, which was withdrawn: its name is never used again; use "
                "another name"
            )
        tags = {name: manifest for name, manifest in tags.items() if name not in self.withdraw}
        both = sorted(refs.keys() & tags.keys())
        if both:
            raise CommitConflict(f"{both[0]!r} would be a ref and a tag at once; use another name")
        if max(len(refs), len(tags)) > MAX_NAMES:
            raise UsageError(
                f"{len(refs)} refs and {len(tags)} tags, expected at most {MAX_NAMES} each; drop some refs"
            )
        return {"refs": refs, "tags": tags, "withdrawn": gone}

    def _set_refs(self, refs: dict[str, str], before: Mapping[str, str]) -> None:
        for name, manifest in self.expected.items():
            # Where it stands already where it is to go, nobody loses anything: the same version was made twice.
            if refs.get(name) != manifest and (name not in self.refs or refs.get(name) != self.refs[name]):
                raise CommitConflict(
                    f"ref {name!r} points at {refs.get(name)}, expected {manifest}; "
                    "look at it (shardkit log), then commit again"
                )
        for name, manifest in self.refs.items():
            now = refs.pop(name, None)
            if name not in self.expected and now not in (before.get(name), manifest):
                raise CommitConflict(
                    f"ref {name!r} was moved to {now} by another commit, expected {before.get(name)}; "
                    "look at it (shardkit log), then commit again"
                )
            if manifest is not None:
                refs[name] = manifest

    def _add_tags(self, tags: dict[str, str]) -> None:
        for name, manifest in self.tags.items():
            if tags.setdefault(name, manifest) != manifest:
                raise CommitConflict(
                    f"tag {name!r} exists and points at {tags[name]}: tags are never moved; use another name"
                )

    def _withdrawn(self, head: LogEntry) -> dict[str, str]:
        for name, manifest in self.withdraw.items():
            if head.tags.get(name, head.withdrawn.get(name)) != manifest:
                raise CommitConflict(
                    f"tag {name!r} names {head.tags.get(name)}, expected {manifest}; look at it (shardkit log), then "
                    "try again"
                )
        return {**head.withdrawn, **self.withdraw}


class CommitLog:
    """Log entries of one repository."""

    def __init__(self, store: Store, identity: Identity) -> None:
        self._store = store
        self._identity = identity
        self._seen = 0  # number of the newest entry met so far: a log never gets shorter

    def head(self) -> LogEntry | None:
        """The newest commit, None before the first. Lists names and reads one entry."""
        number = self._last_number()
        return None if number == 0 else self._entry(number)[0]

    def log(self) -> list[LogEntry]:
        """All commits, newest first, with the whole chain verified down to ``shardkit.json``.

        Raises:
            IntegrityError: An entry is missing or damaged, or the chain is broken.
        """
        entries = list(self.newest_commits())
        if entries and entries[-1].previous != sha256_digest(self._identity.to_bytes()):
            raise IntegrityError(
                f"log of {self._store.url}: entry 1 belongs to another {IDENTITY_NAME}; restore it from a copy of "
                "the root"
            )
        return entries

    def newest_commits(self) -> Iterator[LogEntry]:
        """Commits one by one, newest first, the chain verified as far as it is walked.

        Raises:
            IntegrityError: See `log`.
        """
        later: LogEntry | None = None
        for number in range(self._last_number(), 0, -1):
            entry, data = self._entry(number)
            if later is not None:
                check_succession(entry, data, later, self._store.url)
            yield entry
            later = entry

    def _append(
        self, change: Change, head: LogEntry | None, message: str, author: str = ""
    ) -> LogEntry | None:
        """Append one entry after the newest.

        Args:
            change: Asked for every head that the entry could follow, so that a commit is rebased over those that come
                first; raises CommitConflict where that cannot be.
            head: The head as the caller knows it.
            message: Why.
            author: Who.

        Returns:
            The entry, durably in the log; None where `change` says that there is nothing to do.
        """
        txn = uuid.uuid4().hex
        for attempt in range(_ATTEMPTS):
            changed = change(head)
            if changed is None:
                return None
            entry = self._entry_after(head, {**changed, "txn": txn, "message": message, "author": author})
            if self._put(entry):
                self._seen = max(self._seen, entry.n)
                return entry
            time.sleep(_JITTER.uniform(0, min(_LONGEST_PAUSE_S, 0.001 * 2 ** min(attempt, 10))))
            head = self.head()
        raise CommitConflict(
            f"{self._store.url}: {_ATTEMPTS} other commits came first each time; commit less often, or try again later"
        )

    def _put(self, entry: LogEntry) -> bool:
        return LOG.put(
            self._store,
            entry,
            what=f"commit {entry.txn} to {self._store.url}",
            then=f"ask again: Repository.find_commit({entry.txn!r})",
        )

    def _entry_after(self, head: LogEntry | None, fields: Mapping[str, Any]) -> LogEntry:
        entry = dataclasses.replace(
            head or NO_COMMIT,
            n=head.n + 1 if head else 1,
            repository=self._identity.id,
            previous=sha256_digest((head or self._identity).to_bytes()),
            time=utc_text(),
            software=f"shardkit {_version()}",
            **fields,
        )
        try:
            # nobody may write what nobody will read
            return LogEntry.from_bytes(entry.to_bytes(), "this commit")
        except FormatError as error:
            raise UsageError(f"the commit cannot be written: {error}") from error

    def _last_number(self) -> int:
        """Number of the newest entry; all before it are there.

        A directory that is listed while others commit may show a later entry and not an earlier one, and a network
        file system may show an old listing: what a listing lacks is looked up by name before it counts as missing.
        """
        seen = self._seen  # before the listing: another thread may commit while it is made
        listed = {n for n in map(LOG.number, self._store.list_after(LOG.prefix)) if n is not None}
        last = max(seen, max(listed, default=0))
        if last > len(listed) + _MAX_UNLISTED:
            self._refuse_log(next(n for n in itertools.count(1) if n not in listed))
        for number in sorted(set(range(1, last + 1)) - listed):
            if not self._is_there(number):
                self._refuse_log(number)
        self._seen = max(self._seen, last)
        return last

    def _refuse_log(self, missing: int) -> NoReturn:
        raise IntegrityError(
            f"log of {self._store.url}: entry {missing} is missing; run: shardkit repair {self._store.url}"
        )

    def _is_there(self, number: int) -> bool:
        """Whether an entry that was not listed can be read, from the root or from a copy of it."""
        if self._store.head(LOG.name(number)) is not None:
            return True
        try:
            self._entry(number)
        except NotFoundError:
            return False
        return True

    def _entry(self, number: int) -> tuple[LogEntry, bytes]:
        return LOG.read(self._store, number, self._identity.id)


def _version() -> str:
    import importlib.metadata  # takes as long as ten modules of ours, and is asked by writers only

    try:
        return importlib.metadata.version("shardkit")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
