"""Made the MDS shards below `mds/` with the writer of mosaicml-streaming 0.13.0, and `expected.json` with its reader.

Run it with that package installed, in this folder: python make_mds.py
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from streaming.base.format.mds.reader import MDSReader
from streaming.base.format.mds.writer import MDSWriter

COLUMNS = {
    "blob": "bytes", "text": "str", "number": "int", "small": "uint8", "half": "float16", "wide": "float64",
    "digits": "str_int", "ratio": "str_float", "price": "str_decimal", "meta": "json", "photo": "png",
    "fixed": "ndarray:int32:2,3", "tokens": "ndarray:uint16", "any": "ndarray", "raw": "pil",
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"hashes": ["sha256", "xxh64"], "size_limit": 4096},
    "zstd": {"compression": "zstd:7", "hashes": ["sha1"], "size_limit": 4096},
    "gz": {"compression": "gz"},
}
SHAPES = {"free": "ndarray", "typed": "ndarray:float32", "raw": "pil", "photo": "png"}


def sample(number: int) -> dict[str, Any]:
    pixels = np.arange(number, number + 12, dtype=np.uint8).reshape(2, 2, 3)
    return {
        "blob": bytes(range(number)), "text": f"n° {number}", "number": -number, "small": number, "half": number / 4,
        "wide": number / 3, "digits": 10**number, "ratio": number / 7, "price": Decimal(number) / 100,
        "meta": {"n": [number, None]}, "photo": Image.fromarray(pixels),
        "fixed": np.arange(6, dtype=np.int32).reshape(2, 3) * number,
        "tokens": np.arange(number + 1, dtype=np.uint16), "any": np.full(3, number / 2), "raw": Image.fromarray(pixels),
    }  # fmt: skip


def sample_of_shape(number: int) -> dict[str, Any]:
    """Arrays and pictures whose first dimensions differ from sample to sample; Streaming refuses empty arrays."""
    rows, columns = number + 1, 2 + number % 3
    pixels = np.arange(rows * columns * 3, dtype=np.uint8).reshape(rows, columns, 3)
    return {
        "free": np.arange(rows * 4, dtype=np.int16).reshape(rows, 4),
        "typed": np.arange(rows * columns, dtype=np.float32).reshape(rows, columns) / 2,
        "raw": Image.fromarray(pixels),
        "photo": Image.fromarray(255 - pixels),
    }


def plain(value: Any) -> Any:
    if isinstance(value, Image.Image):
        return np.asarray(value).tolist()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Decimal):
        return str(value)
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def main() -> None:
    for variant, settings in VARIANTS.items():
        with MDSWriter(columns=COLUMNS, out=f"mds/{variant}", **settings) as writer:
            for number in range(15):
                writer.write(sample(number))
    with MDSWriter(columns=SHAPES, out="mds/shapes") as writer:
        for number in range(6):
            writer.write(sample_of_shape(number))
    for variant, expected in (("plain", "expected.json"), ("shapes", "expected_shapes.json")):
        rows = []
        for entry in json.loads(Path(f"mds/{variant}/index.json").read_text())["shards"]:
            reader = MDSReader.from_json(f"mds/{variant}", "", entry)
            rows += [{name: plain(value) for name, value in reader[n].items()} for n in range(reader.samples)]
        Path(f"mds/{expected}").write_text(json.dumps(rows, ensure_ascii=False))


if __name__ == "__main__":
    main()
