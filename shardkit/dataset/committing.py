"""Write rows from scratch as a version: shards, pages, manifest, a selection per split, and the commit.

Refs are moved from where they stood when the version was begun.
A ref whose version has another schema is never moved unless `replace` is given.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.copies.replicate import commit
from shardkit.dataset.costs import put_costs
from shardkit.dataset.layout import BLOCK_BYTES
from shardkit.dataset.lookups import put_lookups
from shardkit.dataset.rows import Rows
from shardkit.dataset.scratch import Parts, ScratchReader
from shardkit.dataset.selecting import put_selected, select_rows
from shardkit.dataset.shard_writing import write_shard
from shardkit.dataset.version_plan import Base, NewVersion, VersionPlan, load_base, plan_version
from shardkit.errors import CommitConflict, NotFoundError, ShardkitError, UsageError
from shardkit.extras import shell_word
from shardkit.formats import Schema
from shardkit.manifest import (
    Lookup,
    Manifest,
    RowCosts,
    ShardRecord,
    ShardTable,
    compose,
)
from shardkit.ranges import parse_size
from shardkit.reading.blocks import BlockReader
from shardkit.reading.inventory import read_root
from shardkit.repository.log import LogEntry
from shardkit.repository.repository import Repository
from shardkit.repository.versions import Part, Version, put_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Repository and ref of a new version, the state of its refs at the start, and the commit's text."""

    repository: Repository  # holds the objects of the version
    ref: str  # names all rows
    expected: Standing | None = None  # where the refs must still be at the commit; see `move_refs`
    base: Base | None = None  # version to append to
    message: str = ""
    author: str = ""

    @classmethod
    def begin(
        cls,
        repository: Repository,
        version: NewVersion,
        ref: str,
        *,
        append: bool = False,
        replace: bool = False,
        message: str = "",
        author: str = "",
    ) -> Destination:
        """Record where the refs stand, and for an append load the base version."""
        base = load_base(repository, ref, version) if append else None
        expected = (
            base.expected
            if base
            else standing_refs(repository, version.refs(ref), version.schema, replace=replace)
        )
        return cls(
            repository=repository, ref=ref, expected=expected, base=base, message=message, author=author
        )


@dataclass(frozen=True, slots=True)
class MadeVersion:
    """A version whose objects are durable, but which no ref names yet."""

    manifest: Manifest  # of all rows
    splits: Mapping[str, Manifest]


def write_version(to: Destination, version: NewVersion, columns: Sequence[Rows], parts: Parts) -> Manifest:
    """Lay rows out, write their shards and commit them, in one process; `parts` are closed."""
    rows = Rows.join(columns)
    if not len(rows):
        raise UsageError("no sample was added; a dataset holds at least one")
    with contextlib.closing(parts):
        reader = ScratchReader(parts, version.schema)
        plan = plan_version(version, rows, to.base, reader)
        shards = [shard.record(write_shard(to.repository, reader, shard, version)) for shard in plan.shards()]
    made = make_manifest(to.repository, plan, shards)
    commit_version(to, made)
    return made.manifest


def make_manifest(repository: Repository, plan: VersionPlan, shards: Sequence[ShardRecord]) -> MadeVersion:
    """Put the pages and manifests of a version whose shards are published.

    The records' strata are numbered as in `Rows`; they get their numbers of the manifest here.
    """
    version, base = plan.version, plan.base
    own = base.manifest if base else None
    numbered = (one._replace(segment_stratum=plan.of_stratum[one.segment_stratum]) for one in shards)
    table = ShardTable.from_records(numbered)
    build = version.build_settings()
    fields = [lookup.field for lookup in own.lookups] if own else version.lookups
    expressions = [one.expression for one in own.costs] if own else version.costs
    lookups: tuple[Lookup, ...] = ()
    costs: tuple[RowCosts, ...] = ()
    if fields or expressions:
        reader = BlockReader(table, [repository.store], [0], [version.format])
        lookups = put_lookups(repository, reader, table, fields, own.lookups if own else ())
        costs = put_costs(repository, reader, table, version.schema, expressions, own.costs if own else ())
    about = own.about if own else None
    if version.about is not None:
        about = repository.put_object(version.about.to_bytes(), "about").digest
    manifest, pages = compose(
        table,
        base=(base.manifest, base.version.table) if base else None,
        schema=version.schema,
        format=version.format,
        compression=version.compression,
        axes=version.axes,
        strata=plan.strata(),
        classes=version.classes,
        sources=version.sources or (own.sources if own else None),
        build={**own.build, "append": {**build, "rows": len(plan.rows)}} if own else build,
        parent=own.id if own else None,
        adopted=own is not None and own.adopted,
        about=about,
        lookups=lookups,
        costs=costs,
    )
    put_manifest(repository, manifest, pages)
    return MadeVersion(manifest, _put_splits(repository, plan, manifest, table))


def commit_version(to: Destination, made: MadeVersion) -> Moved:
    """Move the ref, and one ref per split, to a version."""
    wanted = {name: manifest.id for name, manifest in made.splits.items()} | {to.ref: made.manifest.id}
    said = to.message or f"{made.manifest.rows} rows"
    return move_refs(to.repository, wanted, to.expected, message=said, author=to.author)


def _put_splits(
    repository: Repository, plan: VersionPlan, manifest: Manifest, table: ShardTable
) -> dict[str, Manifest]:
    """Put a selection of all rows for each split and return their manifests by split; `table` has the new shards."""
    base, split, index = plan.base, plan.version.split, plan.split
    if split is None or index is None:
        return {}
    if base is not None:
        table = ShardTable.concatenate([base.version.table, table])
    first = len(base.version.table) if base else 0
    whole = Version(manifest, table, (Part("", repository, manifest, 0),))

    def row_strata(shard: int) -> NDArray[np.int32] | None:
        if base is not None and shard < first:
            return base.row_strata.get(shard)
        return plan.of_stratum[plan.rows.stratum[plan.rows_of(shard - first)]]

    manifests = {}
    for number, name in enumerate(split.names):
        masks = [base.splits[name].mask(shard) for shard in range(first)] if base else []
        masks += [index[plan.rows_of(shard)] == number for shard in range(plan.layout.shards)]
        noted = {"split": {**split.to_json(), "name": name}}
        selected = select_rows(whole, masks, row_strata=row_strata, build=noted)
        manifests[name] = put_selected(repository, selected)
    return manifests


Standing = Mapping[str, str | None]
"""Ref → the manifest id that it names, or None if the ref does not exist."""


class Moved(NamedTuple):
    """The result of `move_refs`."""

    entry: LogEntry | None  # None if every ref named its version already
    refs: Mapping[str, tuple[str | None, str]]  # moved ref → (from, to); from is None for a new ref


NOT_MOVED = Moved(None, {})
"""Result if every ref names its version already, or if there is nothing to commit."""


def standing_refs(
    repository: Repository, refs: Iterable[str], schema: Schema | None = None, *, replace: bool = False
) -> Standing | None:
    """Return where refs stand before a new version is made: the `expected` of `move_refs`.

    Raises:
        UsageError: A ref names samples of another schema.
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
    """Move refs to their new versions, all or none.

    Raises:
        CommitConflict: Another commit moved a ref from where it was expected.
    """
    now = repository.refs
    if wanted.items() <= now.items():
        return NOT_MOVED
    before = {name: now.get(name) for name in wanted} if expected is None else expected
    try:
        entry = commit(repository, wanted, message=message, author=author, expected=before)
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
                "beside the other: "
                f"shardkit tag {shell_word(repository.url)} NAME {manifest}, or the same command with another "
                "--ref; the same command again puts it in the other's place, or with --append after its samples"
            )
    return error


def block_size_for(held: Manifest | None, given: int | str | None) -> int:
    """Return raw bytes per block: the given value, or the value of the version that the ref names, or the default."""
    if given is not None:
        return parse_size(given)
    return BLOCK_BYTES if held is None else int(held.build.get("block_size", BLOCK_BYTES))


def version_of_ref(root: str | os.PathLike[str], ref: str) -> Manifest | None:
    """Return the version that a ref of a root names; None if the root is new, or has no such ref."""
    try:
        repository = Repository.open(root)
    except (NotFoundError, UsageError):  # the root is new
        return None
    return _manifest(repository, repository.refs.get(ref))


def _manifest(repository: Repository, manifest_id: str | None) -> Manifest | None:
    """Return the manifest of a version, or None if it is unreadable: building again must repair it."""
    if manifest_id is None:
        return None
    try:
        return read_root(repository.store, manifest_id)
    except ShardkitError:
        return None
