"""Damaged and disagreeing tables: Parquet, Arrow, CSV, Hugging Face folders and MDS."""

from __future__ import annotations

import csv
import datetime as dt
import decimal
import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import SourceError
from shardkit_tools.importers import ImportOptions, SourceFailure, open_source
from tests.importer_conformance import check_importer, read_all

ODD = 'ab" x'
MDS = Path(__file__).parents[1] / "compat" / "golden" / "mds"


def arrow_file(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


WRITERS: dict[str, Callable[[Path, pa.Table], None]] = {
    "parquet": lambda path, table: pq.write_table(table, path),
    "arrow": arrow_file,
}


@pytest.mark.parametrize("suffix", WRITERS)
def test_files_that_disagree(tmp_path: Path, suffix: str) -> None:
    write = WRITERS[suffix]
    write(tmp_path / f"a.{suffix}", pa.table({"x": [1]}))
    write(tmp_path / f"b.{suffix}", pa.table({"x": ["1"]}))
    with pytest.raises(SourceError, match=rf"b\.{suffix}: column 'x' is string, but int64 in a\.{suffix}"):
        open_source(str(tmp_path))
    for kept in (
        ImportOptions(field_types={"x": "str"}),
        ImportOptions(drop=("x",), field_types={"y": "int8?"}),
    ):
        write(tmp_path / f"b.{suffix}", pa.table({"x": ["1"], "y": [2]}))
        rows = read_all(open_source(str(tmp_path), options=kept))
        wanted: list[dict[str, object]] = [{"x": "1", "y": None}, {"x": "1", "y": 2}]
        assert [dict(row.sample) for row in rows] == [{n: row[n] for n in rows[0].sample} for row in wanted]


@pytest.mark.parametrize("suffix", WRITERS)
def test_damaged_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    WRITERS[suffix](path, pa.table({"x": list(range(5000)), "s": ["text"] * 5000}))
    whole = path.read_bytes()
    for data in (whole[: len(whole) // 2], whole[:-4], b"", b"PAR1", b"ARROW1\0\0", whole[100:]):
        path.write_bytes(data)
        with pytest.raises(SourceError, match=rf"a\.{suffix}"):
            read_all(open_source(str(path)))


@pytest.mark.parametrize("suffix", WRITERS)
def test_types_that_no_field_has(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    WRITERS[suffix](path, pa.table({"d": pa.array([1], pa.decimal128(5, 2)), "x": [1]}))
    rows = read_all(open_source(str(path)))
    assert [dict(row.sample) for row in rows] == [{"d": decimal.Decimal("1.00"), "x": 1}]
    rows = read_all(open_source(str(path), options=ImportOptions(field_types={"d": "str"})))
    assert [dict(row.sample) for row in rows] == [{"d": "1.00", "x": 1}]
    rows = read_all(open_source(str(path), options=ImportOptions(field_types={"d": "float64"})))
    assert [dict(row.sample) for row in rows] == [{"d": 1.0, "x": 1}]
    WRITERS[suffix](path, pa.table({"d": pa.array([{"b": b"1"}])}))
    with pytest.raises(SourceError, match=r"column 'd' is struct<b: binary>.*--schema d=json"):
        open_source(str(path))
    WRITERS[suffix](path, pa.table({"x": ["word"]}))
    with pytest.raises(SourceError, match=r"row 0: field 'x' is 'word', expected int8"):
        read_all(open_source(str(path), options=ImportOptions(field_types={"x": "int8"})))
    WRITERS[suffix](path, pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"]))
    with pytest.raises(SourceError, match=r"two columns are called 'x'"):
        open_source(str(path))
    WRITERS[suffix](path, pa.table({"First Name": pa.array([{"b": b"1"}])}))
    with pytest.raises(SourceError, match=r"--schema 'First Name'=json .*or 'First Name'=str"):
        open_source(str(path))


@pytest.mark.parametrize("suffix", WRITERS)
def test_names_with_dots_beside_structs_of_such_members(tmp_path: Path, suffix: str) -> None:
    made = pa.table(
        {
            "a.b": [1, None],
            "a": [{"b": 1}, {"b": 2}],
            "maps": pa.array([[("x", 1)], []], pa.map_(pa.string(), pa.int8())),
        }
    )
    WRITERS[suffix](tmp_path / f"a.{suffix}", made)
    importer = open_source(str(tmp_path / f"a.{suffix}"), options=ImportOptions(columns=("a.b", "a")))
    assert {name: str(kind) for name, kind in importer.schema.items()} == {"a.b": "int64?", "a": "json"}
    assert [dict(row.sample) for row in check_importer(importer)] == made.select(["a.b", "a"]).to_pylist()


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize(("ends", "name"), [("\n", "a.csv"), ("\r\n", "a.csv.gz"), ("\n", "a.csv.zst")])
def test_cells_end_where_the_header_says(tmp_path: Path, delimiter: str, ends: str, name: str) -> None:
    price = "0.5" if delimiter == "," else "0,5"
    rows = [("id", "price", "word"), ("1", price, "a"), ("2", "", '"b; c|d"')]
    data = b"\xef\xbb\xbf" + "".join(delimiter.join(row) + ends for row in rows).encode()
    pack: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "zst": zstandard.compress, "csv": bytes}
    (tmp_path / name).write_bytes(pack[name.rpartition(".")[2]](data))
    samples = [dict(row.sample) for row in check_importer(open_source(str(tmp_path / name)))]
    assert samples == [
        {"id": 1, "price": 0.5 if delimiter == "," else price, "word": "a"},
        {"id": 2, "price": None if delimiter == "," else "", "word": "b; c|d"},
    ]


def test_one_column_needs_no_delimiter(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('word\n"a;b"\n')
    assert [dict(row.sample) for row in check_importer(open_source(str(tmp_path / "a.csv")))] == [
        {"word": "a;b"}
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an empty file"),
        ("a,,c\n1,2,3\n", "a column without a name"),
        ("a,a\n1,2\n", "two columns are called 'a'"),
        ("a,b\n", "a header and no rows"),
        ("a,b\n1,2\n3\n", r"line 3: 1 cells, but the header has 2"),
        ("a,b\n1,2,3\n", r"line 2: 3 cells, but the header has 2"),
        ('a,b\n1,"2\n', "line 2: a quote that is never closed"),
        ("a,b\n1,K\udce9\n", "not UTF-8"),
    ],
)
def test_bad_csv(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(SourceError, match=rf"a\.csv.*{message}"):
        read_all(open_source(str(tmp_path / "a.csv")))


def test_csv_rows_after_the_scan_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkit_tools.importers.csv._SCAN_ROWS", 1)
    monkeypatch.setattr("shardkit_tools.importers.line_ranges.INFERRED_BYTES", 0)
    (tmp_path / "a.csv").write_text("i,f,b\n1,0.5,true\nx,1,true\n2,,true\n3,2,maybe\n4,3,false\n")
    importer = open_source(str(tmp_path / "a.csv"))
    rows = list(importer.read(importer.tasks()[0]))
    assert [isinstance(row, SourceFailure) for row in rows] == [False, True, True, True, False]
    assert "a.csv line 3: field 'i' is 'x', expected int64" in str(rows[1].error)  # type: ignore[union-attr]
    (tmp_path / "b.csv").write_text("k,l,m\n")
    with pytest.raises(
        SourceError, match=r"b\.csv: its header \(k, l, m\) has no column of a\.csv \(i, f, b\)"
    ):
        open_source(str(tmp_path))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.text(ODD), st.text(ODD)), min_size=1, max_size=5),
    st.sampled_from(["a.tsv", "a.csv"]),
    st.sampled_from(["", "none", '"']),
)
def test_quotes_never_join_rows_without_a_word(rows: list[tuple[str, str]], name: str, quote: str) -> None:
    """Cells of corpora, where quotes are characters: read as they are, or refused with the line and the option."""
    rows = [(first or "x", second) for first, second in rows]
    delimiter = "\t" if name == "a.tsv" else ","
    with TemporaryDirectory() as text:
        path = Path(text, name)
        path.write_text("".join(delimiter.join(row) + "\n" for row in [("a", "b"), *rows]))
        options = ImportOptions(quote=quote, field_types={"a": "str", "b": "str"})
        expected: list[tuple[str, ...]] = [*rows]
        if quote == '"' or (name == "a.csv" and not quote):
            try:
                with path.open(newline="") as stream:
                    expected = [tuple(row) for row in csv.reader(stream, delimiter=delimiter, strict=True)][
                        1:
                    ]
            except csv.Error:
                expected = []
        elif name == "a.tsv" and not quote and any(cell.startswith('"') for row in rows for cell in row):
            line = next(n for n, row in enumerate(rows, 2) if any(cell.startswith('"') for cell in row))
            with pytest.raises(
                SourceError, match=rf"a\.tsv line {line}: a cell begins with a quote.*--quote none"
            ):
                open_source(str(path), options=options)
            return
        if not expected or any(len(row) != 2 for row in expected):
            with pytest.raises(SourceError, match=r"line \d"):
                open_source(str(path), options=options)
            return
        found = check_importer(open_source(str(path), options=options))
        assert [tuple(row.sample.values()) for row in found] == expected


def test_lines_are_named_as_an_editor_counts_them(tmp_path: Path) -> None:
    """Empty lines and line ends in quoted cells count; so does the header."""
    (tmp_path / "a.csv").write_text('a,b\n\n1,"x\ny"\n\n\nz,"w"\n')
    with pytest.raises(SourceError, match=r"a\.csv line 7: field 'a' is 'z'"):
        read_all(open_source(str(tmp_path / "a.csv"), options=ImportOptions(field_types={"a": "int8"})))


def test_an_index_without_a_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(",word\n0,a\n1,b\n")
    importer = open_source(str(tmp_path / "a.csv"))
    assert [dict(row.sample) for row in check_importer(importer)] == [
        {"index": 0, "word": "a"},
        {"index": 1, "word": "b"},
    ]


def test_csv_cells_of_given_types(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('v,m,z\n"[1, 2]","{""k"": null}",007\n')
    given = ImportOptions(field_types={"v": "int32[2]", "m": "json", "z": "int64"})
    (row,) = read_all(open_source(str(tmp_path / "a.csv"), options=given))
    assert dict(row.sample) == {"v": [1, 2], "m": {"k": None}, "z": 7}


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=1), "not an index of MDS shards of version 2"),
        (lambda d: d.update(shards=[]), "the index lists no shards"),
        (lambda d: d["shards"][0].update(format="json"), "a shard has the format 'json'"),
        (lambda d: d["shards"][0]["column_names"].pop(), "do not belong together"),
        (
            lambda d: d["shards"][0]["raw_data"].update(basename="../x.mds"),
            r"the shard '\.\./x\.mds' is missing",
        ),
        (lambda d: d["shards"][0]["raw_data"].update(bytes=5), "the index says 5"),
        (
            lambda d: d["shards"][0]["raw_data"]["hashes"].update(sha256="0" * 64),
            "sha256 is .*, the index says 000",
        ),
        (lambda d: d["shards"][0].update(samples=3), "bytes that are not the 3 rows of the index"),
        (lambda d: d["shards"][1]["column_encodings"].__setitem__(0, "bytes"), "different columns"),
        (
            lambda d: [s["column_encodings"].__setitem__(0, "pkl") for s in d["shards"]],
            "a pickle can run any code",
        ),
        (
            lambda d: [s["column_encodings"].__setitem__(0, "hologram") for s in d["shards"]],
            "'hologram' is not read",
        ),
        (
            lambda d: [s["column_sizes"].__setitem__(3, 25) for s in d["shards"]],
            "row 0: .* its fields ask for",
        ),
    ],
)
def test_mds_indexes_that_lie(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    folder = Path(shutil.copytree(MDS / "plain", tmp_path / "mds"))
    edit(folder / "index.json", change)
    with pytest.raises(SourceError, match=message):
        read_all(open_source(str(folder), "mds"))


def test_mds_shards_that_are_damaged(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MDS / "plain", tmp_path / "mds"))
    shard = folder / "shard.00000.mds"
    whole = shard.read_bytes()
    edit(folder / "index.json", lambda d: [s["raw_data"].update(hashes={}) for s in d["shards"]])
    for offset, value in ((0, b"\x0b"), (4, b"\0\0\0\0"), (8, b"\xff\xff\xff\x7f")):
        shard.write_bytes(whole[:offset] + value + whole[offset + len(value) :])
        with pytest.raises(SourceError, match=r"shard\.00000\.mds"):
            read_all(open_source(str(folder)))
    packed = Path(shutil.copytree(MDS / "zstd", tmp_path / "zstd"))
    edit(packed / "index.json", lambda d: [s["zip_data"].update(hashes={}) for s in d["shards"]])
    shard = packed / "shard.00000.mds.zstd"
    shard.write_bytes(b"\0" * len(shard.read_bytes()))
    with pytest.raises(SourceError, match="cannot be decompressed"):
        read_all(open_source(str(packed)))


def test_a_packed_mds_shard_cannot_blow_up(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MDS / "gz", tmp_path / "gz"))
    edit(folder / "index.json", lambda d: d["shards"][0]["raw_data"].update(bytes=100))
    edit(folder / "index.json", lambda d: d["shards"][0]["zip_data"].update(hashes={}))
    with pytest.raises(SourceError, match=r"101 bytes that are not the 15 rows"):
        read_all(open_source(str(folder)))


def test_splits_of_mds_are_named(tmp_path: Path) -> None:
    shutil.copytree(MDS / "plain", tmp_path / "train")
    with pytest.raises(SourceError, match=r"index\.json is missing; name one of its splits, such as .*train"):
        open_source(str(tmp_path))


def test_huggingface_folders_that_are_incomplete(tmp_path: Path) -> None:
    with pa.ipc.new_stream(
        str(tmp_path / "data-00000-of-00001.arrow"), pa.schema([("x", pa.int64())])
    ) as writer:
        writer.write_table(pa.table({"x": [1, 2]}))
    (tmp_path / "dataset_info.json").write_text('{"features": {"x": {"dtype": "int64", "_type": "Value"}}}')
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    assert [row.sample["x"] for row in read_all(open_source(str(tmp_path)))] == [1, 2]
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "../secret.arrow"}]}')
    with pytest.raises(SourceError, match=r"the data file '\.\./secret\.arrow' of state\.json is missing"):
        open_source(str(tmp_path))
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(SourceError, match="lists no data files"):
        open_source(str(tmp_path))
    (tmp_path / "state.json").write_text("[")
    with pytest.raises(SourceError, match=r"state\.json: not valid JSON"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("nanoseconds", [0, 1])
def test_int96_times_are_kept_or_refused(tmp_path: Path, nanoseconds: int) -> None:
    """Nanoseconds of INT96 wrap around beyond 1677 and 2262; microseconds do not, and must lose nothing."""
    times = [dt.datetime.fromisoformat(day) for day in ("9999-12-31 02:00", "1000-01-01", "2024-01-01")] + [
        None
    ]
    table = pa.table({"t": pa.array(times, pa.timestamp("us"))})
    if nanoseconds:
        table = pa.table({"t": pa.array([0, nanoseconds], pa.timestamp("ns"))})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    if nanoseconds:
        with pytest.raises(SourceError, match=r"a\.parquet: column 't' has INT96 times with nanoseconds"):
            read_all(open_source(str(tmp_path / "a.parquet")))
        return
    source = open_source(str(tmp_path / "a.parquet"))
    assert str(source.schema["t"]) == "timestamp[us]?"
    assert [row.sample["t"] for row in read_all(source)] == times


def test_a_task_of_parquet_reads_the_chunks_of_the_fields_that_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    columns = {"small": range(4000), "large": [bytes(50) + n.to_bytes(2, "big") for n in range(4000)]}
    pq.write_table(pa.table(columns), path, row_group_size=1000, compression="none", use_dictionary=False)
    data, footer = path.read_bytes(), pq.read_metadata(path)
    for place, taken in enumerate(columns):
        source = open_source(str(path), options=ImportOptions(columns=(taken,)))
        expected = read_all(source)
        blank = bytearray(data)
        for group in range(footer.num_row_groups):
            other = footer.row_group(group).column(1 - place)
            start, size = other.data_page_offset, other.total_compressed_size
            blank[start : start + size] = bytes(size)
        path.write_bytes(blank)
        assert blank != data
        assert read_all(source) == expected
        path.write_bytes(data)


def test_keys_of_a_table_are_prefixed_or_left_out(tmp_path: Path) -> None:
    for name in "ab":
        table = pa.table({"__key__": ["k", "l"], "x": [1, 2]})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    wanted = {"source": ["k", "l"] * 2, "prefixed": ["a/k", "a/l", "b/k", "b/l"], "none": [None] * 4}
    for keys, expected in wanted.items():
        rows = read_all(open_source(str(tmp_path), options=ImportOptions(keys=keys)))
        assert [row.key for row in rows] == expected
        assert [row.sample for row in rows] == [{"x": 1}, {"x": 2}] * 2
