"""docs/sources.md: what each kind of source makes of each feature, written by the library whose files these are.

    python tests/compat/test_source_table.py    # writes the tables of the page anew

Every cell is a build: of the feature alone where it is refused, with what the message says to pass; of all the
features of a source together where not. What was stored is compared with what was written.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import gzip
import io
import json
import lzma
import re
import tempfile
import wave
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from PIL import Image

import shardkit
from shardkit.errors import ShardkitError
from shardkit_tools.building.build_run import build
from shardkit_tools.importers import ImportOptions, open_source

PAGE = Path(__file__).parents[2] / "docs" / "sources.md"
MDS = Path(__file__).parent / "golden" / "mds"
NONE, REFUSED = "—", "refused"
WHEN = dt.datetime(2026, 11, 20, 12, 30, tzinfo=dt.UTC)


def picture(number: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (3, 2), (number, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


def sound(number: int) -> bytes:
    stream = io.BytesIO()
    with wave.open(stream, "wb") as out:
        out.setnchannels(1), out.setsampwidth(2), out.setframerate(8000)  # type: ignore[func-returns-value]
        out.writeframes(bytes([number, 0]) * 20)
    return stream.getvalue()


def as_duration(text: str) -> dt.timedelta:
    pd: Any = pytest.importorskip("pandas")
    found: dt.timedelta = pd.Timedelta(text).to_pytimedelta()
    return found


def as_file(data: bytes | None) -> dict[str, object] | None:
    return data and {"bytes": data, "path": None}  # type: ignore[return-value]


@dataclass(frozen=True)
class Feature:
    """Two values of it, their Arrow type, and what makes a value of its text."""

    values: tuple[Any, Any]
    arrow: pa.DataType
    back: Callable[[str], Any] = json.loads

    def column(self) -> pa.Array:
        """The values as Arrow has them."""
        if pa.types.is_map(self.arrow):
            return pa.array([list(value.items()) for value in self.values], self.arrow)
        media = self.values[0] if isinstance(self.values[0], list) else self.values
        if pa.types.is_struct(self.arrow) and isinstance(media[0], bytes):
            return pa.array(list(map(as_file, self.values)), self.arrow)
        if pa.types.is_list(self.arrow) and pa.types.is_struct(self.arrow.value_type):
            return pa.array([list(map(as_file, row)) for row in self.values], self.arrow)
        return pa.array(self.values, self.arrow)


FILE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
FEATURES = {
    "integer": Feature((3, -4), pa.int64()),
    "small, unsigned": Feature((3, 250), pa.uint8()),
    "number": Feature((0.5, -1.25), pa.float64()),
    "float32": Feature((0.5, -1.25), pa.float32()),
    "half float": Feature((0.5, -1.25), pa.float16()),
    "truth": Feature((True, False), pa.bool_(), lambda text: text.lower() == "true"),
    "text": Feature(("größe", "a, b"), pa.string(), str),
    "bytes": Feature((b"\x00\xff", b""), pa.binary(), str.encode),
    "integer or nothing": Feature((3, None), pa.int64()),
    "text or nothing": Feature(("größe", None), pa.string(), str),
    "date": Feature((dt.date(2026, 11, 20), dt.date(1969, 1, 2)), pa.date32(),
                    lambda text: dt.datetime.fromisoformat(text).date()),
    "timestamp": Feature((WHEN.replace(tzinfo=None), dt.datetime(1969, 1, 2)),  # noqa: DTZ001
                         pa.timestamp("us"), lambda text: dt.datetime.fromisoformat(text).replace(tzinfo=None)),
    "timestamp with zone": Feature((WHEN, WHEN), pa.timestamp("us", "Asia/Kolkata"), dt.datetime.fromisoformat),
    "time": Feature((dt.time(1, 2, 3), dt.time(23)), pa.time64("us"), dt.time.fromisoformat),
    "duration": Feature((dt.timedelta(seconds=3), dt.timedelta(0)), pa.duration("us"), as_duration),
    "decimal": Feature((decimal.Decimal("1.20"), decimal.Decimal("-7.50")), pa.decimal128(9, 2), decimal.Decimal),
    "category": Feature(("cat", "dog"), pa.dictionary(pa.int32(), pa.string()), str),
    "list of numbers": Feature(([1, 2], []), pa.list_(pa.int32())),
    "array": Feature(([1, 2, 3], [4, 5, 6]), pa.list_(pa.float32(), 3)),
    "array of two dimensions": Feature(([[1, 2], [3, 4]], [[5, 6], [7, 8]]), pa.list_(pa.list_(pa.int16(), 2), 2)),
    "array of free height": Feature(([[1, 2], [3, 4]], [[5, 6]]), pa.list_(pa.list_(pa.int16(), 2))),
    "list of texts": Feature((["a", ""], []), pa.list_(pa.string())),
    "list of bytes": Feature(([b"a", b""], [b"\xff"]), pa.list_(pa.binary())),
    "struct": Feature(({"a": 1, "b": "x"}, {"a": 2, "b": ""}), pa.struct({"a": pa.int64(), "b": pa.string()})),
    "map": Feature(({"k": 1}, {"j": 2, "k": 3}), pa.map_(pa.string(), pa.int64())),
    "picture": Feature((picture(1), picture(2)), FILE),
    "picture or nothing": Feature((picture(1), None), FILE),
    "several pictures": Feature(([picture(1), picture(2)], [picture(3)]), pa.list_(FILE)),
    "sound": Feature((sound(1), sound(2)), FILE),
    "a name with a space": Feature((3, -4), pa.int64()),
}  # fmt: skip
NAMES = {feature: f"f{number}" for number, feature in enumerate(FEATURES)} | {"a name with a space": "f name"}
NESTED = {feature for feature, one in FEATURES.items() if pa.types.is_nested(one.arrow)}
FILES = {"picture", "picture or nothing", "several pictures", "sound"}


# ---- sources: a title, the features that it can hold, and what writes some of them below a folder


def arrow_table(features: list[str]) -> pa.Table:
    return pa.table({NAMES[feature]: FEATURES[feature].column() for feature in features})


def parquet_of_pyarrow(features: list[str], folder: Path) -> Path:
    pq.write_table(arrow_table(features), folder / "a.parquet")
    return folder / "a.parquet"


def frame(features: list[str]) -> Any:
    pd: Any = pytest.importorskip("pandas")
    made = arrow_table([feature for feature in features if feature != "array of two dimensions"])
    return pd.DataFrame({name: made[name].to_pandas() for name in made.column_names})


def parquet_of_pandas(features: list[str], folder: Path) -> Path:
    frame(features).to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def polars_frame(features: list[str]) -> Any:
    import polars as pl

    return pl.DataFrame(arrow_table(features))


def parquet_of_polars(features: list[str], folder: Path) -> Path:
    polars_frame(features).write_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def ipc_of_polars(features: list[str], folder: Path) -> Path:
    polars_frame(features).write_ipc(folder / "a.arrow")
    return folder / "a.arrow"


def ipc_of_pyarrow(features: list[str], folder: Path) -> Path:
    made = arrow_table(features)
    with pa.ipc.new_file(str(folder / "a.arrow"), made.schema) as writer:
        writer.write_table(made)
    return folder / "a.arrow"


def hub(features: list[str]) -> Any:
    datasets: Any = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    own = {
        "category": datasets.ClassLabel(names=["cat", "dog"]),
        "array of two dimensions": datasets.Array2D((2, 2), "int16"),
        "array of free height": datasets.Array2D((None, 2), "int16"),
        "array": datasets.List(datasets.Value("float32"), length=3),
    }  # fmt: skip
    kinds = datasets.Features.from_arrow_schema(arrow_table(features).schema)
    for feature in features:
        kinds[NAMES[feature]] = own.get(feature, kinds[NAMES[feature]])
    rows = {NAMES[feature]: list(FEATURES[feature].values) for feature in features}
    for feature in FILES & set(features):
        rows[NAMES[feature]] = FEATURES[feature].column().to_pylist()
    made = datasets.Dataset.from_dict(rows, features=kinds)
    image = datasets.Image(decode=False)
    media = {"several pictures": datasets.List(image), "sound": datasets.Audio(decode=False)}
    for feature in FILES & set(features):
        made = made.cast_column(NAMES[feature], media.get(feature, image))
    return made


def parquet_of_datasets(features: list[str], folder: Path) -> Path:
    hub(features).to_parquet(str(folder / "a.parquet"))
    return folder / "a.parquet"


def saved_by_datasets(features: list[str], folder: Path) -> Path:
    hub(features).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def csv_of_pandas(features: list[str], folder: Path) -> Path:
    frame(features).to_csv(folder / "a.csv", index=False)
    return folder / "a.csv"


def tsv_of_polars(features: list[str], folder: Path) -> Path:
    polars_frame(features).write_csv(folder / "a.tsv", separator="\t")
    return folder / "a.tsv"


def lines_of_pandas(features: list[str], folder: Path) -> Path:
    frame(features).to_json(
        folder / "a.jsonl", orient="records", lines=True, date_format="iso", date_unit="us"
    )
    return folder / "a.jsonl"


def array_of_json(features: list[str], folder: Path) -> Path:
    rows = [{NAMES[feature]: FEATURES[feature].values[row] for feature in features} for row in range(2)]
    (folder / "a.json").write_text(json.dumps(rows))
    return folder / "a.json"


def samples_of_webdataset(features: list[str], folder: Path) -> Path:
    webdataset: Any = pytest.importorskip("webdataset")
    members = {
        "integer": "cls", "integer or nothing": "cls", "text": "txt", "text or nothing": "txt", "bytes": "bin",
        "half float": "npy",
        "float32": "npy", "small, unsigned": "npy", "number": "npy", "truth": "npy", "list of numbers": "npy",
        "array": "npy", "array of two dimensions": "npy", "array of free height": "npy", "list of texts": "json",
        "struct": "json", "map": "json", "picture": "png", "picture or nothing": "png", "sound": "wav",
        "a name with a space": "count",
    }  # fmt: skip
    kinds = {"list of numbers": np.int32, "array of free height": np.int16}
    with webdataset.TarWriter(str(folder / "a.tar"), encoder=True) as writer:
        for row in range(2):
            sample: dict[str, Any] = {"__key__": f"{row:06}"}
            for feature in features:
                value, suffix = FEATURES[feature].values[row], members[feature]
                if suffix == "npy":
                    value = np.array(value, kinds.get(feature) or item_type(FEATURES[feature].arrow))
                if value is not None:
                    sample[f"{NAMES[feature]}.{suffix}"] = value
            writer.write(sample)
    return folder / "a.tar"


def item_type(kind: pa.DataType) -> Any:
    return item_type(kind.value_type) if pa.types.is_fixed_size_list(kind) else kind.to_pandas_dtype()


def arrays(features: list[str]) -> dict[str, Any]:
    return {NAMES[one]: np.array(FEATURES[one].values, item_type(FEATURES[one].arrow)) for one in features}


def files_of_numpy(features: list[str], folder: Path) -> Path:
    (folder / "arrays").mkdir()
    for name, array in arrays(features).items():
        np.save(folder / "arrays" / f"{name}.npy", array)
    return folder / "arrays"


def archive_of_numpy(features: list[str], folder: Path) -> Path:
    np.savez_compressed(folder / "a.npz", **arrays(features))
    return folder / "a.npz"


def folder_of_pictures(features: list[str], folder: Path) -> Path:
    for row, name in enumerate(FEATURES["category"].values):
        stem = folder / "photos" / (name if "category" in features else "") / f"{row}"
        stem.parent.mkdir(parents=True, exist_ok=True)
        stem.with_suffix(".png").write_bytes(picture(row + 1))
        if "text" in features:
            stem.with_suffix(".txt").write_text(FEATURES["text"].values[row])
        if "struct" in features:
            stem.with_suffix(".json").write_text(json.dumps(FEATURES["struct"].values[row]))
    return folder / "photos"


def folder_of_sounds(features: list[str], folder: Path) -> Path:
    for row, name in enumerate(FEATURES["category"].values):
        path = folder / "sounds" / (name if "category" in features else "") / f"{row}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sound(row + 1))
    return folder / "sounds"


def folder_of_texts(features: list[str], folder: Path) -> Path:
    for row, name in enumerate(FEATURES["category"].values):
        path = folder / "texts" / (name if "category" in features else "") / f"{row}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FEATURES["text"].values[row])
    return folder / "texts"


def shards_of_streaming(features: list[str], folder: Path) -> Path:
    """What golden/make_mds.py wrote with mosaicml-streaming, which the tests do not need."""
    assert set(features) <= set(IN_MDS)
    assert folder.is_dir()
    return MDS / "plain"


IN_MDS = {
    "integer": "number", "small, unsigned": "small", "number": "wide", "half float": "half", "text": "text",
    "bytes": "blob", "decimal": "price", "list of numbers": "tokens", "array of two dimensions": "fixed",
    "struct": "meta", "picture": "photo",
}  # fmt: skip


def in_mds(feature: str) -> list[Any]:
    """What its own reader says, which `expected.json` keeps."""
    rows = [row[IN_MDS[feature]] for row in json.loads((MDS / "expected.json").read_text())]
    return [bytes.fromhex(row) for row in rows] if feature == "bytes" else rows


@dataclass(frozen=True)
class SourceKind:
    """Who writes it, what of `FEATURES` it can hold, and as which fields."""

    write: Callable[[list[str], Path], Path]
    holds: Collection[str]
    fields: Mapping[str, str] = field(default_factory=lambda: NAMES)
    values: Callable[[str], Sequence[Any]] = lambda feature: FEATURES[feature].values


ALL = frozenset(FEATURES)
PLAIN = ALL - NESTED - {"bytes"}
IN_PANDAS = ALL - {"map", "array of two dimensions"}
IN_JSON = ALL - FILES - {"bytes", "list of bytes"}
OF_PYTHON = {"date", "timestamp", "timestamp with zone", "time", "duration", "decimal"}
ARRAYS = {"integer", "small, unsigned", "number", "float32", "half float", "truth", "array", "array of two dimensions",
          "a name with a space"}  # fmt: skip
MEMBERS = ARRAYS | {
    "integer or nothing", "text", "text or nothing", "bytes", "list of numbers", "array of free height",
    "list of texts", "struct", "map", "picture", "picture or nothing", "sound",
}  # fmt: skip
TABLES = {
    "Parquet, pyarrow": SourceKind(parquet_of_pyarrow, ALL),
    "Parquet, pandas": SourceKind(parquet_of_pandas, IN_PANDAS),
    "Parquet, polars": SourceKind(parquet_of_polars, ALL),
    "Parquet, datasets": SourceKind(parquet_of_datasets, ALL - {"map"}),
    "save_to_disk": SourceKind(saved_by_datasets, ALL - {"map"}),
    "Arrow, pyarrow": SourceKind(ipc_of_pyarrow, ALL),
    "Feather, polars": SourceKind(ipc_of_polars, ALL),
    "CSV, pandas": SourceKind(csv_of_pandas, PLAIN),
    "TSV, polars": SourceKind(tsv_of_polars, PLAIN - {"duration"}),
    "JSON lines, pandas": SourceKind(lines_of_pandas, IN_JSON & IN_PANDAS),
    "JSON array, json": SourceKind(array_of_json, IN_JSON - OF_PYTHON),
}
IN_A_FOLDER = {"picture": "image", "sound": "audio", "text": "text", "struct": "meta", "category": "label"}
SAMPLES = {
    "WebDataset": SourceKind(samples_of_webdataset, MEMBERS),
    "MDS, Streaming": SourceKind(shards_of_streaming, IN_MDS, IN_MDS, in_mds),
    ".npy files": SourceKind(files_of_numpy, ARRAYS),
    ".npz": SourceKind(archive_of_numpy, ARRAYS),
    "Folder of pictures": SourceKind(
        folder_of_pictures, {"picture", "text", "struct", "category"}, IN_A_FOLDER
    ),
    "Folder of sounds": SourceKind(folder_of_sounds, {"sound", "category"}, IN_A_FOLDER),
    "Texts": SourceKind(folder_of_texts, {"text", "category"}, IN_A_FOLDER),
}
KINDS = TABLES | SAMPLES


# ---- cells


def needed(source: Path) -> tuple[str, str] | None:
    """Option and value that the message for a source says to pass; None: nothing."""
    try:
        open_source(str(source))
    except ShardkitError as error:
        asked = re.search(r"--(schema|rename) '?[^=]+=([\w?\[\],*]+)", str(error))
        return (asked[1], asked[2]) if asked else (REFUSED, REFUSED)
    return None


def cells(kind: SourceKind, folder: Path) -> dict[str, str]:
    """Feature → what comes out of it."""
    asked: dict[str, tuple[str, str] | None] = {}
    for feature in FEATURES:
        if feature in kind.holds:
            alone = folder / feature
            alone.mkdir()
            asked[feature] = needed(kind.write([feature], alone))
    taken = [feature for feature in asked if asked[feature] != (REFUSED, REFUSED)]
    given: dict[str, dict[str, str]] = {"schema": {}, "rename": {}}
    for feature in taken:
        if pair := asked[feature]:
            given[pair[0]][kind.fields[feature]] = pair[1]
    options = ImportOptions(field_types=given["schema"], rename=given["rename"])
    source = kind.write(taken, Path(tempfile.mkdtemp(dir=folder)))
    build(str(source), folder / "root", options=options, shuffle=False)
    ds = shardkit.open(folder / "root")
    made = {}
    for feature in taken:
        name = given["rename"].get(kind.fields[feature], kind.fields[feature])
        name = name if name in ds.schema else name.replace(" ", "_")
        values = [as_written(feature, sample[name]) for sample in ds]
        assert all(map(same, values, kind.values(feature))), (feature, ds.schema[name], values)
        option = f" with `--{pair[0]}`" if (pair := asked[feature]) else ""
        made[feature] = f"`{ds.schema[name]}`{option}"
    return {feature: made.get(feature, REFUSED if feature in asked else NONE) for feature in FEATURES}


def as_written(feature: str, value: Any) -> Any:
    """A stored value as what was written, where it is the text or number of it."""
    first = FEATURES[feature].values[0]
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, str) and not isinstance(first, str):
        return FEATURES[feature].back(value)
    if isinstance(value, (int, float)) and not isinstance(first, (int, float)):
        makers: dict[str, Callable[[Any], Any]] = {
            "decimal": lambda number: decimal.Decimal(f"{number:.2f}"),
            "category": lambda number: FEATURES["category"].values[number],
        }
        return makers[feature](value)
    return value


def same(found: Any, written: Any) -> bool:
    """Whether nothing is lost: json has bytes as base64, a CSV nothing as an empty text, a picture its pixels."""
    if isinstance(written, bytes) and isinstance(found, str):
        return bool(base64.b64decode(found) == written)
    if isinstance(found, dict) and found.keys() == {"bytes", "path"}:
        return same(found["bytes"], written)
    if isinstance(written, list) and isinstance(found, list):
        return len(found) == len(written) and all(map(same, found, written))
    if isinstance(written, list) and isinstance(found, bytes):
        return bool(np.asarray(Image.open(io.BytesIO(found))).tolist() == written)
    return bool(found == written) or (written is None and found == "") or str(found) == written


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress, "xz": lzma.compress,
}  # fmt: skip
PACKED = {
    title: KINDS[title]
    for title in (
        "CSV, pandas",
        "TSV, polars",
        "JSON lines, pandas",
        "JSON array, json",
        "WebDataset",
        "Texts",
    )
}


def packed_cells(title: str, folder: Path) -> dict[str, str]:
    """Packing → whether what is packed is read, and has the same samples."""
    source = PACKED[title].write(["text"], folder)
    files = sorted(path for path in ([source] if source.is_file() else source.rglob("*")) if path.is_file())

    def samples(source: Path, root: Path) -> list[dict[str, Any]]:
        build(str(source), root, shuffle=False)
        return list(shardkit.open(root))

    plain = samples(source, folder / "plain")
    made = {}
    for packing, pack in PACKINGS.items():
        for path in files:
            there = folder / packing / path.relative_to(source if source.is_dir() else folder)
            there.parent.mkdir(parents=True, exist_ok=True)
            there.with_name(f"{path.name}.{packing}").write_bytes(pack(path.read_bytes()))
        assert samples(folder / packing, folder / f"{packing}.data") == plain
        made[packing] = "read"
    return made


# ---- the page


def table(columns: Mapping[str, Mapping[str, str]]) -> str:
    """As Markdown, a row for each key that any column has something for."""
    rows = [
        row for row in next(iter(columns.values())) if any(column[row] != NONE for column in columns.values())
    ]
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    lines += [[row, *(column[row] for column in columns.values())] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables_of(page: str) -> list[dict[str, dict[str, str]]]:
    """Its tables as columns: title → row → cell."""
    found = []
    for text in re.findall(r"(?m)(?:^\|.*\n)+", page):
        head, _, *lines = [
            [cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines()
        ]
        columns = {title: {line[0]: line[place] for line in lines} for place, title in enumerate(head, 1)}
        found.append(columns)
    return found


@pytest.mark.parametrize("title", KINDS)
def test_each_cell_is_what_comes_out(title: str, tmp_path: Path) -> None:
    column = {**tables_of(PAGE.read_text(encoding="utf-8"))[title in SAMPLES]}[title]
    found = cells(KINDS[title], tmp_path)
    assert column == {feature: found[feature] for feature in column}, f"{title}: {AGAIN}"
    assert all(cell == NONE for feature, cell in found.items() if feature not in column)


@pytest.mark.parametrize("title", PACKED)
def test_each_packing_is_read(title: str, tmp_path: Path) -> None:
    assert tables_of(PAGE.read_text(encoding="utf-8"))[2][title] == packed_cells(title, tmp_path), AGAIN


AGAIN = "If it is meant: python tests/compat/test_source_table.py, and commit docs/sources.md"


def main() -> None:
    """Write the tables of the page anew, in their places."""

    def made(titles: Iterable[str], cells_of: Callable[[str, Path], dict[str, str]]) -> str:
        columns = {}
        for title in titles:
            with tempfile.TemporaryDirectory() as folder:
                columns[title] = cells_of(title, Path(folder))
        return table(columns) + "\n"

    tables = [made(titles, lambda title, folder: cells(KINDS[title], folder)) for titles in (TABLES, SAMPLES)]
    new = iter([*tables, made(PACKED, packed_cells)])
    page = re.sub(r"(?m)(?:^\|.*\n)+", lambda _: next(new), PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
