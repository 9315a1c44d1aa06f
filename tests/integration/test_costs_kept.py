"""Costs of rows beside the shards: what they are, and that they last as long as the version does."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.dataset import costs as costs_module
from shardkit.dataset.costs import costs_of
from shardkit.errors import IntegrityError, UsageError
from shardkit.manifest import Manifest
from shardkit.plan import encode_costs
from shardkit.stores.store import object_name
from tests.command_line import call
from tests.flips import flip

ROWS = 300
EXPRESSIONS = ["bytes(text)**2", "len(tokens)", "length * 3 + 1", "squares(borders)", "bytes(count)"]
SCHEMA = {"text": "str", "tokens": "int16[*]", "borders": "int32[*]", "length": "uint32", "count": "int64?"}


def sample(number: int) -> dict[str, object]:
    tokens = np.arange(number * 37 % 101, dtype=np.int16)
    borders = np.cumsum(np.arange(number % 7, dtype=np.int32) * 3)
    count = None if number % 3 else number
    return {
        "text": "é" * (number % 89),
        "tokens": tokens,
        "borders": borders,
        "length": number * number % 977,
        "count": count,
    }


def expected(number: int) -> list[int]:
    row = sample(number)
    borders = np.asarray(row["borders"]).tolist()
    text, tokens = str(row["text"]).encode(), np.asarray(row["tokens"])
    costs = [
        len(text) ** 2,
        len(tokens),
        int(str(row["length"])) * 3 + 1,
        sum((b - a) ** 2 for a, b in itertools.pairwise(borders)),
        8,
    ]
    return [max(1, cost) for cost in costs]


def make(
    root: Path, numbers: range, *, format: str = "tar", cost: list[str] | None = None, append: bool = False
) -> None:
    with shardkit.create(
        str(root), schema=SCHEMA, format=format, shard_size="8KiB", block_size="1KiB", append=append,
        cost=EXPRESSIONS if cost is None else cost,
    ) as writer:  # fmt: skip
        for number in numbers:
            writer.add(sample(number), key=f"n{number:04}")


def check(url: str, expressions: list[str] | None = None) -> None:
    """Each sample's costs are those of the sample of that key."""
    ds = shardkit.open(url)
    number_of = {f"n{number:04}": number for number in range(2 * ROWS)}
    numbers = [number_of[ds.key(at)] for at in range(len(ds))]
    for place, text in enumerate(EXPRESSIONS):
        if expressions is None or text in expressions:
            found = costs_of(ds, text).codes[np.arange(len(ds))]
            wanted = encode_costs(np.array([expected(number)[place] for number in numbers]))
            assert np.array_equal(found, wanted), text


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs_module, "PIECE_ROWS", 60)
    monkeypatch.setattr(costs_module, "KEPT_BYTES", 150)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("format", ["tar", "arrow"])
def test_costs_of_any_format_are_those_of_the_samples(tmp_path: Path, format: str) -> None:
    make(tmp_path / "d", range(ROWS), format=format)
    ds = shardkit.open(str(tmp_path / "d"))
    assert [costs.expression for costs in ds.manifest.costs] == sorted(
        "".join(one.split()) for one in EXPRESSIONS
    )
    assert len(ds.manifest.costs[0].pieces) > 3
    check(str(tmp_path / "d"))
    plan = ds.plan(24, lanes=4, cost="length*3+1")
    assert np.array_equal(pickle.loads(pickle.dumps(plan)).steps(0, 9), plan.steps(0, 9))
    assert Manifest.from_bytes(ds.manifest.to_bytes()) == ds.manifest
    odd = ds.select(rows=list(range(1, ROWS, 2)))
    at = np.arange(len(odd))
    assert np.array_equal(
        costs_of(odd, "len(tokens)").codes[at], costs_of(ds, "len(tokens)").codes[2 * at + 1]
    )


@pytest.mark.usefixtures("small_pieces")
def test_a_version_that_lies_there_gets_costs_without_touching_a_shard(tmp_path: Path) -> None:
    root = tmp_path / "d"
    make(root, range(ROWS), cost=[], format="arrow")
    before = shardkit.open(str(root)).manifest
    with pytest.raises(UsageError, match=r"rebuild .*d --cost 'length\*\*2' \(it writes no shard\)"):
        shardkit.open(str(root)).plan(24, cost="length **2")
    with pytest.raises(UsageError, match="text is of str, expected one integer"):
        shardkit.open(str(root)).plan(24, cost="text")
    assert call("rebuild", str(root), "--cost", "length * 3 + 1", "--cost", "len(tokens)")[0] == 0
    after = shardkit.open(str(root)).manifest
    assert (after.pages, after.parent, after.rows) == (before.pages, before.id, before.rows)
    check(str(root), ["length * 3 + 1", "len(tokens)"])
    assert "len(tokens), length*3+1" in call("show", root)[1]
    assert call("rebuild", str(root), "--cost", "")[0] == 0
    assert shardkit.open(str(root)).manifest.costs == ()


@pytest.mark.usefixtures("small_pieces")
def test_costs_go_with_rows_that_are_appended_and_removed(tmp_path: Path) -> None:
    root = tmp_path / "d"
    make(root, range(200))
    make(root, range(200, ROWS), append=True, cost=[])
    check(str(root))
    keys = tmp_path / "keys.txt"
    keys.write_text("".join(f"n{number:04}\n" for number in [*range(0, 130, 7), 250, 299]))
    assert call("remove", root, "--keys", keys, "--reason", "asked")[0] == 0
    check(str(root))
    with pytest.raises(UsageError, match=r"its cost is .*, that of the new rows \['length'\]"):
        make(root, range(ROWS, ROWS + 9), append=True, cost=["length"])
    assert call("remove", root, "--erase", "--keys", "n0008", "--reason", "asked")[0] == 0
    check(str(root))
    assert call("rebuild", str(root), "--format", "arrow", "--ref", "rows")[0] == 0
    check(f"{root}@rows")
    assert call("merge", f"a={root}@rows", f"b={root}", str(tmp_path / "both"))[0] == 0
    merged = shardkit.open(str(tmp_path / "both"))
    assert len(costs_of(merged, "length*3+1").codes[np.arange(len(merged))]) == len(merged)


def test_costs_are_copied_and_kept_as_long_as_a_version_names_them(tmp_path: Path) -> None:
    root, mirror = tmp_path / "d", tmp_path / "mirror"
    make(root, range(ROWS), cost=["length"])
    assert call("place", root, "--location", f"mirror={mirror},domain=b", "--copies", 2)[0] == 0
    assert call("replicate", root)[0] == 0
    ((piece,),) = (costs.pieces for costs in shardkit.open(str(root)).manifest.costs)
    copies = [place / object_name(piece.digest, "cost") for place in (root, mirror)]
    collect = ["gc", str(root), "--delete", "--grace", "0s", "--history", "0s"]
    assert [call(*collect)[0], call(*collect)[0]] == [0, 0]
    assert all(copy.exists() for copy in copies)
    assert call("verify", str(root))[0] == 0
    copies[0].unlink()
    assert call("verify", str(root))[0] != 0
    plan = shardkit.open(str(root)).plan(24, cost="length")  # from the mirror
    assert call("scrub", str(root), "--repair")[0] == 0
    assert copies[0].exists()
    assert shardkit.open(str(root)).plan(24, cost="length").digest == plan.digest
    assert call("rebuild", str(root), "--cost", "")[0] == 0
    assert [call(*collect)[0], call(*collect)[0]] == [0, 0]
    assert not any(copy.exists() for copy in copies)


def test_bytes_that_are_wrong_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "d"
    make(root, range(ROWS), cost=["length"])
    ((piece,),) = (costs.pieces for costs in shardkit.open(str(root)).manifest.costs)
    path = root / object_name(piece.digest, "cost")
    flip(path, -1)
    with pytest.raises(IntegrityError, match=r"\.cost"):
        shardkit.open(str(root)).plan(24, cost="length")
