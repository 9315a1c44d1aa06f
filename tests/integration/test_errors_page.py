"""The page of errors speaks of messages that there are: each heading is a part of one that a user's mistake brings."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.errors import ShardkitError
from tests.command_line import call

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
HEADINGS = re.findall(r"(?m)^## (.*)$", PAGE.read_text(encoding="utf-8"))


@pytest.fixture
def ds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> shardkit.Dataset:
    monkeypatch.chdir(tmp_path)
    with shardkit.create("cats", schema={"x": "float32[4]", "label": "int64"}) as writer:
        for number in range(96):
            writer.add({"x": np.full(4, number, np.float32), "label": number % 3})
    return shardkit.open("cats")


def other_state(ds: shardkit.Dataset) -> None:
    with ds.loader(ds.plan(global_batch=32, seed=0), rank=0, world=1) as loader:
        state = loader.state_dict()
    with ds.loader(ds.plan(global_batch=32, seed=1), rank=0, world=1) as loader:
        loader.load_state_dict(state)


def wrong_sample(ds: shardkit.Dataset) -> None:
    with shardkit.create("dogs", schema=ds.schema) as writer:
        writer.add({"x": np.zeros(4, np.float32), "label": "a dog"})


def flipped(ds: shardkit.Dataset) -> None:
    plan = ds.plan(global_batch=32)
    for shard in Path("cats").rglob("*.tar"):
        shard.chmod(0o644)
        shard.write_bytes(bytes(byte ^ 1 for byte in shard.read_bytes()))
    with ds.loader(plan, rank=0, world=1) as loader:
        list(loader)


def said_by_command(*words: str) -> None:
    code, said = call(*words)
    if code:
        raise ShardkitError(said)


def kinds(ds: shardkit.Dataset) -> None:
    Path("mixed").mkdir()
    Path("mixed/a.csv").write_text("a,b\n1,2\n")
    Path("mixed/b.unknown").write_text("?")
    said_by_command("build", "mixed", "data")


MISTAKES: dict[str, Callable[[shardkit.Dataset], object]] = {
    "make no full step of": lambda ds: ds.plan(global_batch=512),
    "expected a divisor of the global batch": lambda ds: ds.plan(global_batch=32, lanes=7),
    "do not divide evenly over": lambda ds: ds.loader(ds.plan(global_batch=32), rank=0, world=3),
    "cannot share": lambda ds: ds.loader(ds.plan(global_batch=32), rank=0, world=1000),
    "this state belongs to other data": other_state,
    "a loader takes a plan": lambda ds: ds.loader(512),  # type: ignore[arg-type]
    "cannot take": wrong_sample,
    "names sha256": lambda ds: shardkit.create("cats", schema={"x": "int8"}),
    "holds files of several kinds": kinds,
    "XXH3 mismatch": flipped,
    "has no ref or tag": lambda ds: shardkit.open("cats@v9"),
    "has neither a ledger": lambda ds: said_by_command("audit", "cats"),
}


@pytest.mark.parametrize("heading", MISTAKES)
def test_a_mistake_brings_the_message(heading: str, ds: shardkit.Dataset) -> None:
    with pytest.raises(ShardkitError, match=re.escape(heading)):
        MISTAKES[heading](ds)


def test_every_heading_is_a_message() -> None:
    assert list(MISTAKES) == HEADINGS
