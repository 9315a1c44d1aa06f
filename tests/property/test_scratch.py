"""Scratch: rows come back as they went in, from memory or from runs on disk, in any order; damage is noticed."""

from __future__ import annotations

import secrets
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.dataset.encoding import EncodedRow, RowEncoder, ordinal_identity
from shardkit.dataset.scratch import Rows, RowSpool
from shardkit.dataset.scratch_reading import PartFiles, Parts, ScratchReader
from shardkit.errors import FormatError, IntegrityError, SampleError
from shardkit.formats import Row, Schema
from tests.whole_shard import rows_of

SCHEMA = Schema.parse({"one": "bytes", "two": "bytes"})
KEYS = st.from_regex(r"[A-Za-z0-9_-]{1,80}", fullmatch=True)
ROWS = st.builds(
    EncodedRow,
    key=st.none() | KEYS,
    original_key=st.none() | st.text(min_size=1, max_size=100),
    source=st.none() | st.tuples(st.text(min_size=1, max_size=30), st.integers(0, 2**62)),
    payloads=st.tuples(st.binary(max_size=300), st.binary(max_size=300)),
    identity=st.none(),
    stratum=st.tuples(st.sampled_from(["a", "b", "é"])),
    split=st.none() | st.integers(0, 2**64 - 1),
    raw_bytes=st.integers(1, 2**40),
)


def spooled(
    folder: Path, rows: list[EncodedRow], seed: int | None, run_bytes: int
) -> tuple[RowSpool, Rows, Parts]:
    spool = RowSpool(
        str(folder), f"spool-{secrets.token_hex(8)}", SCHEMA, seed=seed, run_bytes=run_bytes, batch_bytes=300
    )
    for number, row in enumerate(rows):
        spool.append(row, ordinal_identity(number))
    columns, part = spool.finish()
    assert part is not None
    return spool, columns, part


def read(columns: Rows, parts: Parts, order: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[Row]:
    if not len(order):
        return []
    held = ScratchReader(parts, SCHEMA).read(columns.records[order], order)
    return rows_of(held.block(0, len(order)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROWS, max_size=40), st.none() | st.integers(0, 99), st.integers(1, 5000), st.integers(0, 99))
def test_rows_come_back_as_they_went_in(
    tmp_path: Path, rows: list[EncodedRow], seed: int | None, run_bytes: int, random: int
) -> None:
    spool, columns, parts = spooled(tmp_path, rows, seed, run_bytes)
    order = np.random.default_rng(random).permutation(len(rows))[: 1 + random % 40]
    for ordinal, row in zip(order.tolist(), read(columns, parts, order), strict=True):
        given_ = rows[ordinal]
        assert row.key == (given_.key or f"{ordinal:010d}")
        assert row.original_key == given_.original_key
        assert row.source == given_.source
        assert row.payloads == given_.payloads
    for ordinal, given_ in enumerate(rows):
        assert columns.strata[columns.stratum[ordinal]] == given_.stratum
        assert columns.raw_bytes[ordinal] == given_.raw_bytes
        assert columns.generated[ordinal] == (given_.key is None)
        assert columns.split[ordinal] == (given_.split or 0)
    spool.drop()
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROWS, min_size=1, max_size=20), st.integers(0, 99))
def test_columns_survive_a_record(tmp_path: Path, rows: list[EncodedRow], seed: int) -> None:
    spool, columns, _ = spooled(tmp_path, rows, seed, 100)
    again, meta = Rows.from_bytes(columns.to_bytes({"part": "x"}))
    spool.drop()
    assert meta == {"part": "x"}
    assert again.strata == columns.strata
    for name in ("identity", "stratum", "raw_bytes", "split", "generated"):
        assert getattr(again, name).tolist() == getattr(columns, name).tolist()
    for name in ("batch", "row"):
        assert getattr(again.records, name).tolist() == getattr(columns.records, name).tolist()
    assert again.records.batches.tolist() == columns.records.batches.tolist()
    with pytest.raises(FormatError):
        Rows.from_bytes(columns.to_bytes({})[:-1])


def test_a_row_larger_than_a_run_and_runs_sorted_by_the_order_of_the_layout(tmp_path: Path) -> None:
    rows = [
        EncodedRow(f"k{n}", None, None, (b"x" * (9_000_000 if n == 3 else 10), b""), None, ("a",), None, 1)
        for n in range(8)
    ]
    spool, columns, parts = spooled(tmp_path, rows, 5, 1000)
    order = np.arange(8)
    assert [len(row.payloads[0]) for row in read(columns, parts, order)] == [
        10,
        10,
        10,
        9_000_000,
        10,
        10,
        10,
        10,
    ]
    batch, row = columns.records.batch, columns.records.row
    assert batch[4:].min() > batch[:4].max(), "a run follows the one before"
    assert row[4:].tolist() != sorted(row[4:].tolist()), "and is shuffled inside"
    spool.drop()


@pytest.mark.parametrize("place", [1000, 3000, -20])
def test_a_flipped_bit_is_noticed(tmp_path: Path, place: int) -> None:
    rows = [EncodedRow(f"k{n}", None, None, (bytes([n]) * 50, b""), None, ("a",), None, 1) for n in range(5)]
    spool = RowSpool(str(tmp_path), "part", SCHEMA, seed=None, run_bytes=1, always_file=True)
    for number, row in enumerate(rows):
        spool.append(row, ordinal_identity(number))
    columns, _ = spool.finish()
    data = bytearray((tmp_path / "part").read_bytes())
    data[place] ^= 4
    (tmp_path / "part").write_bytes(data)
    with pytest.raises(IntegrityError, match="scratch"):
        read(columns, PartFiles(str(tmp_path), ["part"]), np.arange(5))
    (tmp_path / "part").write_bytes(data[:-400])
    with pytest.raises(IntegrityError, match="scratch"):
        read(columns, PartFiles(str(tmp_path), ["part"]), np.arange(5))


def test_only_so_many_parts_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkit.dataset.scratch_reading._MAX_OPEN", 3)
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
    encoder.encode({"blob": bytes(3000)}, "fits", None, where="sample 'fits'")
    with pytest.raises(SampleError, match=r"sample 'large'.*5120 bytes.*4096"):
        encoder.encode({"blob": bytes(4500)}, "large", None, where="sample 'large'")


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


def test_a_scratch_file_is_an_arrow_stream(tmp_path: Path) -> None:
    schema = Schema.parse({"text": "str", "tokens": "int32[*]", "box": "float32[4]?"})
    spool = RowSpool(str(tmp_path), "part", schema, seed=None, run_bytes=500, always_file=True)
    encoder = RowEncoder(schema, "arrow")
    for number in range(9):
        box = [number] * 4 if number % 2 else None
        sample = {"text": f"t{number}", "tokens": list(range(number)), "box": box}
        spool.append(encoder.encode(sample, f"k{number}", None, where=""), ordinal_identity(number))
    spool.finish()
    table = pa.ipc.open_stream(str(tmp_path / "part")).read_all()
    assert table["text"].to_pylist() == [f"t{number}" for number in range(9)]
    assert table["tokens"].to_pylist() == [list(range(number)) for number in range(9)]
    assert table["box"].to_pylist()[7] == [7, 7, 7, 7]
