"""Scratch: rows come back as they went in, in any order; damage is noticed."""

from __future__ import annotations

import dataclasses
import secrets
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.dataset.encoding import RowEncoder, ordinal_identity, spool_batch
from shardkit.dataset.rows import Rows, unwritten_records
from shardkit.dataset.scratch import PartFiles, Parts, RowSpool, ScratchReader
from shardkit.errors import IntegrityError, SampleError
from shardkit.formats import Row, Schema
from tests.whole_shard import rows_of

SCHEMA = Schema.parse({"one": "bytes", "two": "bytes"})


class EncodedRow(NamedTuple):
    key: str | None
    original_key: str | None
    source: tuple[str, int] | None
    payloads: tuple[bytes, ...]
    stratum: tuple[str, ...] = ("a",)
    split: int = 0
    raw_bytes: int = 1


KEYS = st.from_regex(r"[A-Za-z0-9_-]{1,80}", fullmatch=True)
ROWS = st.builds(
    EncodedRow,
    key=st.none() | KEYS,
    original_key=st.none() | st.text(min_size=1, max_size=100),
    source=st.none() | st.tuples(st.text(min_size=1, max_size=30), st.integers(0, 2**62)),
    payloads=st.tuples(st.binary(max_size=300), st.binary(max_size=300)),
    stratum=st.tuples(st.sampled_from(["a", "b", "é"])),
    split=st.integers(0, 2**64 - 1),
    raw_bytes=st.integers(1, 2**40),
)


def joined(rows: list[EncodedRow], first: int, schema: Schema) -> tuple[Rows, Any]:
    keys, originals, sources, payloads, strata, splits, raw_bytes = zip(*rows, strict=True)
    names, numbers = zip(*(source or ("", -1) for source in sources), strict=True)
    columns = [list(column) for column in zip(*payloads, strict=True)]
    batch = spool_batch(
        schema, columns, keys=keys, originals=originals,
        source_names=names, source_rows=np.array(numbers, np.int64),
    )  # fmt: skip
    known = sorted(set(strata))
    table = Rows(
        identity=np.array([ordinal_identity(first + n) for n in range(len(rows))], np.uint64),
        stratum=np.array([known.index(one) for one in strata], np.int32),
        raw_bytes=np.array(raw_bytes, np.int64),
        strata=tuple(known),
        split=np.array(splits, np.uint64),
        generated=np.array([key is None for key in keys]),
        records=unwritten_records(len(rows)),
    )
    return table, batch


def spooled(
    folder: Path,
    rows: list[EncodedRow],
    seed: int | None,
    run_bytes: int,
    at_once: int = 1,
    schema: Schema = SCHEMA,
) -> tuple[RowSpool, Rows, PartFiles]:
    spool = RowSpool(
        str(folder), f"spool-{secrets.token_hex(8)}", schema, seed=seed, run_bytes=run_bytes, batch_bytes=300
    )
    for first in range(0, len(rows), at_once):
        spool.append(*joined(rows[first : first + at_once], first, schema))
    return spool, spool.finish(), PartFiles(str(folder), [spool.name])


def read(columns: Rows, parts: Parts, order: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[Row]:
    held = ScratchReader(parts, SCHEMA).read(columns.records[order], order)
    return rows_of(held.block(0, len(order)))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(ROWS, min_size=1, max_size=40),
    seed=st.none() | st.integers(0, 99),
    run_bytes=st.integers(1, 5000),
    at_once=st.integers(1, 9),
    random=st.integers(0, 99),
)
def test_rows_come_back_as_they_went_in(
    tmp_path: Path, rows: list[EncodedRow], seed: int | None, run_bytes: int, at_once: int, random: int
) -> None:
    """In any order, in blocks; and damage is noticed."""
    spool, columns, parts = spooled(tmp_path, rows, seed, run_bytes, at_once)
    for ordinal, given_ in enumerate(rows):
        assert columns.strata[columns.stratum[ordinal]] == given_.stratum
        assert columns.raw_bytes[ordinal] == given_.raw_bytes
        assert columns.generated[ordinal] == (given_.key is None)
        assert columns.split[ordinal] == given_.split
    order = np.random.default_rng(random).permutation(len(rows))
    reader = ScratchReader(parts, SCHEMA)
    reader.read(columns.records[:1], order[:1])  # a buffer that is too small, and is replaced
    held = reader.read(columns.records[order], order)
    middle = random % len(rows)
    found = [row for first, last in ((0, middle), (middle, len(rows))) if first < last
             for row in rows_of(held.block(first, last))]  # fmt: skip
    assert found == [
        Row(row.key or f"{number:010d}", row.payloads, row.original_key, row.source)
        for number, row in ((number, rows[number]) for number in order.tolist())
    ]
    batches = columns.records.batches.copy()
    batches["check"] ^= np.uint64(1)
    with pytest.raises(IntegrityError, match=r"row \d+ changed"):
        reader.read(dataclasses.replace(columns.records, batches=batches), np.arange(len(rows)))
    parts.close()
    spool.drop()
    assert list(tmp_path.iterdir()) == []


def test_a_row_larger_than_a_run_and_runs_sorted_by_the_order_of_the_layout(tmp_path: Path) -> None:
    rows = [EncodedRow(f"k{n}", None, None, (b"x" * (9_000_000 if n == 3 else 10), b"")) for n in range(8)]
    spool, columns, parts = spooled(tmp_path, rows, 5, 1000)
    sizes = [len(row.payloads[0]) for row in read(columns, parts, np.arange(8))]
    assert sizes == [10, 10, 10, 9_000_000, 10, 10, 10, 10]
    batch, row = columns.records.batch, columns.records.row
    assert batch[4:].min() > batch[:4].max(), "a run follows the one before"
    assert row[4:].tolist() != sorted(row[4:].tolist()), "and is shuffled inside"
    spool.drop()


@pytest.mark.parametrize("place", [1000, 3000, -20])
def test_a_flipped_bit_is_noticed(tmp_path: Path, place: int) -> None:
    rows = [EncodedRow(f"k{n}", None, None, (bytes([n]) * 50, b"")) for n in range(5)]
    spool, columns, parts = spooled(tmp_path, rows, None, 1)
    file = tmp_path / spool.name
    data = bytearray(file.read_bytes())
    data[place] ^= 4
    for found in (data, data[:-400]):
        file.write_bytes(found)
        with pytest.raises(IntegrityError, match="scratch"):
            read(columns, parts, np.arange(5))


def test_only_so_many_parts_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkit.dataset.scratch._MAX_OPEN", 3)
    names = [f"part-{n}" for n in range(10)]
    for n, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes([n]) * 5)
    parts = PartFiles(str(tmp_path), names)
    for n in [*range(10), 0, 9, 5, 5]:
        found = bytearray(3)
        parts.read_into(n, 1, memoryview(found))
        assert found == bytes([n]) * 3
        assert len(parts._open) <= 3
    parts.close()


def test_a_sample_above_what_a_shard_can_hold_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkit.dataset.encoding.MAX_SHARD_BYTES", 4096)
    encoder = RowEncoder(Schema.parse({"blob": "bytes"}), "tar")
    encoder.check_row((bytes(3000),), "fits", "sample 'fits'")
    with pytest.raises(SampleError, match=r"sample 'large'.*5120 bytes.*4096"):
        encoder.check_row((bytes(4500),), "large", "sample 'large'")


def test_the_writer_leaves_no_scratch_behind_when_it_dies_with_the_process(tmp_path: Path) -> None:
    """The scratch file is named like the store's own temporaries, so that the sweep finds it."""
    from shardkit.stores.local import temporary_name

    name = temporary_name("spool")
    dead = name.replace(f"-{name.split('-')[2]}-", "-999999999-", 1)
    shardkit.create(tmp_path, {"n": "int64"}).abort()
    (tmp_path / "tmp").mkdir(exist_ok=True)
    (tmp_path / "tmp" / dead).write_bytes(b"rows")
    shardkit.create(tmp_path, {"n": "int64"}).abort()
    assert list((tmp_path / "tmp").iterdir()) == []
