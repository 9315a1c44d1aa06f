"""Payloads that an author made on purpose, under digests that are right: run as a program of its own.

``python -m tests.faults.format_hostile --pair arrow:zstd --seed 1 --count 300`` mutates the blocks of a small
shard, gives each mutant an index with its true checksums, and reads it under a limit on address space. A mutant must
be a ShardkitError, or read the same as a foreign reader reads it; whatever else happens (another exception, a crash,
memory beyond the limit) is a failure. Prints one JSON line of counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import random
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from shardkit.errors import ShardkitError
from shardkit.formats import FixedColumn, Schema, ShardIndex, read_block, xxh3
from shardkit.formats.arrow_message import raw_message_bytes, read_batch_header
from shardkit.formats.arrow_writing import arrow_schema
from tests.format_conformance import example_samples, stored_block, write_shard

__all__ = ["SCHEMA", "attack", "mutants", "rehashed"]

SCHEMA = Schema.parse(
    {
        "image": "bytes",
        "text": "str",
        "label": "int64",
        "flag": "bool",
        "pixels": "uint8[4,3]",
        "tokens": "int32[*]",
        "marks": "bool[*]",
    }
)
"""Of the shards that are attacked."""

NUMBERS = (
    0,
    1,
    7,
    8,
    0xFF,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 8,
    2**64 - 1,
)
HEADROOM = 256 << 20  # address space that a mutant may use beyond what the imports took


def rehashed(index: ShardIndex, stored: bytes, raw_size: int | None = None) -> ShardIndex:
    """The index of a shard of one block whose bytes are `stored`, with true checksums.

    Args:
        index: Index of a shard of one block.
        stored: The bytes that take the block's place.
        raw_size: What the index declares; default: as before, or that of `stored` where nothing is compressed.
    """
    sizes = np.array([len(stored)], np.uint64)
    raw = sizes if index.compression == "none" else index.block_raw_size
    return dataclasses.replace(
        index,
        block_size=sizes,
        block_raw_size=raw if raw_size is None else np.array([raw_size], np.uint64),
        block_xxh3=np.array([xxh3(stored)], np.uint64),
        block_sha256=np.frombuffer(hashlib.sha256(stored).digest(), np.uint8).reshape(1, 32),
        shard_size=index.shard_size + len(stored) - int(index.block_size[0]),
    )


def _declared(stored: bytes, index: ShardIndex) -> int | None:
    """The raw size that an author who knows the format would declare for a mutant."""
    try:
        if index.format == "tar":
            return len(stored)
        view = memoryview(stored)
        return raw_message_bytes(read_batch_header(view), view)
    except ShardkitError:
        return None


def mutants(stored: bytes, metadata_bytes: int, rng: random.Random) -> Iterator[bytes]:
    """Endless mutants of a block, mostly of its first `metadata_bytes`."""
    while True:
        data = bytearray(stored)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            span = metadata_bytes if rng.random() < 0.7 else len(data)
            place = rng.randrange(max(1, min(span, len(data))))
            action = rng.randrange(6)
            if action == 0:
                data[place] ^= 1 << rng.randrange(8)
            elif action == 1:
                width = rng.choice((2, 4, 8))
                place -= place % width
                number = rng.choice(NUMBERS) % (1 << 8 * width)
                data[place : place + width] = number.to_bytes(width, "little")
            elif action == 2:
                del data[place : place + rng.randrange(1, 40)]
            elif action == 3:
                data[place:place] = rng.randbytes(rng.randrange(1, 40))
            elif action == 4:
                source = rng.randrange(len(data))
                chunk = data[source : source + rng.randrange(1, 64)]
                data[place : place + len(chunk)] = chunk
            else:
                data[place : place + 8] = bytes(8)
            if not data:
                data = bytearray(b"\x00")
        if bytes(data) != stored:
            yield bytes(data)


def _foreign_arrow(stored: bytes) -> list[bytes]:
    """Payload-like bytes of every column as pyarrow reads the message."""
    batch = pa.ipc.read_record_batch(pa.py_buffer(stored), arrow_schema(SCHEMA))
    batch.validate(full=True)
    return [repr(column.to_pylist()).encode() for column in batch.columns]


def _ours(index: ShardIndex, stored: bytes) -> list[bytes]:
    block = read_block(stored, index, 0)
    columns = [repr(index.keys()).encode()]
    for name, kind in SCHEMA.items():
        column = block.column(name)
        if isinstance(column, FixedColumn):
            columns.append(repr(column.values.tolist()).encode())
        else:
            rows: list[object] = [column.payload(row) for row in range(block.rows)]
            if kind.kind == "str":
                rows = [str(payload, "utf-8") for payload in rows]  # type: ignore[call-overload]
            elif kind.kind == "ragged":
                rows = [np.frombuffer(payload, kind.numpy_dtype).tolist() for payload in rows]  # type: ignore[call-overload]
            columns.append(repr(rows).encode())
    return columns


def attack(format: str, compression: str, seed: int, count: int) -> Counter[str]:
    """Read `count` mutants; counts of ``refused``, ``read`` and of failures by what went wrong."""
    rng = random.Random(seed)
    samples = [{name: sample[name] for name in SCHEMA} for sample in example_samples(12)]
    data, index = write_shard(samples, SCHEMA, format=format, compression=compression, block_rows=12)
    stored = bytes(stored_block(data, index, 0))
    metadata = int.from_bytes(stored[4:8], "little") + 8 if format == "arrow" else min(len(stored), 4096)
    outcomes: Counter[str] = Counter()
    for mutant in _first(mutants(stored, metadata, rng), count):
        declared = _declared(mutant, index)
        honest = rng.random() < 0.5 and declared is not None and 0 < declared <= 1 << 33
        outcomes[_read_one(mutant, index, declared if honest else None)] += 1
    return outcomes


def _first(source: Iterator[bytes], count: int) -> Iterator[bytes]:
    for _, mutant in zip(range(count), source, strict=False):
        yield mutant


def _read_one(mutant: bytes, index: ShardIndex, raw_size: int | None) -> str:
    try:
        found = _ours(rehashed(index, mutant, raw_size), mutant)
    except ShardkitError:
        return "refused"
    except BaseException as error:
        return f"failed: {type(error).__name__}: {error}"[:160]
    if index.format == "arrow":
        theirs = _foreign_arrow(mutant)
        if theirs != found:
            return "failed: read something else than pyarrow"
    return "read"


def limit_memory(headroom: int = HEADROOM) -> None:
    """Cap the address space at what is in use now and `headroom`."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + headroom, used + headroom))


def main(arguments: list[str] | None = None, write: Callable[[str], object] = sys.stdout.write) -> None:
    """Attack one pair and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", required=True, help="format:compression")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    chosen = parser.parse_args(arguments)
    pa.set_cpu_count(1)
    attack("arrow", "zstd", 0, 1)  # threads and pools exist before the limit is taken
    limit_memory()
    form, _, compression = chosen.pair.partition(":")
    outcomes = attack(form, compression, chosen.seed, chosen.count)
    write(json.dumps({"outcomes": outcomes}) + "\n")


if __name__ == "__main__":
    main()
