"""The short way to where rows lie finds what the long way finds, or leaves it to the long way."""

from __future__ import annotations

import io
from ctypes import string_at
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.errors import FormatError
from shardkit.formats import Row, Schema, ShardIndex, ShardWriter, read_block, reading, xxh3
from shardkit.loader import block_loading, gather, plain_rows
from shardkit.loader.block_loading import BLOCK, FILE, JOB, LAYOUT, LAYOUT_SIZE, Layouts, PlainShard
from shardkit.loader.gather import GatherColumns, RowAddresses
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
    "arrow": {"label", "small", "tokens", "score"},
    "tar": {"image", "label", "small", "flag"},
}


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

    def placed(self, fields: list[str], layouts: Layouts) -> np.ndarray[Any, Any] | None:
        """The short way: from what was known before, where it begins as was thought, as `Loads` sees."""
        shard = PlainShard.of(self.shard, fields, 0, layouts, objects=False)
        if shard is None:
            return None
        address = np.frombuffer(self.view, np.uint8).ctypes.data
        job = shard.jobs(np.array([self.block]), np.array([address]))[0]
        size = int(job[LAYOUT_SIZE])
        if size >= 0 and string_at(address, size) == string_at(int(job[LAYOUT]), size):
            facts: np.ndarray[Any, Any] = job[JOB:]
            return facts
        found = shard.place(self.block, address)
        return None if found is None else np.frombuffer(found, np.int64)


def _rows(
    schema: Schema,
    fields: list[str],
    facts: np.ndarray[Any, Any],
    which: np.ndarray[Any, Any],
    row: np.ndarray[Any, Any],
) -> dict[str, Any]:
    return RowAddresses(schema, fields, which, row).take(facts, [0, len(which)])[0]


def _stored(format: str, names: list[str], sizes: list[int]) -> list[StoredBlock]:
    schema = Schema.parse({name: FIELDS[name] for name in names})
    sink = io.BytesIO()
    writer = ShardWriter(sink, format=format, compression="none", schema=schema, block_rows=max(sizes))
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


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("format", ["arrow", "tar"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_short_way_finds_the_same_rows(format: str, compiled: bool, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=4, unique=True))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    stored = _stored(format, names, sizes)
    fields = data.draw(st.permutations(names))
    kept = [GatherColumns(read_block(one.view, one.shard, one.block), fields) for one in stored]
    long_way, layouts = table(kept), Layouts(stored[0].shard.schema, fields)
    short_way = [one.placed(fields, layouts) for one in stored]
    assert all((one is not None) == SHORT_WAY[format].issuperset(fields) for one in short_way)
    # some blocks by the one way and some by the other, as where a dataset has parts
    mixed = [long if short is None else short for short, long in zip(short_way, long_way, strict=True)]
    which = np.array(data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=20)), dtype=np.int64)
    row = np.array([data.draw(st.integers(0, sizes[block] - 1)) for block in which], dtype=np.int64)
    chosen = np.stack([mixed[n] if data.draw(st.booleans()) else long_way[n] for n in range(len(sizes))])
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(gather, "block_rows", plain_rows)
        schema = stored[0].shard.schema
        expected, found = (_rows(schema, fields, facts, which, row) for facts in (long_way, chosen))
    for name in fields:
        if isinstance(expected[name], np.ndarray):
            assert found[name].dtype == expected[name].dtype
            np.testing.assert_array_equal(found[name], expected[name])
        elif isinstance(expected[name], tuple):
            for one, other in zip(found[name], expected[name], strict=True):
                np.testing.assert_array_equal(one, other)
        else:
            assert found[name] == expected[name]


def test_every_flipped_byte_is_noticed_without_the_interpreter(tmp_path: Path) -> None:
    loads = pytest.importorskip("shardkit.loader.block_rows").Loads(1)
    data = bytearray(np.random.default_rng(0).bytes(900))
    path = tmp_path / "shard"
    path.write_bytes(data)
    spans = [(first, xxh3(data[first : first + 300])) for first in (0, 300, 600)]
    into, facts = np.zeros((3, 300), np.uint8), np.zeros((3, 1), np.int64)
    loads.set_table(facts)
    assert loads.add_file(str(path), 900) == 0

    def intact() -> list[bool]:
        """By one thread, which is here; what is not intact is the caller's."""
        facts[:] = 0
        jobs = [
            [0, first, 300, into[n].ctypes.data, expected, 0, n, n, 0, 0, 7]
            for n, (first, expected) in enumerate(spans)
        ]
        end = loads.add(np.array(jobs, np.uint64).view(np.int64)) + 3
        loads.add(np.array([[-1, *[0] * 10]]))  # the caller's: all before it are done
        while (job := loads.work())[0] != end:
            assert job[3] == 0
            loads.finish(job[0], job[1], None)
        loads.finish(end, 0, None)
        assert loads.wait(end + 1, 1) == end + 1
        return [bool(one == 7) for one in facts[:, 0]]

    assert intact() == [True, True, True]
    with path.open("r+b", buffering=0) as file:
        for place in range(300, 600):
            for byte in (data[place] ^ 1, data[place]):
                file.seek(place)
                file.write(bytes([byte]))
                assert intact() == [True, byte == data[place], True]
        file.truncate(700)
    assert intact()[2] is False
    loads.close()


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_long_rows_read_into_objects_are_those_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    kinds = {"image": "bytes", "mask": "bytes", "label": "int64", "flag": "bool", "third": "bytes"}
    names = data.draw(st.permutations(sorted(kinds)))[: data.draw(st.integers(1, 5))]
    lengths = data.draw(st.fixed_dictionaries({name: st.sampled_from([0, 5, 700, 30_000]) for name in kinds}))
    rng, samples = np.random.default_rng(5), []
    for number in range(data.draw(st.integers(2, 40))):
        sample: dict[str, Any] = {"label": number - 9, "flag": number % 3 == 0}
        sample |= {
            name: rng.bytes(int(rng.integers(0, lengths[name] + 1))) for name in ("image", "mask", "third")
        }
        samples.append({name: sample[name] for name in names})
    root = tmp_path_factory.mktemp("long") / "root"
    with shardkit.create(
        root,
        {name: kinds[name] for name in names},
        format="tar",
        block_size="64KiB",
        shard_size="300KiB",
    ) as writer:
        for sample in samples:
            writer.add(sample)
    fields = data.draw(st.permutations(names))[: data.draw(st.integers(1, len(names)))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_loading, "_LONG_BYTES", data.draw(st.sampled_from([0, 300, 1 << 40])))
        ds = shardkit.open(root)
        batch = data.draw(st.integers(1, min(7, len(samples))))
        plan = ds.plan(global_batch=batch, lanes=1, window_blocks=2)
        with ds.loader(plan, fields=fields, tensors=False, threads=2) as loader:
            held = [  # what is held is what it was
                (batch.samples, {name: batch[name] for name in fields})
                for batch in [*loader, *loader, *loader]
            ]
        truth = [ds[number] for number in range(len(samples))]
        for numbers, found in held:
            for name in fields:
                wrong = [
                    number
                    for number, value in zip(numbers.tolist(), found[name], strict=True)
                    if value != truth[number][name]
                ]
                assert not wrong, (name, numbers)  # a difference of long bytes takes minutes to be told
        assert sorted(len(one.get("image", b"")) for one in truth) == sorted(
            len(one.get("image", b"")) for one in samples
        )


@pytest.mark.parametrize("text", [b"01", b"-0", b"+1", b" 1", b"1.", b"9223372036854775808", b"-", b"1" * 20])
def test_a_number_that_no_writer_writes_is_refused(text: bytes) -> None:
    """With right digests: whoever wrote it wrote something else than shardkit's format."""
    stored = _stored("tar", ["label"], [1, 1])[0]
    starts, ends = stored.shard.member_places(0)[0], stored.shard.member_ends(0)
    begin = int(starts[0])
    stored.view[begin : begin + len(text)] = text
    ends.flags.writeable = True
    ends[0] = begin + len(text)
    placed = stored.placed(["label"], Layouts(stored.shard.schema, ["label"]))
    assert placed is not None
    zero = np.zeros(1, dtype=np.int64)
    with pytest.raises(FormatError, match="label"):
        _rows(stored.shard.schema, ["label"], placed[None], zero, zero)


def test_numbers_at_the_very_start_of_a_block_read_nothing_before_it() -> None:
    stored = _stored("tar", ["label"], [70])[0]
    starts, _ = stored.shard.member_places(0)
    ends = stored.shard.member_ends(0)
    for column in (starts, ends):
        column.flags.writeable = True
    starts[0], ends[0] = 0, 1  # as a hostile index may say; in front of a map there may be no memory
    stored.view[0:1] = b"7"
    placed = stored.placed(["label"], Layouts(stored.shard.schema, ["label"]))
    assert placed is not None
    rows = np.arange(70, dtype=np.int64)
    found = _rows(stored.shard.schema, ["label"], placed[None], np.zeros_like(rows), rows)["label"]
    assert found[0] == 7
    assert found[1:].tolist() == [_sample(n)["label"] for n in range(1, 70)]


@pytest.mark.parametrize("format", ["arrow", "tar"])
@pytest.mark.parametrize("fields", [["label"], ["image", "label"], ["label", "text"], ["tokens"], ["ragged"]])
def test_a_block_is_verified_once_whichever_way_it_goes(
    format: str, fields: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified: list[int] = []

    def verify(stored: Any, index: Any, block: int, **how: Any) -> None:
        verified.append(block)
        verify_block(stored, index, block, **how)

    class Loads(gather.block_rows.Loads):  # type: ignore[misc]  # either module's
        def add(self, jobs: Any) -> Any:
            verified.extend(jobs[jobs[:, FILE] >= 0, BLOCK].tolist())
            return super().add(jobs)

    verify_block = reading.verify_block
    monkeypatch.setattr(reading, "verify_block", verify)
    monkeypatch.setattr(gather.block_rows, "Loads", Loads)
    schema = {name: FIELDS[name] for name in fields}
    with shardkit.create(tmp_path / "root", schema=schema, format=format, block_size="4KiB") as writer:
        for number in range(300):
            writer.add({name: _sample(number)[name] for name in fields})
    ds = shardkit.open(tmp_path / "root")
    verified.clear()
    with ds.loader(ds.plan(global_batch=10), tensors=False) as loader:
        assert sum(len(batch.samples) for batch in loader) == 300
        assert loader.stats()["block_loads"] == len(verified)
    assert ds.manifest.shards == 1
    assert sorted(verified) == list(range(max(verified) + 1))
    assert len(verified) > 2
