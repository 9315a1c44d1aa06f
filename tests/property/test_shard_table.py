"""Tables survive pages, slices, merges; their columns agree with plain lists of shards."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.documents import sha256_digest
from shardkit.errors import FormatError, UsageError
from shardkit.manifest import (
    SHARDS_PER_PAGE,
    Manifest,
    PageRef,
    ShardRecord,
    ShardTable,
    Stratum,
    merge,
    pack_page,
    paginate,
    stratum_counts,
    unpack_page,
)
from shardkit.manifest.shard_table import SEGMENT_COLUMNS, SHARD_COLUMNS
from tests.property.shard_tables import composed, made_up_digest, made_up_records, made_up_table

seeds = st.integers(0, 10_000)


def same(one: ShardTable, two: ShardTable) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(two, name)) for name in SHARD_COLUMNS | SEGMENT_COLUMNS
    )


@settings(max_examples=40, deadline=None)
@given(seed=seeds, shards=st.integers(1, 12), strata=st.integers(1, 5))
def test_columns_say_what_the_records_say(seed: int, shards: int, strata: int) -> None:
    records, _ = made_up_records(seed, shards, strata, selected=True)
    table = ShardTable.from_records(records)
    assert len(table) == shards
    segment = 0
    for shard, record in enumerate(records):
        assert table.digest_text(shard) == record.digest
        assert table.index_digest_text(shard) == record.index_digest
        assert table.selection_digest_text(shard) == record.selection_digest
        assert int(table.rows[shard]) == sum(record.segment_rows)
        assert int(table.selected[shard]) == sum(record.segment_selected or record.segment_rows)
        assert [int(table.size[shard]), int(table.block_rows[shard])] == [record.size, record.block_rows]
        for stratum, rows in zip(record.segment_stratum, record.segment_rows, strict=True):
            assert int(table.segment_shard[segment]) == shard
            assert (int(table.segment_stratum[segment]), int(table.segment_rows[segment])) == (stratum, rows)
            segment += 1
        assert int(table.segment_starts[shard + 1]) == segment
    counted: Counter[int] = Counter()
    for record in records:
        counted.update(dict(zip(record.segment_stratum, record.segment_rows, strict=True)))
    assert stratum_counts(table, strata)[0].tolist() == [counted[stratum] for stratum in range(strata)]


@settings(max_examples=40, deadline=None)
@given(seed=seeds, shards=st.integers(1, 12), selected=st.booleans(), data=st.data())
def test_pages_and_slices(seed: int, shards: int, selected: bool, data: st.DataObject) -> None:
    table = made_up_table(seed, shards, selected=selected)
    assert same(unpack_page(pack_page(table)), table)
    cut = data.draw(st.integers(0, shards))
    assert same(ShardTable.concatenate([table.take(range(cut)), table.take(range(cut, shards))]), table)
    order = data.draw(st.permutations(range(shards)))
    taken = table.take(order)
    assert same(taken, ShardTable.concatenate([table.take(range(shard, shard + 1)) for shard in order]))
    assert same(taken.take(np.argsort(order)), table)


def test_columns_are_read_only() -> None:
    table = made_up_table(1, 3)
    for name in SHARD_COLUMNS | SEGMENT_COLUMNS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(table, name)[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        unpack_page(pack_page(table)).rows[0] = 1


def test_an_empty_table() -> None:
    table = ShardTable.from_records([])
    assert len(table) == 0
    assert paginate(table) == []
    assert same(ShardTable.concatenate([table, table]), table)
    with pytest.raises(UsageError, match="1 to 4096"):
        pack_page(table)


def test_pages_hold_4096_shards() -> None:
    records = made_up_records(7, 100, 2)[0]
    table = ShardTable.concatenate([ShardTable.from_records(records)] * 83)  # 8,300 shards
    pages = paginate(table)
    assert [ref.shards for ref, _ in pages] == [4_096, 4_096, 108]
    assert [sha256_digest(data) for _, data in pages] == [ref.digest for ref, _ in pages]
    assert sum(ref.rows for ref, _ in pages) == sum(sum(record.segment_rows) for record in records) * 83
    assert same(ShardTable.concatenate([unpack_page(data, ref) for ref, data in pages]), table)
    with pytest.raises(UsageError, match="4096"):
        pack_page(table.take(range(SHARDS_PER_PAGE + 1)))


def test_an_append_keeps_the_full_pages() -> None:
    table = ShardTable.concatenate([made_up_table(7, 100, 2)] * 50)
    longer = ShardTable.concatenate([table, made_up_table(8, 10, 2)])
    assert paginate(longer)[0] == paginate(table)[0]


BROKEN: dict[str, Callable[[ShardTable], dict[str, Any]]] = {
    "rows are not the sum of segments": lambda t: {"rows": t.rows + 1, "selected": t.rows + 1},
    "negative size": lambda t: {"size": -t.size},
    "zero rows in a segment": lambda t: {"segment_rows": t.segment_rows * 0},
    "more selected than rows": lambda t: {"segment_selected": t.segment_rows + 1, "selected": t.selected + 1},
    "selected without a selection": lambda t: {"segment_selected": t.segment_rows * 0, "selected": t.rows * 0},
    "a selection of all rows": lambda t: {"selection_digest": t.selection_digest + 1},
    "segments out of order": lambda t: {"segment_shard": t.segment_shard[::-1]},
    "a segment of no shard": lambda t: {"segment_shard": t.segment_shard + 1},
    "a negative stratum": lambda t: {"segment_stratum": t.segment_stratum - 1},
    "a column too short": lambda t: {"size": t.size[:-1]},
    "digests of another length": lambda t: {"digest": t.digest[:, :31]},
    "no rows per block": lambda t: {"block_rows": t.block_rows * 0},
    "a block larger than the shard": lambda t: {"largest_block": t.raw_bytes + 1},
    "an enormous count": lambda t: {"raw_bytes": t.raw_bytes + 2**62},
    "a sum that overflows": lambda t: {
        "segment_rows": np.full(len(t.segment_rows), 2**62), "segment_selected": np.full(len(t.segment_rows), 2**62)
    },
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_contradictions_are_refused(what: str) -> None:
    table = made_up_table(3, 4)
    with pytest.raises(FormatError, match="contradicts itself"):
        dataclasses.replace(table, **BROKEN[what](table))


def test_a_page_is_compared_with_the_root() -> None:
    table = made_up_table(3, 4)
    ((ref, data),) = paginate(table)
    for wrong in (
        PageRef(ref.digest, ref.size, ref.shards + 1, ref.rows),
        PageRef(ref.digest, ref.size, ref.shards, ref.rows + 1),
    ):
        with pytest.raises(FormatError, match=f"page {ref.digest}.*root says"):
            unpack_page(data, wrong)


def test_the_same_content_is_the_same_bytes_however_it_was_made() -> None:
    """Any number of jobs: tables made in pieces and joined, columns of any integer dtype or memory layout."""
    records = made_up_records(11, 60, 4, selected=True)[0]
    whole = ShardTable.from_records(records)
    strata = [("a",), ("b",), ("c",), ("d",)]

    def made(table: ShardTable) -> tuple[str, list[bytes]]:
        manifest, pages = composed(table, strata, axes=("label",), build={"seed": 1, "a": "b"})
        return manifest.id, pages

    expected = made(whole)
    for jobs in (2, 3, 7, 60):
        pieces = [
            ShardTable.from_records(records[first : first + -(-60 // jobs)])
            for first in range(0, 60, -(-60 // jobs))
        ]
        assert made(ShardTable.concatenate(pieces)) == expected
    strided = {
        name: np.asfortranarray(np.repeat(getattr(whole, name), 2, axis=0)[::2]) for name in SHARD_COLUMNS
    }
    assert made(dataclasses.replace(whole, **strided)) == expected
    swapped = {
        name: getattr(whole, name).astype(getattr(whole, name).dtype.newbyteorder(">"))
        for name in SHARD_COLUMNS
    }
    assert made(dataclasses.replace(whole, **swapped)) == expected
    assert made(whole.take(range(59, -1, -1)))[0] != expected[0]


def two_parts() -> tuple[Manifest, Manifest]:
    one, _ = composed(
        made_up_table(1, 5, 2, selected=True), [("a",), ("b",)], axes=("label",), classes=("cat", "dog")
    )
    table = made_up_table(2, 3, 3)
    pooled = int(table.segment_rows[table.segment_stratum == 2].sum())
    two, _ = composed(
        table, [("b",), ("c/d",), ("*pool*",)], [Stratum(("x",), pooled, pooled, in_pool=True)],
        format="arrow", compression="zstd:3", axes=("label",),
    )  # fmt: skip
    return one, two


def test_values_that_do_not_fit_their_column_are_refused() -> None:
    table = made_up_table(3, 4)
    columns: list[Any] = [table.digest.astype(np.int64) + 256, table.digest + 0.5]
    for column in columns:
        with pytest.raises(FormatError, match="do not fit uint8"):
            dataclasses.replace(table, digest=column)


def test_merged_totals_and_strata() -> None:
    one, two = two_parts()
    merged = merge([("web", one), ("code", two)])
    assert merged.parts == (("web", one.id), ("code", two.id))
    assert merged.pages == ()
    assert (merged.format, merged.compression, merged.classes) == ("mixed", "mixed", ())
    assert merged.axes == ("part", "label")
    assert [s.name for s in merged.strata] == [
        "web/a",
        "web/b",
        "code/b",
        "code/c%2Fd",
        "code/*pool*",
        "code/x",
    ]
    assert [(s.rows, s.selected, s.pooled, s.in_pool) for s in merged.strata] == [
        (s.rows, s.selected, s.pooled, s.in_pool) for s in (*one.strata, *two.strata)
    ]
    assert (merged.rows, merged.selected) == (one.rows + two.rows, one.selected + two.selected)
    assert Manifest.from_bytes(merged.to_bytes()) == merged
    with pytest.raises(UsageError, match="merged itself"):
        merge([("again", merged)])


def test_records_with_a_selection_name_their_counts() -> None:
    record = ShardRecord(
        made_up_digest(1), 10, made_up_digest(2), 10, 1, 1, 10, [0], [5], None, made_up_digest(3)
    )
    with pytest.raises(UsageError, match="segment_selected"):
        ShardTable.from_records([record])
