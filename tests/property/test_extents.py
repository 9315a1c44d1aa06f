"""Payloads that stay in the source until their shard is written: the same blocks as when they are spooled."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkit.dataset.encoding import (
    EncodedRow,
    Extent,
    ExtentColumn,
    RowEncoder,
    encode_columns,
    file_state,
    generated_key,
    generated_keys,
)
from shardkit.dataset.scratch import Rows, RowSpool
from shardkit.dataset.scratch_reading import ExtentReader, HeldRecords, Parts, ScratchReader
from shardkit.errors import SampleError, SourceError
from shardkit.formats import RowBlock, Schema
from shardkit.formats.block import payloads_of

SCHEMA = Schema.parse({"blob": "bytes", "n": "int64"})


def spool_of(folder: Path, seed: int | None, run_bytes: int = 500) -> RowSpool:
    return RowSpool(str(folder), f"part-{secrets.token_hex(8)}", seed=seed, run_bytes=run_bytes)


def extent(file: int, offset: int, payload: bytes) -> Extent:
    return Extent(file, offset, len(payload), xxhash.xxh3_64_intdigest(payload))


def held(
    columns: Rows, part: Parts, order: np.ndarray[tuple[int], np.dtype[np.int64]], reader: ExtentReader
) -> HeldRecords:
    return ScratchReader(part, SCHEMA, reader).read(columns.records[order], order)


def payloads(block: RowBlock) -> list[tuple[bytes, ...]]:
    columns = [payloads_of(column) for column in block.columns]
    return [tuple(bytes(column[row]) for column in columns) for row in range(len(block))]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(st.binary(max_size=200), st.booleans(), st.integers(0, 2)), min_size=1, max_size=30
    ),
    seed=st.none() | st.integers(0, 9),
    random=st.integers(0, 99),
)
def test_rows_whose_payloads_are_in_files_come_back_as_those_that_are_spooled(
    tmp_path: Path, rows: list[tuple[bytes, bool, int]], seed: int | None, random: int
) -> None:
    """Also mixed: a build that is gone on with may have spooled some of its rows."""
    files = [bytearray(b"head") for _ in range(3)]
    spools = spool_of(tmp_path, seed), spool_of(tmp_path, seed)
    for number, (payload, is_extent, file) in enumerate(rows):
        there = extent(file, len(files[file]), payload)
        files[file] += payload
        small = number.to_bytes(8, "little")
        one = EncodedRow(f"k{number}", None, ("s", number), (payload, small), (1, number), ("a",), None, 1)
        spools[0].append(one, (1, number))
        spools[1].append(one._replace(payloads=(there, small)) if is_extent else one, (1, number))
    paths = [str(tmp_path / f"file{n}") for n in range(3)]
    for path, data in zip(paths, files, strict=True):
        Path(path).write_bytes(data)
    reader = ExtentReader({0: paths})
    order = np.random.default_rng(random).permutation(len(rows))
    found = []
    for spool in spools:
        columns, part = spool.finish()
        assert part is not None
        records = held(columns, part, order, reader)
        middle = random % len(rows)
        blocks = [records.block(a, b, None) for a, b in ((0, middle), (middle, len(rows))) if a < b][-1:]
        found.append([(list(block.keys), payloads(block)) for block in blocks])
        assert records.payload_bytes[-1] == sum(len(payload) + 8 for payload, _, _ in rows)
        spool.drop()
    reader.close()
    assert found[0] == found[1]


def test_columns_of_extents_are_rows_of_them(tmp_path: Path) -> None:
    schema = Schema.parse({"tokens": "int32[8]", "label": "int64"})
    encoder = RowEncoder(schema, "arrow", stratify=["label"])
    tokens = np.arange(80, dtype=np.int32).reshape(10, 8)
    (tmp_path / "file").write_bytes(b"before" + tokens.tobytes())
    column = ExtentColumn(0, 6 + 32 * np.arange(10), 32, file_state(str(tmp_path / "file")))
    labels = np.arange(10) % 3
    by_extent = encode_columns(encoder, {"tokens": column, "label": labels}, "file", 0)
    by_value = encode_columns(encoder, {"tokens": tokens, "label": labels}, "file", 0)
    assert by_extent is not None
    assert by_value is not None
    assert by_extent.raw_bytes == by_value.raw_bytes
    assert (by_extent.identity == by_value.identity).all()
    assert by_extent.stratum.tolist() == by_value.stratum.tolist()
    spool = spool_of(tmp_path, 3)
    spool.append_rows(by_extent)
    columns, part = spool.finish()
    assert part is not None
    order = np.array([7, 0, 9, 3])
    reader = ExtentReader({0: [str(tmp_path / "file")]})
    block = ScratchReader(part, schema, reader).read(columns.records[order], order).block(0, 4, None)
    reader.close()
    assert np.asarray(block.columns[0]).view(np.int32).tolist() == tokens[order].tolist()
    assert payloads(block)[1][1] == labels[0].tobytes()
    assert block.source_names == ("file",)
    assert block.source_row is not None
    assert block.source_row.tolist() == order.tolist()
    assert encode_columns(encoder, {"tokens": tokens, "label": column}, "file", 0) is None
    spool.drop()


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "pipe"])
def test_a_source_that_is_not_what_it_was_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "film.mp4"
    path.write_bytes(b"0123456789")
    spool = spool_of(tmp_path, None)
    row = EncodedRow("k", None, ("s", 0), (extent(0, 2, b"234567"), bytes(8)), None, ("a",), None, 1)
    spool.append(row, (0, 0))
    columns, part = spool.finish()
    assert part is not None
    if damage == "flip":
        path.write_bytes(b"0123x56789")
    elif damage == "truncate":
        path.write_bytes(b"01234")
    else:
        path.unlink()
    if damage == "pipe":
        os.mkfifo(path)
    reader = ExtentReader({0: [str(path)]})
    with pytest.raises(SourceError, match=r"film\.mp4: .*; (build|put)"):
        held(columns, part, np.arange(1), reader).block(0, 1, None)
    reader.close()
    spool.drop()


def test_only_so_many_files_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkit.dataset.scratch_reading._MAX_OPEN", 3)
    paths = [str(tmp_path / str(n)) for n in range(10)]
    for n, path in enumerate(paths):
        Path(path).write_bytes(bytes([n]) * 5)
    reader = ExtentReader({4: paths})
    buffer = bytearray(3)
    for n in [*range(10), 0, 9, 5, 5]:
        one = np.frombuffer(extent(n, 1, bytes([n]) * 3).packed(), "<u8").reshape(1, 3)
        reader.read(
            np.array([4], np.int32), one, np.array([False]), np.array([0]), np.array([3]), memoryview(buffer)
        )
        assert bytes(buffer) == bytes([n]) * 3
        assert len(reader._open) <= 3
    reader.close()
    assert not reader._open


@given(st.lists(st.integers(0, 10**12), max_size=5))
def test_generated_keys_are_those_of_single_rows(ordinals: list[int]) -> None:
    assert generated_keys(ordinals) == [generated_key(ordinal) for ordinal in ordinals]


def test_any_write_changes_the_state_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    states = {file_state(str(path))}
    assert states == {file_state(str(path))}
    before = path.stat().st_mtime_ns
    while len(states) == 1:  # the clock of the file system may be a coarse one
        path.write_bytes(b"012345678x")
        os.utime(path, ns=(before, before))
        states.add(file_state(str(path)))
    (tmp_path / "b").write_bytes(b"0123456789")
    os.utime(tmp_path / "b", ns=(before, before))
    os.replace(tmp_path / "b", path)
    assert file_state(str(path)) not in states
    path.unlink()
    with pytest.raises(SourceError, match="put it back"):
        file_state(str(path))


def test_an_extent_is_encoded_like_its_bytes() -> None:
    encoder = RowEncoder(SCHEMA, "tar")
    there = Extent(0, 7, 1000, 1)
    row = encoder.encode({"blob": there, "n": 3}, "k", ("s", 1), where="")
    same = encoder.encode({"blob": bytes(1000), "n": 3}, "k", ("s", 1), where="")
    assert row._replace(payloads=same.payloads) == same
    assert row.payloads == (there, same.payloads[1])
    with pytest.raises(SampleError, match="'n'"):
        encoder.encode({"blob": there, "n": Extent(0, 0, 8, 0)}, "k", None, where="row")
    with pytest.raises(SampleError, match="other"):
        encoder.encode({"blob": there, "other": there}, "k", None, where="row")
