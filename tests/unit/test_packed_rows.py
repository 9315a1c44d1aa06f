"""Packed rows: where documents begin, and a model whose attention stays inside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardkit
from shardkit.errors import SampleError, UsageError
from shardkit.loader.packed_rows import find_documents
from shardkit_trainer.configuration import ModelConfig
from shardkit_trainer.tasks import IGNORED, LanguageTask

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
