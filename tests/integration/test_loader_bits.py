"""The bits of every field are the same for 1, 2 and 4 ranks, 1 to 8 threads and any number of workers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import shardkit
from tests.drills import DRILLS

ROWS, BATCH, LANES = 400, 40, 8


@pytest.fixture(scope="module", params=["tar", "arrow"])
def ds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    root = str(tmp_path_factory.mktemp("data") / request.param)
    schema = {
        "image": "uint8[6,5,3]",
        "tokens": "int32[*]",
        "text": "str",
        "blob": "bytes",
        "score": "float32",
    }
    compression = "zstd" if request.param == "arrow" else "none"
    rng = np.random.default_rng(0)
    with shardkit.create(root, schema=schema, format=request.param, compression=compression, block_size="24KiB",
                         shard_size="96KiB") as writer:  # fmt: skip
        for n in range(ROWS):
            writer.add({"image": rng.integers(0, 256, (6, 5, 3), dtype=np.uint8), "text": "é" * (n % 5) + str(n),
                        "tokens": rng.integers(-9, 9, n % 7, dtype=np.int32), "score": np.float32(rng.normal()),
                        "blob": rng.bytes(int(rng.integers(0, 9000)))})  # fmt: skip
    return shardkit.open(root)


def augment(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Draws as much as it likes, from a generator that nobody else draws from."""
    top, left = rng.integers(3), rng.integers(2)
    crop = sample["image"][top : top + 4, left : left + 4]
    crop = crop[:, ::-1] if rng.random() < 0.5 else crop
    noise = rng.normal(size=crop.shape).astype(np.float32)
    return {**sample, "image": crop + noise, "gain": rng.random(), "tokens": np.asarray(sample["tokens"])}


def _rows(batches: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Step, place, sample, and the bytes of each field, row by row."""
    rows: list[tuple[Any, ...]] = []
    for batch in batches:
        fields = [_parts(batch[name]) for name in sorted(batch) if name not in ("step", "samples")]
        slots, samples = np.asarray(batch.slots).tolist(), np.asarray(batch.samples).tolist()
        rows += zip([batch.step] * len(slots), slots, samples, *fields, strict=True)
    return rows


def _parts(column: Any) -> list[bytes]:
    if isinstance(column, tuple):
        values, borders = (np.asarray(part) for part in column)
        return [values[a:b].tobytes() for a, b in pairwise(borders)]
    if isinstance(column, list):
        return [part if isinstance(part, bytes) else part.encode() if isinstance(part, str) else
                np.asarray(part).tobytes() for part in column]  # fmt: skip
    return [row.tobytes() for row in np.asarray(column)]


@pytest.mark.drill
@pytest.mark.parametrize("transform", [None, augment], ids=["as stored", "augmented"])
def test_ranks_threads_and_prefetch_change_no_bit(ds: shardkit.Dataset, transform: Any) -> None:
    plan = ds.plan(global_batch=BATCH, lanes=LANES, seed=3)
    whole = sorted(_rows(ds.loader(plan, tensors=False, transform=transform, threads=1)))
    assert len(whole) == ROWS
    if transform is not None:
        assert len({row[4] for row in whole}) == ROWS  # no two samples drew the same
    settings = [(world, threads) for world in (1, 2, 4) for threads in (range(1, 9) if DRILLS else (1, 3, 8))]
    for number, (world, threads) in enumerate(settings):
        got: list[tuple[Any, ...]] = []
        for rank in range(world):
            with ds.loader(
                plan, rank=rank, world=world, tensors=False, transform=transform, threads=threads,
                prefetch=(None, 0, 1, 5)[number % 4], memory=("2GiB", None)[number % 2],
            ) as loader:  # fmt: skip
                got += _rows(loader)
        assert sorted(got) == whole, (world, threads)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("workers", [0, 2, 5])
def test_data_loader_workers_change_no_bit(ds: shardkit.Dataset, workers: int) -> None:
    pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    import shardkit.torch

    plan = ds.plan(global_batch=BATCH, lanes=LANES, seed=3)
    whole = _rows(ds.loader(plan, tensors=True, transform=augment, threads=1))
    data = shardkit.torch.dataset(ds, plan, transform=augment)
    assert _rows(DataLoader(data, batch_size=None, num_workers=workers)) == whole
