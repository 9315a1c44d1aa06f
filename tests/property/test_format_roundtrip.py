"""Every schema type, every format, every compression: what goes in comes out, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkit.formats import FieldType, FixedColumn, Schema, ShardIndex, max_key_bytes, read_block
from shardkit.formats.schema import DTYPES
from tests.format_conformance import FORMAT_PAIRS, stored_block, write_shard
from tests.whole_shard import check_whole_shard

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,12}", fullmatch=True).filter(
    lambda name: name not in {"step", "samples", "weight", "__key__"}
)
SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3)
TYPES = st.one_of(
    st.sampled_from(["bytes", "str", "json"]),
    st.sampled_from(DTYPES),
    st.sampled_from([f"{dtype}[*]" for dtype in DTYPES]),
    st.builds(lambda dtype, shape: f"{dtype}[{','.join(map(str, shape))}]", st.sampled_from(DTYPES), SHAPES),
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
MAGICS = st.sampled_from(
    [b"", b"\xff\xd8\xff", b"GIF89a", b"RIFF0000WAVE", b"BM\x06\x00\x00\x00", b"\xff\xfb\x90"]
)


def values(kind: FieldType) -> st.SearchStrategy[Any]:
    """Values of a type; numbers are drawn as bytes, so that every bit pattern occurs, signalling NaNs too."""
    if kind.kind == "bytes":
        return st.builds(lambda magic, rest: magic + rest, MAGICS, st.binary(max_size=600))
    if kind.kind == "str":
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
    if kind.kind == "json":
        return JSON
    dtype = np.dtype(kind.dtype)
    count = st.integers(0, 70) if kind.kind == "ragged" else st.just(int(np.prod(kind.shape, dtype=int)))
    raw = count.flatmap(lambda n: st.binary(min_size=n * dtype.itemsize, max_size=n * dtype.itemsize))

    def shaped(data: bytes) -> Any:
        array = np.frombuffer(data, np.uint8)
        array = (array % 2).view(np.bool_) if dtype.kind == "b" else array.view(dtype)
        return array if kind.kind == "ragged" else array.reshape(kind.shape)

    return raw.map(shaped)


@st.composite
def datasets(draw: st.DrawFn) -> tuple[Schema, list[dict[str, Any]], list[str], int]:
    """(schema, samples, keys, block_rows)."""
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    # A sample of a tar needs a member, so one field always has a value.
    schema = Schema.parse(
        {name: draw(TYPES) + draw(st.sampled_from(["", "?"])) * (name != names[-1]) for name in names}
    )
    count = draw(st.integers(1, 6))
    samples = [{name: draw(values(kind)) for name, kind in schema.items()} for _ in range(count)]
    for sample in samples:
        for name, kind in schema.items():
            change = draw(st.sampled_from(["", "null", "missing"])) if kind.optional else ""
            if change == "null":
                sample[name] = None
            elif change:
                del sample[name]
    limit = min(max_key_bytes(schema, "tar"), 80)
    key = st.one_of(
        st.from_regex(r"[A-Za-z0-9_-]{1,12}", fullmatch=True), st.sampled_from(["k" * limit, "-" * limit])
    )
    keys = draw(st.lists(key, min_size=count, max_size=count, unique=True))
    return schema, samples, keys, draw(st.integers(1, 4))


def same(kind: FieldType, got: object, expected: Any) -> bool:
    """Equal to the bit; Python floats of NaN lose the signalling bit of float16 and float32, so compare as numbers."""
    if expected is None:
        return got is None
    if kind.kind == "scalar":
        array = np.asarray(got, kind.dtype)
        if array.dtype.kind == "f" and np.isnan(array):
            return bool(np.isnan(expected))
        return bool(array.tobytes() == expected.tobytes())
    if kind.kind in ("array", "ragged"):
        assert isinstance(got, np.ndarray)
        return bool(
            got.shape == expected.shape
            and got.dtype == expected.dtype
            and got.tobytes() == expected.tobytes()
        )
    return type(got) is type(expected) and got == expected


@pytest.mark.parametrize(("format", "compression"), [pair for pair in FORMAT_PAIRS if pair[1] != "zstd:9"])
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(dataset=datasets())
def test_what_goes_in_comes_out(
    format: str, compression: str, dataset: tuple[Schema, list[dict[str, Any]], list[str], int]
) -> None:
    schema, samples, keys, block_rows = dataset
    data, index = write_shard(
        samples, schema, format=format, compression=compression, block_rows=block_rows, keys=keys
    )
    index = ShardIndex.from_bytes(index.to_bytes())
    check_whole_shard(data, index)
    assert index.keys() == keys
    row = 0
    for number in range(index.blocks):
        block = read_block(stored_block(data, index, number), index, number, verify="strong")
        for place in range(block.rows):
            assert block.payloads(place) == schema.encode(samples[row], where="again")
            found = block.sample(place)
            bad = [
                name for name, kind in schema.items() if not same(kind, found[name], samples[row].get(name))
            ]
            assert not bad
            row += 1
    assert row == len(samples)


def arrow_payload(value: Any, kind: FieldType) -> bytes:
    """What pyarrow says a value is, as canonical payload bytes: an encoding of its own, not the schema's."""
    if kind.kind == "bytes":
        return bytes(value)
    if kind.kind in ("str", "json"):
        return str(value).encode()
    return np.asarray(value, kind.dtype).tobytes()


@pytest.mark.parametrize("compression", ["none", "zstd"])
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(dataset=datasets())
def test_arrow_columns_equal_those_of_pyarrow(
    compression: str, dataset: tuple[Schema, list[dict[str, Any]], list[str], int]
) -> None:
    """Our views of the buffers against pyarrow's own reading of the file; NaNs are compared by where they are."""
    schema, samples, keys, block_rows = dataset
    data, index = write_shard(
        samples, schema, format="arrow", compression=compression, block_rows=block_rows, keys=keys
    )
    with pa.ipc.open_file(data) as reader:
        assert reader.num_record_batches == index.blocks
        for number in range(index.blocks):
            batch = reader.get_batch(number)
            batch.validate(full=True)
            block = read_block(stored_block(data, index, number), index, number)
            first = int(index.block_start[number])
            assert batch.column("__key__").to_pylist() == keys[first : first + batch.num_rows]
            for name, kind in schema.items():
                present = block.present(name)
                assert batch.schema.field(name).nullable == kind.optional
                assert batch.column(name).is_valid().to_pylist() == present.tolist()
                theirs, ours = batch.column(name).drop_null(), block.column(name)
                if isinstance(ours, FixedColumn):
                    flat = theirs
                    for _ in kind.shape:
                        flat = flat.flatten()
                    numbers = flat.to_numpy(zero_copy_only=False)
                    assert numbers.tobytes() == np.ascontiguousarray(ours.values[present]).tobytes()
                else:
                    rows = [arrow_payload(value, kind) for value in theirs.to_pylist()]
                    mine = [ours.payload(row) for row in range(block.rows) if present[row]]
                    if kind.dtype.startswith("float"):
                        pairs = zip(rows, mine, strict=True)
                        for left, right in pairs:
                            np.testing.assert_array_equal(
                                np.frombuffer(left, kind.dtype), np.frombuffer(right, kind.dtype)
                            )
                    else:
                        assert mine == rows


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(0, 900), min_size=2, max_size=12), data=st.data())
def test_strided_and_gathered_tar_columns_agree(lengths: list[int], data: st.DataObject) -> None:
    """Rows at a constant pitch are views, others are gathered; both equal what was written."""
    schema = Schema.parse({"blob": "bytes", "grid": "int16[3,2]"})
    grids = [np.array(data.draw(st.binary(min_size=12, max_size=12))) for _ in lengths]
    arrays = [np.frombuffer(grid.tobytes().ljust(12, b"\0"), "<i2").reshape(3, 2) for grid in grids]
    samples = [{"blob": bytes(n), "grid": array} for n, array in zip(lengths, arrays, strict=True)]
    shard, index = write_shard(samples, schema, format="tar", compression="none", block_rows=len(samples))
    column = read_block(stored_block(shard, index, 0), index, 0).column("grid")
    assert isinstance(column, FixedColumn)
    assert np.array_equal(column.values, np.stack(arrays))
    pitches = {-(-n // 512) for n in lengths[1:]}
    shares = np.shares_memory(column.values, np.frombuffer(shard, np.uint8))
    assert shares == (len(pitches) == 1)
