"""Measure the formats on this machine: write, and read_block with every column, in CPU seconds of one process."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from shardkit.formats import Row, Schema, ShardIndex, ShardWriter, Verify, read_block

REPEATS = 3


class Memory:
    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def write(self, data: bytes | memoryview, /) -> int:
        self.parts.append(bytes(data))
        return len(data)


def write(rows: list[Row], schema: Schema, block_rows: int, pair: str) -> tuple[list[bytes], ShardIndex]:
    form, _, compression = pair.partition("/")
    sink = Memory()
    writer = ShardWriter(sink, format=form, compression=compression, schema=schema, block_rows=block_rows)
    for start in range(0, len(rows), block_rows):
        writer.write_block(rows[start : start + block_rows])
    index = writer.finish()
    return sink.parts, index


def read(data: bytes, index: ShardIndex, verify: Verify) -> None:
    view = memoryview(data)
    for number in range(index.blocks):
        start = int(index.block_offset[number])
        block = read_block(view[start : start + int(index.block_size[number])], index, number, verify=verify)
        for name in index.schema:
            block.column(name)


def measure(
    title: str, types: dict[str, str], samples: list[dict[str, Any]], block_rows: int, pairs: list[str]
) -> None:
    schema = Schema.parse(types)
    rows = [Row(f"key-{i}", schema.encode(sample, where="bench")) for i, sample in enumerate(samples)]
    megabytes = sum(len(payload) for row in rows for payload in row.payloads) / 1e6
    for pair in pairs:
        seconds = {"write": 1e9, "fast": 1e9, "strong": 1e9}
        for _ in range(REPEATS):
            begun = time.process_time()
            parts, index = write(rows, schema, block_rows, pair)
            seconds["write"] = min(seconds["write"], time.process_time() - begun)
            data = b"".join(parts)
            verify: Verify
            for verify in ("fast", "strong"):
                begun = time.process_time()
                read(data, index, verify)
                seconds[verify] = min(seconds[verify], time.process_time() - begun)
        rates = {name: megabytes / value for name, value in seconds.items()}
        print(
            f"{title:24s} {pair:13s} {megabytes:5.1f} MB in blocks of {len(data) / index.blocks / 1e6:4.2f} MB: "
            f"write {rates['write']:5.0f} MB/s, read fast {rates['fast']:5.0f}, strong {rates['strong']:5.0f}, "
            f"{seconds['fast'] / len(rows) * 1e6:5.2f} µs per row"
        )


def main() -> None:
    rng = np.random.default_rng(0)
    blobs = [{"image": rng.bytes(100_000), "label": i} for i in range(600)]
    every = ["tar/none", "arrow/none", "arrow/zstd:1"]
    measure("100 kB blob + label", {"image": "bytes", "label": "int64"}, blobs, 10, every)
    tokens = [{"tokens": row} for row in rng.integers(0, 50_000, (4000, 2048), dtype=np.int32)]
    measure("int32[2048]", {"tokens": "int32[2048]"}, tokens, 128, every)
    texts = [{"text": "the quick brown fox " * int(n)} for n in rng.integers(1, 80, 20_000)]
    measure("text of 800 B", {"text": "str"}, texts, 1300, every)
    pixels = [
        {"x": x, "label": i} for i, x in enumerate(rng.integers(0, 256, (20_000, 32, 32, 3), dtype=np.uint8))
    ]
    measure(
        "uint8[32,32,3] + label",
        {"x": "uint8[32,32,3]", "label": "int64"},
        pixels,
        340,
        ["tar/none", "arrow/none"],
    )


if __name__ == "__main__":
    main()
