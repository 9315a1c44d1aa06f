"""Rewrite shards without erased rows, and the manifests over them; journal the erasure (SPEC.md §10).

Everything else stays as it is. The journal consists of documents below ``erasures/<id>/`` of the root: a
killed erasure continues from them, and the report remains as evidence. In the order of writing: ``plan.json``
(numbers of shards and rows), ``objects.json`` (replacements, and objects to delete), ``report.json`` (the
result; the first two are then deleted). They hold only numbers and digests, no keys or values.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardkit.dataset.costs import read_piece, write_piece
from shardkit.dataset.lookups import Entries
from shardkit.dataset.rows import PublishedShard
from shardkit.dataset.shard_writing import publish_shard
from shardkit.dataset.store_survey import StoreSurvey, shard_pair, version_reader
from shardkit.documents import Document, decode, encode
from shardkit.errors import NotFoundError
from shardkit.formats import Row, block_starts, sha256_digest
from shardkit.manifest import (
    CostPiece,
    Lookup,
    LookupPiece,
    Manifest,
    RowCosts,
    Selection,
    ShardRecord,
    ShardTable,
    Stratum,
    check_against,
    paginate,
    stratum_counts,
)
from shardkit.reading.blocks import BlockReader
from shardkit.repository.repository import Repository
from shardkit.repository.versions import load_selection, put_manifest, put_selection
from shardkit.stores.store import Store, put_over

_PREFIX: Final = "erasures/"
_MAX_BYTES: Final = 2**30


class ErasurePlan(Document, frozen=True, kw_only=True, tag="shardkit-erasure/1"):
    """The rows to erase."""

    request: str  # digest of the request, to recognise a repeated call
    reason: str  # for the log, like the author
    author: str
    shards: tuple[
        tuple[str, str, tuple[int, ...]], ...
    ]  # (hex of the shard, hex of its index, rows), ascending
    notes: tuple[str, ...]  # findings that cannot be erased from here
    samples: int  # number of samples asked for

    @property
    def id(self) -> str:
        """32 hex digits, the same for the same plan."""
        return sha256_digest(encode(self)).removeprefix("sha256:")[:32]


class ErasureReport(msgspec.Struct, forbid_unknown_fields=True):
    """Result of an erasure."""

    id: str = ""  # id of the erasure
    reason: str = ""
    samples: int = 0  # number of samples asked for
    rows: int = 0  # rows erased from shards, including equal rows in other shards
    # old manifest id → new one, "" if no row was left
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    refs: dict[str, str] = msgspec.field(default_factory=dict)  # ref → new manifest id, "" if it was dropped
    tags: dict[str, str] = msgspec.field(
        default_factory=dict
    )  # withdrawn tag → the manifest id that it named
    commits: list[int] = msgspec.field(default_factory=list)  # numbers of the log entries
    rewritten: int = 0  # number of shards replaced
    dropped: int = 0  # number of shards without a remaining row
    objects: list[str] = msgspec.field(default_factory=list)  # names of deleted objects
    bytes: int = 0  # size of the deleted objects
    # data that cannot be erased from here, and what to do about it
    not_reached: list[str] = msgspec.field(default_factory=list)


class _State(Document, frozen=True, kw_only=True, tag="shardkit-erasure/1"):
    report: ErasureReport
    shards: dict[str, PublishedShard | None] = msgspec.field(
        default_factory=dict
    )  # replacements, as in `Rewriter`


T = TypeVar("T", ErasurePlan, _State)


def _read(store: Store, name: str, kind: type[T]) -> T:
    return decode(kind, store.get(name, max_bytes=_MAX_BYTES), name, max_bytes=_MAX_BYTES)


class ErasureJournal:
    """The documents of one erasure in the root."""

    def __init__(self, repository: Repository, plan: ErasurePlan) -> None:
        self._store = repository.store
        self.plan = plan
        self._folder = f"{_PREFIX}{plan.id}/"

    def begin(self) -> None:
        """Make the plan durable; from then on the erasure will be finished."""
        self._store.put_new(f"{self._folder}plan.json", encode(self.plan))

    def write(self, shards: dict[str, PublishedShard | None], report: ErasureReport) -> None:
        """Record replacements and objects to delete, before anything that they depend on is deleted."""
        document = _State(shards=shards, report=report)
        put_over(self._store, f"{self._folder}objects.json", encode(document))

    def read(self) -> tuple[dict[str, PublishedShard | None], ErasureReport]:
        """Return what `write` recorded, or no shards and a new report if it was not called."""
        try:
            found = _read(self._store, f"{self._folder}objects.json", _State)
        except NotFoundError:
            plan = self.plan
            rows = sum(len(rows) for *_, rows in plan.shards)
            return {}, ErasureReport(plan.id, plan.reason, plan.samples, rows, not_reached=list(plan.notes))
        return found.shards, found.report

    def report(self) -> ErasureReport | None:
        """Return the report of an erasure that was killed while finishing, or None."""
        try:
            return _read(self._store, f"{self._folder}report.json", _State).report
        except NotFoundError:
            return None

    def finish(self, report: ErasureReport) -> None:
        """Write the report and delete the other documents."""
        put_over(self._store, f"{self._folder}report.json", encode(_State(report=report)))
        for name in ("objects.json", "plan.json"):
            self._store.delete(self._folder + name)


def unfinished_plans(repository: Repository) -> list[ErasurePlan]:
    """Return the plans of unfinished erasures, sorted by id."""
    return [
        _read(repository.store, name, ErasurePlan)
        for name in repository.store.list_after(_PREFIX)
        if name.endswith("/plan.json")
    ]


P = TypeVar("P", LookupPiece, CostPiece)


@dataclass(eq=False)
class Rewriter:
    """Makes the shards and manifests that replace those with rows of a plan.

    Everything is named by its content, so work done before a kill is found again or, at worst, repeated.
    """

    repository: Repository  # repository of the rows
    plan: ErasurePlan  # rows to erase
    # replacements from an earlier attempt, whose originals may be deleted, and new ones; None if no row is left
    shards: dict[str, PublishedShard | None]
    empty_strata: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._lost = {(shard, index): rows for shard, index, rows in self.plan.shards}

    def lost_rows(self, table: ShardTable, shard: int) -> tuple[int, ...]:
        """Return the rows of a shard to erase, ascending."""
        return self._lost.get(shard_pair(table, shard), ())

    def touches(self, table: ShardTable) -> NDArray[np.bool_]:
        """Return (shards,) bool, True for shards of a table that lose rows."""
        lost = [bool(self.lost_rows(table, shard)) for shard in range(len(table))]
        return np.array(lost, dtype=np.bool_)

    def rewrite(self, survey: StoreSurvey, manifest: Manifest, parent: str | None) -> Manifest | None:
        """Put the manifest that replaces another, with all its objects; return None if no sample is left."""
        lost = np.zeros((2, len(manifest.strata)), dtype=np.int64)
        pages = [self._page(manifest, page, lost) for page in survey.pages(manifest)]
        kept = [page for page in pages if len(page)]
        table = ShardTable.concatenate(kept)
        if not table.selected.any():
            return None
        references = [(ref, data) for page in kept for ref, data in paginate(page)]
        before = survey.table(manifest)
        strata = _recount(manifest, table, lost)
        # Strata keep their numbers, which other shards and indexes use; so empty strata keep their names.
        self.empty_strata |= {
            new.name for new, old in zip(strata, manifest.strata, strict=True) if old.rows and not new.rows
        }
        erased = int(manifest.build.get("erased", 0)) + manifest.rows - int(table.rows.sum())
        new = msgspec.structs.replace(
            manifest,
            strata=strata,
            **table.totals,
            pages=tuple(ref for ref, _ in references),
            parent=parent,
            build={**manifest.build, "erased": erased},
            lookups=tuple(
                Lookup(
                    one.field, self._pieces(one.pieces, before, functools.partial(self._lookup, one.field))
                )
                for one in manifest.lookups
            ),
            costs=tuple(
                RowCosts(
                    one.expression,
                    self._pieces(one.pieces, before, functools.partial(self._cost, one.expression)),
                )
                for one in manifest.costs
            ),
        )
        Manifest.from_bytes(new.to_bytes())
        check_against(new, table)
        put_manifest(self.repository, new, [data for _, data in references])
        return new

    def _page(self, manifest: Manifest, page: ShardTable, lost: NDArray[np.int64]) -> ShardTable:
        """Return a page without the rows; an unaffected page is returned as it is and keeps its digest.

        `lost`, (2, strata), counts all lost rows of each stratum in the pool, and the lost rows that were selected.
        """
        touched = self.touches(page)
        if not touched.any():
            return page
        tables: list[ShardTable] = []
        for shard, is_touched in enumerate(touched.tolist()):
            if not is_touched:
                tables.append(page.take([shard]))
            elif (record := self._record(manifest, page, shard, lost)) is not None:
                tables.append(ShardTable.from_records([record]))
        return ShardTable.concatenate(tables) if tables else page.take([])

    def _record(
        self, manifest: Manifest, page: ShardTable, shard: int, lost: NDArray[np.int64]
    ) -> ShardRecord | None:
        """Return the record of the shard that replaces one, and put it if needed; None if no row is left."""
        rows = int(page.rows[shard])
        keep = np.ones(rows, dtype=np.bool_)
        keep[list(self.lost_rows(page, shard))] = False
        mask = np.ones(rows, dtype=np.bool_)
        digest = page.selection_digest_text(shard)
        if digest is not None:
            mask = load_selection(self.repository, digest, rows).mask()
        new_rows = page.count_by_segment(shard, keep)
        reader = version_reader(self.repository, manifest, page)
        # The index is read only if needed: after a kill it may be deleted already.
        has_pool = any(stratum.in_pool for stratum in manifest.strata)
        if has_pool and (own := reader.index(shard).row_stratum) is not None:
            gone = ~keep & (own >= 0)
            for counts, some in zip(lost, (gone, gone & mask), strict=True):
                counts += np.bincount(own[some], minlength=len(counts))
        new = self._shard(manifest, page, shard, reader, keep, new_rows)
        if new is None:
            return None
        new_selected = page.count_by_segment(shard, keep & mask)
        left = Selection.from_mask(mask[keep])
        stratum, stays = page.segment_stratum[page.segments_of(shard)], new_rows > 0
        return new.record(int(page.block_rows[shard]), stratum[stays], new_rows[stays])._replace(
            segment_selected=new_selected[stays],
            selection_digest=None if left.count == left.rows else put_selection(self.repository, left).digest,
        )

    def _shard(
        self,
        manifest: Manifest,
        page: ShardTable,
        shard: int,
        reader: BlockReader,
        keep: NDArray[np.bool_],
        segment_rows: NDArray[np.int64],
    ) -> PublishedShard | None:
        """Return the shard without the erased rows, None if no row is left; others stay as they are, in their order."""
        block_rows = int(page.block_rows[shard])
        # Another manifest may divide the same bytes into other segments, and then needs other blocks.
        cut = hashlib.sha256(np.ascontiguousarray(page.digest[shard]).tobytes())
        cut.update(np.ascontiguousarray(page.index_digest[shard]).tobytes())
        cut.update(np.array([block_rows, *segment_rows], dtype="<i8").tobytes())
        key = cut.hexdigest()
        if key not in self.shards and not keep.any():
            self.shards[key] = None
        if key not in self.shards:
            rows = _kept_rows(reader, shard, keep)
            borders = block_starts([n for n in segment_rows.tolist() if n], block_rows).tolist()
            self.shards[key] = publish_shard(
                self.repository,
                (list(islice(rows, stop - start)) for start, stop in pairwise(borders)),
                format=manifest.format,
                compression=manifest.compression,
                schema=manifest.schema,
                block_rows=block_rows,
                is_small=True,
            )
        return self.shards[key]

    def _pieces(
        self,
        pieces: Sequence[P],
        table: ShardTable,
        rewrite: Callable[[P, NDArray[np.int64], NDArray[np.bool_]], P | None],
    ) -> tuple[P, ...]:
        """Return the pieces of a sidecar; pieces over shards that lose rows are rewritten or dropped.

        `rewrite` gets a piece, the numbers of rows of its shards, and a mask of the rows that stay.
        """
        touched, found, first = self.touches(table), list[P](), 0
        for piece in pieces:
            last = first + piece.shards
            new: P | None = piece
            if touched[first:last].any():
                rows = table.rows[first:last]
                before, keep = np.cumsum(rows) - rows, np.ones(int(rows.sum()), dtype=np.bool_)
                for place in range(first, last):
                    lost = np.array(self.lost_rows(table, place), dtype=np.int64)
                    keep[before[place - first] + lost] = False
                new = rewrite(piece, rows, keep)
            found += [new] if new is not None else []
            first = last
        return tuple(found)

    def _lookup(
        self, field: str, piece: LookupPiece, rows: NDArray[np.int64], keep: NDArray[np.bool_]
    ) -> LookupPiece | None:
        data = self.repository.get_object(piece.digest, "lookup", piece.size)
        entries = Entries.from_bytes(data, field, rows)
        before = np.cumsum(rows) - rows
        left = np.add.reduceat(keep.astype(np.int64), before)
        inside = before[entries.shard] + entries.row  # position of each entry among the rows of the piece
        rank: NDArray[np.int64] = np.cumsum(keep) - keep
        new_row = (rank[inside] - rank[before][entries.shard]).astype(np.uint32)
        new_shard = (np.cumsum(left > 0) - 1)[entries.shard].astype(np.uint32)
        kept = entries.take(keep[inside], new_shard, new_row)
        count = int((left > 0).sum())
        if not count:
            return None
        placed = self.repository.put_object(kept.to_bytes(field, count), "lookup")
        return LookupPiece(placed.digest, placed.size, count, len(kept))

    def _cost(
        self, expression: str, piece: CostPiece, rows: NDArray[np.int64], keep: NDArray[np.bool_]
    ) -> CostPiece | None:
        codes = read_piece(self.repository, expression, piece)[keep]
        left = int(np.logical_or.reduceat(keep, np.cumsum(rows) - rows).sum())
        if not left:
            return None
        placed = self.repository.put_object(write_piece(expression, left, codes), "cost")
        return CostPiece(placed.digest, placed.size, left, len(codes))


def _kept_rows(reader: BlockReader, shard: int, keep: NDArray[np.bool_]) -> Iterator[Row]:
    index = reader.index(shard)
    for number in range(index.blocks):
        first = int(index.block_start[number])
        if not keep[first : int(index.block_start[number + 1])].any():
            continue
        block = reader.read(shard, number)
        for inside in range(block.rows):
            row = first + inside
            if not keep[row]:
                continue
            key, original = index.key(row), index.original_key(row)
            yield Row(
                key,
                block.payloads(inside),
                None if original == key else original,
                index.source(row),
                index.stratum(row),
            )


def _recount(manifest: Manifest, table: ShardTable, lost: NDArray[np.int64]) -> tuple[Stratum, ...]:
    """Return the strata with new counts; strata in the pool are counted by their lost rows."""
    rows, selected = stratum_counts(table, len(manifest.strata))
    for number, stratum in enumerate(manifest.strata):
        if stratum.in_pool:
            rows[number] = stratum.rows - lost[0, number]
            selected[number] = stratum.selected - lost[1, number]
    return tuple(
        msgspec.structs.replace(stratum, rows=int(rows[number]), selected=int(selected[number]))
        for number, stratum in enumerate(manifest.strata)
    )
