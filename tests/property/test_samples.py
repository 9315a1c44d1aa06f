"""Whatever way samples are asked for, they are those of ``ds[number]``, bit by bit, and each block is read once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.errors import IntegrityError, NotFoundError, UsageError
from shardkit.formats import Schema
from tests.flips import flip
from tests.format_conformance import EXAMPLE_SCHEMA, example_samples

COUNT = 90
KINDS = ["tar none", "arrow none", "arrow zstd", "merged", "view", "view of merged"]


def write(root: Path, *, format: str, compression: str, first: int = 0) -> str:
    with shardkit.create(
        root, EXAMPLE_SCHEMA, stratify="flag", format=format, compression=compression,
        shard_size="16KiB", block_size="3KiB",
    ) as writer:  # fmt: skip
        for number, sample in enumerate(example_samples(COUNT)):
            writer.add(sample, key=f"{first + number:04}")
    return str(root)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, shardkit.Dataset]:
    base = tmp_path_factory.mktemp("samples")
    roots = {}
    for number, kind in enumerate(KINDS[:3]):
        format_, compression = kind.split()
        roots[kind] = write(base / str(number), format=format_, compression=compression, first=1000 * number)
    found = {kind: shardkit.open(root) for kind, root in roots.items()}
    found["merged"] = shardkit.open({"a": roots["tar none"], "b": roots["arrow zstd"]})
    found["view"] = found["arrow none"].select(where="count == 0 or label == -7")
    found["view of merged"] = found["merged"].select(rows=range(5, 2 * COUNT, 7))
    return found


@pytest.fixture(params=KINDS)
def ds(request: pytest.FixtureRequest, datasets: dict[str, shardkit.Dataset]) -> shardkit.Dataset:
    return datasets[request.param]


def payloads(sample: dict[str, Any], schema: Schema = EXAMPLE_SCHEMA) -> tuple[bytes, ...]:
    """Canonical bytes: NaN equals itself, and 0.0 is not -0.0."""
    return schema.encode(sample, where="test")


def one_by_one(ds: shardkit.Dataset) -> list[tuple[bytes, ...]]:
    return [payloads(ds[number]) for number in range(len(ds))]


def rows_of(batch: Any, schema: Schema = EXAMPLE_SCHEMA) -> Iterator[tuple[bytes, ...]]:
    """Rows of an Arrow table as pyarrow reads them."""
    for row in batch.to_pylist():
        yield payloads(
            {name: json.loads(row[name]) if str(schema[name]) == "json" else row[name] for name in row},
            schema,
        )


def test_loops_and_tables_give_the_same_samples(ds: shardkit.Dataset) -> None:
    expected = one_by_one(ds)
    assert [payloads(sample) for sample in ds] == expected
    assert [payloads(sample) for sample in ds[:]] == expected
    assert [payloads(sample) for sample in ds.head(7)] == expected[:7]
    assert [payloads(sample) for sample in ds.head(10**6)] == expected
    table = ds.to_arrow()
    table.validate(full=True)
    assert list(rows_of(table)) == expected
    for size in (1, 7, len(ds), 1024):
        batches = list(ds.iter_arrow(batch_rows=size))
        assert [batch.num_rows for batch in batches[:-1]] == [size] * (len(batches) - 1)
        assert 1 <= batches[-1].num_rows <= size
        assert [row for batch in batches for row in rows_of(batch)] == expected
    some = Schema({name: EXAMPLE_SCHEMA[name] for name in ("tokens", "label")})
    assert list(rows_of(ds.to_arrow(fields=["tokens", "label"]), some)) == [
        payloads({"tokens": ds[number]["tokens"], "label": ds[number]["label"]}, some)
        for number in range(len(ds))
    ]


@pytest.fixture(scope="module")
def plain(datasets: dict[str, shardkit.Dataset]) -> dict[str, list[tuple[bytes, ...]]]:
    return {kind: one_by_one(datasets[kind]) for kind in ("tar none", "merged", "view")}


numbers = st.integers(-3 * COUNT, 3 * COUNT)


@pytest.mark.slow
@settings(max_examples=40)
@given(data=st.data())
def test_slices_and_lists_give_the_same_samples(
    datasets: dict[str, shardkit.Dataset], plain: dict[str, list[tuple[bytes, ...]]], data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(sorted(plain)))
    ds, expected = datasets[kind], plain[kind]

    def got(wanted: Any) -> list[Any]:
        return [payloads(sample) for sample in ds[wanted]]

    ends = st.none() | numbers
    run = slice(data.draw(ends), data.draw(ends), data.draw(st.none() | st.integers(-5, 5).filter(bool)))
    assert got(run) == expected[run]
    some = data.draw(st.lists(st.integers(-len(ds), len(ds) - 1), max_size=12))
    for wanted in (some, np.array(some, np.int32), [np.int64(one) for one in some]):
        assert got(wanted) == [expected[one] for one in some]
    assert got(range(len(ds) - 1, -1, -3)) == expected[::-3]


def test_each_block_is_read_once(ds: shardkit.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []
    really = ds.reader.read

    def counted(shard: int, block: int, *args: Any, **settings: Any) -> Any:
        read.append((shard, block))
        return really(shard, block, *args, **settings)

    needed = {ds.rows.shard_of_block(one) for one in ds.rows.locate(np.arange(len(ds))).block.tolist()}
    assert len(needed) > 3
    monkeypatch.setattr(ds.reader, "read", counted)
    ways: list[Callable[[], object]] = [
        lambda: list(ds),
        lambda: ds[::-1],
        lambda: ds[[*range(len(ds))] * 2],
        lambda: ds.to_arrow(),
        lambda: list(ds.iter_arrow(batch_rows=5)),
        lambda: ds.sample(len(ds)),
    ]
    for way in ways:
        read.clear()
        way()
        assert sorted(read) == sorted(needed)
    read.clear()
    next(iter(ds))
    ds.iter_arrow(batch_rows=1).read_next_batch()
    assert len(read) == 2


def test_samples_are_their_caller_s_own(datasets: dict[str, shardkit.Dataset]) -> None:
    ds = datasets["arrow none"]
    first, second = ds[[3, 3]]
    first["pixels"][:] = 0
    first["label"] = "mine"
    assert payloads(second) == payloads(ds[3])


def test_random_samples_depend_on_version_and_seed_alone(datasets: dict[str, shardkit.Dataset]) -> None:
    one = datasets["tar none"]
    keys = {payloads(one[number]): number for number in range(len(one))}
    drawn = [keys[payloads(sample)] for sample in one.sample(20, seed=0)]
    assert len(set(drawn)) == 20
    assert drawn[:5] == GOLDEN
    assert [
        keys[payloads(sample)] for sample in shardkit.open(one.repository.url).sample(5, seed=0)
    ] == drawn[:5]
    assert [keys[payloads(sample)] for sample in one.sample(20, seed=1)] != drawn
    everything = sorted(keys[payloads(sample)] for sample in one.sample(len(one), seed=3))
    assert everything == list(range(len(one)))
    assert one.sample(0) == []
    for wrong in (len(one) + 1, -1, 1.5, True):
        with pytest.raises(UsageError, match="sample"):
            one.sample(wrong)  # type: ignore[arg-type]


GOLDEN = [47, 52, 0, 10, 81]
"""Sample numbers; they never change."""


@pytest.mark.parametrize(
    ("wanted", "advice"),
    [
        ("000", "find ROOT --field key"),
        (1.7, "expected a sample number"),
        (np.float64(1), "expected a sample number"),
        (True, "flatnonzero"),
        (np.bool_(True), "flatnonzero"),
        ([True, False], "flatnonzero"),
        (np.array([True, False]), "flatnonzero"),
        ((3, 5), r"ds\[\[3, 5, 8\]\]"),
        ([1, "a"], "find ROOT --field key"),
        ([1.0], "expected a sample number"),
        (np.array([[1]]), "expected a sample number"),
        (slice("a", "b"), "expected a sample number"),
        (slice(None, None, 0), "expected a sample number"),
        (None, "expected a sample number"),
        ({1}, "expected a sample number"),
    ],
)
def test_what_is_no_number_is_refused(
    datasets: dict[str, shardkit.Dataset], wanted: Any, advice: str
) -> None:
    ds = datasets["tar none"]
    with pytest.raises(UsageError, match=advice):
        ds[wanted]
    if not isinstance(wanted, slice | tuple | list | np.ndarray):
        for call in (ds.key, ds.source):
            with pytest.raises(UsageError, match=advice):
                call(wanted)
    if wanted is not None and not isinstance(wanted, tuple):
        with pytest.raises(UsageError, match=advice):
            ds.select(rows=wanted if isinstance(wanted, list | np.ndarray) else [wanted])


def test_a_truth_of_torch_is_no_number(datasets: dict[str, shardkit.Dataset]) -> None:
    """`operator.index` takes it for 1."""
    torch = pytest.importorskip("torch")
    with pytest.raises(UsageError, match="flatnonzero"):
        datasets["tar none"][torch.tensor(True)]


def test_numbers_outside(datasets: dict[str, shardkit.Dataset]) -> None:
    ds = datasets["view"]
    for wanted in (len(ds), -len(ds) - 1, 2**70, [0, len(ds)], [-len(ds) - 1], np.array([2**63], np.uint64),
                   range(3, len(ds) + 1), [2**70]):  # fmt: skip
        with pytest.raises(NotFoundError, match=f"samples 0 to {len(ds) - 1}"):
            ds[wanted]
    assert payloads(ds[-1]) == payloads(ds[len(ds) - 1])
    assert payloads(ds.select(rows=[-1])[0]) == payloads(ds[-1])
    assert ds.key(-1) == ds.key(len(ds) - 1)


@pytest.mark.parametrize("format_", ["tar", "arrow"])
def test_a_damaged_block_reaches_nobody(tmp_path: Path, format_: str) -> None:
    ds = shardkit.open(write(tmp_path, format=format_, compression="none"))
    shard, block = ds.rows.shard_of_block(ds.rows.blocks - 1)
    path = tmp_path / ds.reader.shard_name(shard)
    flip(path, int(ds.reader.index(shard).block_offset[block]) + 200)
    good: list[Any] = []
    with pytest.raises(IntegrityError, match=f"block {block}"):
        good.extend(ds)
    assert 0 < len(good) < len(ds)
    for way in (ds.to_arrow, lambda: list(ds.iter_arrow()), ds.to_polars, lambda: ds[:]):
        with pytest.raises(IntegrityError, match=f"block {block}"):
            way()
