"""Sources with dirt in them, built and adopted: equal samples, and what is left out is reported."""

from __future__ import annotations

import base64
import gzip
import io
import itertools
import json
import re
import struct
import tarfile
import uuid
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as encryption
import pytest
from PIL import Image
from pyarrow import feather

import shardkit
from shardkit.copies.verify import verify
from shardkit.errors import ShardkitError, UsageError
from shardkit_tools.adopting import adopt, line_files
from shardkit_tools.building.build_run import build
from shardkit_tools.importers import ImportOptions, line_ranges, mds, open_source, webdataset
from tests.mds_shards import write_shards
from tests.pictures import PNG
from tests.servers.object_stores import s3_client

BUCKETS = ("odd-names",)

Rows = list[dict[str, Any]]
Way = Callable[..., tuple[Rows, str]]


def built(
    source: Path, root: Path, *, skip: bool = False, from_: str | None = None, **options: Any
) -> tuple[Rows, str]:
    """Return the samples of a build without shuffling, and what it says."""
    given = ImportOptions(skip_bad_rows=skip, **options)
    on_error = "skip" if skip else "raise"
    result = build(source, root, from_=from_, options=given, shuffle=False, jobs=1, on_error=on_error)
    said = [*result.notes, *(one.message for one in result.skipped)]
    return [dict(sample) for sample in shardkit.open(root)], "\n".join(said)


def adopted(
    source: Path, root: Path, *, skip: bool = False, from_: str | None = None, **options: Any
) -> tuple[Rows, str]:
    """Return the samples of an adoption, and what it says."""
    result = adopt(source, root, from_=from_, options=ImportOptions(skip_bad_rows=skip, **options))
    return [dict(sample) for sample in shardkit.open(root)], "\n".join([*result.notes, *result.skipped])


WAYS = pytest.mark.parametrize("way", [built, adopted])


def tar_of(members: Sequence[tuple[str, bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def npy_of(values: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, values)
    return out.getvalue()


def members_of(rows: Sequence[int]) -> list[tuple[str, bytes]]:
    return [
        one for row in rows for one in ((f"{row}.bin", bytes([row]) * 700), (f"{row}.txt", str(row).encode()))
    ]


# ---- Tars


@WAYS
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (tarfile.SYMTYPE, tarfile.GNU_FORMAT),
        (tarfile.LNKTYPE, tarfile.PAX_FORMAT),
        (tarfile.FIFOTYPE, tarfile.GNU_FORMAT),
        (None, tarfile.GNU_FORMAT),
    ],
)
def test_a_link_and_a_name_that_is_not_utf_8_cost_their_own_sample(
    way: Way, kind: bytes | None, form: int, tmp_path: Path
) -> None:
    names = ["a" + "é" * 60, "b", "c", "d"]  # the first is cut within a character where it is short
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as tar:
        for number, name in enumerate(names):
            member = tarfile.TarInfo(f"{name}.bin")
            if name != "b":
                member.size = 1
            elif kind is None:
                member.name = "x\udce9.bin"
            else:
                member.type, member.linkname = kind, "a.bin"
            tar.addfile(member, io.BytesIO(bytes([number]) * member.size))
    with pytest.raises(ShardkitError, match=r"a\.tar: .*(only files and folders|is not UTF-8)"):
        way(tmp_path / "a.tar", tmp_path / "root")
    rows, said = way(tmp_path / "a.tar", tmp_path / "skip", skip=True)
    assert [row["blob"] for row in rows] == [b"\0", b"\2", b"\3"]
    assert re.search("only files and folders|is not UTF-8", said)


@WAYS
@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "[1e999]", "[NaN]"])
def test_json_in_a_tar_is_strict(way: Way, text: str, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_of([("0.json", b"{}"), ("1.json", text.encode())]))
    with pytest.raises(ShardkitError, match="JSON"):
        way(tmp_path / "a.tar", tmp_path / "root")
    assert way(tmp_path / "a.tar", tmp_path / "skip", skip=True)[0] == [{"meta": {}}]


@WAYS
def test_a_tar_cut_anywhere_gives_the_samples_before_the_cut(way: Way, tmp_path: Path) -> None:
    whole = tar_of(members_of(range(4)))
    size = 512 + 1024 + 512 + 512  # of a sample: headers and padded data
    for cut in range(2 * size, 4 * size + 1024, 256):
        source = tmp_path / f"{cut}"
        source.mkdir()
        (source / "a.tar").write_bytes(whole[:cut])
        with pytest.raises(ShardkitError, match=r"a\.tar"):
            way(source, tmp_path / f"{cut}-strict")
        rows, said = way(source, tmp_path / f"{cut}-root", skip=True)
        assert [row["text"] for row in rows] == [str(n) for n in range(min(4, cut // size))]
        assert all(row["blob"] == bytes([int(row["text"])]) * 700 for row in rows)
        assert "a.tar" in said


@WAYS
@pytest.mark.parametrize("damaged", [0, 1, 6, 7, 99])
@pytest.mark.parametrize("inner", [0, 5000])
def test_the_samples_after_a_damaged_header_of_a_tar_are_kept(
    way: Way, damaged: int, inner: int, tmp_path: Path
) -> None:
    """A header of a sample, first or second, has a flipped bit; what follows starts at the next valid header."""
    members = [(name, data * (1 + inner // 700)) for name, data in members_of(range(50))]
    data = bytearray(tar_of(members))
    data[[at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"][damaged] + 105] ^= 1
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(ShardkitError, match=r"a\.tar.*checksum"):
        way(tmp_path / "a.tar", tmp_path / "strict")
    rows, said = way(tmp_path / "a.tar", tmp_path / "root", skip=True)
    kept = [n for n in range(50) if n != damaged // 2]
    assert [(row["blob"], row["text"]) for row in rows] == [
        (members[2 * n][1], members[2 * n + 1][1].decode()) for n in kept
    ]
    assert "checksum" in said
    assert "second time" not in said
    assert not verify(str(tmp_path / "root"), level="decode").exit_code


@WAYS
def test_a_sample_next_to_damage_never_lacks_a_field_in_silence(way: Way, tmp_path: Path) -> None:
    """A field that is optional in the tar may have been lost with the header, and so may a long name."""
    long = "7" * 120
    members = [
        *members_of(range(3)),
        ("x.bin", b"x"),
        *members_of(range(3, 6)),
        (f"{long}.bin", b"l"),
        (f"{long}.txt", b"l"),
    ]
    members += members_of(range(6, 9))
    whole = tar_of(members)
    heads = [at for at in range(0, len(whole), 512) if whole[at + 257 : at + 262] == b"ustar"]
    for head in heads:
        data = bytearray(whole)
        data[head + 105] ^= 1
        (tmp_path / "a.tar").write_bytes(data)
        rows, said = way(tmp_path / "a.tar", tmp_path / f"{head}", skip=True)
        expected = {(b"x", None), (b"l", "l"), *((bytes([n]) * 700, str(n)) for n in range(9))}
        found = {(row["blob"], row["text"]) for row in rows}
        assert found <= expected, head
        assert len(found) >= len(expected) - 2, (head, expected - found)
        assert "checksum" in said


@WAYS
@pytest.mark.parametrize(
    ("name", "field", "data", "kind", "value"),
    [
        ("extra.bin", "extra", b"x" * 5000, "bytes?", b"x" * 5000),
        ("seen.txt", "seen", b"once", "str?", "once"),
        ("cls", "label", b" 7", "int64?", 7),
        ("v.npy", "v", npy_of(np.arange(3, dtype="f4")), "float32[3]?", [0, 1, 2]),
    ],
    ids=["bytes", "text", "whole", "array"],
)
def test_a_member_that_one_sample_has_is_an_optional_field(
    way: Way, name: str, field: str, data: bytes, kind: str, value: Any, tmp_path: Path
) -> None:
    stray = [("3.bin", b"3" * 700), ("3.txt", b"3"), (f"3.{name}", data)]
    (tmp_path / "a.tar").write_bytes(tar_of([*members_of(range(3)), *stray, *members_of(range(4, 90))]))
    rows, _ = way(tmp_path / "a.tar", tmp_path / "root")
    assert str(shardkit.open(tmp_path / "root").schema[field]) == kind
    found = [row.pop(field) for row in rows]
    assert np.array_equal(found[3], value)
    assert found[:3] + found[4:] == [None] * 89
    assert [row["text"] for row in rows] == [str(n) for n in range(90)]
    assert not verify(str(tmp_path / "root"), level="decode").exit_code
    with pytest.raises(ShardkitError, match="stratif"):
        adopt(tmp_path / "a.tar", tmp_path / "strata", stratify=field)


@WAYS
@pytest.mark.parametrize(
    "dirt",
    [
        [("README", b"x")],
        [("0.bin", b"again"), ("0.txt", b"again")],
        [("y.txt", b"no blob")],
        [("y.bin", b"y"), ("y.txt", b"\xff\xfe")],
        [("y.pkl", b"y"), ("y.bin", b"y"), ("y.txt", b"y")],
        [("y.bin", b"y"), ("y.txt", b"y"), ("y.TXT", b"y")],
    ],
    ids=["no-extension", "key-twice", "no-field", "not-utf8", "pickle", "field-twice"],
)
def test_a_bad_sample_of_a_tar_is_lost_alone(way: Way, dirt: list[tuple[str, bytes]], tmp_path: Path) -> None:
    source = tmp_path / "tars"
    source.mkdir()
    (source / "a.tar").write_bytes(tar_of([*members_of(range(3)), *dirt, *members_of(range(3, 200))]))
    types = {"blob": "bytes", "text": "str"}
    with pytest.raises(ShardkitError, match=r"a\.tar"):
        way(source, tmp_path / "strict", field_types=types)
    rows, said = way(source, tmp_path / "root", skip=True, field_types=types)
    assert [row["text"] for row in rows] == [str(n) for n in range(200)]
    assert said.count("a.tar") == 1


def test_arrays_without_items_have_a_free_size(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_of([("0.npy", npy_of(np.zeros((0, 4), np.float32)))]))
    np.save(tmp_path / "b.npy", np.zeros((3, 0)))
    rows, _ = built(tmp_path / "a.tar", tmp_path / "a")
    assert rows[0]["array"].shape == (0, 4)
    assert len(built(tmp_path / "b.npy", tmp_path / "b")[0]) == 3


# ---- Tables of text


@WAYS
@pytest.mark.parametrize("delimiter", [",", "\t", ";"])
def test_columns_of_csv_are_matched_by_name(way: Way, delimiter: str, tmp_path: Path) -> None:
    source = tmp_path / "tables"
    source.mkdir()
    suffix = "tsv" if delimiter == "\t" else "csv"
    columns: dict[str, Callable[[int], object]] = {
        "id": int,
        "name": "n{}".format,
        "score": lambda n: n / 2,
        "left out": str,
    }
    rows: Rows = []
    for number, names in enumerate(itertools.permutations(columns)):
        lines = [delimiter.join(names)]
        for n in range(3 * number, 3 * number + 3):
            lines.append(delimiter.join(str(columns[name](n)) for name in names))
            rows.append({"id": n, "name": f"n{n}", "score": n / 2, "left out": n})
        (source / f"{number:02}.{suffix}").write_text("\n".join(lines) + "\n")
    assert way(source, tmp_path / "root")[0] == rows


@WAYS
def test_a_column_that_a_csv_file_lacks_is_null_and_said(way: Way, tmp_path: Path) -> None:
    source = tmp_path / "tables"
    source.mkdir()
    (source / "a.csv").write_text("id,name,n\n1,a,5\n2,b,6\n")
    (source / "b.csv").write_text("extra,id\ntrue,3\n")
    rows, said = way(source, tmp_path / "root")
    assert rows == [
        {"id": 1, "name": "a", "n": 5, "extra": None},
        {"id": 2, "name": "b", "n": 6, "extra": None},
        {"id": 3, "name": None, "n": None, "extra": True},
    ]
    assert "name is missing in 1 of 2 files (b.csv)" in said
    (source / "c.csv").write_text("4,d,7\n5,e,8\n")
    with pytest.raises(ShardkitError, match=r"c\.csv: its header"):
        way(source, tmp_path / "strict")


# ---- Appends


def _parquet(folder: Path, rows: Rows) -> None:
    pq.write_table(_table(rows), folder / "t.parquet")


def _table(rows: Rows) -> Any:
    return pa.table({name: [row[name] for row in rows] for name in rows[0]})


def test_appended_rows_may_lack_optional_fields(tmp_path: Path) -> None:
    rows: Rows = [{"y": 4, "x": 1, "z": 1.5}, {"y": None, "x": 2, "z": None}]
    for name, some in (("whole", rows), ("part", [{"x": 3}]), ("more", [{"x": 3, "q": 1}])):
        (tmp_path / name).mkdir()
        _parquet(tmp_path / name, some)
    root = tmp_path / "root"
    build(tmp_path / "whole", root, shuffle=False, jobs=1)
    build(tmp_path / "part", root, shuffle=False, jobs=1, append=True)
    assert [dict(one) for one in shardkit.open(root)] == [*rows, {"y": None, "x": 3, "z": None}]
    with pytest.raises(UsageError, match=r"the new rows have q \(int64\) in addition"):
        build(tmp_path / "more", root, shuffle=False, jobs=1, append=True)


def test_appended_rows_need_the_other_fields(tmp_path: Path) -> None:
    for name, some in (("whole", [{"x": 1, "y": 4}]), ("part", [{"x": 3}])):
        (tmp_path / name).mkdir()
        _parquet(tmp_path / name, some)
    build(tmp_path / "whole", tmp_path / "root", jobs=1)
    with pytest.raises(UsageError, match=r"the new rows have no y \(int64\)"):
        build(tmp_path / "part", tmp_path / "root", jobs=1, append=True)


# ---- Names in buckets


Put = Callable[[str, bytes], None]


@pytest.fixture(params=["s3", "memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Put]]:
    """Yield a URL or folder, and a function that puts an object there by its name."""
    folder = uuid.uuid4().hex
    if request.param == "s3":
        with s3_client(request.getfixturevalue("proxy").endpoint) as s3:
            yield (
                f"s3://{BUCKETS[0]}/{folder}",
                lambda name, data: s3.put_object(Bucket=BUCKETS[0], Key=f"{folder}/{name}", Body=data),
            )
        return
    url = f"memory://{folder}" if request.param == "memory" else str(tmp_path)
    system, root = fsspec.core.url_to_fs(url)

    def put(name: str, data: bytes) -> None:
        system.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        system.pipe_file(f"{root}/{name}", data)

    yield url, put


@pytest.mark.parametrize(
    "name", ["a[1].jsonl", "a*.jsonl", "a?.jsonl", "v[1]/a.jsonl", "v[12]/w?/a[b].jsonl"]
)
def test_an_object_whose_name_holds_wildcards_goes_before_the_glob(store: tuple[str, Put], name: str) -> None:
    others = ["a1.jsonl", "ab.jsonl", "v1/a.jsonl", "v1/wx/ab.jsonl"]
    url, put = store
    for number, one in enumerate([name, *others]):
        put(one, b'{"n": %d}\n' % number)

    def numbers(source: str) -> list[object]:
        importer = open_source(source)
        return [row.sample["n"] for task in importer.tasks() for row in importer.read(task)]  # type: ignore[union-attr]

    assert numbers(f"{url}/{name}") == [0]
    if "/" in name:
        folder = name.rpartition("/")[0]
        assert numbers(f"{url}/{folder}") == [0]
        assert url.startswith("memory") or numbers(f"{url}/{folder}/*.jsonl") == [0]
    assert numbers(f"{url}/a[1b].jsonl") == [1, 2]
    assert sorted(map(str, numbers(f"{url}/**/*.jsonl")))[:5] == ["0", "1", "2", "3", "4"]


# ---- Files that are not what they seem


@WAYS
def test_an_mds_index_without_shards_is_no_sample(way: Way, tmp_path: Path) -> None:
    source = tmp_path / "mds"
    source.mkdir()
    (source / "index.json").write_text('{"version": 2, "shards": []}')
    for given in (source, source / "index.json"):
        with pytest.raises(ShardkitError, match=r"index\.json: the index lists no shards"):
            way(given, tmp_path / "root")
    (source / "index.json").write_text('{"version": 2, "shards": [{"format": "csv"}]}')
    for name in ("shard.00000.csv", "shard.00000.csv.meta"):  # of Streaming's writer of CSV
        (source / name).write_text("n\n1\n")
    with pytest.raises(ShardkitError, match=r"has the format 'csv', .*shard\.\*\.csv"):
        way(source, tmp_path / "root")


@WAYS
def test_webp_cut_anywhere_is_found(way: Way, tmp_path: Path) -> None:
    source, image = tmp_path / "pictures", io.BytesIO()
    source.mkdir()
    Image.effect_noise((40, 40), 90).convert("RGB").save(image, "webp")
    whole = image.getvalue()
    (source / "whole.webp").write_bytes(whole)
    for cut in (12, 13, 30, len(whole) // 2, len(whole) - 1):
        (source / f"{cut}.webp").write_bytes(whole[:cut])
    (source / "sound.webp").write_bytes(b"RIFF\4\0\0\0WAVE")
    with pytest.raises(ShardkitError, match=r"6 samples cannot be read"):
        way(source, tmp_path / "strict")
    rows, said = way(source, tmp_path / "root", skip=True)
    assert rows == [{"image": whole}]
    assert said.count("fetch it again") == 6


def test_keys_of_a_table_that_an_adoption_does_not_use_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"__key__": ["a", "b"], "x": [1, 2]}), tmp_path / "t.parquet")
    rows, said = adopted(tmp_path / "t.parquet", tmp_path / "root")
    assert rows == [{"x": 1}, {"x": 2}]
    assert "the column __key__ is not used" in said


_NOISE = np.random.default_rng(0).bytes(100_000)


@WAYS
@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", gzip.compress(b'{"a": 1}\n', mtime=0), r"a\.jsonl line \d.*compressed.*name it \.gz"),
        ("a.jsonl", '{"a": 1}\n'.encode("utf-16"), r"a\.jsonl line \d.*iconv -f UTF-16"),
        ("a.jsonl", b'{"a": 1}{"a": 2}\n', r"a\.jsonl line \d.*several values in one line"),
        ("a.jsonl", b'{"a": 1},\n{"a": 2},\n', r"a\.jsonl line \d.*a comma after the object"),
        ("a.jsonl", b'{\n "a": 1\n}\n', r"a\.jsonl line \d.*continues on the next line; .*jq -c"),
        ("a.jsonl", b'{"a": 1}\nnull\n', r"a\.jsonl line \d.*not an object"),
        ("a.csv", gzip.compress(b"x\n1\n"), r"compressed.*name it \.gz"),
        ("a.tar", gzip.compress(tar_of([("a.bin", _NOISE[:1])])), r"compressed.*such as \.tar\.gz"),
        ("a.tar", gzip.compress(tar_of([("a.bin", _NOISE)])), r"compressed.*such as \.tar\.gz"),
        ("a.npy", 2 * npy_of(np.arange(3)), "what follows the array would be lost"),
    ],
    ids=["gzip", "utf-16", "one-line", "commas", "indented", "null", "csv", "small-tar", "tar", "two-arrays"],
)
def test_files_that_are_not_what_their_names_say_are_refused_with_the_way_on(
    way: Way, name: str, data: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ShardkitError, match=message):
        way(tmp_path / name, tmp_path / "root")


@WAYS
@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.json", '{"data": [{"a": 1}, {"a": 2}]}', "one object, which is one sample"),
        ("a.json", '{"a": {"0": 1, "1": 2}, "b": {"0": 3, "1": 4}}', "one object, which is one sample"),
        ("a.csv", "1.0,2.0\n3.0,4.0\n", "a column of numbers '1.0'"),
        ("a.csv", "7,a\n8,b\n", "a column of numbers '7'"),
        ("a.csv", "x\n1\n\\N\n", "takes such cells as missing values"),
    ],
    ids=["data", "pandas", "savetxt", "part", "null"],
)
def test_guesses_that_may_lose_samples_or_values_are_said(
    way: Way, name: str, text: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    assert expected in way(tmp_path / name, tmp_path / "root")[1]
    (tmp_path / "b.csv").write_text("x,0,1\na,2,3\n")
    assert "number" not in way(tmp_path / "b.csv", tmp_path / "other")[1]


@WAYS
@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.csv", f"x\n{2**64 - 1}\n{2**64 - 2}\n", [str(2**64 - 1), str(2**64 - 2)]),
        ("a.csv", "x\n+491\n-2\n", [491, -2]),
        ("a.csv", "x\n1e400\n1.5\n", ["1e400", "1.5"]),
        ("a.csv", "x,y\r1,a\r2,b\r", [1, 2]),
        ("a.psv", "x|y\n1|a\n", [1]),
        ("part-0", "x\n1\n", [1]),
    ],
    ids=["hashes", "signs", "overflow", "returns", "bars", "no-extension"],
)
def test_cells_of_csv_are_not_changed(
    way: Way, name: str, text: str, expected: list[object], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(text.encode())
    rows, _ = way(tmp_path / name, tmp_path / "root", from_="csv")
    assert [row["x"] for row in rows] == expected


@WAYS
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "x\n1.5\n1e400\n"),
        ("a.csv", f"x\n1.5\n{2**53 + 1}\n"),
        ("a.jsonl", '{"x": 1.5}\n{"x": 1e400}\n'),
        ("a.jsonl", '{"x": [1.5]}\n{"x": [1e400]}\n'),
        ("a.jsonl", '{"x": [1.5]}\n{"x": ' + "[" * 300 + "]" * 300 + "}\n"),
    ],
)
def test_values_that_would_change_are_refused_when_they_are_read(
    way: Way, name: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    given = {"x": "float64"} if name == "a.csv" else {}
    with pytest.raises(ShardkitError, match=r"a\.(csv line 3|jsonl line 2)"):
        way(tmp_path / name, tmp_path / "root", field_types=given)
    rows, said = way(tmp_path / name, tmp_path / "skip", field_types=given, skip=True)
    assert len(rows) == 1
    assert " line " in said


# ---- Arrow and Parquet


@WAYS
@pytest.mark.parametrize("write", [pq.write_table, feather.write_feather])
@pytest.mark.parametrize("order", [None, (1, 0, 2), (2, 0, 1), (1, 2, 0)])
def test_tensors_of_one_shape_keep_it(
    way: Way, write: Callable[[Any, str], None], order: tuple[int, ...] | None, tmp_path: Path
) -> None:
    kind = pa.fixed_shape_tensor(pa.int32(), (2, 3, 4), permutation=order)
    flat = np.arange(5 * 24, dtype=np.int32).reshape(5, 24)
    column = pa.ExtensionArray.from_storage(kind, pa.array(list(flat), pa.list_(pa.int32(), 24)))
    path = tmp_path / f"a.{'parquet' if write is pq.write_table else 'feather'}"
    write(pa.table({"x": column, "name": ["a", "b", "c", "d", "e"]}).slice(1), str(path))
    rows, _ = way(path, tmp_path / "root")
    stored = flat[1:].reshape(4, 2, 3, 4)
    axes = order or (0, 1, 2)  # axis d of a tensor is axis axes[d] of what is stored; pyarrow errs for cycles
    for row, one in zip(rows, stored, strict=True):
        assert row["x"].shape == tuple(one.shape[axis] for axis in axes)
        for place in np.ndindex(one.shape):
            assert row["x"][tuple(place[axis] for axis in axes)] == one[place]


@WAYS
@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (pa.array([{"bytes": b"a", "path": "a.png"}]), pa.array([b"b"]), [b"a", b"b"]),
        (
            pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
            pa.array([{"a": 2}]),
            [{"a": 1}, {"a": 2}],
        ),
    ],
    ids=["files", "objects"],
)
def test_columns_of_one_field_type_need_no_common_type_of_arrow(
    way: Way, one: Any, other: Any, expected: list[object], tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    for name, column in (("0", one), ("1", other)):
        pq.write_table(pa.table({"x": column}), tmp_path / f"in/{name}.parquet")
    assert [row["x"] for row in way(tmp_path / "in", tmp_path / "root")[0]] == expected


@WAYS
@pytest.mark.parametrize("write", [pq.write_table, feather.write_feather])
def test_parameters_of_extension_types_that_are_not_kept_are_said(
    way: Way, write: Callable[..., None], tmp_path: Path
) -> None:
    """Months as pandas writes them, without pandas."""
    period = {"ARROW:extension:name": "pandas.period", "ARROW:extension:metadata": '{"freq": "M"}'}
    plain = {"ARROW:extension:name": "arrow.uuid", "ARROW:extension:metadata": ""}
    schema = pa.schema(
        [pa.field("x", pa.int64(), metadata=period), pa.field("id", pa.binary(16), metadata=plain)]
    )
    path = tmp_path / f"a.{'parquet' if write is pq.write_table else 'arrow'}"
    write(pa.table({"x": [600], "id": [bytes(16)]}, schema), str(path))
    rows, said = way(path, tmp_path / "root")
    assert rows == [{"x": 600, "id": bytes(16)}]
    assert 'x is int64, the storage of pandas.period, whose parameters are not kept: {"freq": "M"}' in said
    assert "id is" not in said


@WAYS
@pytest.mark.parametrize("write", [pq.write_table, feather.write_feather])
def test_class_numbers_with_other_names_in_other_files_are_said(
    way: Way, write: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "tables").mkdir()
    for name, classes in {"a": ["cat", "dog"], "b": ["dog", "cat"]}.items():
        features = {"animal": {"names": classes, "_type": "ClassLabel"}}
        described = {"huggingface": json.dumps({"info": {"features": features}})}
        suffix = "parquet" if write is pq.write_table else "arrow"
        table = pa.table({"animal": [0, 1]}).replace_schema_metadata(described)
        write(table, str(tmp_path / "tables" / f"{name}.{suffix}"))
    _, said = way(tmp_path / "tables", tmp_path / "root")
    assert "the numbers of animal mean other classes in other files" in said
    assert f"['cat', 'dog'] in a.{suffix}, ['dog', 'cat'] in b.{suffix}" in said


@pytest.mark.parametrize("kind", ["tar", "mds"])
def test_floats_that_become_wider_after_inference_are_not_rounded(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(webdataset, "_SCAN_SAMPLES", 2)
    monkeypatch.setattr(mds, "_SCAN_ROWS", 2)
    arrays = [np.full((2, 3), 0.1, "f8" if row == 2 else "f4") for row in range(4)]
    if kind == "tar":
        (tmp_path / "x.tar").write_bytes(
            tar_of([(f"{n}.x.npy", npy_of(one)) for n, one in enumerate(arrays)])
        )
    else:
        data = [bytes([66 if one.itemsize == 8 else 34, 2 << 2, 2, 3]) + one.tobytes() for one in arrays]
        rows_of_shard = [struct.pack("<I", len(one)) + one for one in data]
        write_shards(tmp_path / "x.mds", {"x": ("ndarray", None)}, [rows_of_shard])
    source = tmp_path / f"x.{kind}"
    with pytest.raises(ShardkitError, match=r"'x' is an array of float64, .*--schema x='float64\[2,3\]'"):
        built(source, tmp_path / "root")
    rows, said = built(source, tmp_path / "skip", skip=True)
    assert [row["x"].tolist() for row in rows] == [arrays[n].tolist() for n in (0, 1, 3)]
    assert "float64" in said
    rows, _ = built(source, tmp_path / "wide", field_types={"x": "float64[2,3]"})
    assert [row["x"].tolist() for row in rows] == [one.tolist() for one in arrays]


@WAYS
def test_a_missing_tensor_is_no_value(way: Way, tmp_path: Path) -> None:
    storage = pa.array([[1, 2, 3, 4], None, [5, 6, 7, 8]], pa.list_(pa.int32(), 4))
    column = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int32(), (2, 2)), storage)
    pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet")
    rows, _ = way(tmp_path / "a.parquet", tmp_path / "root")
    assert [None if row["x"] is None else row["x"].tolist() for row in rows] == [
        [[1, 2], [3, 4]],
        None,
        [[5, 6], [7, 8]],
    ]


class _Keys(encryption.KmsClient):  # type: ignore[misc]  # pyarrow has no types
    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        return base64.b64encode(key_bytes)

    def unwrap_key(self, wrapped_key: bytes, master_key_identifier: str) -> bytes:
        return base64.b64decode(wrapped_key)


@WAYS
@pytest.mark.parametrize("plain_footer", [True, False])
def test_encrypted_columns_are_refused(way: Way, plain_footer: bool, tmp_path: Path) -> None:
    table = pa.table({"x": [1], "y": [2]})
    given = encryption.EncryptionConfiguration(
        footer_key="key", column_keys={"key": ["x"]}, plaintext_footer=plain_footer
    )
    properties = encryption.CryptoFactory(lambda _: _Keys()).file_encryption_properties(
        encryption.KmsConnectionConfig(), given
    )
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    with pytest.raises(ShardkitError, match=r"a\.parquet.*encrypted"):
        way(tmp_path / "a.parquet", tmp_path / "root")


# ---- Folders and token files


@WAYS
def test_files_of_windows_archives_are_joined_and_said(way: Way, tmp_path: Path) -> None:
    source = tmp_path / "pictures"
    (source / "cats").mkdir(parents=True)
    (source / "cats" / "1.png").write_bytes(PNG)
    (source / "cats\\2.png").write_bytes(PNG + b"2")
    (source / "metadata.csv").write_text("file_name,x\ncats\\1.png,1\ncats/2.png,2\n")
    rows, said = way(source, tmp_path / "root")
    assert sorted(row["x"] for row in rows) == [1, 2]
    assert "names with backslashes" in said


@WAYS
def test_labels_that_are_not_the_numbers_of_their_folders_are_said(way: Way, tmp_path: Path) -> None:
    for count, expected in ((10, False), (11, True)):
        source = tmp_path / f"{count}"
        for number in range(count):
            (source / f"{number}").mkdir(parents=True)
            (source / f"{number}" / "a.png").write_bytes(PNG)
        rows, said = way(source, tmp_path / f"{count}-root")
        assert sorted(row["label"] for row in rows) == list(range(count))
        assert ("'10' is label 2" in said) == expected


@WAYS
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_headers_of_llm_c_are_no_tokens(way: Way, dtype: str, tmp_path: Path) -> None:
    tokens = np.arange(5000, dtype=dtype)
    mark = 20240520 if dtype == "uint16" else 20240801
    header = np.array([mark, 1, len(tokens), *[0] * 253], np.int32)
    path = tmp_path / "train.bin"
    path.write_bytes(header.tobytes() + tokens.tobytes())
    with pytest.raises(ShardkitError, match=r"train\.bin: it begins with a header of llm\.c.*tail -c \+1025"):
        way(path, tmp_path / "root", dtype=dtype, row=100)
    path.write_bytes(path.read_bytes()[1024:])
    rows, _ = way(path, tmp_path / "root", dtype=dtype, row=100)
    assert np.concatenate([row["tokens"] for row in rows]).tolist() == tokens.tolist()


@WAYS
@pytest.mark.parametrize("place", ["a.txt", "a.tar", "folder", "lines"])
def test_a_byte_order_mark_is_no_part_of_a_text(way: Way, place: str, tmp_path: Path) -> None:
    source: Path = tmp_path / place
    options: dict[str, Any] = {}
    if place == "a.tar":
        marked = [("a.txt", BOM_UTF8 + b"one"), ("a.json", BOM_UTF8 + b'{"x": 1}')]
        source.write_bytes(tar_of([*marked, ("b.txt", b"two"), ("b.json", b"{}")]))
    elif place == "folder":
        source.mkdir()
        for name, text in (("a", BOM_UTF8 + b"one"), ("b", b"two")):
            (source / f"{name}.png").write_bytes(PNG)
            (source / f"{name}.txt").write_bytes(text)
    else:
        source.write_bytes(BOM_UTF8 + b"one" + b"\ntwo" * (place == "lines"))
        options = {"from_": "text", "per": "line"} if place == "lines" else {}
    if place == "lines" and way is adopted:
        return  # adopted texts are whole files
    rows, _ = way(source, tmp_path / "root", **options)
    assert [row["text"] for row in rows] == ["one", "two"][: 1 if place == "a.txt" else 2]
    if place == "a.txt":
        rows, _ = way(source, tmp_path / "octets", field_types={"text": "bytes"})
        assert rows[0]["text"] == BOM_UTF8 + b"one"
    assert not verify(str(tmp_path / "root"), level="decode").exit_code


@WAYS
@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([0.5, 1e300]), "float32"),
        (pa.array(["0.5", "1e300"]), "float32"),
        (pa.array([0.5, -1e6], pa.float32()), "float16"),
        (pa.array([[0.5], [1e300]]), "float32[*]"),
    ],
)
def test_numbers_that_a_type_cannot_hold_do_not_become_infinite(
    way: Way, column: Any, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": column}), path)
    with pytest.raises(ShardkitError, match=r"a\.parquet (row 1|from row 0 on).*overflows"):
        way(path, tmp_path / "root", field_types={"x": kind})
    inf = pa.array([float("inf"), float("-inf"), None, 1.5])
    pq.write_table(pa.table({"x": inf}), path)
    rows, _ = way(path, tmp_path / "root", field_types={"x": "float32?"})
    assert [row["x"] for row in rows] == [float("inf"), float("-inf"), None, 1.5]


def test_a_damaged_row_group_is_lost_alone(tmp_path: Path) -> None:
    """All row groups are one task, whose later groups are intact."""
    path = tmp_path / "a.parquet"
    texts = [f"{n} {n * n}" for n in range(1000)]
    table = pa.table({"n": range(1000), "text": texts})
    pq.write_table(
        table, path, row_group_size=100, write_page_checksum=True, compression="none", use_dictionary=False
    )
    data, column = bytearray(path.read_bytes()), pq.read_metadata(path).row_group(4).column(1)
    data[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ShardkitError, match=r"a\.parquet.*cannot be read"):
        built(path, tmp_path / "strict")
    rows, said = built(path, tmp_path / "root", skip=True)
    assert [row["n"] for row in rows] == [*range(400), *range(500, 1000)]
    assert [row["text"] for row in rows] == texts[:400] + texts[500:]
    assert "rows 400 to 499 are lost" in said
    keys = shardkit.open(tmp_path / "root")
    assert [keys.key(n) for n in (399, 400)] == [keys.key(0)[:-3] + "399", keys.key(0)[:-3] + "400"]


_LZ4_MAGIC = b"\x04\x22\x4d\x18"


def arrow_file(path: Path) -> list[int]:
    """Write ten record batches of 100 rows, compressed with lz4; return where their messages begin."""
    batches = [
        pa.record_batch({"n": range(n, n + 100), "text": [f"{row} {row * row}" for row in range(n, n + 100)]})
        for n in range(0, 1000, 100)
    ]
    with pa.ipc.new_file(
        path, batches[0].schema, options=pa.ipc.IpcWriteOptions(compression="lz4")
    ) as writer:
        for batch in batches:
            writer.write_batch(batch)
    data = path.read_bytes()
    begins = [place for place in range(0, len(data), 8) if data[place : place + 4] == b"\xff" * 4]
    return begins[1:12]  # the first message is the schema


@pytest.mark.parametrize(
    ("what", "lost"), [("data", range(500, 600)), ("header", range(500, 1000))], ids=["data", "header"]
)
def test_a_damaged_record_batch_is_lost_alone_if_its_rows_are_known(
    what: str, lost: range, tmp_path: Path
) -> None:
    """Types are inferred from the same batches; the rows after a damaged header cannot be numbered."""
    path = tmp_path / "a.arrow"
    begins = arrow_file(path)
    data = bytearray(path.read_bytes())
    at = data.index(_LZ4_MAGIC, begins[5]) if what == "data" else begins[5] + 24
    data[at : at + 40] = bytes(byte ^ 0x5A for byte in data[at : at + 40])
    path.write_bytes(data)
    with pytest.raises(ShardkitError, match=r"a\.arrow: record batch 5 cannot be read"):
        built(path, tmp_path / "strict")
    rows, said = built(path, tmp_path / "root", skip=True)
    assert [row["n"] for row in rows] == [n for n in range(1000) if n not in lost]
    assert all(row["text"] == f"{row['n']} {row['n'] ** 2}" for row in rows)
    assert "record batch 5 cannot be read" in said
    assert ("rows 500 to 599 are lost" in said) == (len(lost) == 100)


@pytest.mark.parametrize(
    ("column", "kind"),
    [([[1, None], [2]], None), (["1", "x"], "json"), ([1, 300], "int8")],
    ids=["null", "json", "int8"],
)
def test_an_error_of_one_row_says_that_a_build_can_leave_it_out(
    column: list[Any], kind: str | None, tmp_path: Path
) -> None:
    """The attribute of the error decides, whatever the message says."""
    pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet")
    types = {} if kind is None else {"x": kind}
    with pytest.raises(ShardkitError, match=r"row \d.*leaves out no rows of a table.*build --on-error skip"):
        adopted(tmp_path / "a.parquet", tmp_path / "root", skip=True, field_types=types)
    rows, _ = built(tmp_path / "a.parquet", tmp_path / "built", skip=True, field_types=types)
    assert len(rows) == 1


def _stream_of(table: Any) -> bytes:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return bytes(out.getvalue())


def _file_of(table: Any, **settings: Any) -> bytes:
    out = pa.BufferOutputStream()
    with pa.ipc.new_file(out, table.schema, options=pa.ipc.IpcWriteOptions(**settings)) as writer:
        writer.write_table(table, 1)
    return bytes(out.getvalue())


def _archive_of(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def _parquet_of(table: Any) -> bytes:
    out = pa.BufferOutputStream()
    pq.write_table(table, out)
    return bytes(out.getvalue())


@WAYS
@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.csv", b"x,y\n1,2\n", r"a\.csv line 3: repeats the header"),
        ("a.csv", b"\xef\xbb\xbfx,y\n1,2\n", r"a\.csv line 3: repeats the header"),
        ("a.arrow", _stream_of(pa.table({"x": [1], "y": [2]})), "several streams in one file"),
        ("a.arrow", _file_of(pa.table({"x": [1], "y": [2]})), "several Arrow files in one"),
        (
            "a.feather",
            _file_of(pa.table({"x": [1], "y": [2]}), compression="lz4"),
            "several Arrow files in one",
        ),
        ("a.npz", _archive_of(x=np.array([1]), y=np.array([2])), "several archives in one file"),
        ("a.parquet", _parquet_of(pa.table({"x": [1], "y": [2]})), "several Parquet files in one"),
    ],
    ids=["csv", "csv with marks", "stream", "arrow", "feather", "npz", "parquet"],
)
def test_files_that_cat_has_joined_lose_no_rows_in_silence(
    way: Way, name: str, data: bytes, expected: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(2 * data)
    with pytest.raises(ShardkitError, match=expected):
        way(tmp_path / name, tmp_path / "root")
    if name == "a.csv":
        rows, said = way(tmp_path / name, tmp_path / "skip", skip=True)
        assert rows == [{"x": 1, "y": 2}] * 2
        assert re.search(expected, said)
    (tmp_path / name).write_bytes(data)
    assert way(tmp_path / name, tmp_path / "one")[0] == [{"x": 1, "y": 2}]


@WAYS
@pytest.mark.parametrize(("first", "second"), [(1, 9), (9, 1)])
def test_an_arrow_file_after_another_is_found_whatever_their_sizes(
    way: Way, first: int, second: int, tmp_path: Path
) -> None:
    files = [_file_of(pa.table({"x": list(range(rows))})) for rows in (first, second)]
    (tmp_path / "a.arrow").write_bytes(b"".join(files))
    with pytest.raises(ShardkitError, match=r"a\.arrow: its footer lists messages up to byte \d+"):
        way(tmp_path / "a.arrow", tmp_path / "root")


@WAYS
def test_padding_before_the_footer_of_an_arrow_file_may_have_any_size(way: Way, tmp_path: Path) -> None:
    data = _file_of(pa.table({"x": [1, 2]}))
    footer = len(data) - 10 - int.from_bytes(data[-10:-6], "little")
    (tmp_path / "a.arrow").write_bytes(data[:footer] + bytes(4096) + data[footer:])
    assert way(tmp_path / "a.arrow", tmp_path / "root")[0] == [{"x": 1}, {"x": 2}]


@WAYS
def test_tables_of_lines_that_end_in_carriage_returns_are_read_in_pieces(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def whole_lines(*arguments: Any, **settings: Any) -> Iterator[bytes]:
        for piece in line_ranges_whole_lines(*arguments, **settings):
            sizes.append(len(piece))
            yield piece

    line_ranges_whole_lines = line_ranges.whole_lines
    monkeypatch.setattr(line_ranges, "READ_BYTES", 100)
    for module in (line_ranges, line_files):
        monkeypatch.setattr(module, "whole_lines", whole_lines)
    lines = [f"{n},w{n}" for n in range(200)]
    for ends in ("\r", "\r\n", "\n"):
        (tmp_path / "a.csv").write_bytes(ends.join(["n,w", *lines, ""]).encode())
        rows, _ = way(tmp_path / "a.csv", tmp_path / f"root{len(ends)}{ord(ends[0])}")
        assert rows == [{"n": n, "w": f"w{n}"} for n in range(200)]
    assert max(sizes) < 120


@WAYS
@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.jsonl", b'{"a": 1}{"a": 2}\n', r"a\.jsonl line 1: several values in one line"),
        ("a.csv", "x,y\n1,é\n".encode("latin-1"), r"a\.csv line 2: not UTF-8"),
        ("a.tar", bytes(512) + b"x" * 1024, r"a\.tar: the tar ends with one zero block|a\.tar: data follows"),
        ("a.parquet", _parquet_of(pa.table({"x": [{"y": float("nan")}]})), r"a\.parquet row 0: .*NaN"),
        ("a.txt", b"\xff\xfe", r"a\.txt: not UTF-8"),
        ("a.png", b"\xff", r"no samples? "),
        ("b.tar", tar_of([("a.txt", b"\xff"), ("b.txt", b"\xfe")]), r"no samples? "),
    ],
    ids=["jsonl", "csv", "tar", "parquet", "text", "png", "members"],
)
def test_if_all_rows_are_left_out_the_error_says_why(
    way: Way, name: str, data: bytes, expected: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ShardkitError, match=expected):
        way(tmp_path / name, tmp_path / "root", skip=True)
    with pytest.raises(ShardkitError):  # nothing was committed
        shardkit.open(tmp_path / "root")


@WAYS
def test_tokens_in_no_document_are_reported(way: Way, tmp_path: Path) -> None:
    """A writer that is killed leaves tokens that its index does not list."""
    index = struct.pack("<QBQQ", 1, 8, 2, 3) + np.array([2, 1], "<i4").tobytes()
    index += np.array([0, 4], "<i8").tobytes() + np.array([0, 1, 2], "<i8").tobytes()
    index += b"\0\1"  # the modes of multimodal data
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.idx").write_bytes(b"MMIDIDX\0\0" + index)
    (tmp_path / "in/a.bin").write_bytes(np.array([1, 2, 3, 4], "<u2").tobytes())
    rows, said = way(tmp_path / "in", tmp_path / "root", from_="tokens")
    assert [row["tokens"].tolist() for row in rows] == [[1, 2], [3]]
    assert "a.bin: 2 bytes are in no document of its index, and are left out" in said
    assert "a.idx: its last 2 bytes are left out; multimodal data has the modes" in said


@WAYS
def test_times_beyond_those_of_python_and_numpy(way: Way, tmp_path: Path) -> None:
    """Python's dates end in 9999; the least integer is NumPy's NaT."""
    days = pa.array([5_000_000, -5_000_000, 0], pa.int32()).cast(pa.date32())
    pq.write_table(pa.table({"x": days}), tmp_path / "a.parquet")
    rows, _ = way(tmp_path / "a.parquet", tmp_path / "root")
    assert [np.datetime64(row["x"]) for row in rows] == [
        np.datetime64(n, "D") for n in (5_000_000, -5_000_000, 0)
    ]
    for kind in (pa.timestamp("us"), pa.duration("s")):
        feather.write_feather(pa.table({"x": pa.array([0, -(2**63)]).view(kind)}), str(tmp_path / "a.arrow"))
        with pytest.raises(ShardkitError, match=r"a\.arrow row 1: .* out of range of"):
            way(tmp_path / "a.arrow", tmp_path / "other")


@WAYS
def test_folders_of_partitions_that_become_no_field_are_said(way: Way, tmp_path: Path) -> None:
    for lang in ("de", "en"):
        (tmp_path / f"data/lang={lang}").mkdir(parents=True)
        (tmp_path / f"data/lang={lang}/a.csv").write_text(f"x\n{lang}\n")
    rows, said = way(tmp_path / "data", tmp_path / "root")
    assert rows == [{"x": "de"}, {"x": "en"}]
    assert "lang=de/ is the name of a folder, and no field" in said


@pytest.mark.parametrize(
    ("good", "bad", "kind", "options"),
    [
        ({"x": 1.0}, {"x": float("nan")}, None, {}),
        ([1, 2], [1, None], None, {}),
        ([1, 2], [1, None], None, {"write_statistics": False}),
        ({"bytes": b"a", "path": "a.png"}, {"bytes": None, "path": "b.png"}, None, {}),
        ("a", None, "str", {}),
        (1.0, 1e300, "float32", {}),
        (1, 2, "bool", {}),
        ([1, 2], [3], "int64[2]", {}),
        ("1", "{", "json", {}),
        ("1", "1e400", "float64", {}),
        ("1", "0x1f", "int64", {}),
        ("[1]", "[300]", "int8[*]", {}),
    ],
    ids=[
        "nan",
        "null",
        "statistics",
        "path",
        "no-value",
        "overflow",
        "boolean",
        "shape",
        "json",
        "infinity",
        "hexadecimal",
        "list",
    ],
)
def test_a_value_of_a_later_row_group_that_does_not_fit_is_found_by_the_adoption(
    good: object, bad: object, kind: str | None, options: dict[str, Any], tmp_path: Path
) -> None:
    table = pa.table({"x.y": [good] * 9 + [bad]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=5, **options)
    types = {} if kind is None else {"x.y": kind}
    for way in (built, adopted):
        with pytest.raises(ShardkitError, match=r"a\.parquet row 9.*x\.y"):
            way(tmp_path / "a.parquet", tmp_path / "root", field_types=types)
