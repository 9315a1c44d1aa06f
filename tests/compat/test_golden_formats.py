"""Golden shards: they are read, and written the same as long as the libraries are the same."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard

from shardkit.formats import Schema, ShardIndex, pack_columns, unpack_columns
from tests.format_conformance import read_samples, write_shard
from tests.whole_shard import check_whole_shard

GOLDEN = Path(__file__).parents[1] / "golden" / "formats"
PAIRS = [("tar", "none"), ("arrow", "none"), ("arrow", "zstd")]
TYPES = {
    "image": "bytes",
    "text": "str",
    "meta": "json",
    "label": "int64",
    "score": "float32",
    "grid": "int16[2,2]",
    "ids": "uint32[*]",
}
SCHEMAS = {
    "plain": Schema.parse(TYPES),
    "optional": Schema.parse({name: kind + "?" for name, kind in TYPES.items()}),
    "packed": Schema.parse(
        {"Größe": "uint8[*,*,3]", "left.eye": "float32[*,2]", "tags": "str[*]", "pages/%": "bytes[*]?"}
    ),
    "logical": Schema.parse(
        {
            "day": "date?",
            "at": "time[ms]",
            "fine": "time[us]",
            "seen": "timestamp[us, Europe/Berlin]",
            "took": "duration[ns]",
            "price": "decimal[18,4]",
        }
    ),
}


def samples(golden: str) -> list[dict[str, Any]]:
    """What the golden shards hold."""
    if golden == "packed":
        return _packed_samples()
    if golden == "logical":
        return _logical_samples()
    full = _full_samples()
    if golden == "plain":
        return full
    places = {name: place for place, name in enumerate(TYPES)}
    return [
        {
            name: value
            for name, value in sample.items()
            if (name == "ids" if number == 3 else (number + places[name]) % 3)
        }
        for number, sample in enumerate(full)
    ]


def _full_samples() -> list[dict[str, Any]]:
    return [
        {
            "image": b"GIF89a" + bytes(range(i * 9)),
            "text": ["", "golden", "größe", "雪", "\n"][i],
            "meta": {"i": i, "nested": [None, True, "x"]},
            "label": [0, -1, 2**63 - 1, -(2**63), 42][i],
            "score": i / 2,
            "grid": np.array([[i, -i], [300, -300]], np.int16),
            "ids": np.arange(i, dtype=np.uint32) * 10**9,
        }
        for i in range(5)
    ]


def _packed_samples() -> list[dict[str, Any]]:
    return [
        {
            "Größe": np.arange(i * 2 * 3, dtype=np.uint8).reshape(i, 2, 3),
            "left.eye": np.full((3 - i % 3, 2), i / 2, np.float32),
            "tags": ["größe", "", "雪"][:i],
            **({"pages/%": [b"\x00" * i, b""]} if i % 2 else {}),
        }
        for i in range(5)
    ]


def _logical_samples() -> list[dict[str, Any]]:
    start = dt.datetime(1969, 12, 31, 23, tzinfo=dt.UTC)
    return [
        {
            **({"day": dt.date(1970, 1, 1) - dt.timedelta(days=i)} if i % 2 else {}),
            "at": dt.time(23, 59, 59, 999_000 - i * 1000),
            "fine": dt.time(i, 0, 0, i),
            "seen": start + dt.timedelta(days=100 * i, microseconds=i),
            "took": np.timedelta64(i - 2, "ns"),
            "price": Decimal(i - 2) / 16,
        }
        for i in range(5)
    ]


def write(golden: str, format: str, compression: str) -> tuple[bytes, ShardIndex]:
    return write_shard(samples(golden), SCHEMAS[golden], format=format, compression=compression, block_rows=2)


def versions() -> dict[str, str]:
    """The libraries whose releases may change compressed or Arrow bytes."""
    zstd = ".".join(map(str, zstandard.ZSTD_VERSION))
    return {"pyarrow": pa.__version__.partition(".")[0], "zstd": zstd}


def recorded(golden: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / golden / "digests.json").read_text())
    return found


def name(format: str, compression: str) -> str:
    return f"{format}-{compression}.{format}"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("golden", SCHEMAS)
@pytest.mark.parametrize(("format", "compression"), PAIRS)
def test_golden_shards_are_read(golden: str, format: str, compression: str) -> None:
    shard = (GOLDEN / golden / name(format, compression)).read_bytes()
    packed = (GOLDEN / golden / f"{format}-{compression}.index").read_bytes()
    digests = recorded(golden)["digests"]
    assert sha256(shard) == digests[name(format, compression)]
    assert sha256(packed) == digests[f"{format}-{compression}.index"]
    index = ShardIndex.from_bytes(packed)
    check_whole_shard(shard, index)
    assert index.schema == SCHEMAS[golden]
    for found, expected in zip(read_samples(shard, index), samples(golden), strict=True):
        for field in SCHEMAS[golden]:
            if isinstance(expected.get(field), list):
                assert found[field] == expected[field], field
            else:
                assert np.array_equal(np.asarray(found[field]), np.asarray(expected.get(field))), field
    assert index.keys() == [f"key-{i}" for i in range(5)]


@pytest.mark.parametrize("which", SCHEMAS)
@pytest.mark.parametrize(("format", "compression"), PAIRS)
def test_golden_shards_are_written(which: str, format: str, compression: str) -> None:
    shard, index = write(which, format, compression)
    golden = recorded(which)
    own_bytes = (format, compression) == ("tar", "none")
    if not own_bytes and versions() != golden["versions"]:
        pytest.skip(f"golden bytes are of {golden['versions']}, here are {versions()}")
    assert sha256(shard) == golden["digests"][name(format, compression)]
    if versions() == golden["versions"]:
        assert sha256(index.to_bytes()) == golden["digests"][f"{format}-{compression}.index"]


def test_a_plain_container_is_byte_for_byte_what_the_specification_says() -> None:
    """Written out by hand from SPEC.md §2."""
    packed = pack_columns(
        "page", {"a": 1}, {"x": np.array([1, 2], np.uint16), "y": np.array([[-1]], np.int64)}, compress=False
    )
    header = (
        b'{"columns":[{"codec":"none","dtype":"<u2","name":"x","offset":0,"raw":4,"shape":[2],"size":4},'
        b'{"codec":"none","dtype":"<i8","name":"y","offset":64,"raw":8,"shape":[1,1],"size":8}],'
        b'"kind":"page","meta":{"a":1},"version":1}'
    )
    by_hand = b"SHRDCOL1" + len(header).to_bytes(8, "little") + header
    by_hand += bytes(-len(by_hand) % 64) + b"\x01\x00\x02\x00" + bytes(60) + b"\xff" * 8
    assert packed == by_hand
    assert unpack_columns(by_hand, "page").arrays["y"].tolist() == [[-1]]


def record() -> None:
    """Write the golden shards and their digests."""
    for golden in SCHEMAS:
        folder = GOLDEN / golden
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        digests = {}
        for format, compression in PAIRS:
            shard, index = write(golden, format, compression)
            for file, data in (
                (name(format, compression), shard),
                (f"{format}-{compression}.index", index.to_bytes()),
            ):
                (folder / file).write_bytes(data)
                digests[file] = sha256(data)
        document = {"digests": digests, "versions": versions()}
        (folder / "digests.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
