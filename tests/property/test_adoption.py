"""Adopted files: digests, rows and headers found at once are those found one by one."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import tempfile
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.errors import ShardkitError, SourceError
from shardkit.formats import xxh3
from shardkit_tools.adopting import adopt, files, tars
from shardkit_tools.adopting.files import ScannedBlocks
from shardkit_tools.importers import ImportOptions, tar_members
from shardkit_tools.importers.tar_members import Member, members_and_damage

# ---- Adopted Parquet and Arrow files of any schema have the values that pyarrow reads, whole and by field


VALUES: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "int8": (pa.int8(), st.integers(-128, 127)),
    "uint64": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "float64": (pa.float64(), st.floats(allow_nan=False)),
    "bool": (pa.bool_(), st.booleans()),
    "text": (pa.string(), st.text(max_size=20)),
    "large_text": (pa.large_string(), st.text(max_size=3)),
    "bytes": (pa.binary(), st.binary(max_size=20)),
    "word": (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["a", "bc", ""])),
    "list": (pa.list_(pa.int32()), st.lists(st.integers(-5, 5), max_size=4)),
    "fixed": (pa.list_(pa.int16(), 3), st.lists(st.integers(-5, 5), min_size=3, max_size=3)),
    "struct": (pa.struct([("a", pa.int64()), ("b", pa.string())]),
               st.fixed_dictionaries({"a": st.integers(-9, 9), "b": st.text(max_size=3)})),
    "texts": (pa.list_(pa.string()), st.lists(st.text(max_size=3), max_size=3)),
}  # fmt: skip
SCALARS = ("int8", "uint64", "float64", "bool", "text", "bytes", "word")


@st.composite
def tables(draw: st.DrawFn) -> Any:
    """A table of any columns, some of them with nulls."""
    rows = draw(st.integers(1, 40))
    columns = {}
    for number, name in enumerate(draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=5))):
        kind, values = VALUES[name]
        if name in SCALARS and draw(st.booleans()):
            values = st.none() | values
        columns[f"{name}.{number}"] = pa.array(draw(st.lists(values, min_size=rows, max_size=rows)), kind)
    return pa.table(columns)


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


@settings(max_examples=25)
@given(
    table=tables(),
    parquet=st.booleans(),
    group=st.integers(1, 20),
    codec=st.sampled_from(["none", "zstd", "lz4"]),
)
def test_adopted_values_are_those_of_pyarrow(table: Any, parquet: bool, group: int, codec: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("a.parquet" if parquet else "a.arrow")
        if parquet:
            pq.write_table(table, path, row_group_size=group, compression=codec)
        else:
            options = pa.ipc.IpcWriteOptions(compression=None if codec == "none" else codec)
            with pa.ipc.new_file(path, table.schema, options=options) as writer:
                writer.write_table(table, group)
        adopt([path], Path(folder) / "root")
        ds = shardkit.open(Path(folder) / "root")
        expected = table.to_pylist()
        found = [{name: plain(value) for name, value in sample.items()} for sample in ds[:]]
        assert [{name: row[name] for name in table.column_names} for row in found] == expected
        first = table.column_names[0]
        stored = list(ds.schema.stored)
        for block in range(ds.reader.index(0).blocks):
            alone, whole = (ds.reader.read(0, block, fields=fields) for fields in ([first], None))
            rows = range(whole.rows)
            assert ds.reader.read(0, block, fields=[]).rows == whole.rows
            last = ds.reader.read(0, block, fields=stored[-1:]).column(stored[-1])
            assert [last.payload(row) for row in rows] == [
                whole.column(stored[-1]).payload(row) for row in rows
            ]
            assert [alone.column(first).payload(row) for row in rows] == [
                whole.column(first).payload(row) for row in rows
            ]


# ---- Digests of a block and of its ranges, computed in one pass, are those of their bytes


@st.composite
def _spans(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """Ranges of three fields: some begin where the block begins, overlap, are empty or the whole block."""
    place = st.integers(0, size)
    spans = draw(st.lists(st.tuples(place, place), min_size=3, max_size=3))
    return [(min(one), max(one)) for one in spans]


@given(
    drawn=st.lists(
        st.binary(min_size=1, max_size=60).flatmap(lambda data: st.tuples(st.just(data), _spans(len(data)))),
        min_size=1,
        max_size=4,
    ),
    threads=st.booleans(),
)
def test_digests_of_blocks_and_ranges(
    drawn: list[tuple[bytes, list[tuple[int, int]]]], threads: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch, ScannedBlocks() as blocks:
        patch.setattr(files, "_THREAD_BYTES", 0 if threads else 1 << 16)
        blocks.add_head(b"head")
        for data, spans in drawn:
            blocks.add(data, 1, spans)
        blocks.add_tail(b"tail")
        whole, columns = blocks.sha256, blocks.columns()
    joined = b"".join(data for data, _ in drawn)
    assert whole == hashlib.sha256(b"head" + joined + b"tail").hexdigest()
    borders = pairwise(accumulate((len(data) for data, _ in drawn), initial=len(b"head")))
    assert columns["block_offset"].tolist() == [start for start, _ in borders]
    for block, (data, spans) in enumerate(drawn):
        assert columns["block_xxh3"][block] == xxh3(data)
        assert columns["block_sha256"][block].tobytes() == hashlib.sha256(data).digest()
        for field, (start, stop) in enumerate(spans):
            part = data[start:stop]
            assert columns["range_offset"][block, field] == start
            assert columns["range_size"][block, field] == len(part)
            assert columns["range_xxh3"][block, field] == xxh3(part)
            assert columns["range_sha256"][block, field].tobytes() == hashlib.sha256(part).digest()


# ---- Files of lines whose rows are counted become the blocks of files whose rows are parsed, or the same error


TEXTS = st.text('a\u00e4 \\"\U0001f600', max_size=8)
ROWS = st.one_of(
    st.builds(lambda n, t: json.dumps({"n": n, "t": t}), st.integers(-9, 9), TEXTS),
    st.builds(
        lambda n, t: json.dumps({"n": n, "t": t}, ensure_ascii=False),
        st.integers(-9, 9),
        TEXTS.map(lambda t: t * 40),
    ),
    st.sampled_from(["", " ", "\t", '{"n": 1, "t": "\\ud800"}', '{"n": 2, "t": "\\uD83D\\uDE00"}']),
)
CELLS = st.sampled_from(["1,x", "2,y y", '3,"a\nb"', "4,", "", "x" * 300 + ",5", "6,\r"])


def _settings(index: Any) -> bytes:
    settings: bytes = index.common.tobytes()
    return settings


def adopted(path: Path, root: Path, check: str) -> tuple[Any, ...]:
    """Return facts about the blocks of a file, or the error."""
    try:
        adopt([path], root, options=ImportOptions(check=check), block_size="64B")  # type: ignore[arg-type]  # literals
    except ShardkitError as error:
        return (str(error),)
    index = shardkit.open(root).reader.index(0)
    found = [dict(row) for row in shardkit.open(root)]
    return (
        *(getattr(index, name).tolist() for name in ("block_start", "block_offset", "block_size", "block_xxh3")),
        index.tail_sha256, index.head_sha256, _settings(index), found,
    )  # fmt: skip


@settings(max_examples=60)
@given(
    lines=st.lists(ROWS, min_size=1, max_size=30), cells=st.lists(CELLS, min_size=1, max_size=20),
    is_csv=st.booleans(), end=st.sampled_from(["\n", "\r\n"]), last=st.booleans(), mark=st.booleans(),
)  # fmt: skip
def test_counted_rows_have_the_blocks_of_parsed_rows(
    lines: list[str], cells: list[str], is_csv: bool, end: str, last: bool, mark: bool
) -> None:
    text = end.join(["n,t", *cells] if is_csv else lines) + end * last
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("a.csv" if is_csv else "a.jsonl")
        path.write_bytes(b"\xef\xbb\xbf" * mark + text.encode())
        parsed, counted = (adopted(path, Path(folder) / check, check) for check in ("decode", "none"))
    assert counted == parsed


# ---- Members whose headers are read at once are those that are read one by one, damage included


NAMES = st.one_of(
    st.from_regex(r"[a-z./0-9_ -]{1,12}", fullmatch=True), st.text("aä./\\\n", min_size=1, max_size=6),
    st.just("long/" * 25 + "x"), st.just("x" * 120),
)  # fmt: skip
TIMES = st.one_of(st.integers(0, 2**31), st.floats(0, 2**31), st.just(-5))


@st.composite
def member_tars(draw: st.DrawFn) -> bytes:
    """A tar as common writers make it, of which some bytes are changed."""
    kinds = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=draw(st.sampled_from(kinds))) as tar:
        for _ in range(draw(st.integers(0, 6))):
            info = tarfile.TarInfo(draw(NAMES))
            info.mtime = draw(TIMES) if tar.format == tarfile.PAX_FORMAT else 7
            data = draw(st.binary(max_size=3)) * draw(st.integers(0, 400))
            info.type = draw(st.sampled_from([tarfile.REGTYPE] * 8 + [tarfile.DIRTYPE, tarfile.SYMTYPE]))
            info.size = len(data) if info.type == tarfile.REGTYPE else 0
            try:
                tar.addfile(info, io.BytesIO(data))
            except (ValueError, UnicodeError):
                continue  # the name does not fit this format
    made = bytearray(out.getvalue())
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(made) - 1)) % 4096 % len(made)
        made[at] = draw(st.sampled_from([*b"\0 019x-"]))
    return bytes(made[: draw(st.sampled_from([len(made), len(made), len(made) // 2]))])


def members(data: bytes) -> tuple[list[tuple[object, ...]], str]:
    found: list[tuple[object, ...]] = []
    try:
        for one in members_and_damage(io.BytesIO(data), "a.tar", one_name=True):
            assert isinstance(one, Member)
            found.append((one.name, one.data, one.start, one.offset, one.end, one.why))
    except SourceError as error:
        return found, str(error)
    return found, ""


@given(data=member_tars(), ahead=st.sampled_from([512, 2048, 5000, 1 << 20]), few=st.integers(1, 6))
def test_headers_read_at_once_are_those_read_one_by_one(data: bytes, ahead: int, few: int) -> None:
    with mock.patch.object(tar_members, "plain_headers", return_value=tar_members._NO_HEADERS):
        expected = members(data)
    with (
        mock.patch.object(tar_members, "_BUFFER_BYTES", ahead),
        mock.patch.object(tar_members, "_FEW_HEADERS", few),
    ):
        assert members(data) == expected


def test_plain_headers_are_read_at_once() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for number in range(100):
            info = tarfile.TarInfo(f"{number:05d}.txt")
            info.size, info.mtime = number, number + 0.5  # as webdataset.TarWriter has it
            tar.addfile(info, io.BytesIO(bytes(number)))
    found = tar_members.plain_headers(out.getvalue(), 0, 1000)
    assert len(found.names) == 100


# ---- Values that are located together are those that are located one by one


EXTENSIONS = st.lists(
    st.sampled_from(["jpg", "cls", "JSON", "txt", "left.png", "bin"]), max_size=4, unique=True
)
CONTENTS = {"cls": [b"7", b"12", b"3\n", b"007", b"x"], "JSON": [b"{}", b"[1]", b'\xef\xbb\xbf"a"', b"{"]}
TEXT = [b"hi", b"", b"\xef\xbb\xbfhi", b"\xff"]


@st.composite
def sample_tars(draw: st.DrawFn) -> bytes:
    """A tar of samples, most of which have the same fields."""
    usual, out = draw(EXTENSIONS.filter(bool)), io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for number in range(draw(st.integers(1, 12))):
            key = f"d/{number if draw(st.integers(0, 20)) else 0:03d}"
            for extension in usual if draw(st.integers(0, 5)) else draw(EXTENSIONS):
                name = f"{key}.{extension}" if draw(st.integers(0, 30)) else f"d/._{number}.{extension}"
                bad = draw(st.integers(0, 20)) == 0
                choices = CONTENTS.get(extension, TEXT)
                data = draw(st.sampled_from(choices if bad else choices[:3]))
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


@settings(max_examples=60)
@given(data=sample_tars(), block_bytes=st.sampled_from([1, 2000, 1 << 20]), skip=st.booleans())
def test_values_located_together_are_those_located_one_by_one(
    data: bytes, block_bytes: int, skip: bool
) -> None:
    def found(root: Path) -> str:
        options = ImportOptions(skip_bad_rows=skip, field_types={"text": "str?"})
        try:
            done = adopt([path], root, options=options, block_size=block_bytes)
        except ShardkitError as error:
            return str(error)
        assert done.manifest is not None
        return f"{done.manifest.id} {done.skipped}"

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.tar"
        path.write_bytes(data)
        together = found(Path(folder) / "together")
        with mock.patch.object(
            tars, "_are_whole", lambda _, data, offsets, sizes: np.zeros(len(sizes), bool)
        ):
            assert found(Path(folder) / "alone") == together
