"""The shard table of a manifest: numpy columns over shards and segments, stored in pages (SPEC.md §2).

A page holds at most 4,096 shards; an append adds pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from shardkit.documents import Natural, Record, convert, format_digest, parse_digest, sha256_digest
from shardkit.errors import FormatError, UsageError
from shardkit.formats.columns import pack_columns, unpack_columns
from shardkit.manifest.manifest import MAX_SEGMENTS_PER_PAGE, SHARDS_PER_PAGE, Manifest, PageRef

SHARD_COLUMNS: Final[dict[str, type[Any]]] = {
    "digest": np.uint8,
    "size": np.int64,
    "index_digest": np.uint8,
    "index_size": np.int64,
    "rows": np.int64,
    "selected": np.int64,
    "block_rows": np.int64,
    "largest_block": np.int64,
    "raw_bytes": np.int64,
    "selection_digest": np.uint8,
}
"""Columns with one entry per shard, and their dtypes; digests are (shards, 32)."""

SEGMENT_COLUMNS: Final[dict[str, type[Any]]] = {
    "segment_shard": np.int32,
    "segment_stratum": np.int32,
    "segment_rows": np.int64,
    "segment_selected": np.int64,
}
"""Columns with one entry per segment, and their dtypes; segments are in shard order, then row order."""


class ShardRecord(NamedTuple):
    """A written shard, as an input of `ShardTable.from_records`."""

    digest: str
    size: int
    index_digest: str
    index_size: int
    block_rows: int
    largest_block: int
    raw_bytes: int
    segment_stratum: Sequence[int] | NDArray[np.int32]
    segment_rows: Sequence[int] | NDArray[np.int64]
    """Number of rows of each segment, in row order; the sum is the number of rows of the shard."""
    segment_selected: Sequence[int] | NDArray[np.int64] | None = None
    """Number of selected rows of each segment; None if all rows are selected."""
    selection_digest: str | None = None


@dataclass(frozen=True, eq=False)
class ShardTable:
    """Columns over the shards of a dataset and over their segments; read-only.

    `segment_shard` is an index into this table, `segment_stratum` an index into `Manifest.strata`.

    Raises:
        FormatError: Columns have other shapes or values than SPEC.md §2 allows.
    """

    digest: NDArray[np.uint8]  # (shards, 32) SHA-256 of the shard
    size: NDArray[np.int64]  # stored bytes
    index_digest: NDArray[np.uint8]  # (shards, 32)
    index_size: NDArray[np.int64]
    rows: NDArray[np.int64]
    selected: NDArray[np.int64]
    block_rows: NDArray[np.int64]  # rows of a full block
    largest_block: NDArray[np.int64]  # raw bytes of the largest block, for memory budgets
    raw_bytes: NDArray[np.int64]
    selection_digest: NDArray[np.uint8]  # (shards, 32) zeros if all rows are selected
    segment_shard: NDArray[np.int32]  # ascending
    segment_stratum: NDArray[np.int32]
    segment_rows: NDArray[np.int64]
    segment_selected: NDArray[np.int64]

    def __post_init__(self) -> None:
        for name, dtype in (SHARD_COLUMNS | SEGMENT_COLUMNS).items():
            given = np.asarray(getattr(self, name))
            column = np.ascontiguousarray(given, dtype=dtype)
            if given.dtype != column.dtype and not np.array_equal(given, column):
                raise FormatError(
                    f"column {name} of {given.dtype} holds values that do not fit {column.dtype}"
                )
            if column.flags.writeable:
                column = column.view()
                column.flags.writeable = False
            object.__setattr__(self, name, column)
        _check_table(self)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def totals(self) -> dict[str, Any]:
        """Totals of the table, under the names that a manifest uses: shards, rows, selected, raw and stored bytes."""
        columns = {
            "rows": self.rows,
            "selected": self.selected,
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.size,
        }
        return {"shards": len(self), **{name: sum(column.tolist()) for name, column in columns.items()}}

    @cached_property
    def segment_starts(self) -> NDArray[np.int64]:
        """First segment of each shard, then the number of segments: (shards + 1,)."""
        return np.searchsorted(self.segment_shard, np.arange(len(self) + 1)).astype(np.int64)

    def segments_of(self, shard: int) -> slice:
        """Return the segments of a shard, as a slice of the columns over segments."""
        return slice(int(self.segment_starts[shard]), int(self.segment_starts[shard + 1]))

    def count_by_segment(self, shard: int, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the number of rows of each segment of a shard for which a (rows,) mask is True."""
        rows = self.segment_rows[self.segments_of(shard)]
        return np.add.reduceat(mask.astype(np.int64), np.cumsum(rows) - rows)

    @cached_property
    def has_selection(self) -> NDArray[np.bool_]:
        """Mask of the shards that have unselected rows: (shards,)."""
        return np.asarray(self.selection_digest.any(axis=1))

    def digest_text(self, shard: int) -> str:
        return format_digest(self.digest[shard].tobytes())

    def index_digest_text(self, shard: int) -> str:
        """Return ``sha256:<hex>`` of the index of a shard."""
        return format_digest(self.index_digest[shard].tobytes())

    def selection_digest_text(self, shard: int) -> str | None:
        """Return ``sha256:<hex>`` of the selection of a shard, or None if all rows are selected."""
        return format_digest(self.selection_digest[shard].tobytes()) if self.has_selection[shard] else None

    def take(self, shards: NDArray[np.int64] | Sequence[int]) -> ShardTable:
        """Return a table of the given shards, in the given order."""
        wanted = np.asarray(shards, dtype=np.int64)
        starts = self.segment_starts
        counts = starts[wanted + 1] - starts[wanted]
        shard = np.repeat(np.arange(len(wanted)), counts)
        before = np.cumsum(counts) - counts
        segment = np.arange(len(shard)) - before[shard] + starts[wanted][shard]
        columns = {name: getattr(self, name)[wanted] for name in SHARD_COLUMNS}
        segments = {name: getattr(self, name)[segment] for name in SEGMENT_COLUMNS}
        return ShardTable(**columns, **{**segments, "segment_shard": shard.astype(np.int32)})

    @classmethod
    def concatenate(
        cls, tables: Sequence[ShardTable], *, stratum_offsets: Sequence[int] | None = None
    ) -> ShardTable:
        """Concatenate tables in order; each of `stratum_offsets` is added to the stratum numbers of its table."""
        if not tables:
            return cls.from_records([])
        if len(tables) == 1 and stratum_offsets is None:
            return tables[0]
        columns = {name: np.concatenate([getattr(table, name) for table in tables]) for name in SHARD_COLUMNS}
        segments = {
            name: np.concatenate([getattr(table, name) for table in tables]) for name in SEGMENT_COLUMNS
        }
        before = np.cumsum([0, *(len(table) for table in tables)])[:-1]
        lengths = [len(table.segment_shard) for table in tables]
        segments["segment_shard"] = segments["segment_shard"] + np.repeat(before, lengths).astype(np.int32)
        if stratum_offsets is not None:
            offsets = np.repeat(np.asarray(stratum_offsets, dtype=np.int32), lengths)
            segments["segment_stratum"] = segments["segment_stratum"] + offsets
        return cls(**columns, **segments)

    @classmethod
    def from_records(cls, records: Iterable[ShardRecord]) -> ShardTable:
        """Return the table of written shards, given in manifest order.

        Raises:
            FormatError: A record is not valid.
            UsageError: A record has a selection without `segment_selected`.
        """
        held = list(records)
        lengths = [len(record.segment_rows) for record in held]
        selected = [_selection(record) for record in held]
        return cls(
            digest=_digests([record.digest for record in held]),
            size=_column([record.size for record in held]),
            index_digest=_digests([record.index_digest for record in held]),
            index_size=_column([record.index_size for record in held]),
            rows=_column([int(np.sum(record.segment_rows)) for record in held]),
            selected=_column([int(np.sum(counts)) for counts in selected]),
            block_rows=_column([record.block_rows for record in held]),
            largest_block=_column([record.largest_block for record in held]),
            raw_bytes=_column([record.raw_bytes for record in held]),
            selection_digest=_digests([record.selection_digest for record in held]),
            segment_shard=np.repeat(np.arange(len(held), dtype=np.int32), lengths),
            segment_stratum=_join([record.segment_stratum for record in held], np.int32),
            segment_rows=_join([record.segment_rows for record in held], np.int64),
            segment_selected=_join(selected, np.int64),
        )


def _selection(record: ShardRecord) -> Sequence[int] | NDArray[np.int64]:
    if record.segment_selected is None and record.selection_digest is not None:
        raise UsageError("a shard with a selection needs segment_selected: the selected rows of each segment")
    return record.segment_rows if record.segment_selected is None else record.segment_selected


def _column(values: Sequence[int]) -> NDArray[np.int64]:
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError as error:
        raise FormatError(f"a shard's size or count does not fit 63 bits: {error}") from None


def _digests(texts: Sequence[str | None]) -> NDArray[np.uint8]:
    joined = b"".join(bytes(32) if text is None else bytes.fromhex(parse_digest(text)) for text in texts)
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, 32)


def _join(lists: Sequence[Sequence[int] | NDArray[Any]], dtype: type[Any]) -> NDArray[Any]:
    return np.concatenate([np.asarray(values, dtype=dtype) for values in lists] or [np.zeros(0, dtype)])


MAX_VALUE: Final = 2**42
"""Maximum size or count of one shard (4 TiB, 4·10¹² rows). A sum over one page fits int64; a sum over `MAX_SHARDS`
shards needs Python integers."""
_LEAST: Final = {
    "size": 1, "index_size": 1, "rows": 1, "selected": 0, "block_rows": 1, "largest_block": 0, "raw_bytes": 0,
    "segment_rows": 1, "segment_selected": 0, "segment_stratum": 0,
}  # fmt: skip
"""Minimum value of each column."""


def _check_table(table: ShardTable) -> None:
    """Check shapes, ranges and sums."""
    shards, segments = len(table.rows), len(table.segment_rows)
    shapes = {name: (shards, 32) if kind is np.uint8 else (shards,) for name, kind in SHARD_COLUMNS.items()}
    for name, shape in (shapes | dict.fromkeys(SEGMENT_COLUMNS, (segments,))).items():
        if getattr(table, name).shape != shape:
            _refuse(f"column {name} has shape {getattr(table, name).shape}, expected {shape}")
    for name, least in _LEAST.items():
        column = getattr(table, name)
        if len(column) and (int(column.min()) < least or int(column.max()) > MAX_VALUE):
            _refuse(
                f"column {name} holds {int(column.min())} … {int(column.max())}, expected {least} … {MAX_VALUE}"
            )
    _check_segments(table)
    _first(table.selected > table.rows, "has more selected rows than rows")
    _first(
        (table.selected < table.rows) != table.has_selection,
        "has a selection though all rows are selected, or none though not",
    )
    _first(table.largest_block > table.raw_bytes, "has a block larger than itself")


def _check_segments(table: ShardTable) -> None:
    shard, shards = table.segment_shard, len(table.rows)
    if len(shard) and (shard[0] < 0 or shard[-1] >= shards or np.any(shard[1:] < shard[:-1])):
        _refuse("its segments are not in shard order, or name shards that are not there")
    starts = np.searchsorted(shard, np.arange(shards + 1))
    for total, part in (("rows", "segment_rows"), ("selected", "segment_selected")):
        before = np.concatenate([[0], np.cumsum(getattr(table, part))])
        if len(before) > 1 and np.any(before[1:] < before[:-1]):
            _refuse(f"column {part} overflows 63 bits")
        sums = before[starts[1:]] - before[starts[:-1]]
        _first(sums != getattr(table, total), f"has {total} that are not the sum of its segments'")
    wrong = np.flatnonzero(table.segment_selected > table.segment_rows)
    if len(wrong):
        _refuse(f"shard {int(shard[wrong[0]])} has a segment with more selected rows than rows")


def _first(wrong: NDArray[np.bool_], what: str) -> None:
    found = np.flatnonzero(wrong)
    if len(found):
        _refuse(f"shard {int(found[0])} {what}")


def _refuse(why: str) -> NoReturn:
    raise FormatError(f"the shard table contradicts itself: {why}; do not trust it")


# Pages

_KIND: Final = "page"
# The number of segments of each shard is stored instead of segment_shard: it is shorter and always in order.
_STORED: Final = {
    **SHARD_COLUMNS,
    "segments": np.uint32,
    **{k: v for k, v in SEGMENT_COLUMNS.items() if k != "segment_shard"},
}
_SHARD_BYTES: Final = 3 * 32 + 7 * 8 + 4
_SEGMENT_BYTES: Final = 4 + 8 + 8


class _PageMeta(Record, frozen=True, kw_only=True):
    shards: Natural
    segments: Natural


def pack_page(table: ShardTable) -> bytes:
    """Return the bytes of one page, which are the same for equal tables.

    Raises:
        UsageError: Too many shards or segments for one page.
    """
    segments = np.diff(table.segment_starts)
    if not 1 <= len(table) <= SHARDS_PER_PAGE or int(segments.sum()) > MAX_SEGMENTS_PER_PAGE:
        raise UsageError(
            f"page of {len(table)} shards and {int(segments.sum())} segments: expected 1 to {SHARDS_PER_PAGE} shards "
            f"and at most {MAX_SEGMENTS_PER_PAGE} segments; order rows by stratum inside a shard"
        )
    columns = {name: segments if name == "segments" else getattr(table, name) for name in _STORED}
    meta = {"shards": len(table), "segments": int(segments.sum())}
    return pack_columns(
        _KIND, meta, {name: np.asarray(columns[name], dtype=_STORED[name]) for name in _STORED}
    )


def unpack_page(data: bytes, ref: PageRef | None = None, *, strata: int | None = None) -> ShardTable:
    """Parse a page whose digest has been checked.

    Args:
        data: The page.
        ref: Reference from the root; its counts are compared with the page.
        strata: Number of strata in the root; segments may not refer to others.

    Raises:
        FormatError: The bytes are not a page, or contradict `ref` or `strata`.
    """
    where = f"page {sha256_digest(data)}"
    try:
        most = (SHARDS_PER_PAGE if ref is None else ref.shards) * _SHARD_BYTES
        most += MAX_SEGMENTS_PER_PAGE * _SEGMENT_BYTES
        columns = unpack_columns(data, _KIND, max_raw_bytes=most)
        arrays = dict(columns.arrays)
        shards = len(arrays.get("segments", ()))
        for name, dtype in _STORED.items():
            if name not in arrays or arrays[name].dtype != dtype:
                raise FormatError(f"column {name} is missing or not {np.dtype(dtype)}")
        counts = arrays.pop("segments")
        if len(arrays) != len(_STORED) - 1 or counts.ndim != 1:
            raise FormatError(f"unexpected columns: {sorted(arrays.keys() - _STORED.keys())[:5]}")
        segments = int(counts.sum(dtype=np.int64))
        meta = convert(_PageMeta, columns.meta, "header")
        if (meta.shards, meta.segments) != (shards, segments) or segments != len(arrays["segment_rows"]):
            raise FormatError(
                f"{shards} shards and {segments} segments, the header and the columns say otherwise"
            )
        shard = np.repeat(np.arange(shards, dtype=np.int32), counts)
        table = ShardTable(**arrays, segment_shard=shard)
        if ref is not None and (len(table) != ref.shards or int(table.rows.sum()) != ref.rows):
            raise FormatError(
                f"{len(table)} shards and {int(table.rows.sum())} rows, the root says {ref.shards} and {ref.rows}"
            )
        highest = int(table.segment_stratum.max(initial=0))
        if strata is not None and highest >= strata:
            raise FormatError(f"a segment belongs to stratum {highest}, the root has {strata}")
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from error
    return table


def paginate(table: ShardTable) -> list[tuple[PageRef, bytes]]:
    """Split a table into pages, in order.

    Returns:
        (reference for the root, bytes) of each page.
    """
    pages = []
    for start in range(0, len(table), SHARDS_PER_PAGE):
        piece = table.take(range(start, min(start + SHARDS_PER_PAGE, len(table))))
        data = pack_page(piece)
        pages.append((PageRef(sha256_digest(data), len(data), len(piece), int(piece.rows.sum())), data))
    return pages


def check_against(manifest: Manifest, table: ShardTable) -> None:
    """Compare a root with its whole table.

    Raises:
        FormatError: Totals or the rows of costs differ, or segments refer to a stratum that is unknown or in the pool.
    """
    rows, selected = stratum_counts(table, len(manifest.strata))
    for number, stratum in enumerate(manifest.strata):
        expected = (0, 0) if stratum.in_pool else (stratum.rows, stratum.selected)
        if (int(rows[number]), int(selected[number])) != expected:
            _contradict(
                manifest,
                f"stratum {stratum.name!r} has {rows[number]} rows, {selected[number]} selected, expected {expected}",
            )
    for name, total in table.totals.items():
        if total != getattr(manifest, name):
            _contradict(manifest, f"its pages hold {total} {name}, the root says {getattr(manifest, name)}")
    before = np.concatenate([[0], np.cumsum(table.rows)])
    for costs in manifest.costs:
        ends = np.cumsum([0, *(piece.shards for piece in costs.pieces)])
        if np.diff(before[ends]).tolist() != [piece.rows for piece in costs.pieces]:
            _contradict(
                manifest, f"the pieces of cost {costs.expression!r} have other rows than their shards"
            )


def stratum_counts(table: ShardTable, strata: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows and the selected rows of each stratum, counted from the segments: (strata,) each.

    Raises:
        FormatError: A segment refers to a stratum outside 0 … strata - 1.
    """
    if len(table.segment_stratum) and int(table.segment_stratum.max()) >= strata:
        raise FormatError(
            f"a segment belongs to stratum {int(table.segment_stratum.max())}, there are {strata}; do not trust it"
        )
    rows, selected = np.zeros(strata, dtype=np.int64), np.zeros(strata, dtype=np.int64)
    np.add.at(rows, table.segment_stratum, table.segment_rows)  # exact, unlike a weighted bincount
    np.add.at(selected, table.segment_stratum, table.segment_selected)
    return rows, selected


def _contradict(manifest: Manifest, why: str) -> None:
    raise FormatError(f"manifest {manifest.id} and its pages contradict each other: {why}; do not trust it")


def check_alignment(
    manifest: Manifest, table: ShardTable, added: Sequence[tuple[Manifest, ShardTable]]
) -> None:
    """Check that added fields are aligned with the rows of a version, and that the schema lists them last.

    Raises:
        FormatError: Shards, segments or blocks of an added version have other rows, or the schema differs.
    """
    fields = [field for other, _ in added for field in other.schema.items()]
    if fields and list(manifest.schema.items())[-len(fields) :] != fields:
        raise FormatError(
            f"manifest {manifest.id}: its schema does not end in its added fields; do not trust it"
        )
    for other, columns in added:
        if other.parts or other.added or other.selected != other.rows:
            raise FormatError(f"manifest {other.id}: no version of added fields; do not trust {manifest.id}")
        for name in ("rows", "block_rows", "segment_shard", "segment_stratum", "segment_rows"):
            if not np.array_equal(getattr(table, name), getattr(columns, name)):
                raise FormatError(
                    f"manifest {other.id}: its column {name} is not that of {manifest.id}, whose fields it adds; do "
                    "not trust it"
                )
