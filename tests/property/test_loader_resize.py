"""A loader that is resized is the loader that a restart would have made, at any step and in any order of worlds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.errors import ConfigurationError
from shardkit.ledger import read_journal

STEPS, BATCH, LANES = 9, 12, 6


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    root = tmp_path_factory.mktemp("data") / "numbers"
    with shardkit.create(str(root), schema={"x": "int64[8]", "b": "bytes"}, block_size="1KiB") as writer:
        for n in range(STEPS * BATCH):
            writer.add({"x": np.arange(n, n + 8), "b": bytes(n % 5)})
    return shardkit.open(str(root))


def _plan(ds: shardkit.Dataset) -> Any:
    return ds.plan(global_batch=BATCH, lanes=LANES, seed=3)


def _facts(batch: Any) -> tuple[Any, ...]:
    return (
        batch.step,
        batch.weight,
        batch.samples.tolist(),
        batch.slots.tolist(),
        batch["x"].tolist(),
        batch["b"],
    )


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_sequence_of_sizes_gives_what_restarts_would_have_given(
    ds: shardkit.Dataset, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    plan = _plan(ds)
    run = tmp_path_factory.mktemp("run") / "run" if data.draw(st.booleans()) else None
    options: dict[str, Any] = {
        "tensors": False,
        "uneven": True,
        "prefetch": data.draw(st.sampled_from([None, 0, 2])),
        "transform": data.draw(st.sampled_from([None, _noise])),
    }

    def make(rank: int, world: int) -> Any:
        return ds.loader(plan, rank=rank, world=world, run=run, **options)

    worlds = data.draw(st.lists(st.integers(1, LANES), min_size=1, max_size=5))
    loaders: list[Any] = [make(rank, worlds[0]) for rank in range(worlds[0])]
    loops: list[Any] = [iter(loader) for loader in loaders]
    step = 0
    for world in worlds:
        state = loaders[0].state_dict()
        order = data.draw(st.permutations(range(len(loaders))))
        loaders, loops = [loaders[i] for i in order], [loops[i] for i in order]
        for loader in loaders[world:]:
            loader.close()
        del loaders[world:], loops[world:]
        for rank, loader in enumerate(loaders):
            loader.resize(rank=rank, world=world)
        for rank in range(len(loaders), world):
            loaders.append(make(rank, world))
            loaders[-1].load_state_dict(state)
            loops.append(iter(loaders[-1]))
        count = data.draw(st.integers(0, 4))
        for rank, loader in enumerate(loaders):
            with ds.loader(plan, rank=rank, world=world, **options) as restarted:
                restarted.load_state_dict(state)
                expected = iter(restarted)
                for offset in range(count):
                    batch = next(loops[rank], None)
                    if batch is None:  # the epoch is over
                        loops[rank] = iter(loader)
                        batch = next(loops[rank])
                    ours = next(expected, None)
                    if ours is None:
                        expected = iter(restarted)
                        ours = next(expected)
                    assert _facts(batch) == _facts(ours)
                    assert batch.step == step + offset
                assert loader.state_dict() == restarted.state_dict()
                assert loader.lanes == restarted.lanes
        step += count
    for loader in loaders:
        loader.close()
    if run is not None:
        cells = sorted(
            (one.step, one.lane) for path in (run / "journal").iterdir() for one in read_journal(path)
        )
        assert cells == [(at, lane) for at in range(step) for lane in range(LANES)]


def _noise(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "x": sample["x"] + rng.integers(1000)}


def test_what_cannot_be_shared_is_refused_and_changes_nothing(ds: shardkit.Dataset, tmp_path: Path) -> None:
    plan = _plan(ds)
    with ds.loader(plan, tensors=False) as loader:
        loop = iter(loader)
        next(loop)
        for rank, world, message in (
            (0, 7, "cannot share"),
            (0, 4, "divide evenly"),
            (2, 2, "impossible"),
            (0.5, 2, "whole"),
        ):
            with pytest.raises(ConfigurationError, match=message):
                loader.resize(rank=rank, world=world)  # type: ignore[arg-type]
        assert [batch.step for batch in loop] == list(range(1, STEPS))
        assert loader.lanes == list(range(LANES))
    chosen = ds.loader(plan, tensors=False, lanes=[0, 1], rank=0, world=1)
    with pytest.raises(ConfigurationError, match="lanes= decides"):
        chosen.resize(rank=0, world=2)
