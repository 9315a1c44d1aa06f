"""Where nobody set a bound, memory is what the windows need: nothing is said of it, and little is read twice."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import shardkit
from tests.command_line import output_of

_SIZES = st.one_of(st.integers(0, 60), st.integers(500, 9000), st.just(200_000), st.just(3_000_000))


def _value(kind: str, number: int, size: int) -> Any:
    start = number.to_bytes(4, "little")
    if kind == "bytes":
        return start + b"x" * size
    return f"{number:08}" + "y" * size if kind == "str" else np.full(1 + size // 8, number)


def _number(kind: str, value: Any) -> int:
    if kind == "bytes":
        return int.from_bytes(value[:4], "little")
    return int(value[:8]) if kind == "str" else int(value[0])


def _rows(kind: str, batch: Any) -> list[Any]:
    if kind != "int64[*]":
        return list(batch["x"])
    values, borders = batch["x"]
    return [values[a:b] for a, b in itertools.pairwise(borders)]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 700),
    sizes=st.lists(_SIZES, min_size=1, max_size=4),
    every=st.integers(5, 60),
    kind=st.sampled_from(["bytes", "str", "int64[*]"]),
    stored=st.sampled_from([("tar", "none"), ("arrow", "none"), ("arrow", "zstd")]),
    block_size=st.sampled_from(["4KiB", "32KiB", "1MiB"]),
    strata=st.integers(1, 5),
    lanes=st.sampled_from([1, 2, 4, 8]),
    world=st.sampled_from([1, 2]),
    shuffle=st.sampled_from(["window", "full", "none"]),
    window_blocks=st.sampled_from([None, 1, 4]),
)
@example(
    320, [30], 5, "str", ("tar", "none"), "1MiB", 4, 4, 2, "window", None
)  # bounds of blocks far above them
def test_no_bound_that_nobody_set_is_passed(
    rows: int, sizes: list[int], every: int, kind: str, stored: tuple[str, str], block_size: str, strata: int,
    lanes: int, world: int, shuffle: Any, window_blocks: int | None,
) -> None:  # fmt: skip
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        root, run = Path(folder) / "data", Path(folder) / "run"
        with shardkit.create(
            root, {"x": kind, "of": "int64"}, stratify="of", format=stored[0], compression=stored[1],
            block_size=block_size, shard_size="1MiB",
        ) as writer:  # fmt: skip
            for number in range(rows):
                size = sizes[number // every % len(sizes)] if not number % every else sizes[0] % 10_000
                writer.add({"x": _value(kind, number, size), "of": number * number % strata})
        dataset = shardkit.open(root)
        plan = dataset.plan(
            global_batch=8, lanes=lanes, remainder="short", shuffle=shuffle, window_blocks=window_blocks
        )
        seen, stats = [], {}
        for rank in range(world):
            if rank >= lanes:
                continue
            with dataset.loader(
                plan, rank=rank, world=min(world, lanes), uneven=True, tensors=False, run=run
            ) as loader:
                seen += [_number(kind, value) for batch in loader for value in _rows(kind, batch)]
                stats = loader.stats()
        assert sorted(seen) == list(range(rows))
        events = run / "events.jsonl"
        said = (
            [json.loads(line)["event"] for line in events.read_text().splitlines()] if events.exists() else []
        )
        assert not {"over_memory", "rereading"} & set(said)
        if shuffle != "full":
            assert stats["block_reloads"] <= max(16, stats["block_loads"] / 2)


def test_a_later_pass_over_a_stratum_is_no_want_of_memory(tmp_path: Path) -> None:
    with shardkit.create(
        tmp_path / "data",
        {"x": "int64[512]", "of": "int64"},
        stratify="of",
        block_size="32KiB",
        shard_size="1MiB",
    ) as writer:
        for number in range(3000):
            writer.add({"x": np.full(512, number), "of": int(number % 3 == 0)})
    dataset = shardkit.open(tmp_path / "data")
    plan = dataset.plan(global_batch=16, lanes=2, weights={"0": 1, "1": 1}, epoch_steps=1500, window_blocks=2)
    with warnings.catch_warnings(), dataset.loader(plan, tensors=False) as loader:
        warnings.simplefilter("error")
        assert sum(len(batch.samples) for batch in loader) == 24000
        stats = loader.stats()
        assert loader.resources is not None
        assert loader.resources.memory.pool.limit < 2 * loader.memory_needed
    assert stats["block_reloads"] > stats["block_loads"] / 2


def test_a_bound_above_what_windows_need_is_not_filled(tmp_path: Path) -> None:
    with shardkit.create(
        tmp_path / "data", {"x": "int64[512]"}, block_size="32KiB", shard_size="1MiB"
    ) as writer:
        for number in range(6000):
            writer.add({"x": np.full(512, number)})
    dataset = shardkit.open(tmp_path / "data")
    plan = dataset.plan(global_batch=16, lanes=2, window_blocks=4)
    with dataset.loader(plan, tensors=False, memory="1GiB") as loader:
        for _ in range(2):
            assert sorted(int(x) for batch in loader for x in batch["x"][:, 0]) == list(range(6000))
        stats, needed = loader.stats(), loader.memory_needed
    assert stats["peak_bytes"] <= needed < dataset.manifest.raw_bytes / 4


def test_a_window_grows_for_a_large_step_up_to_the_bound(tmp_path: Path) -> None:
    with shardkit.create(tmp_path / "data", {"x": "bytes"}, block_size="32KiB", shard_size="8MiB") as writer:
        for number in range(256):
            writer.add({"x": number.to_bytes(2, "little") * (1_000_000 if number == 77 else 4000)})
    dataset = shardkit.open(tmp_path / "data")
    plan = dataset.plan(global_batch=4, lanes=2, window_blocks=2)
    with warnings.catch_warnings(), dataset.loader(plan, tensors=False, memory="64MiB") as loader:
        warnings.simplefilter("error")
        assert sorted(int.from_bytes(x[:2], "little") for batch in loader for x in batch["x"]) == list(
            range(256)
        )
        assert loader.memory_needed < 2_000_000 <= loader.stats()["peak_bytes"] <= 64 << 20


def test_a_window_over_a_network_has_room_for_uneven_blocks_unless_it_is_bounded(tmp_path: Path) -> None:
    root = tmp_path / "data"
    with shardkit.create(root, {"x": "bytes"}, block_size="32KiB", shard_size="1MiB") as writer:
        for number in range(4000):
            writer.add({"x": bytes(number)})

    def share(memory: str | None) -> float:
        """Memory of the window as a share of the need."""
        dataset = shardkit.open(root)
        with dataset.loader(dataset.plan(global_batch=16, lanes=4), tensors=False, memory=memory) as loader:
            next(iter(loader))
            assert loader.resources is not None
            return loader.resources.memory.pool.limit / loader.memory_needed

    assert share(None) == 1
    # a dataset with two locations is not one folder
    output_of("place", root, "--location", f"b={tmp_path / 'b'},domain=b", "--copies", "2")
    assert share(None) == pytest.approx(1.5, abs=0.001)
    bounded = share("64MiB")
    assert share("32MiB") == pytest.approx(bounded / 2)
