"""Small sources of every format, their rows as the format's own library reads them, and as shardkit does.

A program of its own, since fsspec and the hub's client read their settings once, and webdataset leaves files open:

    python source_cells.py write FOLDER            make the sources; print {source: rows} of the libraries
    python source_cells.py read PLACE FOLDER WORK  build and adopt each from a place, which holds FOLDER's files;
                                                   print {"source, way": rows or error}
"""

from __future__ import annotations

import csv
import io
import json
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq

Rows = list[dict[str, Any]]
MDS = Path(__file__).parents[1] / "compat" / "golden" / "mds"
COUNT = 40
TABLE = pa.table(
    {
        "id": pa.array(range(COUNT), pa.int64()),
        "text": [f"text {n} é" * (n % 3) for n in range(COUNT)],
        "score": pa.array([n / 7 for n in range(COUNT)], pa.float32()),
        "raw": [bytes(range(n)) for n in range(COUNT)],
        "vector": pa.array([[n, n + 1, n + 2] for n in range(COUNT)], pa.list_(pa.int32(), 3)),
        "maybe": pa.array([n if n % 4 else None for n in range(COUNT)], pa.int16()),
        "large": pa.array([2**63 + n if n else 0 for n in range(COUNT)], pa.uint64()),
        "flag": [n % 3 == 0 for n in range(COUNT)],
        "word": pa.array([f"w{n % 5}" for n in range(COUNT)]).dictionary_encode(),
        "tokens": pa.array([list(range(n % 6)) for n in range(COUNT)], pa.list_(pa.int32())),
        "matrix": pa.array(
            [[[n, 1], [2, 3], [4, n]] for n in range(COUNT)], pa.list_(pa.list_(pa.int64(), 2), 3)
        ),
        "meta": [{"n": n, "tags": ["a"] * (n % 3)} for n in range(COUNT)],
    }
)
HALVES = (TABLE.slice(0, COUNT // 2), TABLE.slice(COUNT // 2))


@dataclass(frozen=True)
class Source:
    """A source: `write` makes its files in a folder and returns the rows that its own library reads.

    Attributes:
        given: what a user types behind the place of the folder. settings: of `ImportOptions`.
    """

    write: Callable[[Path], Rows]
    given: str = ""
    from_: str | None = None
    settings: tuple[tuple[str, Any], ...] = ()


def _tars(folder: Path) -> Rows:
    import webdataset

    for half in range(2):
        with webdataset.TarWriter(f"{folder}/{half}.tar") as writer:
            for row in range(half * 20, half * 20 + 20):
                writer.write(
                    {
                        "__key__": f"s{row:03d}",
                        "jpg": bytes([row]) * (row + 1),
                        "cls": row % 3,
                        "txt": f"é {row}",
                        "json": {"row": row, "of": [None] * (row % 3)},
                        "tokens.npy": np.arange(row % 7, dtype=np.int32) - 3,
                        "emb.npy": np.full((2, 3), row / 3, np.float32),
                    }
                    | ({"wav": bytes([row]) * 9} if row % 3 else {})
                )
    found = webdataset.WebDataset([f"{folder}/{half}.tar" for half in range(2)], shardshuffle=False)
    return [
        {
            "image": one["jpg"],
            "label": int(one["cls"]),
            "text": one["txt"].decode(),
            "meta": json.loads(one["json"]),
            "tokens": np.load(io.BytesIO(one["tokens.npy"])),
            "emb": np.load(io.BytesIO(one["emb.npy"])),
            "audio": one.get("wav"),
        }
        for one in iter(found)
    ]


def _parquet(folder: Path) -> Rows:
    for number, half in enumerate(HALVES):
        pq.write_table(half, folder / f"{number}.parquet", row_group_size=7)
    return list(pq.read_table(folder).to_pylist())


def _arrow(folder: Path) -> Rows:
    for number, half in enumerate(HALVES):
        opened = pa.ipc.new_stream if number else pa.ipc.new_file
        with opened(folder / f"{number}.arrow", half.schema) as writer:
            writer.write_table(half, max_chunksize=7)
    with pa.ipc.open_file(folder / "0.arrow") as file, pa.ipc.open_stream(folder / "1.arrow") as stream:
        return [*file.read_all().to_pylist(), *stream.read_all().to_pylist()]


def _feather(folder: Path) -> Rows:
    pa.feather.write_feather(TABLE, str(folder / "all.feather"), compression="zstd", chunksize=9)
    return list(pa.feather.read_table(folder / "all.feather").to_pylist())


def _saved(folder: Path) -> Rows:
    import datasets

    datasets.Dataset(TABLE).save_to_disk(folder, num_shards=2)
    return list(datasets.load_from_disk(str(folder)).data.to_pylist())


def _mds(name: str) -> Callable[[Path], Rows]:
    """Golden shards of Streaming, and the values that its own reader gave."""

    def write(folder: Path) -> Rows:
        for path in (MDS / name).iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        rows = json.loads((MDS / "expected.json").read_text())
        for row in rows:
            row["blob"] = bytes.fromhex(row["blob"])
            row["ratio"] = str(row["ratio"])
            for picture in ("photo", "raw"):  # which Streaming decodes
                row.pop(picture)
        return list(rows)

    return write


def _npy(folder: Path) -> Rows:
    array = np.arange(COUNT * 6, dtype=np.float32).reshape(COUNT, 2, 3)
    for number in range(2):
        np.save(folder / f"part-{number}.npy", array[number * 20 : number * 20 + 20])
    return [{"value": row} for number in range(2) for row in np.load(folder / f"part-{number}.npy")]


def _npz(folder: Path) -> Rows:
    np.savez(folder / "all.npz", x=np.arange(COUNT * 3).reshape(COUNT, 3), y=np.arange(COUNT) % 5)
    with np.load(folder / "all.npz") as loaded:
        x, y = loaded["x"], loaded["y"]
    return [{"x": x[row], "y": y[row]} for row in range(COUNT)]


def _tokens(folder: Path) -> Rows:
    np.arange(COUNT * 8, dtype=np.uint16).tofile(folder / "train.bin")
    return [{"tokens": row} for row in np.fromfile(folder / "train.bin", np.uint16).reshape(-1, 8)]


def _documents(writer: str) -> Callable[[Path], Rows]:
    """Tokens with an index, as the writers of Megatron Core and of fairseq lay it out."""

    def write(folder: Path) -> Rows:
        parts = np.split(np.arange(COUNT * 8, dtype=np.uint16), np.arange(1, COUNT) ** 2 // 6)
        np.concatenate(parts).tofile(folder / "text.bin")
        sizes, borders = np.array([len(part) for part in parts]), np.arange(COUNT + 1)
        starts = np.cumsum([0, *sizes])
        if writer == "megatron":
            head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, COUNT, COUNT + 1)
            body = sizes.astype("<i4").tobytes() + (2 * starts[:-1]).astype("<i8").tobytes()
        else:
            head = b"TNTIDX\0\0" + struct.pack("<6Q", 1, 8, 2, COUNT, COUNT, COUNT + 1)
            body = b"".join(one.astype("<i8").tobytes() for one in (borders, starts, sizes))
        (folder / "text.idx").write_bytes(head + body + borders.astype("<i8").tobytes())
        tokens = np.memmap(folder / "text.bin", np.uint16)
        return [{"tokens": tokens[start : start + size]} for start, size in zip(starts, sizes, strict=False)]

    return write


def _json_lines(folder: Path) -> Rows:
    rows = TABLE.select(["id", "text", "vector", "maybe", "large", "flag", "meta"]).to_pylist()
    for number, encoding in enumerate(("utf-8", "utf-8-sig")):
        part, end = rows[number * 20 : number * 20 + 20], ("\n", "\r\n  \n")[number]
        lines = [json.dumps(row, ensure_ascii=bool(number)) + end for row in part]
        (folder / f"{number}.jsonl").write_text("".join(lines), encoding=encoding, newline="")
    texts = [(folder / f"{n}.jsonl").read_text("utf-8-sig") for n in range(2)]
    return [json.loads(line) for text in texts for line in text.split("\n") if line.strip()]


def _csv(extension: str, delimiter: str, encoding: str, text: str) -> Callable[[Path], Rows]:
    def write(folder: Path) -> Rows:
        path = folder / f"all.{extension}"
        with path.open("w", newline="", encoding=encoding) as stream:
            writer = csv.writer(stream, delimiter=delimiter)
            writer.writerow(["id", "text", "share", "code", "maybe"])
            for n in range(COUNT):
                writer.writerow([n, text.format(n), n / 8, f"{n:05}", n if n % 3 else ""])
        with path.open(newline="", encoding=encoding) as stream:
            return [
                {
                    **row,
                    "id": int(row["id"]),
                    "share": float(row["share"]),
                    "maybe": int(row["maybe"]) if row["maybe"] else None,
                }
                for row in csv.DictReader(stream, delimiter=delimiter)
            ]

    return write


def _folder(folder: Path) -> Rows:
    for row in range(COUNT):
        path = folder / ("cat", "dog")[row % 2] / f"{row:03d}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([row]) * (row + 1))
    return [
        {"blob": path.read_bytes(), "label": number}
        for number, name in enumerate(("cat", "dog"))
        for path in sorted((folder / name).iterdir())
    ]


def _texts(folder: Path) -> Rows:
    for row in range(COUNT):
        (folder / f"{row:03d}.txt").write_text(f"text {row} é\n" * (row % 4 + 1), encoding="utf-8")
    return [{"text": path.read_text("utf-8")} for path in sorted(folder.iterdir())]


WAYS = ("build", "adopt")
_AS_STORED = (("field_types", {"ratio": "str"}), ("drop", ("photo", "raw")))
SOURCES = {
    "tars": Source(_tars, "/*.tar"),
    "tars_as_text": Source(
        lambda folder: [row | {"label": str(row["label"])} for row in _tars(folder)],
        "/*.tar",
        settings=(("field_types", {"label": "str"}),),
    ),
    "parquet": Source(_parquet, "/*.parquet"),
    "arrow": Source(_arrow, "/*.arrow"),
    "feather": Source(_feather, "/all.feather"),
    "save_to_disk": Source(_saved, from_="huggingface"),
    "mds": Source(_mds("plain"), settings=_AS_STORED),
    "mds_zstd": Source(_mds("zstd"), settings=_AS_STORED),
    "npy": Source(_npy, "/part-*.npy"),
    "npz": Source(_npz, "/all.npz"),
    "tokens": Source(_tokens, "/train.bin", settings=(("dtype", "uint16"), ("row", 8))),
    "megatron": Source(_documents("megatron"), "/text.*", from_="tokens"),
    "fairseq": Source(_documents("fairseq"), from_="tokens"),
    "jsonl": Source(_json_lines, "/*.jsonl"),
    "csv": Source(_csv("csv", ",", "utf-8-sig", 'n° {}, "é"\r\nzweite\rdritte'), "/all.csv"),
    "tsv": Source(_csv("tsv", "\t", "utf-8", "n° {}, é"), "/all.tsv"),
    "folder": Source(_folder, from_="folder"),
    "text": Source(_texts, from_="text"),
}


def write_all(folder: Path) -> dict[str, Rows]:
    """Make all sources, each in a folder of its own name."""
    rows = {}
    for name, source in SOURCES.items():
        (folder / name).mkdir(parents=True)
        rows[name] = source.write(folder / name)
    return rows


def read_all(place: str, work: Path) -> Iterator[tuple[str, Rows | str]]:
    """Build and adopt the sources below `place`, and read every row back."""
    import shardkit
    from shardkit.errors import ShardkitError
    from shardkit_tools import adopt, build
    from shardkit_tools.importers import ImportOptions

    for name, source in SOURCES.items():
        options = ImportOptions(**dict(source.settings))
        for way in WAYS:
            root, given = work / f"{name}-{way}", f"{place}/{name}{source.given}"
            try:
                if way == "build":
                    build(given, root, from_=source.from_, options=options, shuffle=False)
                else:
                    adopt(given, root, from_=source.from_, options=options)
                ds = shardkit.open(root)
                yield f"{name}, {way}", ds[:]
            except ShardkitError as error:
                yield f"{name}, {way}", f"{type(error).__name__}: {error}"


def _plain(value: Any) -> Any:
    """A value as JSON: bytes as hexadecimal digits, arrays as lists."""
    if isinstance(value, bytes):
        return value.hex()
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def main(arguments: list[str]) -> None:
    """See the module."""
    if arguments[0] == "write":
        found: Any = write_all(Path(arguments[1]))
    else:
        found = dict(read_all(arguments[1], Path(arguments[2])))
    json.dump(found, sys.stdout, default=_plain)


if __name__ == "__main__":
    main(sys.argv[1:])
