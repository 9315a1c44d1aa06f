"""torchtitan gets its microbatches from a plan, and its checkpoints fit any data-parallel degree."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.errors import ConfigurationError, StateError
from shardkit.ledger import read_journal
from tests.servers.serving import free_port

torch = pytest.importorskip("torch")
pytest.importorskip("torchtitan")
from shardkit.integrations.torchtitan import PlanDataLoader  # noqa: E402

ROWS, LENGTH, BATCH, STEPS = 80, 32, 8, 13  # ten steps are an epoch


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows of two documents and padding; the first token of a row is its number."""
    draw = np.random.default_rng(0)
    root = str(tmp_path_factory.mktemp("data") / "tokens")
    schema = {"tokens": f"int32[{LENGTH + 1}]", "boundaries": "int32[*]"}
    with shardkit.create(root, schema=schema, format="arrow", block_size="1KiB") as writer:
        for number in range(ROWS):
            cut, end = int(draw.integers(5, 25)), int(draw.integers(28, LENGTH + 2))
            row = np.zeros(LENGTH + 1, np.int32)
            row[:end] = [number, *draw.integers(1, 2000, end - 1)]
            writer.add({"tokens": row, "boundaries": [0, cut, end]})
    return root


def _loaders(data: str, world: int, local_batch: int, **settings: Any) -> list[Any]:
    """The dataloaders of all ranks, as torchtitan's trainer builds them."""
    config = PlanDataLoader.Config(
        dataset_path=data, global_batch=BATCH, **{"plan": {"lanes": 4, "seed": 3}, **settings}
    )
    return [
        config.build(
            dp_world_size=world, dp_rank=rank, seq_len=LENGTH, local_batch_size=local_batch, tokenizer=None,
            snapshot_every_n_steps=1,
        )
        for rank in range(world)
    ]  # fmt: skip


def _steps(loaders: list[Any], local_batch: int, count: int) -> list[list[int]]:
    """The row numbers of each global batch."""
    streams = [iter(loader) for loader in loaders]
    microbatches = BATCH // len(loaders) // local_batch
    found = []
    for _ in range(count):
        numbers = []
        for stream in streams:
            for _ in range(microbatches):
                inputs, labels = next(stream)
                assert (
                    inputs["input"].shape
                    == inputs["positions"].shape
                    == labels.shape
                    == (local_batch, LENGTH)
                )
                numbers += inputs["input"][:, 0].tolist()
        found.append(numbers)
    return found


def test_a_state_fits_any_degree_and_local_batch(data: str) -> None:
    undisturbed = _steps(_loaders(data, 1, 8), 8, STEPS)
    assert sorted(number for step in undisturbed[:10] for number in step) == list(range(ROWS))
    first = _loaders(data, 2, 2)
    assert _steps(first, 2, 7) == undisturbed[:7]
    state = first[1].state_dict()
    assert state == first[0].state_dict(), "ranks save one state"
    for world, local_batch in ((1, 4), (4, 1), (4, 2)):
        later = _loaders(data, world, local_batch)
        for loader in later:
            loader.load_state_dict(state)
        assert _steps(later, local_batch, STEPS - 7) == undisturbed[7:]


def test_positions_and_labels_stay_in_a_document(tmp_path: Path) -> None:
    root = str(tmp_path / "data")
    with shardkit.create(root, schema={"tokens": "int32[7]", "boundaries": "int32[*]"}) as writer:
        writer.add({"tokens": [11, 12, 13, 21, 22, 0, 0], "boundaries": [0, 3, 5]})
    config = PlanDataLoader.Config(dataset_path=root, global_batch=1, infinite=False)
    settings = {"dp_world_size": 1, "dp_rank": 0, "local_batch_size": 1, "tokenizer": None}
    for seq_len in (6, 7):
        ((inputs, labels),) = config.build(seq_len=seq_len, **settings)
        assert inputs["input"].tolist() == [[11, 12, 13, 21, 22, 0, 0][:seq_len]]
        assert inputs["positions"].tolist() == [[0, 1, 2, 0, 1, 0, 1][:seq_len]]
        assert labels.tolist() == [[12, 13, -100, 22, -100, -100, -100][:seq_len]]


def test_without_boundaries_a_row_is_a_document(tmp_path: Path) -> None:
    root = str(tmp_path / "data")
    with shardkit.create(root, schema={"ids": "uint16[4]"}) as writer:
        writer.add({"ids": [5, 6, 7, 8]})
    config = PlanDataLoader.Config(dataset_path=root, tokens="ids", global_batch=1, infinite=False)
    loader = config.build(dp_world_size=1, dp_rank=0, seq_len=3, local_batch_size=1, tokenizer=None)
    for _ in range(2):  # each validation reads the same epoch
        ((inputs, labels),) = loader
        assert (inputs["positions"].tolist(), labels.tolist()) == ([[0, 1, 2]], [[6, 7, 8]])


def test_sources_are_mixed(data: str) -> None:
    (loader,) = _loaders(
        data, 1, 8, sources={"a": data, "b": data}, plan={"weights": {"a*": 3, "b*": 1}, "lanes": 1}
    )
    (numbers,) = _steps([loader], 8, 1)
    assert len(numbers) == BATCH


def test_settings_that_do_not_fit(data: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"global_batch = 8: a multiple of 3 data-parallel ranks × 2 rows"
    ):
        _loaders(data, 3, 2)
    with pytest.raises(ConfigurationError, match=r"tokens = 'text' is None.*--pack text=33"):
        _loaders(data, 1, 8, tokens="text")
    (loader,) = _loaders(data, 1, 4)
    stream = iter(loader)
    next(stream)
    with pytest.raises(StateError, match=r"1 microbatches .* set training.global_batch_size = 8"):
        loader.state_dict()
    next(stream)
    assert loader.state_dict()["step"] == 1


def test_the_settings_are_torchtitan_s(data: str) -> None:
    config = PlanDataLoader.Config(dataset_path=data, global_batch=8)
    assert dataclasses.replace(config, infinite=False).to_dict()["dataset_path"] == data


def _train(data: str, folder: Path, world: int, local_batch: int, die_at: int) -> None:
    port = free_port()
    program = Path(__file__).with_name("titan_ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), data, str(folder), str(local_batch), str(STEPS), str(die_at)],
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                 "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                 "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    for rank in ranks:
        errors = rank.communicate(timeout=300)[1]
        assert rank.returncode == (9 if die_at < STEPS else 0), errors[-3000:]


def _digests(run: Path) -> dict[tuple[int, int], str]:
    """The last record of each cell: repeated steps replace those after the checkpoint."""
    paths = sorted((run / "journal").glob("*"), key=lambda path: path.stat().st_mtime_ns)
    return {(record.step, record.lane): record.digest for path in paths for record in read_journal(path)}


@pytest.mark.slow
@pytest.mark.timeout(1800)  # seven ranks of torchtitan, up to four at once
def test_the_trainer_dies_on_two_ranks_and_continues_on_one_and_on_four(data: str, tmp_path: Path) -> None:
    ds = shardkit.open(data)
    with ds.loader(ds.plan(global_batch=BATCH, seed=3, lanes=4), run=tmp_path / "undisturbed") as loader:
        while loader.state_dict()["step"] < STEPS:
            next(iter(loader))
    first = tmp_path / "two"
    _train(data, first, 2, 2, die_at=7)  # checkpoints at steps 3 and 6; step 7 is trained again
    shutil.copytree(first, tmp_path / "four")
    _train(data, first, 1, 4, die_at=STEPS)
    _train(data, tmp_path / "four", 4, 2, die_at=STEPS)
    expected = _digests(tmp_path / "undisturbed")
    assert set(expected) == {(step, lane) for step in range(STEPS) for lane in range(4)}
    assert _digests(first / "run") == expected == _digests(tmp_path / "four" / "run")
