"""Moving refs to a new version: from where they stood when it was begun, and never over another schema unasked."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardkit.dataset.layout import BLOCK_BYTES
from shardkit.errors import CommitConflict, NotFoundError, ShardkitError, UsageError
from shardkit.formats import Schema
from shardkit.manifest import Manifest
from shardkit.ranges import parse_size
from shardkit.reading.inventory import read_root
from shardkit.repository.log import LogEntry
from shardkit.repository.repository import Repository

Standing = Mapping[str, str | None]
"""Ref → the manifest id that it names, None where there is no such ref."""


class Moved(NamedTuple):
    """What a commit did."""

    entry: LogEntry | None  # None where every ref named its version already
    refs: Mapping[str, tuple[str | None, str]]  # ref → (from, to) of those that moved; from None: it is new


NOT_MOVED = Moved(None, {})
"""Every ref names its version already, or nothing was to be committed."""


def standing_refs(
    repository: Repository, refs: Iterable[str], schema: Schema | None = None, *, replace: bool = False
) -> Standing | None:
    """Where refs stand before a version is made that they are going to name: what `move_refs` expects.

    Args:
        repository: that holds them.
        refs: their names.
        schema: of the version; None: any may be replaced.
        replace: whatever they name may be replaced, what comes meanwhile included: nothing is expected.

    Raises:
        UsageError: a ref names samples of another schema.
    """
    if replace:
        return None
    now = repository.refs
    for name in refs if schema is not None else ():
        held = _manifest(repository, now.get(name))
        if held is not None and held.schema != schema:
            raise UsageError(
                f"ref {name!r} of {repository.url} names {now[name]}, samples of another schema ({held.schema}; "
                f"these are {schema}); give another --ref (ref=), or replace it with --replace (replace=True)"
            )
    return {name: now.get(name) for name in refs}


def move_refs(
    repository: Repository, wanted: Mapping[str, str], expected: Standing | None, *, message: str, author: str
) -> Moved:
    """Move refs to the versions that they are to name, all or nothing.

    Args:
        repository: that holds the versions.
        wanted: ref → manifest id.
        expected: where they must stand, unless they are there already; None: wherever they stand now.
        message: of the commit.
        author: of the commit.

    Raises:
        CommitConflict: a ref was moved meanwhile; says to what, and how this version can be named all the same.
        CommitUnknown, StoreError: see `Repository.commit`.
    """
    now = repository.refs
    if wanted.items() <= now.items():
        return NOT_MOVED
    before = {name: now.get(name) for name in wanted} if expected is None else expected
    try:
        entry = repository.commit(wanted, message=message, author=author, expected=before)
    except CommitConflict as error:
        raise _conflict(repository, wanted, before, error) from error
    return Moved(
        entry, {name: (before.get(name), to) for name, to in wanted.items() if before.get(name) != to}
    )


def _conflict(
    repository: Repository, wanted: Mapping[str, str], before: Standing, error: CommitConflict
) -> CommitConflict:
    now = repository.refs
    for name, manifest in wanted.items():
        came, stood = now.get(name), before.get(name)
        if came not in (stood, manifest):
            was = f"it named {stood}" if stood else "it was not there"
            return CommitConflict(
                f"ref {name!r} of {repository.url} names {came or 'nothing'}, which another commit made meanwhile "
                f"({was} when this one was begun); nothing was replaced. This version is whole: {manifest}; to keep it "
                f"beside the other: shardkit tag {repository.url} NAME {manifest}, or the same command with another "
                "--ref; to put it in the other's place: the same command again"
            )
    return error


def block_size_for(root: str | os.PathLike[str], ref: str, given: int | str | None) -> int:
    """Raw bytes per block: as given, else those of the version that a ref names, else those of new datasets."""
    if given is not None:
        return parse_size(given)
    try:
        repository = Repository.open(root)
    except (NotFoundError, UsageError):  # nothing is there yet
        return BLOCK_BYTES
    held = _manifest(repository, repository.refs.get(ref))
    return BLOCK_BYTES if held is None else int(held.build.get("block_size", BLOCK_BYTES))


def _manifest(repository: Repository, manifest_id: str | None) -> Manifest | None:
    """Of a version; None where it cannot be read: whoever repairs it by building it again must be able to."""
    if manifest_id is None:
        return None
    try:
        return read_root(repository, manifest_id)
    except ShardkitError:
        return None
