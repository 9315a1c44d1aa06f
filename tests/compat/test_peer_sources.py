"""Importers against the peers: data that the peer's own writer made, compared with what its own reader gives."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from PIL import Image

import shardkit
from shardkit_tools.building.build_run import build
from shardkit_tools.importers import Importer, ImportOptions, SourceFailure, open_source
from tests.importer_conformance import check_importer

MDS = Path(__file__).parent / "golden" / "mds"


def rows_of(importer: Importer) -> list[dict[str, Any]]:
    return [dict(row.sample) for row in check_importer(importer)]


def types_of(importer: Importer) -> dict[str, str]:
    return {name: str(kind) for name, kind in importer.schema.items()}


def plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value


def table(rows: int, seed: int = 3) -> pa.Table:
    """A column of every type that can be a field."""
    draw = random.Random(seed)
    numbers = range(rows)
    return pa.table(
        {
            "i8": pa.array([n % 100 for n in numbers], pa.int8()),
            "u64": pa.array([2**63 + n for n in numbers], pa.uint64()),
            "f32": pa.array([n / 8 for n in numbers], pa.float32()),
            "flag": pa.array([n % 3 == 0 for n in numbers]),
            "text": pa.array([f"n° {n}" * (n % 4) for n in numbers]),
            "big_text": pa.array([str(n) for n in numbers], pa.large_string()),
            "word": pa.array([f"w{n % 5}" for n in numbers]).dictionary_encode(),
            "blob": pa.array([draw.randbytes(n % 9) for n in numbers]),
            "hash": pa.array([n.to_bytes(4, "big") for n in numbers], pa.binary(4)),
            "tokens": pa.array([list(range(n % 6)) for n in numbers], pa.list_(pa.int32())),
            "vector": pa.array([[n, n + 1, n + 2] for n in numbers], pa.list_(pa.float32(), 3)),
            "matrix": pa.array(
                [[[n, 1], [2, 3], [4, n]] for n in numbers], pa.list_(pa.list_(pa.int64(), 2), 3)
            ),
            "meta": pa.array([{"n": n, "tags": ["a"] * (n % 3)} for n in numbers]),
        }
    )


def same_rows(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [{n: plain(v) for n, v in row.items()} for row in found] == expected


def test_parquet_row_groups_are_read_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkit_tools.importers.tables.TASK_BYTES", 1)
    pq.write_table(table(100), tmp_path / "a.parquet", row_group_size=30)
    importer = open_source(str(tmp_path))
    assert [(task.start, task.stop) for task in importer.tasks()] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [row.source_row for row in check_importer(importer)] == list(range(100))


def test_our_own_arrow_shards(tmp_path: Path) -> None:
    with shardkit.create(tmp_path / "d", {"t": "str", "v": "int16[2]"}, format="arrow") as writer:
        for number in range(20):
            writer.add({"t": str(number), "v": [number, -number]}, key=f"k{number}")
    (shard,) = (tmp_path / "d").glob("objects/sha256/*/*.arrow")
    ds = shardkit.open(tmp_path / "d")
    samples = check_importer(open_source(str(shard)))
    assert [row.key for row in samples] == [ds.key(number) for number in range(20)]
    same_rows([dict(row.sample) for row in samples], [{**ds[n], "v": ds[n]["v"].tolist()} for n in range(20)])


def test_huggingface_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "text": datasets.Value("string"),
            "tokens": datasets.Sequence(datasets.Value("int32")),
            "pair": datasets.Sequence(datasets.Value("float32"), length=2),
            "grid": datasets.Array2D((2, 3), "int16"),
            "photo": datasets.Image(),
        }
    )
    samples = []
    for number in range(30):
        stream = io.BytesIO()
        Image.new("RGB", (4, 4), (number, 0, 0)).save(stream, "PNG")
        samples.append(
            {
                "label": number % 2, "text": f"t{number}", "tokens": list(range(number % 4)), "pair": [number, 0.5],
                "grid": [[number] * 3] * 2, "photo": {"bytes": stream.getvalue(), "path": None},
            }
        )  # fmt: skip
    saved = datasets.Dataset.from_list(samples, features=features)
    saved.save_to_disk(str(tmp_path / "hf"), num_shards=3)
    importer = open_source(str(tmp_path / "hf"))
    assert importer.classes == ("cat", "dog")
    assert types_of(importer) == {
        "label": "int64", "text": "str", "tokens": "int32[*]", "pair": "float32[2]", "grid": "int16[2,3]",
        "photo": "bytes",
    }  # fmt: skip
    theirs = (
        datasets.load_from_disk(str(tmp_path / "hf"))
        .with_format(None)
        .cast_column("photo", datasets.Image(decode=False))
    )
    expected = [{**row, "photo": row["photo"]["bytes"]} for row in theirs]
    same_rows(rows_of(importer), expected)
    result = build(str(tmp_path / "hf"), tmp_path / "root", stratify="label")
    assert dict(result.strata) == {"0": 15, "1": 15}
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(shardkit.errors.SourceError, match="holds the splits train, test; name one of them"):
        open_source(str(tmp_path / "splits"))
    assert len(rows_of(open_source(str(tmp_path / "splits" / "test")))) == 30


def test_class_names_that_are_in_the_files(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    def written(name: str, names: list[str], field: str = "label") -> Path:
        features = datasets.Features({field: datasets.ClassLabel(names=names), "n": datasets.Value("int32")})
        rows = [{field: n % 2, "n": n} for n in range(30)]
        datasets.Dataset.from_list(rows, features=features).to_parquet(str(tmp_path / name))
        return tmp_path / name

    table = pq.read_table(written("a.parquet", ["cat", "big dog"]))
    pa.feather.write_feather(table, str(tmp_path / "a.arrow"))
    for name in ("a.parquet", "a.arrow"):
        root = tmp_path / f"root.{name}"
        assert dict(build(str(tmp_path / name), root, stratify="__class__").strata) == {
            "cat": 15,
            "big dog": 15,
        }
        assert shardkit.open(str(root)).classes == ("cat", "big dog")
    written("b.parquet", ["big dog", "cat"])  # the same numbers mean others
    assert open_source(f"{tmp_path}/*.parquet").classes == ()
    assert (
        open_source(str(tmp_path / "a.parquet"), options=ImportOptions(rename={"label": "kind"})).classes
        == ()
    )
    as_text = ImportOptions(field_types={"label": "str"})
    assert open_source(str(tmp_path / "a.parquet"), options=as_text).classes == ()
    assert open_source(str(written("c.parquet", ["x", "y"], "coarse"))).classes == ()
    for names in (b'"ab"', b'["a", 1]', b'["a", "a"]', b'["\\u0000"]', b'["\\ud800"]', b"[" * 100_000):
        hostile = b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": %s}}}}' % names
        pq.write_table(table.replace_schema_metadata({"huggingface": hostile}), tmp_path / "d.parquet")
        assert open_source(str(tmp_path / "d.parquet")).classes == ()


def test_a_path_without_bytes_costs_its_row(tmp_path: Path) -> None:
    files = [
        {"bytes": b"x", "path": "x.png"},
        {"bytes": None, "path": "y.png"},
        {"bytes": None, "path": None},
        None,
    ]
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    pq.write_table(pa.table({"photo": pa.array(files, kind)}), tmp_path / "a.parquet")
    pa.feather.write_feather(pa.table({"photo": pa.array(files, kind)}), str(tmp_path / "a.arrow"))
    for name in ("a.parquet", "a.arrow"):
        importer = open_source(str(tmp_path / name))
        assert types_of(importer) == {"photo": "bytes?"}
        rows = list(importer.read(importer.tasks()[0]))
        assert [isinstance(row, SourceFailure) for row in rows] == [False, True, False, False]
        assert "row 1: field 'photo' holds no bytes, only a path" in str(rows[1].error)  # type: ignore[union-attr]
        assert [row.sample["photo"] for row in rows if not isinstance(row, SourceFailure)] == [
            b"x",
            None,
            None,
        ]


@pytest.mark.parametrize("variant", ["plain", "zstd", "gz"])
def test_mds_shards(variant: str) -> None:
    importer = open_source(str(MDS / variant))
    assert types_of(importer) == {
        "any": "float64[*]", "blob": "bytes", "digits": "int64", "fixed": "int32[2,3]", "half": "float16",
        "meta": "json", "number": "int64", "photo": "bytes", "price": "str", "ratio": "float64",
        "raw": "uint8[2,2,3]", "small": "uint8", "text": "str", "tokens": "uint16[*]", "wide": "float64",
    }  # fmt: skip
    found = rows_of(importer)
    for row in found:
        row["photo"] = np.asarray(Image.open(io.BytesIO(row["photo"])))
        row["blob"] = row["blob"].hex()
    same_rows(found, json.loads((MDS / "expected.json").read_text()))


def test_mds_arrays_and_pictures_of_varying_size() -> None:
    importer = open_source(str(MDS / "shapes"))
    assert types_of(importer) == {
        "free": "int16[*,4]", "photo": "bytes", "raw": "uint8[*,*,3]", "typed": "float32[*,*]"
    }  # fmt: skip
    found = rows_of(importer)
    for row in found:
        row["photo"] = np.asarray(Image.open(io.BytesIO(row["photo"])))
    same_rows(found, json.loads((MDS / "expected_shapes.json").read_text()))


def test_nulls_cost_their_rows(tmp_path: Path) -> None:
    columns = {
        "a": [1, None, 3, 4, 5],
        "l": [[1], [2], [3, None], [4], None],
        "s": ["x", "y", "z", "u", "v"],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    given = ImportOptions(field_types={"a": "int64", "l": "int64[*]"})
    importer = open_source(str(tmp_path / "a.parquet"), options=given)
    rows = list(importer.read(importer.tasks()[0]))
    assert [isinstance(row, SourceFailure) for row in rows] == [False, True, True, False, True]
    assert "a.parquet row 1: field 'a' is null" in str(rows[1].error)  # type: ignore[union-attr]
    assert "row 2: field 'l' is null, or holds one" in str(rows[2].error)  # type: ignore[union-attr]
    inferred = open_source(str(tmp_path / "a.parquet"))
    assert types_of(inferred) == {"a": "int64?", "l": "int64[*]?", "s": "str"}
    rows = list(inferred.read(inferred.tasks()[0]))
    assert [isinstance(row, SourceFailure) for row in rows] == [False, False, True, False, False]
    as_json = open_source(
        str(tmp_path / "a.parquet"), options=ImportOptions(field_types={"a": "json", "l": "json"})
    )
    same_rows(rows_of(as_json), pa.table(columns).to_pylist())


WHEN = dt.datetime(2026, 11, 20, 12, 30)  # noqa: DTZ001  Arrow's own time of day, of no zone
SCALARS: list[tuple[pa.Array, str, object, dict[str, object]]] = [
    # column, its type, its value, and the values of other types that it can be given
    (pa.array([WHEN.date()]), "date", 20777, {"int64": 20777, "str": "2026-11-20"}),
    (pa.array([WHEN.date()], pa.date64()), "date", 20777, {"int64": 1795132800000, "str": "2026-11-20"}),
    (pa.array([WHEN], pa.timestamp("s")), "timestamp[s]", 1795177800, {"str": "2026-11-20 12:30:00"}),
    (pa.array([WHEN], pa.timestamp("ms")), "timestamp[ms]", 1795177800000, {"str": "2026-11-20 12:30:00.000"}),
    (
        pa.array([WHEN], pa.timestamp("us", "Asia/Kolkata")),
        "timestamp[us, Asia/Kolkata]", 1795177800000000, {"str": "2026-11-20 18:00:00.000000+0530"},
    ),
    (
        pa.array([WHEN], pa.timestamp("ns", "UTC")),
        "timestamp[ns, UTC]", 1795177800 * 10**9, {"str": "2026-11-20 12:30:00.000000000Z"},
    ),
    (pa.array([3723], pa.time32("s")), "time[s]", 3723, {"int64": 3723, "str": "01:02:03"}),
    (pa.array([dt.time(1, 2, 3)]), "time[us]", 3723000000, {"str": "01:02:03.000000"}),
    (pa.array([dt.timedelta(seconds=3)], pa.duration("ms")), "duration[ms]", 3000, {"str": "3000", "int64": 3000}),
    (pa.array([decimal.Decimal("1.20")]), "decimal[18,2]", decimal.Decimal("1.20"), {"float64": 1.2, "str": "1.20"}),
    (pa.array([decimal.Decimal("-7.5")], pa.decimal256(50, 3)), "str", "-7.500", {"float64": -7.5}),
    (pa.array(["[1]"]).dictionary_encode(), "str", "[1]", {"json": [1]}),
    (pa.array([1.5], pa.float16()), "float16", 1.5, {"float64": 1.5, "str": "1.5"}),
    (
        pa.array([[("k", 1), ("j", 2)]], pa.map_(pa.string(), pa.int32())),
        "json", {"k": 1, "j": 2}, {"str": '{"j": 2, "k": 1}'},
    ),
    (pa.array([[(3, "x")]], pa.map_(pa.int32(), pa.string())), "json", [[3, "x"]], {"str": '[[3, "x"]]'}),
    (
        pa.array([{"at": WHEN.date(), "cost": decimal.Decimal("0.10"), "in": [{"x": 1}]}]),
        "json", {"at": "2026-11-20", "cost": "0.10", "in": [{"x": 1}]}, {},
    ),
    (pa.array([["x", None]]), "json", ["x", None], {"str": '["x", null]'}),
]  # fmt: skip


def same_stored(found: Importer, expected: list[dict[str, object]]) -> None:
    """Dates and numbers of days are equal where they are stored as the same bytes."""
    encoded = [[found.schema.encode(row, where="") for row in rows] for rows in (rows_of(found), expected)]
    assert encoded[0] == encoded[1]


@pytest.mark.parametrize("number", range(len(SCALARS)))
def test_scalars_of_tables_arrive_as_expected(tmp_path: Path, number: int) -> None:
    column, kind, value, others = SCALARS[number]
    pq.write_table(pa.table({"v": column}), tmp_path / "a.parquet")
    pa.feather.write_feather(pa.table({"v": column}), str(tmp_path / "a.arrow"), compression="uncompressed")
    for name in ("a.parquet", "a.arrow"):
        if name == "a.parquet" and column.type in (pa.timestamp("s"), pa.time32("s")):
            continue  # Parquet has none of whole seconds
        found = open_source(str(tmp_path / name))
        assert types_of(found) == {"v": kind}
        same_stored(found, [{"v": value}])
    for given, expected in others.items():
        options = ImportOptions(field_types={"v": given})
        same_rows(rows_of(open_source(str(tmp_path / "a.arrow"), options=options)), [{"v": expected}])


def test_scalars_without_a_value_are_optional(tmp_path: Path) -> None:
    for column, kind, value, _ in SCALARS:
        pair = pa.concat_arrays([column, pa.nulls(1, column.type)])
        pa.feather.write_feather(pa.table({"v": pair}), str(tmp_path / "a.arrow"))
        found = open_source(str(tmp_path / "a.arrow"))
        assert types_of(found) == {"v": kind if kind == "json" else f"{kind}?"}
        same_stored(found, [{"v": value}, {"v": None}])


SPAN = {"months": 1, "days": 2, "nanoseconds": 3}
UNFIT: list[tuple[pa.Array, object]] = [
    # column, and what it is as json; as str it is the text of that
    (pa.array([[{"bytes": b"\xff\xd8", "note": "n"}]]), [{"bytes": "/9g=", "note": "n"}]),
    (pa.array([[[b"x"]]]), [["eA=="]]),
    (pa.array([{"b": b"x", "n": 1}]), {"b": "eA==", "n": 1}),
    (pa.array([[("k", b"x")]], pa.map_(pa.string(), pa.binary())), {"k": "eA=="}),
    (pa.array([[pa.MonthDayNano([1, 2, 3])]]), [SPAN]),
    (pa.array([pa.MonthDayNano([1, 2, 3])]), SPAN),
]


@pytest.mark.parametrize("number", range(len(UNFIT)))
def test_what_is_suggested_for_a_column_that_no_field_holds_works(tmp_path: Path, number: int) -> None:
    column, expected = UNFIT[number]
    pa.feather.write_feather(pa.table({"v": column}), str(tmp_path / "a.arrow"), compression="uncompressed")
    with pytest.raises(shardkit.errors.SourceError, match=r"--schema v=json .*v=str") as caught:
        open_source(str(tmp_path / "a.arrow"))
    assert ("--flatten" in str(caught.value)) == pa.types.is_struct(column.type)
    for given, value in (("json", expected), ("str", json.dumps(expected, sort_keys=True))):
        options = ImportOptions(field_types={"v": given})
        same_rows(rows_of(open_source(str(tmp_path / "a.arrow"), options=options)), [{"v": value}])
