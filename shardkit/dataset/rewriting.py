"""Shards without some of their rows, and manifests over such shards: everything else stays as it was (SPEC.md §10)."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardkit.dataset.costs import covers, read_piece, write_piece
from shardkit.dataset.erasure_journal import ErasurePlan, NewShard
from shardkit.dataset.lookups import Entries
from shardkit.dataset.store_survey import StoreSurvey
from shardkit.formats import Row, ShardIndex, ShardWriter, block_starts, extension
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


@dataclass(frozen=True, slots=True, eq=False)
class _Loss:
    """What a manifest loses in one shard: own strata of the rows that go, and which of them it had selected."""

    stratum: NDArray[np.int32] | None
    selected: NDArray[np.bool_]


class Rewriter:
    """Makes the shards and manifests that replace those of a plan; everything it puts is named by its content.

    So whatever was done before a kill is found again, and made again at worst.

    Args:
        repository: that rows are erased from.
        plan: which rows.
        shards: replacements known from an earlier attempt, whose originals may be gone.
    """

    def __init__(self, repository: Repository, plan: ErasurePlan, shards: Mapping[str, NewShard]) -> None:
        self.repository = repository
        self._plan = plan
        self.shards = dict(shards)
        self.empty_strata: set[str] = set()

    def touches(self, table: ShardTable) -> NDArray[np.bool_]:
        """(shards,) which shards of a table lose rows."""
        pairs = zip(table.digest, table.index_digest, strict=True)
        return np.array(
            [(a.tobytes().hex(), b.tobytes().hex()) in self._plan.shards for a, b in pairs], dtype=np.bool_
        )

    def rewrite(self, survey: StoreSurvey, manifest: Manifest, parent: str | None) -> Manifest | None:
        """Put the manifest that replaces one of the plan's, with all that it needs; None where no sample is left.

        Args:
            survey: of the repository.
            manifest: of which some shard loses rows.
            parent: what the new one is to name as its parent.
        """
        losses: list[_Loss] = []
        pages = [self._page(manifest, page, losses) for page in survey.pages(manifest)]
        kept = [page for page in pages if page is not None and len(page)]
        table = ShardTable.concatenate(kept)
        if not table.selected.any():
            return None
        references = [(ref, data) for page in kept for ref, data in paginate(page)]
        erased = int(manifest.build.get("erased", 0)) + manifest.rows - int(table.rows.sum())
        strata = _recount(manifest, table, losses)
        # They keep their numbers, which other shards and indexes use; so their names stay.
        self.empty_strata |= {
            new.name for new, old in zip(strata, manifest.strata, strict=True) if old.rows and not new.rows
        }
        new = dataclasses.replace(
            manifest,
            strata=strata,
            shards=len(table),
            rows=int(table.rows.sum()),
            selected=int(table.selected.sum()),
            raw_bytes=sum(table.raw_bytes.tolist()),
            stored_bytes=sum(table.size.tolist()),
            pages=tuple(ref for ref, _ in references),
            parent=parent,
            build={**manifest.build, "erased": erased},
            lookups=self._lookups(manifest, survey.table(manifest)),
            costs=self._costs(manifest, survey.table(manifest)),
        )
        Manifest.from_bytes(new.to_bytes())
        check_against(new, table)
        put_manifest(self.repository, new, [data for _, data in references])
        return new

    def _page(self, manifest: Manifest, page: ShardTable, losses: list[_Loss]) -> ShardTable | None:
        """A page without the rows; the page itself where it loses none, so that its digest stays."""
        touched = self.touches(page)
        if not touched.any():
            return page
        tables: list[ShardTable] = []
        for shard, is_touched in enumerate(touched.tolist()):
            if not is_touched:
                tables.append(page.take([shard]))
                continue
            record = self._record(manifest, page, shard, losses)
            if record is not None:
                tables.append(ShardTable.from_records([record]))
        return ShardTable.concatenate(tables) if tables else None

    def _record(
        self, manifest: Manifest, page: ShardTable, shard: int, losses: list[_Loss]
    ) -> ShardRecord | None:
        """The entry of the shard that replaces one, put where it has not been."""
        segments = slice(int(page.segment_starts[shard]), int(page.segment_starts[shard + 1]))
        segment_rows = page.segment_rows[segments]
        rows = int(page.rows[shard])
        keep = np.ones(rows, dtype=np.bool_)
        keep[list(self._rows(page, shard))] = False
        mask = np.ones(rows, dtype=np.bool_)
        digest = page.selection_digest_text(shard)
        if digest is not None:
            mask = load_selection(self.repository, digest, rows).mask()
        starts = np.cumsum(segment_rows) - segment_rows
        new_rows = np.add.reduceat(keep.astype(np.int64), starts)
        index = _Lazy(self.repository, page, shard)
        losses.append(_Loss(self._own_strata(manifest, index, ~keep), mask[~keep]))
        new = self._shard(manifest, page, shard, index, keep, new_rows)
        if not new.digest:
            return None
        new_selected = np.add.reduceat((keep & mask).astype(np.int64), starts)
        left = Selection.from_mask(mask[keep])
        return ShardRecord(
            digest=new.digest,
            size=new.size,
            index_digest=new.index_digest,
            index_size=new.index_size,
            block_rows=int(page.block_rows[shard]),
            largest_block=new.largest_block,
            raw_bytes=new.raw_bytes,
            segment_stratum=page.segment_stratum[segments][new_rows > 0],
            segment_rows=new_rows[new_rows > 0],
            segment_selected=new_selected[new_rows > 0],
            selection_digest=None if left.count == left.rows else put_selection(self.repository, left).digest,
        )

    def _own_strata(
        self, manifest: Manifest, index: _Lazy, lost: NDArray[np.bool_]
    ) -> NDArray[np.int32] | None:
        if not any(stratum.in_pool for stratum in manifest.strata):
            return None
        strata = index.load().row_stratum
        return None if strata is None else strata[lost]

    def _shard(
        self,
        manifest: Manifest,
        page: ShardTable,
        shard: int,
        index: _Lazy,
        keep: NDArray[np.bool_],
        segment_rows: NDArray[np.int64],
    ) -> NewShard:
        # The same bytes may be cut into other segments by another manifest: its blocks then lie otherwise.
        cut = hashlib.sha256(np.ascontiguousarray(page.digest[shard]).tobytes())
        cut.update(np.ascontiguousarray(page.index_digest[shard]).tobytes())
        cut.update(np.array([page.block_rows[shard], *segment_rows], dtype="<i8").tobytes())
        key = cut.hexdigest()
        if key not in self.shards:
            self.shards[key] = (
                _write(self.repository, manifest, page, shard, index.load(), keep, segment_rows)
                if keep.any()
                else NewShard("", 0, "", 0, 0, 0)
            )
        return self.shards[key]

    def _rows(self, table: ShardTable, shard: int) -> tuple[int, ...]:
        pair = (table.digest[shard].tobytes().hex(), table.index_digest[shard].tobytes().hex())
        return self._plan.shards.get(pair, ())

    def _lookups(self, manifest: Manifest, table: ShardTable) -> tuple[Lookup, ...]:
        """The sidecars without the rows; pieces over shards that lose none stay as they are."""
        touched = self.touches(table)
        lookups = []
        for lookup in manifest.lookups:
            pieces = []
            first = 0
            for piece in lookup.pieces:
                shards = range(first, first + piece.shards)
                first += piece.shards
                new = piece if not touched[shards].any() else self._piece(lookup.field, piece, table, shards)
                pieces += [new] if new is not None else []
            lookups.append(Lookup(lookup.field, tuple(pieces)))
        return tuple(lookups)

    def _piece(self, field: str, piece: LookupPiece, table: ShardTable, shards: range) -> LookupPiece | None:
        data = self.repository.get_object(piece.digest, "lookup", piece.size)
        rows = table.rows[shards.start : shards.stop]
        entries = Entries.from_bytes(data, field, rows)
        before = np.cumsum(rows) - rows
        keep = self._kept(table, shards)
        left = np.add.reduceat(keep.astype(np.int64), before)
        inside = before[entries.shard] + entries.row  # of each entry in the rows of the piece
        rank: NDArray[np.int64] = np.cumsum(keep) - keep
        new_row = (rank[inside] - rank[before][entries.shard]).astype(np.uint32)
        new_shard = (np.cumsum(left > 0) - 1)[entries.shard].astype(np.uint32)
        kept = entries.take(keep[inside], new_shard, new_row)
        count = int((left > 0).sum())
        if not count:
            return None
        placed = self.repository.put_object(kept.to_bytes(field, count), "lookup")
        return LookupPiece(placed.digest, placed.size, count, len(kept))

    def _costs(self, manifest: Manifest, table: ShardTable) -> tuple[RowCosts, ...]:
        """What rows cost without those that go; pieces over shards that lose none stay as they are."""
        touched = self.touches(table)
        found = []
        for costs in manifest.costs:
            if not covers(costs, table.rows):
                continue
            pieces: list[CostPiece] = []
            first = 0
            for piece in costs.pieces:
                shards = range(first, first + piece.shards)
                first += piece.shards
                if not touched[shards].any():
                    pieces.append(piece)
                    continue
                keep = self._kept(table, shards)
                codes = read_piece(self.repository, costs.expression, piece)[keep]
                starts = np.cumsum(table.rows[shards]) - table.rows[shards]
                left = int(np.logical_or.reduceat(keep, starts).sum())
                if left:
                    data = write_piece(costs.expression, left, codes)
                    placed = self.repository.put_object(data, "cost")
                    pieces.append(CostPiece(placed.digest, placed.size, left, len(codes)))
            found.append(RowCosts(costs.expression, tuple(pieces)))
        return tuple(found)

    def _kept(self, table: ShardTable, shards: range) -> NDArray[np.bool_]:
        """bool[rows of some shards]: which stay."""
        rows = table.rows[shards.start : shards.stop]
        before, keep = np.cumsum(rows) - rows, np.ones(int(rows.sum()), dtype=np.bool_)
        for place, shard in enumerate(shards):
            keep[before[place] + np.array(self._rows(table, shard), dtype=np.int64)] = False
        return keep


class _Lazy:
    """The index of a shard, read when it is needed: after a kill it may be gone, and not needed any more."""

    def __init__(self, repository: Repository, page: ShardTable, shard: int) -> None:
        self._repository = repository
        self._digest = page.index_digest_text(shard)
        self._size = int(page.index_size[shard])
        self._index: ShardIndex | None = None

    def load(self) -> ShardIndex:
        """The verified index."""
        if self._index is None:
            data = self._repository.get_object(self._digest, "index", self._size)
            self._index = ShardIndex.from_bytes(data)
        return self._index


def _write(
    repository: Repository,
    manifest: Manifest,
    page: ShardTable,
    shard: int,
    index: ShardIndex,
    keep: NDArray[np.bool_],
    segment_rows: NDArray[np.int64],
) -> NewShard:
    """Write a shard without some rows, block by block; payloads, keys and sources stay to the last byte."""
    reader = BlockReader(page, [repository], [0], [(manifest.format, manifest.compression)], "strong")
    rows = _kept_rows(reader, shard, index, keep)
    block_rows = int(page.block_rows[shard])
    borders = block_starts([n for n in segment_rows.tolist() if n], block_rows)
    with repository.stage_object(extension(manifest.format, manifest.compression)) as staged:
        writer = ShardWriter(
            staged,
            format=manifest.format,
            compression=manifest.compression,
            schema=manifest.schema,
            block_rows=block_rows,
        )
        for start, stop in pairwise(borders.tolist()):
            writer.write_block([next(rows) for _ in range(stop - start)])
        written = writer.finish()
        placed = staged.finish()
    sidecar = repository.put_object(written.to_bytes(), "index")
    return NewShard(
        placed.digest,
        placed.size,
        sidecar.digest,
        sidecar.size,
        int(written.block_raw_size.max()),
        int(written.block_raw_size.sum()),
    )


def _kept_rows(reader: BlockReader, shard: int, index: ShardIndex, keep: NDArray[np.bool_]) -> Iterator[Row]:
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


def _recount(manifest: Manifest, table: ShardTable, losses: list[_Loss]) -> tuple[Stratum, ...]:
    """The strata with their new counts; those that share the pool by the rows that they lost."""
    rows, selected = stratum_counts(table, len(manifest.strata))
    for number, stratum in enumerate(manifest.strata):
        if stratum.in_pool:
            lost = [loss.stratum == number for loss in losses if loss.stratum is not None]
            of = [loss.selected for loss in losses if loss.stratum is not None]
            rows[number] = stratum.rows - sum(int(mine.sum()) for mine in lost)
            selected[number] = stratum.selected - sum(
                int((mine & chosen).sum()) for mine, chosen in zip(lost, of, strict=True)
            )
    return tuple(
        dataclasses.replace(stratum, rows=int(rows[number]), selected=int(selected[number]))
        for number, stratum in enumerate(manifest.strata)
    )
