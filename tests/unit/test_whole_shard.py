"""What lies around the blocks, and indexes made anew: from forged, mutated and cut shards."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from typing import Any

import numpy as np
import pytest

from shardkit.errors import FormatError
from shardkit.formats import Schema, ShardIndex, block_starts
from shardkit.formats.tar_members import TRAILER
from tests.format_conformance import EXAMPLE_SCHEMA, FORMAT_PAIRS, example_samples, write_shard
from tests.whole_shard import build_index, check_whole_shard, tail_offset


def shard(format: str, compression: str) -> tuple[bytes, ShardIndex]:
    return write_shard(
        example_samples(5), EXAMPLE_SCHEMA, format=format, compression=compression, block_rows=2
    )


def with_tail(data: bytes, index: ShardIndex, tail: bytes) -> tuple[bytes, ShardIndex]:
    """A shard that ends otherwise, under digests that are right."""
    forged = data[: tail_offset(index)] + tail
    digest = hashlib.sha256(tail).hexdigest()
    return forged, dataclasses.replace(index, shard_size=len(forged), tail_sha256=digest)


def test_forged_ends_of_archives_are_refused() -> None:
    plain = shard("tar", "none")
    check_whole_shard(*with_tail(*plain, TRAILER))
    for tail in (b"", TRAILER[:512], TRAILER + bytes(512), b"\x01" + TRAILER[1:]):
        with pytest.raises(FormatError, match="two zero blocks"):
            check_whole_shard(*with_tail(*plain, tail))


def test_forged_arrow_frames_are_refused() -> None:
    data, index = shard("arrow", "none")
    tail = data[tail_offset(index) :]
    other, other_index = write_shard(
        example_samples(3), EXAMPLE_SCHEMA, format="arrow", compression="none", block_rows=2
    )
    for forged in (
        tail[8:],
        tail[:-1],
        tail + b"\x00",
        other[tail_offset(other_index) :],
        tail[:8] + tail[-6:],
        b"",
    ):
        with pytest.raises(FormatError, match="arrow"):
            check_whole_shard(*with_tail(data, index, forged))
    fields = dict(EXAMPLE_SCHEMA)
    renamed = Schema({("words" if name == "text" else name): kind for name, kind in fields.items()})
    with pytest.raises(FormatError, match="schema"):
        check_whole_shard(data, dataclasses.replace(index, schema=renamed))


def test_plain_tar_needs_its_segments_to_be_indexed() -> None:
    samples = example_samples(7)
    data, _ = write_shard(samples, EXAMPLE_SCHEMA, format="tar", compression="none", block_rows=3)
    settings: dict[str, Any] = {
        "format": "tar",
        "compression": "none",
        "schema": EXAMPLE_SCHEMA,
        "block_rows": 3,
    }
    index = build_index(data, **settings, segment_rows=[4, 0, 3])
    assert index.block_start.tolist() == [0, 3, 4, 7]
    with pytest.raises(FormatError, match="7 rows, the segments have 6"):
        build_index(data, **settings, segment_rows=[4, 2])


@pytest.mark.parametrize(
    ("segments", "rows", "starts"),
    [
        ([], 4, [0]),
        ([5], 2, [0, 2, 4, 5]),
        ([4, 4], 4, [0, 4, 8]),
        ([1, 0, 3], 2, [0, 1, 3, 4]),
        ([2], 100, [0, 2]),
    ],
)
def test_blocks_restart_at_segment_borders(segments: list[int], rows: int, starts: list[int]) -> None:
    assert block_starts(segments, rows).tolist() == starts


@pytest.mark.parametrize(("format", "compression"), FORMAT_PAIRS)
def test_mutated_shards_are_refused_when_indexed(format: str, compression: str) -> None:
    """No digest in front: a FormatError, or an index that says what the mutant holds; never another exception."""
    data, index = shard(format, compression)
    rng = random.Random(3)
    refused = 0
    for turn in range(150):
        mutant = bytearray(data)
        if turn % 3 == 0:
            del mutant[rng.randrange(len(mutant)) :]
        elif turn % 3 == 1:
            mutant[rng.randrange(min(len(mutant), 3000))] ^= 1 << rng.randrange(8)
        else:
            place = rng.randrange(len(mutant))
            mutant[place : place + 8] = (2 ** rng.randrange(64)).to_bytes(8, "little")
        try:
            found = build_index(
                mutant, format=format, compression=compression, schema=index.schema, block_rows=2
            )
        except FormatError:
            refused += 1
        else:
            assert found.rows == len(found.keys()) <= 5
    assert refused >= 50


def test_an_index_of_another_schema_is_refused() -> None:
    data, _ = shard("tar", "none")
    fields = dict(reversed(list(EXAMPLE_SCHEMA.items())))
    with pytest.raises(FormatError, match=r"expected KEY\.signal"):
        build_index(data, format="tar", compression="none", schema=Schema(fields), block_rows=2)
    first = Schema({name: kind for name, kind in EXAMPLE_SCHEMA.items() if name != "signal"})
    with pytest.raises(FormatError, match="expected"):
        build_index(data, format="tar", compression="none", schema=first, block_rows=2)


def test_unaligned_columns_of_views_are_copied_not_refused() -> None:
    _, index = shard("tar", "none")
    packed = index.to_bytes()
    for shift in range(8):
        moved = memoryview(bytes(shift) + packed)[shift:]
        found = ShardIndex.from_bytes(moved)
        assert np.array_equal(found.block_offset, index.block_offset)
        assert found.block_offset.flags.aligned
