"""Rows of several documents: packed fields and their borders."""

from __future__ import annotations

import io
import json
import re
import shlex
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardkit
from shardkit.errors import FormatError, SampleError, SchemaError, UsageError
from shardkit.formats import FieldType
from shardkit.formats.schema import decode_payload, encode_value
from shardkit.loader.packed_rows import find_documents
from shardkit_trainer.configuration import ModelConfig
from shardkit_trainer.tasks import IGNORED, LanguageTask
from tests.command_line import call

# ---- Arrays of varying shape and lists: their bytes, what damage does to them, and their ways in and out


SCHEMA = {
    "picture": "uint8[*,*,3]",
    "sound": "float32[*,80]?",
    "words": "str[*]",
    "files": "bytes[*]?",
    "number": "int64",
}


def rows(count: int = 40) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    return [
        {
            "picture": random.integers(0, 255, (i % 4, 5 + i % 3, 3)).astype(np.uint8),
            "sound": None if i % 5 == 0 else random.random((i % 4, 80)).astype(np.float32),
            "words": ["ä" * k for k in range(i % 4)],
            "files": None if i % 7 == 0 else [b"x" * k for k in range(i % 3)],
            "number": i,
        }
        for i in range(count)
    ]


def same(found: object, expected: object) -> bool:
    if isinstance(found, np.ndarray) and isinstance(expected, np.ndarray):
        return (
            found.shape == expected.shape
            and found.dtype == expected.dtype
            and bool((found == expected).all())
        )
    return found == expected


@pytest.mark.parametrize("text", ["uint8[*,*,3]", "float32[*,80]?", "bool[2,*]", "str[*]", "bytes[*]?"])
def test_types_are_spelled_one_way(text: str) -> None:
    assert str(FieldType.parse(text)) == text
    assert FieldType.parse(text).is_packed
    assert FieldType.parse(text).numpy_dtype == np.uint8


@pytest.mark.parametrize(
    "text", ["str[3]", "bytes[*,*]", "json[*]", "uint8[*,0]", "uint8[*,03]", "uint8[*,]"]
)
def test_other_types_are_refused(text: str) -> None:
    with pytest.raises(SchemaError):
        FieldType.parse(text)


def test_payloads_are_these_bytes() -> None:
    """Stored data depends on them: an array is what `numpy.save` writes, a list says its sizes first."""
    array = np.arange(6, dtype="<f4").reshape(2, 3)
    file = io.BytesIO()
    np.save(file, array)
    payload = encode_value(FieldType.parse("float32[*,*]"), array, "here", "x")
    assert payload == file.getvalue()
    assert encode_value(FieldType.parse("str[*]"), ["a", "ü"], "here", "x") == (
        b"\2\0\0\0\0\0\0\0" + b"\1\0\0\0\0\0\0\0" + b"\2\0\0\0\0\0\0\0" + "aü".encode()
    )


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("uint8[*,*,3]", np.zeros((2, 2, 4), np.uint8)),
        ("uint8[*,*,3]", np.zeros((2, 2), np.uint8)),
        ("float32[*,*]", [[1.0, 2.0], [3.0]]),
        ("uint8[*,*]", [[256]]),
        ("float32[*,*]", np.zeros((70_000, 0), np.float32)),
        ("str[*]", "text"),
        ("str[*]", ["a", None]),
        ("bytes[*]", ["a"]),
    ],
)
def test_values_of_other_types_are_refused(kind: str, value: object) -> None:
    with pytest.raises(SampleError, match="'x'"):
        encode_value(FieldType.parse(kind), value, "here", "x")


VALUES: list[tuple[str, object]] = [
    ("uint8[*,*,3]", np.arange(24, dtype=np.uint8).reshape(2, 4, 3)),
    ("float64[*,2]", np.zeros((0, 2))),
    ("bool[*,*]", np.ones((3, 2), np.bool_)),
    ("str[*]", ["one", "", "drei €"]),
    ("bytes[*]", [b"\0" * 9, b"1"]),
]


@given(
    case=st.sampled_from(VALUES),
    cut=st.integers(0, 400),
    flips=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 255)), max_size=3),
    added=st.binary(max_size=9),
)
def test_damaged_payloads_are_refused_or_of_the_type(
    case: tuple[str, object], cut: int, flips: list[tuple[int, int]], added: bytes
) -> None:
    kind = FieldType.parse(case[0])
    damaged = bytearray(encode_value(kind, case[1], "here", "x"))
    for place, bits in flips:
        damaged[place % len(damaged)] ^= bits
    payload = bytes(damaged[: len(damaged) - cut]) + added if cut < len(damaged) else added
    try:
        value = decode_payload(kind, payload, "x")
    except FormatError:
        return
    assert encode_value(kind, value, "here", "x") == payload


@pytest.mark.parametrize("shape", ["(1099511627776, 1)", "(0, 1099511627776)", "(9, 99999999999)"])
def test_sizes_are_not_believed(shape: str) -> None:
    kind = FieldType.parse("uint8[*,*]")
    true = encode_value(kind, np.zeros((2, 2), np.uint8), "here", "x")
    start = true.index(b"(2, 2), }")
    lie = f"{shape}, }}".encode()
    header = (true[:start] + lie + true[start + 9 : 127])[:127].ljust(127) + b"\n"
    for kind_, payload in (
        (kind, header),
        (kind, header + b"1234"),
        (FieldType.parse("str[*]"), (2**60).to_bytes(8, "little") * 2),
        (FieldType.parse("bytes[*]"), (1).to_bytes(8, "little") + (2**63).to_bytes(8, "little")),
    ):
        tracemalloc.start()
        try:
            value = decode_payload(kind_, payload, "x")
            assert isinstance(value, np.ndarray)
            assert value.size == 0
        except FormatError:
            pass
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


@pytest.mark.parametrize(("form", "compression"), [("tar", "none"), ("arrow", "zstd:3"), ("arrow", "none")])
def test_a_dataset_of_them(tmp_path: Path, form: str, compression: str) -> None:
    made = rows()
    with shardkit.create(tmp_path / "d", schema=SCHEMA, format=form, compression=compression) as writer:
        for row in made:
            writer.add(row)
    ds = shardkit.open(tmp_path / "d")
    for sample in ds:
        assert all(same(value, made[sample["number"]][name]) for name, value in sample.items())
    for record in ds.to_arrow().to_pylist():
        row = made[record["number"]]
        assert record["words"] == row["words"]
        assert record["files"] == row["files"]
        assert record["picture"] == row["picture"].tolist()
        assert record["sound"] == (None if row["sound"] is None else row["sound"].tolist())
    plan = ds.plan(global_batch=8, seed=1)
    seen = 0
    with ds.loader(plan, tensors=False) as loader:
        for batch in loader:
            values, offsets, shapes = batch["picture"]
            assert shapes.shape == (8, 3)
            assert values.dtype == np.uint8
            sounds, borders, sizes = batch["sound"]
            for place, number in enumerate(batch["number"].tolist()):
                row = made[number]
                assert same(
                    values[offsets[place] : offsets[place + 1]].reshape(shapes[place]), row["picture"]
                )
                assert batch["words"][place] == row["words"]
                assert batch["files"][place] == row["files"]
                assert batch.valid["sound"][place] == (row["sound"] is not None)
                found = sounds[borders[place] : borders[place + 1]].reshape(sizes[place])
                assert same(found, np.zeros((0, 80), np.float32) if row["sound"] is None else row["sound"])
            seen += 1
    assert seen == len(made) // 8


def test_transforms_get_arrays_in_their_shapes_and_each_item_is_decoded(tmp_path: Path) -> None:
    made = rows()
    with shardkit.create(tmp_path / "d", schema=SCHEMA) as writer:
        for row in made:
            writer.add(row)
    ds = shardkit.open(tmp_path / "d")
    plan = ds.plan(global_batch=8, seed=1)

    def looked_at(row: dict[str, Any], _: object) -> dict[str, Any]:
        assert same(row["picture"], made[row["number"]]["picture"])
        return {"sizes": row["files"], "number": row["number"]}

    with ds.loader(plan, decode={"files": len}, transform=looked_at, tensors=False) as loader:
        batch = next(iter(loader))
        for sizes, number in zip(batch["sizes"], batch["number"].tolist(), strict=True):
            files = made[number]["files"]
            assert sizes == (None if files is None else list(map(len, files)))
    with pytest.raises(UsageError, match="decode: 'picture' is uint8"):
        ds.loader(plan, decode={"picture": "rgb8"})


def test_a_build_says_how_lists_become_arrays(tmp_path: Path) -> None:
    rows = [
        {"left eye": [[1.5, 2.5]], "ids": [1, 2], "tags": ["a"]},
        {"left eye": [], "ids": [], "tags": []},
        {"left eye": [[3]], "ids": [5], "tags": ["b"]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for form, told in (("parquet", {"left eye"}), ("jsonl", {"left eye", "ids"})):
        _, said = call("build", tmp_path / f"in.{form}", tmp_path / f"plain {form}")
        advice = dict(re.findall(r"note: (.*) is json; (--schema .*) makes an array", said))
        assert advice.keys() == told, said
        flags = [flag for one in advice.values() for flag in shlex.split(one)]
        _, said = call("build", tmp_path / f"in.{form}", tmp_path / form, *flags)
        assert "is json;" not in said
        ds = shardkit.open(tmp_path / form)
        assert sorted(ds[n]["left eye"].tolist() for n in range(3)) == [[], [[1.5, 2.5]], [[3]]]
        assert sorted(ds[n]["ids"].tolist() for n in range(3)) == [[], [1, 2], [5]]


# ---- Packed rows: where documents begin, and a model whose attention stays inside them


ROW = st.lists(st.integers(1, 12), max_size=5)  # lengths of a row's documents


@given(st.lists(ROW, max_size=6), st.integers(0, 9))
def test_documents_are_those_of_a_slow_model(rows: list[list[int]], padding: int) -> None:
    length = max((sum(row) for row in rows), default=0) + padding or 1
    values, offsets = [], [0]
    for row in rows:
        values += [0, *np.cumsum(row, dtype=int).tolist()] if row else []
        offsets.append(len(values))
    found = find_documents(np.array(values, np.int64), np.array(offsets), length)
    starts = []
    for number, row in enumerate(rows):
        pieces = [*row, length - sum(row)] if sum(row) < length else row
        ids = [i for i, piece in enumerate(pieces) for _ in range(piece)]
        positions = [place for piece in pieces for place in range(piece)]
        assert found.document_ids[number].tolist() == ids
        assert found.position_ids[number].tolist() == positions
        starts += [number * length + sum(pieces[:i]) for i in range(len(pieces))]
    assert found.cu_seqlens.tolist() == [*starts, len(rows) * length]
    assert found.cu_seqlens.dtype == np.int32
    assert found.max_seqlen == max(np.diff(found.cu_seqlens).tolist(), default=0)
    mask = found.mask()
    for row, query, key in np.ndindex(mask.shape):
        same = found.document_ids[row, query] == found.document_ids[row, key]
        assert mask[row, query, key] == (same and key <= query)


@pytest.fixture
def dataset(tmp_path: Path) -> shardkit.Dataset:
    schema = {"tokens": "int32[12]", "boundaries": "int32[*]"}
    with shardkit.create(tmp_path / "packed", schema, format="arrow", shuffle=False) as writer:
        for number in range(8):
            tokens = (np.arange(12, dtype=np.int32) * 7 + number) % 50
            writer.add({"tokens": tokens, "boundaries": np.array([0, 5, 9], np.int32)})
    return shardkit.open(tmp_path / "packed")


@pytest.mark.parametrize("outside", [-1, 13])
def test_a_boundary_outside_of_its_row_is_refused(tmp_path: Path, outside: int) -> None:
    schema = {"tokens": "int32[12]", "boundaries": "int32[*]"}
    with shardkit.create(tmp_path / "packed", schema, format="arrow", shuffle=False) as writer:
        for number in range(8):
            found = [0, 12] if number != 5 else [outside] if outside < 0 else [0, outside]
            writer.add({"tokens": np.zeros(12, np.int32), "boundaries": np.array(found, np.int32)})
    dataset = shardkit.open(tmp_path / "packed")
    with dataset.loader(dataset.plan(global_batch=8, lanes=1), tensors=False) as loader:
        batch = next(iter(loader))
    with pytest.raises(
        SampleError, match=rf"sample 5: boundaries holds {outside}, and its row has 12 tokens"
    ):
        batch.documents("tokens")


@pytest.mark.parametrize("tensors", [False, True])
def test_a_batch_tells_its_documents(dataset: shardkit.Dataset, tensors: bool) -> None:
    with dataset.loader(dataset.plan(global_batch=4, lanes=1), tensors=tensors) as loader:
        batch = next(iter(loader))
    found = batch.documents("tokens")
    assert isinstance(found.cu_seqlens, torch.Tensor if tensors else np.ndarray)
    assert found.cu_seqlens.tolist() == [12 * row + place for row in range(4) for place in (0, 5, 9)] + [48]
    assert found.max_seqlen == 5
    assert found.position_ids[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert tuple(found.mask().shape) == (4, 12, 12)
    assert batch.documents(boundaries="none").cu_seqlens.tolist() == [0, 12, 24, 36, 48]
    with pytest.raises(UsageError, match="rows of tokens"):
        batch.documents("boundaries")


def test_the_built_in_model_attends_inside_documents_and_takes_whole_rows(dataset: shardkit.Dataset) -> None:
    torch.manual_seed(0)
    task = LanguageTask(ModelConfig(kind="gpt", width=16, heads=2, layers=2, field="tokens"), dataset.schema)
    assert task.context == 12
    assert task.remarks == []
    with dataset.loader(dataset.plan(global_batch=4, lanes=1), tensors=True) as loader:
        batch: Any = next(iter(loader))
    inputs = task.prepare(batch, seed=0)
    # no target crosses the end of a document, and the last token of a row has none
    assert (inputs.tensors["targets"][0] == IGNORED).nonzero().ravel().tolist() == [4, 8, 11]
    assert inputs.valid == 4 * 9
    model = task.model.eval()

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(tokens, inputs.tensors["documents"], inputs.tensors["positions"])
        return found

    before = inputs.tensors["tokens"]
    after = before.clone()
    after[:, 2] = (after[:, 2] + 1) % 50  # of the first document
    moved = (logits(before) - logits(after)).abs().amax(dim=(0, 2)) > 0
    assert moved.tolist() == [False, False, True, True, True] + [False] * 7
    # a document gives the same logits wherever it stands in a row
    alone = before[:1, 5:9]
    zero = torch.zeros_like(alone)
    with torch.no_grad():
        found = model(alone, zero, torch.arange(4)[None])
    torch.testing.assert_close(found[0], logits(before)[0, 5:9], atol=1e-5, rtol=1e-5)


def test_a_shorter_context_is_said(dataset: shardkit.Dataset) -> None:
    config = ModelConfig(kind="gpt", width=16, heads=2, layers=1, field="tokens", context=8)
    task = LanguageTask(config, dataset.schema)
    assert "each row of 12 tokens gives one random crop of 8" in task.remarks[0]
    with dataset.loader(dataset.plan(global_batch=4, lanes=1), tensors=True) as loader:
        inputs = task.prepare(next(iter(loader)), seed=3)
    assert inputs.tensors["tokens"].shape == (4, 8)
    assert inputs.valid < 4 * 8
