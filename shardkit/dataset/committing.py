"""Write rows from scratch as a version: shards, pages, manifest, a selection per split, and the commit.

Refs are moved from where they stood when the version was begun.
A ref whose version has another schema is never moved unless `replace` is given.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardkit.copies.replicate import commit
from shardkit.dataset.costs import put_costs
from shardkit.dataset.layout import BLOCK_BYTES
from shardkit.dataset.lookups import put_lookups
from shardkit.dataset.scratch import MIN_RUN_BYTES, Rows, ShardRows, join_parts
from shardkit.dataset.scratch_reading import Parts, ScratchReader
from shardkit.dataset.selecting import put_selected, select_rows, selected_rows
from shardkit.dataset.version_plan import Base, NewVersion, VersionPlan, load_base, plan_version
from shardkit.errors import CommitConflict, NotFoundError, ShardkitError, UsageError
from shardkit.formats import Row, RowBlock, Schema, ShardWriter, Sink, block_starts
from shardkit.manifest import (
    Lookup,
    Manifest,
    PageRef,
    RowCosts,
    ShardRecord,
    ShardTable,
    check_against,
    paginate,
)
from shardkit.ranges import parse_size
from shardkit.reading.blocks import BlockReader
from shardkit.reading.inventory import read_root
from shardkit.repository.log import LogEntry
from shardkit.repository.repository import Repository
from shardkit.repository.versions import put_manifest


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
    """Lay rows out, write their shards and commit them, in one process."""
    rows = join_parts(columns)
    if not len(rows):
        raise UsageError("no sample was added; a dataset holds at least one")
    reader = ScratchReader(parts, version.schema)
    plan = plan_version(version, rows, to.base, reader)
    shards = [write_shard(to.repository, reader, shard, version) for shard in plan.shards()]
    made = make_manifest(to.repository, plan, shards)
    commit_version(to, made)
    return made.manifest


def make_manifest(repository: Repository, plan: VersionPlan, shards: Sequence[ShardRecord]) -> MadeVersion:
    """Put the pages and manifests of a version whose shards are published.

    The records' strata are numbered as in `Rows`; they get their numbers of the manifest here.
    """
    base = plan.base
    numbered = (one._replace(segment_stratum=plan.of_stratum[one.segment_stratum]) for one in shards)
    table = ShardTable.from_records(numbered)
    pages = paginate(table)
    manifest = _root(repository, plan, table, tuple(ref for ref, _ in pages))
    if base is not None:
        table = ShardTable.concatenate([base.version.table, table])
    Manifest.from_bytes(manifest.to_bytes())  # never write what readers reject
    check_against(manifest, table)
    put_manifest(repository, manifest, [data for _, data in pages])
    return MadeVersion(manifest, _put_splits(repository, plan, manifest, table))


def commit_version(to: Destination, made: MadeVersion) -> Moved:
    """Move the ref, and one ref per split, to a version."""
    wanted = {name: manifest.id for name, manifest in made.splits.items()} | {to.ref: made.manifest.id}
    said = to.message or f"{made.manifest.rows} rows"
    return move_refs(to.repository, wanted, to.expected, message=said, author=to.author)


def _root(
    repository: Repository, plan: VersionPlan, table: ShardTable, pages: tuple[PageRef, ...]
) -> Manifest:
    """Return the manifest of the new shards; an append keeps the pages of the base before its own."""
    version, own = plan.version, plan.base.manifest if plan.base else None
    build = version.build_settings()
    return Manifest(
        schema=version.schema,
        format=version.format,
        compression=version.compression,
        axes=version.axes,
        strata=plan.strata(),
        **{name: total + (getattr(own, name) if own else 0) for name, total in table.totals.items()},
        pages=(own.pages if own else ()) + pages,
        classes=version.classes,
        sources=version.sources or (own.sources if own else None),
        build={**own.build, "append": {**build, "rows": table.totals["rows"]}} if own else build,
        parent=own.id if own else None,
        adopted=own is not None and own.adopted,
        **_sidecars(repository, version, table, own),
    )


def _sidecars(
    repository: Repository, version: NewVersion, table: ShardTable, own: Manifest | None
) -> dict[str, Any]:
    """Return the manifest's about, look-ups and costs; an append adds new pieces to the base's."""
    fields = tuple(lookup.field for lookup in own.lookups) if own else version.lookups
    expressions = tuple(costs.expression for costs in own.costs) if own else version.costs
    lookups: tuple[Lookup, ...] = ()
    costs: tuple[RowCosts, ...] = ()
    if fields or expressions:
        reader = BlockReader(table, [repository.store], [0], [version.format])
        lookups = put_lookups(repository, reader, table, fields)
        costs = put_costs(repository, reader, table, version.schema, expressions)
    about = own.about if own else None
    if version.about is not None:
        about = repository.put_object(version.about.to_bytes(), "about").digest
    if own is not None:
        before = {one.field: one.pieces for one in own.lookups}
        lookups = tuple(Lookup(new.field, before[new.field] + new.pieces) for new in lookups)
        known = {one.expression: one.pieces for one in own.costs}
        costs = tuple(RowCosts(new.expression, known[new.expression] + new.pieces) for new in costs)
    return {"about": about, "lookups": lookups, "costs": costs}


def _put_splits(
    repository: Repository, plan: VersionPlan, manifest: Manifest, table: ShardTable
) -> dict[str, Manifest]:
    """Put a selection of all rows for each split and return their manifests by split."""
    base, split, index = plan.base, plan.version.split, plan.split
    if split is None or index is None:
        return {}
    first = len(base.version.table) if base else 0

    def row_strata(shard: int) -> NDArray[np.int32] | None:
        if base is not None and shard < first:
            return base.row_strata.get(shard)
        return plan.of_stratum[plan.rows.stratum[plan.rows_of(shard - first)]]

    manifests = {}
    for number, name in enumerate(split.names):
        masks = {first + shard: index[plan.rows_of(shard)] == number for shard in range(plan.layout.shards)}
        masks |= {shard: selected_rows(base.splits[name], shard) for shard in range(first)} if base else {}
        noted = {"split": {**split.to_json(), "name": name}}
        selected, new_table, selections = select_rows(
            manifest, table, masks, row_strata=row_strata, build=noted
        )
        put_selected(repository, selected, new_table, selections)
        manifests[name] = selected
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
                f"beside the other: shardkit tag {repository.url} NAME {manifest}, or the same command with another "
                "--ref; to put it in the other's place: the same command again"
            )
    return error


def block_size_for(root: str | os.PathLike[str], ref: str, given: int | str | None) -> int:
    """Return raw bytes per block: the given value, or that of the version of `ref`, or the default."""
    if given is not None:
        return parse_size(given)
    try:
        repository = Repository.open(root)
    except (NotFoundError, UsageError):  # the root is new
        return BLOCK_BYTES
    held = _manifest(repository, repository.refs.get(ref))
    return BLOCK_BYTES if held is None else int(held.build.get("block_size", BLOCK_BYTES))


def _manifest(repository: Repository, manifest_id: str | None) -> Manifest | None:
    """Return the manifest of a version, or None if it is unreadable: building again must repair it."""
    if manifest_id is None:
        return None
    try:
        return read_root(repository.store, manifest_id)
    except ShardkitError:
        return None


# ---- Shards: blocks of rows from scratch, written to a published object and its index

# Below this size, starting threads costs more than it saves.
_SMALL_BYTES = 4 * 2**20

# Reads of this size cost a disk little more than longer ones. Rows of few runs are gathered with less memory:
# touching memory for the first time costs more than a copy.
_RANGE_BYTES = 128 * 2**10
_MIN_GATHER_BYTES = 6 * 2**20
# Raw bytes; for blocks of a few rows, numpy calls per block would take longer than copying their bytes.
_TOGETHER_BYTES = 2**20

GATHER_BYTES = 64 * 2**20
"""Most bytes of rows in memory at a time; a larger block is held whole."""


def write_shard(
    repository: Repository,
    reader: ScratchReader,
    rows: ShardRows,
    version: NewVersion,
    *,
    gather_bytes: int = GATHER_BYTES,
    on_block: Callable[[int, int], None] | None = None,
) -> ShardRecord:
    """Write and publish one shard and its index; objects that exist already are kept.

    At most `gather_bytes` of scratch are in memory at a time.
    `on_block` is called with (rows, payload bytes) after every few blocks.
    """

    def blocks() -> Iterator[RowBlock]:
        for block, size in _blocks(reader, rows, gather_bytes):
            yield block
            if on_block is not None:
                on_block(len(block), size)

    return publish_shard(
        repository,
        blocks(),
        format=version.format,
        compression=version.compression,
        schema=version.schema,
        block_rows=rows.block_rows,
        segments=(rows.segment_stratum, rows.segment_rows),
        is_small=rows.raw_bytes < _SMALL_BYTES,
    )


def publish_shard(
    repository: Repository,
    blocks: Iterable[RowBlock | Sequence[Row]],
    *,
    format: str,
    compression: str,
    schema: Schema,
    block_rows: int,
    segments: tuple[Sequence[int] | NDArray[np.int32], Sequence[int] | NDArray[np.int64]],
    is_small: bool = False,
) -> ShardRecord:
    """Publish blocks of rows as a shard and its index; objects that exist already are kept.

    `segments` are the stratum and the number of rows of each segment, in row order.
    Other threads hash and write a block while the next one is read and encoded, unless the shard `is_small`:
    then threads would not pay.
    """
    with (
        repository.stage_object(format) as staged,
        WriteBehind(staged, staged.sync, is_small=is_small) as behind,
    ):
        writer = ShardWriter(
            behind,
            format=format,
            compression=compression,
            schema=schema,
            block_rows=block_rows,
            executor=behind.hashing,
        )
        for block in blocks:
            writer.write_block(block)
        index = writer.finish()
        behind.flush()
        # Each waits for the disk a few times; nothing names either yet, so their order is free.
        put_index = behind.beside(lambda: repository.put_object(index.to_bytes(), "index"))
        shard, sidecar = repository.publish(staged, format), put_index()
    return ShardRecord(
        digest=shard.digest,
        size=shard.size,
        index_digest=sidecar.digest,
        index_size=sidecar.size,
        block_rows=block_rows,
        largest_block=int(index.block_raw_size.max()),
        raw_bytes=int(index.block_raw_size.sum()),
        segment_stratum=segments[0],
        segment_rows=segments[1],
    )


def _blocks(reader: ScratchReader, rows: ShardRows, gather_bytes: int) -> Iterator[tuple[RowBlock, int]]:
    """Yield a few encoded blocks at a time and their payload bytes; blocks restart at segment borders."""
    borders = block_starts(rows.segment_rows.tolist(), rows.block_rows)
    gather_bytes = min(gather_bytes, max(_MIN_GATHER_BYTES, _num_runs(rows) * _RANGE_BYTES))
    size_before = np.concatenate([[0], np.cumsum(rows.row_bytes)])[borders]
    most = max(1, _TOGETHER_BYTES * (len(borders) - 1) // max(1, rows.raw_bytes))
    first = 0
    while first < len(borders) - 1:
        limit = int(size_before[first]) + gather_bytes
        last = max(first + 1, int(np.searchsorted(size_before, limit, side="right")) - 1)
        begin, end = int(borders[first]), int(borders[last])
        held = reader.read(rows.records[begin:end], rows.ordinal[begin:end])
        inside = borders[first : last + 1] - begin
        for part, size in _encoded_together(inside, held.payload_bytes[inside], most):
            start, stop = int(part[0]), int(part[-1])
            stratum = rows.stratum[begin + start : begin + stop] if rows.stratum is not None else None
            yield held.block(start, stop, stratum, ends=(part[1:] - start).tolist()), size
        del held  # frees the buffer before the reader allocates another
        first = last


def _encoded_together(
    borders: NDArray[np.int64], bytes_before: NDArray[np.int64], most: int
) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Yield the borders of up to `most` blocks and their payload bytes; a large block comes alone."""
    first = 0
    while first < len(borders) - 1:
        limit = bytes_before[first] + _TOGETHER_BYTES
        last = max(first + 1, int(np.searchsorted(bytes_before, limit, side="right")) - 1)
        last = min(last, first + most)
        yield borders[first : last + 1], int(bytes_before[last] - bytes_before[first])
        first = last


def _num_runs(rows: ShardRows) -> int:
    """Return an upper bound of the number of scratch runs that hold the rows."""
    batches = rows.records.batches
    part, offset = batches.part.astype(np.int64), batches.offset
    # not `np.unique`: its first call imports numpy's masked arrays
    runs = np.sort((part << 32) + offset // MIN_RUN_BYTES)
    return int(np.count_nonzero(np.diff(runs, prepend=-1)))


T = TypeVar("T")
_WRITTEN_TOGETHER = 2**20  # bytes; a larger piece is written alone
_MAX_UNWRITTEN = 4
_SYNC_BYTES = 32 * 2**20


class WriteBehind:
    """A sink that writes in order, from its own thread, to another sink; a context manager.

    hashlib, xxhash and write(2) release the interpreter lock.
    Buffers are borrowed until they are written: call `flush` before relying on the bytes.
    Leaving the context waits for the threads, so that nothing is written to a dropped sink.

    Args:
        sink: destination of all bytes.
        sync: makes the bytes in the sink durable; called every 32 MiB, so that the disk works while more is
            written.
        is_small: write at once, without threads.

    Attributes:
        hashing: executor for the hashes of blocks, or None if they are computed at once.
    """

    def __init__(self, sink: Sink, sync: Callable[[], None], *, is_small: bool) -> None:
        self._sink = sink
        self._sync = sync
        self._syncing = None if is_small else ThreadPoolExecutor(1, "sync")
        self._unsynced = 0
        self._synced: Future[None] | None = None
        self._writing = None if is_small else ThreadPoolExecutor(1, "write")
        self._taken: list[bytes | memoryview] = []
        self._taken_bytes = 0
        self._unwritten: deque[Future[None]] = deque()
        self.hashing: Executor | None = None if is_small else ThreadPoolExecutor(1, "hash")

    def write(self, data: bytes | memoryview, /) -> None:
        """Queue bytes for writing."""
        if self._writing is None:
            self._put([data])
            return
        self._taken.append(data)
        self._taken_bytes += len(data)
        if self._taken_bytes >= _WRITTEN_TOGETHER:
            self._hand_over(self._writing)

    def _hand_over(self, writing: Executor) -> None:
        """Queue the collected pieces as one write: waking a thread per piece costs as much as writing it."""
        while len(self._unwritten) >= _MAX_UNWRITTEN:
            self._unwritten.popleft().result()
        self._unwritten.append(writing.submit(self._put, self._taken))
        self._begin_sync(self._taken_bytes)
        self._taken, self._taken_bytes = [], 0

    def beside(self, work: Callable[[], T]) -> Callable[[], T]:
        """Start other work, in a thread if there are any, and return a function that waits for its result."""
        if self.hashing is None:
            return work
        return self.hashing.submit(work).result

    def flush(self) -> None:
        """Wait until the sink has everything."""
        if self._writing is not None and self._taken:
            self._hand_over(self._writing)
        while self._unwritten:
            self._unwritten.popleft().result()
        if self._synced is not None:
            self._synced.result()

    def _begin_sync(self, size: int) -> None:
        """Start a sync every 32 MiB unless one is running; its errors are raised to the writer."""
        self._unsynced += size
        if self._syncing is None or self._unsynced < _SYNC_BYTES:
            return
        if self._synced is not None:
            if not self._synced.done():
                return
            self._synced.result()
        self._synced, self._unsynced = self._syncing.submit(self._sync), 0

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for executor in (self._writing, self.hashing, self._syncing):
            if executor is not None:
                executor.shutdown(wait=True, cancel_futures=True)

    def _put(self, pieces: Sequence[bytes | memoryview]) -> None:
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                taken = self._sink.write(rest)
                rest = rest[len(rest) if taken is None else taken :]
