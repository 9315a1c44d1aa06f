"""Rows that lack a value of an optional field: whatever way they go, they lack that value afterwards and no other."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.dataset.lookups import find_samples, hash_values
from shardkit.dataset.removing import erase
from shardkit.errors import ConfigurationError, FormatError, RunError, SampleError, SchemaError
from shardkit.formats import FieldType, Schema, ShardIndex
from shardkit.loader import Batch
from tests.format_conformance import write_shard

pytestmark = pytest.mark.usefixtures("copies")

SCHEMA = {
    "id": "int64", "age": "int64?", "ok": "bool?", "score": "float32?", "vector": "float32[3]?", "tokens": "int32[*]?",
    "name": "str?", "image": "bytes?", "meta": "json?",
}  # fmt: skip
FILL = {"age": -1, "vector": 7.5, "name": "nobody", "ok": True}
PAIRS = [("arrow", "none"), ("arrow", "zstd"), ("tar", "none")]


def full(number: int) -> dict[str, Any]:
    """A sample with every value, some of them like what stands in the place of none."""
    return {
        "id": number, "age": number % 5 - 1, "ok": number % 2 == 0, "score": np.float32(number / 4),
        "vector": np.arange(3, dtype=np.float32) * number, "tokens": np.arange(number % 4, dtype=np.int32),
        "name": "n" * (number % 3), "image": b"\xff\xd8\xff" * (number % 3), "meta": [{}, [], "", 0, False][number % 5],
    }  # fmt: skip


def has(number: int, field: str, seed: int) -> bool:
    """A fifth of the values, at random, and all of a field now and then, is not there."""
    place = list(SCHEMA).index(field)
    return field == "id" or ((number * 31 + place * 7 + seed) % 5 != 0 and place != seed % 17)


def partial(number: int, seed: int) -> dict[str, Any]:
    return {field: value for field, value in full(number).items() if has(number, field, seed)}


def write(
    root: str, format: str, compression: str, seed: int, rows: int, **settings: Any
) -> shardkit.Dataset:
    settings = {"shard_size": "4KiB", "block_size": "700B"} | settings
    with shardkit.create(root, SCHEMA, format=format, compression=compression, **settings) as writer:
        for number in range(rows):
            absent = dict.fromkeys(SCHEMA) if number % 2 else {}  # None and missing are the same
            writer.add({**absent, **partial(number, seed)}, key=f"k{number}")
    return shardkit.open(root)


def same(found: Any, expected: Any) -> bool:
    if expected is None or found is None:
        return found is expected
    return type(found) is type(expected) and found == expected if not isinstance(expected, np.ndarray) else (
        found.dtype == expected.dtype and np.array_equal(found, expected)
    )  # fmt: skip


def check_sample(sample: dict[str, Any], seed: int) -> None:
    expected = partial(int(sample["id"]), seed)
    assert sample.keys() == SCHEMA.keys()
    for field, found in sample.items():
        value = expected.get(field)
        assert same(found, value.item() if isinstance(value, np.generic) else value), (field, sample)


def check_batch(batch: Batch, seed: int) -> None:
    """The batch against the samples as they were given; nothing here has gone through the loader."""
    assert set(batch) == {*SCHEMA, "step", "samples"}
    assert set(batch.valid) == set(SCHEMA) - {"id"}
    for place, number in enumerate(batch["id"].tolist()):
        expected = partial(number, seed)
        for field, mask in batch.valid.items():
            assert mask.dtype == np.bool_
            assert mask[place] == (field in expected)
            column = batch[field]
            if isinstance(column, tuple):
                found = column[0][column[1][place] : column[1][place + 1]]
                assert np.array_equal(found, expected.get(field, []))
            elif isinstance(column, list):
                assert same(column[place], expected.get(field, FILL.get(field)))
            else:
                assert np.array_equal(
                    column[place], np.broadcast_to(expected.get(field, FILL.get(field, 0)), column.shape[1:])
                )


@pytest.mark.slow
@pytest.mark.parametrize(("format", "compression"), PAIRS)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 200), rows=st.integers(16, 60))
def test_samples_batches_and_tables_lack_what_was_not_there(
    format: str, compression: str, seed: int, rows: int
) -> None:
    with TemporaryDirectory() as folder:
        ds = write(f"{folder}/a", format, compression, seed, rows)
        for sample in ds:
            check_sample(sample, seed)
        table = ds.to_arrow()
        for field in SCHEMA:
            assert table.schema.field(field).nullable == (field != "id")
            assert table.column(field).null_count == sum(
                not has(number, field, seed) for number in range(rows)
            )
        seen = 0
        with ds.loader(ds.plan(8), tensors=False, fill=FILL) as loader:
            for batch in loader:
                check_batch(batch, seed)
                seen += len(batch.samples)
        assert seen == rows - rows % 8
        old = [number for number in range(rows) if partial(number, seed).get("age", -1) >= 0]
        if old:
            assert sorted(sample["id"] for sample in ds.select(where="age >= 0")) == old


@pytest.mark.parametrize(("format", "compression"), PAIRS)
def test_versions_made_of_versions_lack_the_same(tmp_path: Path, format: str, compression: str) -> None:
    a = write(str(tmp_path / "a"), format, compression, 3, 40)
    write(str(tmp_path / "b"), "arrow" if format == "tar" else "tar", "none", 3, 25)
    merged = shardkit.open({"a": str(tmp_path / "a"), "b": str(tmp_path / "b")})
    for ds in (merged, merged.select(rows=range(3, 60, 4))):
        for sample in ds:
            check_sample(sample, 3)
    gone = {a.key(5), a.key(6)}
    erase(str(tmp_path / "a"), rows=[5, 6], reason="asked for")
    left = shardkit.open(str(tmp_path / "a"))
    assert {left.key(n) for n in range(len(left))} == {f"k{n}" for n in range(40)} - gone
    for sample in left:
        check_sample(sample, 3)


def test_a_look_up_finds_values_and_never_what_is_not_there(tmp_path: Path) -> None:
    ds = write(str(tmp_path / "a"), "arrow", "none", 3, 40, lookup="age,name")
    for text in ("0", "1"):
        found = {
            int(ds[int(n)]["id"]) for n in find_samples(ds, *hash_values(ds.schema, "age", [text])).sample
        }
        assert found == {n for n in range(40) if partial(n, 3).get("age") == int(text)}


@pytest.mark.parametrize("format", ["arrow", "tar"])
def test_a_substitute_brings_its_own_gaps(tmp_path: Path, format: str) -> None:
    write(str(tmp_path / "a"), format, "none", 1, 40)

    def decode(image: bytes) -> bytes:
        if len(image) == 3:
            raise ValueError("no picture")
        return image

    ds = shardkit.open(str(tmp_path / "a"))
    with ds.loader(
        ds.plan(8), tensors=False, fill=FILL, decode={"image": decode}, on_error="substitute"
    ) as loader:
        for batch in loader:
            assert not any(image is not None and len(image) == 3 for image in batch["image"])
            check_batch(batch, 1)
    plan = ds.plan(8)
    with (
        ds.loader(plan, decode={"image": decode}) as loader,
        pytest.raises(RunError, match="does not decode"),
    ):
        list(loader)


def test_fields_are_asked_for_alone_and_through_a_transform(tmp_path: Path) -> None:
    ds = write(str(tmp_path / "a"), "arrow", "none", 20, 40)
    plan = ds.plan(8)
    with ds.loader(plan, tensors=False, fields=["id", "name"]) as loader:
        for batch in loader:
            assert set(batch) == {"id", "name", "step", "samples"}
            assert list(batch.valid) == ["name"]
            names = [partial(n, 20).get("name") for n in batch["id"].tolist()]
            assert batch["name"] == names
    seen: list[set[str]] = []

    def keep(row: dict[str, Any], _: Any) -> dict[str, Any]:
        seen.append(set(row))
        return {"id": row["id"], "name": row["name"]}

    with ds.loader(plan, tensors=False, transform=keep) as loader:
        for batch in loader:
            assert [has(n, "age", 20) for n in batch["id"].tolist()] == batch.valid["age"].tolist()
    assert all(one == set(SCHEMA) for one in seen)


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    ds = write(str(tmp_path / "a"), "arrow", "none", 1, 16)
    plan = ds.plan(8)
    for fill, message in (
        ({"id": 0}, "'id' is no optional field"),
        ({"tokens": [1]}, "'tokens' is no optional field that"),
        ({"age": 0.5}, "not of type int64"),
        ({"vector": [1, 2]}, "not of type float32"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            ds.loader(plan, fill=fill)
    with pytest.raises(ConfigurationError, match="stratify or split by 'name': it is of type str\\?"):
        shardkit.create(str(tmp_path / "b"), SCHEMA, stratify="name")
    with pytest.raises(SampleError, match=r"key 'k1': no field has a value.*--format arrow"):
        write_shard([{"name": "x"}, {}], Schema.parse({"name": "str?"}), format="tar", compression="none", block_rows=2,
                    keys=["k0", "k1"])  # fmt: skip
    with pytest.raises(SampleError, match=r"cannot take NoneType None: .*of type int64\?"):
        Schema.parse({"id": "int64"}).encode({"id": None}, where="here")


@pytest.mark.parametrize("text", ["int64??", "?", "int64?[3]"])
def test_other_question_marks_are_no_types(text: str) -> None:
    with pytest.raises(SchemaError, match="is unknown"):
        FieldType.parse(text)


def test_an_index_with_a_size_where_there_is_no_member_is_refused() -> None:
    schema = Schema.parse({"id": "int64", "name": "str?"})
    _, index = write_shard(
        [{"id": 1}, {"id": 2, "name": "x"}], schema, format="tar", compression="none", block_rows=2
    )
    assert index.field_offset is not None
    assert index.field_size is not None
    assert index.field_offset[0, 1] == index.field_size[0, 1] == 0
    data = {name: getattr(index, name) for name in index.__dataclass_fields__}
    size = index.field_size.copy()
    size[0, 1] = 3
    with pytest.raises(FormatError, match="no member has a size"):
        ShardIndex(**{**data, "field_size": size})
