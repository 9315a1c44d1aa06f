"""Digests of a block and of its ranges, computed in one pass, are those of their bytes."""

from __future__ import annotations

import hashlib
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.formats import xxh3
from shardkit_tools.adopting import files
from shardkit_tools.adopting.files import ScannedBlocks


@st.composite
def _spans(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """Ranges of three fields: some begin where the block begins, overlap, are empty or the whole block."""
    place = st.integers(0, size)
    spans = draw(st.lists(st.tuples(place, place), min_size=3, max_size=3))
    return [(min(one), max(one)) for one in spans]


@given(
    drawn=st.lists(
        st.binary(min_size=1, max_size=60).flatmap(lambda data: st.tuples(st.just(data), _spans(len(data)))),
        min_size=1,
        max_size=4,
    ),
    threads=st.booleans(),
)
def test_digests_of_blocks_and_ranges(
    drawn: list[tuple[bytes, list[tuple[int, int]]]], threads: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch, ScannedBlocks() as blocks:
        patch.setattr(files, "_THREAD_BYTES", 0 if threads else 1 << 16)
        blocks.add_head(b"head")
        for data, spans in drawn:
            blocks.add(data, 1, spans)
        blocks.add_tail(b"tail")
        whole, columns = blocks.sha256, blocks.columns()
    joined = b"".join(data for data, _ in drawn)
    assert whole == hashlib.sha256(b"head" + joined + b"tail").hexdigest()
    borders = pairwise(accumulate((len(data) for data, _ in drawn), initial=len(b"head")))
    assert columns["block_offset"].tolist() == [start for start, _ in borders]
    for block, (data, spans) in enumerate(drawn):
        assert columns["block_xxh3"][block] == xxh3(data)
        assert columns["block_sha256"][block].tobytes() == hashlib.sha256(data).digest()
        for field, (start, stop) in enumerate(spans):
            part = data[start:stop]
            assert columns["range_offset"][block, field] == start
            assert columns["range_size"][block, field] == len(part)
            assert columns["range_xxh3"][block, field] == xxh3(part)
            assert columns["range_sha256"][block, field].tobytes() == hashlib.sha256(part).digest()
