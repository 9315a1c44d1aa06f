"""The layout's promises (dataset/SPEC.md §2), on row tables of every shape, and against shards dealt row by row."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.dataset.layout import MAX_SHARD_BYTES, Layout, LayoutSettings, RowTable, lay_out, order_keys
from shardkit.errors import ConfigurationError, UsageError


@st.composite
def tables(draw: st.DrawFn, *, equal_sizes: bool = False) -> tuple[RowTable, int]:
    """A row table in any order of strata, and how many strata there are."""
    strata = draw(st.integers(1, 12))
    counts = draw(st.lists(st.integers(0, 60), min_size=strata, max_size=strata))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    stratum = random.permutation(np.repeat(np.arange(strata, dtype=np.int32), counts))
    n = len(stratum)
    sizes = np.full(n, 100) if equal_sizes else random.integers(1, draw(st.sampled_from([3, 200, 5000])), n)
    identity = random.integers(0, 2**64, (n, 2), dtype=np.uint64)
    return RowTable(identity, stratum, sizes.astype(np.int64)), strata


def counts_by_shard(layout: Layout, strata: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """(shards, strata + 1) rows, taken from the segments."""
    counts = np.zeros((layout.shards, strata + 1), dtype=np.int64)
    np.add.at(counts, (layout.segment_shard, layout.segment_stratum), np.diff(layout.segment_start))
    return counts


def rows_of(layout: Layout, shard: int) -> list[int]:
    rows: list[int] = layout.rows[layout.shard_start[shard] : layout.shard_start[shard + 1]].tolist()
    return rows


@settings(max_examples=200, deadline=None)
@given(tables(), st.integers(5001, 20_000))
def test_strata_are_spread_evenly_over_shards_and_over_runs_of_shards(drawn, shard_size):  # type: ignore[no-untyped-def]
    table, strata = drawn
    layout = lay_out(table, strata, LayoutSettings(shard_size=shard_size))
    if not layout.shards:
        return
    counts = counts_by_shard(layout, strata)
    assert (counts.max(axis=0) - counts.min(axis=0) <= 1).all()
    fair = np.outer(np.arange(1, layout.shards + 1), counts.sum(axis=0)) / layout.shards
    assert (np.abs(np.cumsum(counts, axis=0) - fair) < 2).all()
    assert counts.sum(axis=1).min() >= 1


@settings(max_examples=100, deadline=None)
@given(tables(), st.integers(1, 6000), st.integers(1, 900))
def test_blocks_aim_at_the_block_size(drawn, shard_size, block_size):  # type: ignore[no-untyped-def]
    table, strata = drawn
    layout = lay_out(table, strata, LayoutSettings(shard_size=shard_size, block_size=block_size))
    for shard, block_rows in enumerate(layout.block_rows.tolist()):
        sizes = [int(table.raw_bytes[row]) for row in rows_of(layout, shard)]
        mean = sum(sizes) / len(sizes)
        assert block_rows >= 1
        assert block_rows == 1 or block_rows * mean <= block_size
        assert (block_rows + 1) * mean > block_size


@settings(max_examples=100, deadline=None)
@given(tables(), st.integers(1, 6000))
def test_without_shuffle_a_stratum_keeps_its_order(drawn, shard_size):  # type: ignore[no-untyped-def]
    table, strata = drawn
    layout = lay_out(table, strata, LayoutSettings(shuffle=False, shard_size=max(5001, shard_size)))
    for stratum in range(strata):
        mine = [row for row in layout.rows.tolist() if table.stratum[row] == stratum]
        assert mine == sorted(mine)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 200))
def test_without_shuffle_and_strata_the_order_is_kept_around_large_rows(
    sizes: list[int], shard_size: int
) -> None:
    count = len(sizes)
    identity = np.arange(2 * count, dtype=np.uint64).reshape(count, 2)
    table = RowTable(identity, np.zeros(count, np.int32), np.array(sizes, np.int64))
    layout = lay_out(table, 1, LayoutSettings(shuffle=False, shard_size=shard_size))
    assert layout.rows.tolist() == list(range(count))
    for shard in range(layout.shards):
        rows = rows_of(layout, shard)
        assert len(rows) == 1 or max(sizes[row] for row in rows) <= shard_size


@settings(max_examples=60, deadline=None)
@given(tables(), st.integers(1, 6000), st.integers(0, 5))
def test_the_order_of_adding_does_not_matter(drawn, shard_size, seed):  # type: ignore[no-untyped-def]
    table, strata = drawn
    if not len(table):
        return
    moved = np.random.default_rng(seed).permutation(len(table))
    other = RowTable(table.identity[moved], table.stratum[moved], table.raw_bytes[moved])
    settings_ = LayoutSettings(seed=seed, shard_size=shard_size)
    one, two = lay_out(table, strata, settings_), lay_out(other, strata, settings_)
    assert (table.identity[one.rows] == other.identity[two.rows]).all()
    assert one.segment_start.tolist() == two.segment_start.tolist()
    assert one.segment_shard.tolist() == two.segment_shard.tolist()
    assert one.block_rows.tolist() == two.block_rows.tolist()


@settings(max_examples=100, deadline=None)
@given(tables(), st.integers(5001, 9000), st.integers(0, 5))
def test_against_a_dealer_who_hands_out_row_by_row(drawn, shard_size, seed):  # type: ignore[no-untyped-def]
    """SPEC §2 read literally, one row and one shard at a time."""
    table, strata = drawn
    if not len(table):
        return
    layout = lay_out(table, strata, LayoutSettings(seed=seed, shard_size=shard_size))
    keys = [scalar_order(int(high), int(low), seed) for high, low in table.identity]
    order = sorted(range(len(table)), key=lambda row: (keys[row], *map(int, table.identity[row]), row))
    shards = min(len(table), -(-int(table.raw_bytes.sum()) // shard_size))
    counts = Counter(table.stratum.tolist())
    own = [s for s in range(strata) if counts[s] >= shards]
    groups = [[row for row in order if table.stratum[row] == s] for s in own]
    groups.append([row for row in order if table.stratum[row] not in own])
    held: list[list[int]] = [[] for _ in range(shards)]
    filled, phase = [0] * shards, 0
    for group in groups:
        each, extra = divmod(len(group), shards)
        give = 2 * extra <= shards
        places = extra if give else shards - extra
        near: dict[int, list[int]] = {}
        for shard in range(shards if places else 0):
            near.setdefault((shard * places + phase) // shards % places, []).append(shard)
        picked = {min(among, key=lambda j: (filled[j] if give else -filled[j], j)) for among in near.values()}
        phase = (phase + extra) % shards
        left = list(group)
        for shard in range(shards):
            take = each + ((shard in picked) == give if extra else 0)
            held[shard] += left[:take]
            filled[shard] += sum(int(table.raw_bytes[row]) for row in left[:take])
            left = left[take:]
        assert not left
    assert [rows_of(layout, shard) for shard in range(layout.shards)] == held


def scalar_order(high: int, low: int, seed: int) -> int:
    """The order key of SPEC §1 in Python integers."""

    def mix(z: int) -> int:
        z = (z + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    return mix(high ^ mix(low ^ mix(seed)))


def test_golden_order() -> None:
    """These numbers decide manifest ids: they never change."""
    identity = np.array([[0, 0], [1, 2], [2**64 - 1, 7]], dtype=np.uint64)
    golden = [0xA711A1ABDD4D6F75, 0x001EDB30E8870A64, 0x11E04990C443CEAD]
    assert order_keys(identity, 5).tolist() == [
        scalar_order(0, 0, 5),
        scalar_order(1, 2, 5),
        scalar_order(2**64 - 1, 7, 5),
    ]
    assert order_keys(identity, 5).tolist() == golden


def test_equal_order_keys_fall_back_to_the_identity() -> None:
    """64-bit keys collide in principle; a pair that does is made by hand: equal identities."""
    identity = np.zeros((4, 2), dtype=np.uint64)
    table = RowTable(identity, np.zeros(4, np.int32), np.full(4, 10, np.int64))
    assert lay_out(table, 1, LayoutSettings()).rows.tolist() == [0, 1, 2, 3]


def test_a_shard_never_outgrows_one_put() -> None:
    """Half of the rows of a stratum are empty, half are as large as a shard may be: more shards, not larger ones."""
    sizes = np.array([1] * 40 + [2**31] * 40, dtype=np.int64)
    table = RowTable(np.arange(160, dtype=np.uint64).reshape(80, 2), np.zeros(80, np.int32), sizes)
    layout = lay_out(table, 1, LayoutSettings(shuffle=False, shard_size=2**31))
    totals = [int(sizes[rows_of(layout, shard)].sum()) for shard in range(layout.shards)]
    assert max(totals) <= MAX_SHARD_BYTES
    assert sorted(layout.rows.tolist()) == list(range(80))


@pytest.mark.parametrize(
    "settings_", [{"shard_size": 0}, {"shard_size": 2**40}, {"block_size": 0}, {"seed": -1}, {"seed": 2**63}]
)
def test_settings_out_of_range_are_named(settings_) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=next(iter(settings_))):
        LayoutSettings(**settings_)


def test_what_cannot_be_laid_out_is_named() -> None:
    table = RowTable(np.zeros((1, 2), np.uint64), np.zeros(1, np.int32), np.array([MAX_SHARD_BYTES + 1]))
    with pytest.raises(UsageError, match="row 0"):
        lay_out(table, 1, LayoutSettings())
    with pytest.raises(UsageError, match="70000 strata"):
        lay_out(table, 70_000, LayoutSettings())
