"""The short way to where rows lie finds what the long way finds, or leaves it to the long way."""

from __future__ import annotations

import functools
import io
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import FormatError
from shardkit.formats import NumberedKeys, Row, Schema, ShardIndex, ShardWriter, read_block, reading, xxh3
from shardkit.loader import gather, plain_rows
from shardkit.loader.block_loading import LocalShard, layout_of
from shardkit.loader.gather import GatherColumns, RowAddresses
from shardkit.loader.load_queue import ADDRESS, FILE, HASH, JOB, OFFSET, SIZE
from shardkit_tools.adopting.files import ScannedBlocks
from tests.property.facts_of_blocks import table

FIELDS = {
    "image": "bytes",
    "label": "int64",
    "small": "uint8",
    "flag": "bool",
    "tokens": "int32[70]",
    "score": "float64",
    "text": "str",
    "ragged": "int16[*]",
}
SHORT_WAY = {  # the fields of which it knows all that it needs, by format
    "arrow": {"image", "label", "small", "tokens", "score", "text", "ragged"},
    "tar": {"image", "label", "small", "flag", "text", "tokens", "score"},
}


@functools.cache
def _sample(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    return {
        "image": rng.bytes(int(rng.integers(0, 3000))),
        "label": int(rng.choice([0, -1, 7, 2**63 - 1, -(2**63), int(rng.integers(-99999, 99999))])),
        "small": int(rng.integers(0, 256)),
        "flag": bool(number % 2),
        "tokens": rng.integers(-9, 9, 70, dtype=np.int32),
        "score": float(rng.normal()),
        "text": "é" * (number % 3),
        "ragged": rng.integers(-9, 9, number % 4, dtype=np.int16),
    }


class StoredBlock(NamedTuple):
    """Stored bytes of a block, which is one of its shard."""

    view: memoryview
    shard: ShardIndex
    block: int

    def layout(self, fields: list[str]) -> Any:
        if self.shard.format != "arrow":
            return None
        return layout_of(self.shard, fields, np.frombuffer(self.view, np.uint8))

    def placed(self, fields: list[str], layout: Any = None) -> tuple[np.ndarray[Any, Any], Any] | None:
        """The short way: facts that `load_blocks` finds in a file of this block, and the memory that they refer to."""
        block_rows = pytest.importorskip("shardkit.loader.block_rows")
        layout = self.layout(fields) if layout is None else layout
        shard = LocalShard.of(self.shard, fields, 0, layout)
        if shard is None or not shard.is_fit[self.block]:
            return None
        memory = np.zeros(int(shard.own_sizes[self.block]) + 8, np.uint8)
        address = memory.ctypes.data + -memory.ctypes.data % 8
        job = shard.jobs(np.array([self.block]))
        job[:, ADDRESS] = address
        job[:, OFFSET], job[:, HASH] = 0, np.array([xxh3(self.view)], np.uint64).view(np.int64)
        objects = block_rows.make_objects(job[0])
        with tempfile.NamedTemporaryFile() as file:
            file.write(self.view)
            file.flush()
            job[:, FILE] = file.fileno()
            loaded, _ = block_rows.load_blocks(job, (objects,))
        return (job[0, JOB:], (memory, shard, objects)) if loaded else None


def _rows(
    schema: Schema,
    fields: list[str],
    facts: np.ndarray[Any, Any],
    which: np.ndarray[Any, Any],
    row: np.ndarray[Any, Any],
) -> dict[str, Any]:
    return RowAddresses(schema, fields, which, row).take(facts, [0, len(which)])[0]


def _stored(format: str, names: list[str], sizes: list[int], compression: str = "none") -> list[StoredBlock]:
    schema = Schema.parse({name: FIELDS[name] for name in names})
    sink = io.BytesIO()
    writer = ShardWriter(sink, format=format, compression=compression, schema=schema, block_rows=max(sizes))
    first = 0
    for size in sizes:
        samples = [{name: _sample(n)[name] for name in names} for n in range(first, first + size)]
        writer.write_block(
            [Row(f"k{first + i}", schema.encode(one, where="")) for i, one in enumerate(samples)]
        )
        first += size
    index = writer.finish()
    data = np.frombuffer(bytearray(sink.getvalue()), dtype=np.uint8)
    spans = index.spans
    return [
        StoredBlock(data[one.offset : one.offset + one.size].data, index, number)
        for number, one in enumerate(spans)
    ]


@pytest.mark.parametrize(("format", "compression"), [("arrow", "none"), ("arrow", "zstd"), ("tar", "none")])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_short_way_finds_the_same_rows(format: str, compression: str, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=4, unique=True))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    stored = _stored(format, names, sizes, compression)
    fields = data.draw(st.permutations(names))
    kept = [GatherColumns(read_block(one.view, one.shard, one.block), fields) for one in stored]
    long_way = table(kept)
    placed = [one.placed(fields) for one in stored]
    for one, block in zip(placed, stored, strict=True):
        is_long = len(block.view) > 240  # others are hashed in another way
        assert (one is not None) == (is_long and SHORT_WAY[format].issuperset(fields))
    short_way = [None if one is None else one[0] for one in placed]
    # some blocks by the one way and some by the other, as where a dataset has parts
    mixed = [long if short is None else short for short, long in zip(short_way, long_way, strict=True)]
    which = np.array(data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=20)), dtype=np.int64)
    row = np.array([data.draw(st.integers(0, sizes[block] - 1)) for block in which], dtype=np.int64)
    chosen = np.stack([mixed[n] if data.draw(st.booleans()) else long_way[n] for n in range(len(sizes))])
    schema = stored[0].shard.schema
    expected = _rows(schema, fields, long_way, which, row)
    for module in (gather.block_rows, plain_rows):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gather, "block_rows", module)
            found = _rows(schema, fields, chosen, which, row)
        for name in fields:
            if isinstance(expected[name], np.ndarray):
                assert found[name].dtype == expected[name].dtype
                np.testing.assert_array_equal(found[name], expected[name])
            elif isinstance(expected[name], tuple):
                for one, other in zip(found[name], expected[name], strict=True):
                    np.testing.assert_array_equal(one, other)
            else:
                assert found[name] == expected[name]


LOCATED = {"image": "bytes", "label": "int64", "tokens": "int32[70]", "score": "float64", "text": "str"}


def _of_another_writer(names: list[str], sizes: list[int], *, located: bool) -> list[StoredBlock]:
    """Blocks of the format `rows`: payloads end to end, in arrays of rows or where the index locates them."""
    schema = Schema.parse({name: LOCATED[name] for name in names})
    parts, places = [], []
    for number, size in enumerate(sizes):
        payloads = [
            schema.encode({n: _sample(9 * number + row)[n] for n in names}, where="") for row in range(size)
        ]
        lengths = np.array([[len(one) for one in row] for row in payloads])
        places += [
            (end - length, length)
            for end, length in zip(np.cumsum(lengths).tolist(), lengths.ravel().tolist(), strict=True)
        ]
        parts.append(b"".join(b"".join(row) for row in payloads))
    with ScannedBlocks() as blocks:
        for part, size in zip(parts, sizes, strict=True):
            blocks.add(part, size)
    table = np.array(places, np.uint64).reshape(sum(sizes), len(names), 2)
    found: dict[str, Any] = {
        "field_offset": table[:, :, 0].copy(),
        "field_size": table[:, :, 1].copy(),
        "field_is_payload": np.ones(len(names), np.uint8),
    }
    index = ShardIndex(
        format="rows",
        compression="none",
        schema=schema,
        block_rows=max(sizes),
        shard_size=sum(map(len, parts)),
        key_texts=NumberedKeys(5, sum(sizes)),
        **blocks.columns(),
        **(found if located else {}),
    )
    assert ShardIndex.from_bytes(index.to_bytes()).to_bytes() == index.to_bytes()
    return [StoredBlock(memoryview(bytearray(part)), index, number) for number, part in enumerate(parts)]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_of_another_writer_are_found_both_ways(data: st.DataObject) -> None:
    located = data.draw(st.booleans())
    known = sorted(LOCATED if located else {"label", "tokens", "score"})
    names = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=4, unique=True))
    sizes = data.draw(st.lists(st.integers(4, 9), min_size=1, max_size=4))
    stored = _of_another_writer(names, sizes, located=located)
    fields = data.draw(st.permutations(names))
    kept = [GatherColumns(read_block(one.view, one.shard, one.block), fields) for one in stored]
    long_way = table(kept)
    which = np.array(data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=20)), dtype=np.int64)
    row = np.array([data.draw(st.integers(0, sizes[block] - 1)) for block in which], dtype=np.int64)
    placed = [one.placed(fields) for one in stored]
    assert [one is not None for one in placed] == [len(one.view) > 240 for one in stored]
    short_way = np.stack(
        [long if one is None else one[0] for one, long in zip(placed, long_way, strict=True)]
    )
    schema = stored[0].shard.schema
    for facts in (long_way, short_way):
        found = _rows(schema, fields, facts, which, row)
        for name in fields:
            expected = [
                _sample(9 * int(block) + int(one))[name] for block, one in zip(which, row, strict=True)
            ]
            assert len(found[name]) == len(expected)
            assert all(np.array_equal(one, other) for one, other in zip(found[name], expected, strict=True))


@pytest.mark.parametrize(
    ("is_located", "change"),
    [
        (False, {"block_start": np.array([0, 5, 9])}),
        (True, {"field_offset": np.full((9, 2), 2**40, np.uint64)}),
        (False, {"schema": Schema.parse({"label": "int64?", "tokens": "int32[70]"})}),
        (False, {"schema": Schema.parse({"label": "int64", "tokens": "int32[*]"})}),
        (True, {"field_is_payload": None}),
        (True, {"field_is_payload": np.full(2, 2, np.uint8)}),
        (True, {"field_size": None}),
        (False, {"format": "arrow"}),
        (False, {"key_texts": NumberedKeys(5, 8)}),
        (False, {"key_texts": NumberedKeys(2**62, 9)}),
        (False, {"compression": "zstd:3"}),
    ],
)
def test_an_index_of_rows_that_contradicts_itself_is_refused(
    is_located: bool, change: dict[str, Any]
) -> None:
    index = _of_another_writer(["label", "tokens"], [4, 5], located=is_located)[0].shard
    with pytest.raises(FormatError, match="index:"):
        replace(index, **change)


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["none", "zstd"])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_message_that_was_tampered_with_is_read_as_the_long_way_reads_it_or_not_at_all(
    compression: str, data: st.DataObject
) -> None:
    """With right digests: lengths, places and offsets that lead anywhere are seen before they are followed."""
    fields = ["image", "tokens", "ragged"]
    stored = _stored("arrow", fields, [5], compression)[0]
    schema, size = stored.shard.schema, len(stored.view)
    layout = stored.layout(fields)
    assert stored.placed(fields, layout) is not None
    numbers = [int(layout[2]), int(layout[3])]  # where they lie: rows, body, nodes, buffers
    numbers += [int(layout[at]) + 8 * n for at in (4, 6) for n in range(2 * int(layout[at + 1]))]
    body = int(layout[0])
    for buffer in (4, 10) if compression == "none" else ():  # the offsets of image and ragged
        begin = body + int.from_bytes(stored.view[int(layout[6]) + 16 * buffer :][:8], "little")
        numbers += range(begin, begin + 48, 8)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(
            st.sampled_from(numbers)
            | st.sampled_from(numbers)
            | st.integers(0, body - 8)
            | st.integers(body, size - 8)
        )
        old = int.from_bytes(stored.view[place : place + 8], "little", signed=True)
        by = data.draw(st.none() | st.integers(-65, 65))
        new = (
            data.draw(st.sampled_from([-1, 0, 1, 8, 2**40, 2**62, -(2**63), 2**63 - 1]))
            if by is None
            else old + by
        )
        stored.view[place : place + 8] = (max(-(2**63), min(new, 2**63 - 1))).to_bytes(
            8, "little", signed=True
        )
    placed = stored.placed(fields, layout)
    if placed is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "verify_block", lambda *_arguments, **_how: None)
        columns = GatherColumns(
            read_block(stored.view, stored.shard, stored.block, keys=False, fields=fields), fields
        )
    row = np.arange(5)
    found, expected = (
        _rows(schema, fields, facts, 0 * row, row) for facts in (placed[0][None], table([columns]))
    )
    assert found["image"] == expected["image"]
    np.testing.assert_array_equal(found["tokens"], expected["tokens"])
    for one, other in zip(found["ragged"], expected["ragged"], strict=True):
        np.testing.assert_array_equal(one, other)


def test_messages_of_another_codec_than_the_index_says_have_no_layout() -> None:
    """`read_block` refuses them, and no shard of them may be read without it."""
    for compression, other in (("none", "zstd:3"), ("zstd", "none")):
        stored = _stored("arrow", ["label"], [5], compression)[0]
        assert stored.layout(["label"]) is not None
        assert stored._replace(shard=replace(stored.shard, compression=other)).layout(["label"]) is None


@pytest.mark.parametrize("compiled", [True, False])
def test_no_row_is_copied_where_some_are_texts(compiled: bool) -> None:
    stored = _stored("tar", ["label", "tokens"], [5])[0]
    placed = stored.placed(["tokens", "label"])
    assert placed is not None
    rows = pytest.importorskip("shardkit.loader.block_rows") if compiled else plain_rows
    targets: list[np.ndarray[Any, Any]] = [np.full((5, 70), 7, np.int32), np.full(5, 7, np.int64)]
    facts, row = placed[0][None], np.arange(5)
    assert rows.gather_rows(targets, facts, 0 * row, row, (0, 1)) != rows.COPIED
    assert all((target == 7).all() for target in targets)
    assert rows.gather_rows(targets[:1], facts, 0 * row, row, (0,)) == rows.COPIED
    assert targets[0].tolist() == [_sample(n)["tokens"].tolist() for n in range(5)]


@pytest.mark.parametrize(("format", "compression"), [("arrow", "none"), ("arrow", "zstd"), ("tar", "none")])
def test_text_that_is_none_is_refused(format: str, compression: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FIELDS, "text", "bytes")  # whoever wrote it did not look
        patch.setitem(
            globals(),
            "_sample",
            lambda number: {
                "text": b"text"
                + b"\xff" * (number == 3)
                + np.random.default_rng(number).bytes(300).hex().encode()
            },
        )
        stored = _stored(format, ["text"], [5], compression)[0]
    kinds = {"text": "str"}
    honest = stored.placed(["text"])
    assert honest is not None
    zero = np.zeros(5, np.int64)
    with pytest.raises(FormatError, match=r"'text'.*UTF-8"):
        _rows(Schema.parse(kinds), ["text"], honest[0][None], zero, np.arange(5))


def test_every_flipped_byte_is_noticed_without_the_interpreter(tmp_path: Path) -> None:
    block_rows = pytest.importorskip("shardkit.loader.block_rows")
    data = bytearray(np.random.default_rng(0).bytes(900))
    path = tmp_path / "shard"
    path.write_bytes(data)
    into, jobs = np.zeros((3, 300), np.uint8), np.zeros((3, JOB + 1), np.int64)
    for n in range(3):
        expected = np.array([xxh3(data[300 * n :][:300])], np.uint64).view(np.int64)[0]
        jobs[n, [OFFSET, SIZE, ADDRESS, HASH, JOB]] = 300 * n, 300, into[n].ctypes.data, expected, 7
    with path.open("r+b", buffering=0) as file:
        jobs[:, FILE] = file.fileno()

        def intact() -> list[bool]:
            return [block_rows.load_blocks(jobs[n : n + 1].copy(), (None,))[0] == 1 for n in range(3)]

        assert intact() == [True, True, True]
        for place in range(300, 600):
            for byte in (data[place] ^ 1, data[place]):
                file.seek(place)
                file.write(bytes([byte]))
                assert intact() == [True, byte == data[place], True]
        file.truncate(700)
        assert intact()[2] is False


def test_an_array_with_another_header_is_left_to_the_long_way() -> None:
    stored = _stored("tar", ["tokens", "label"], [3], "none")[0]
    begin = int(stored.shard.member_places[0][0][1])  # of the second row
    assert stored.placed(["label", "tokens"]) is not None
    for place in (0, 40, 127):
        view = bytearray(stored.view)
        view[begin + place] ^= 1
        changed = stored._replace(view=memoryview(view))
        assert changed.placed(["label", "tokens"]) is None, place
        assert changed.placed(["label"]) is not None


@pytest.mark.parametrize("text", [b"01", b"-0", b"+1", b" 1", b"1.", b"9223372036854775808", b"-", b"1" * 20])
def test_a_number_that_no_writer_writes_is_refused(text: bytes) -> None:
    """With right digests: whoever wrote it wrote something else than shardkit's format."""
    stored = _stored("tar", ["label"], [1, 1])[0]
    starts, ends = stored.shard.member_places[0][0], stored.shard.member_ends[0]
    begin = int(starts[0])
    stored.view[begin : begin + len(text)] = text
    ends.flags.writeable = True
    ends[0] = begin + len(text)
    placed = stored.placed(["label"])
    assert placed is not None
    zero = np.zeros(1, dtype=np.int64)
    with pytest.raises(FormatError, match="label"):
        _rows(stored.shard.schema, ["label"], placed[0][None], zero, zero)


def test_numbers_at_the_very_start_of_a_block_read_nothing_before_it() -> None:
    stored = _stored("tar", ["label"], [70])[0]
    starts, _ = stored.shard.member_places[0]
    ends = stored.shard.member_ends[0]
    for column in (starts, ends):
        column.flags.writeable = True
    starts[0], ends[0] = 0, 1  # as a hostile index may say; in front of a map there may be no memory
    stored.view[0:1] = b"7"
    placed = stored.placed(["label"])
    assert placed is not None
    rows = np.arange(70, dtype=np.int64)
    found = _rows(stored.shard.schema, ["label"], placed[0][None], np.zeros_like(rows), rows)["label"]
    assert found[0] == 7
    assert found[1:].tolist() == [_sample(n)["label"] for n in range(1, 70)]
