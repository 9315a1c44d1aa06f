"""safetensors export, read back by the format's own description."""

import json
import struct
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from shardkit.errors import NotFoundError
from shardkit.torch import CheckpointWriter, export_safetensors


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_export_holds_the_model_and_nothing_else(tmp_path: Path) -> None:
    model = {
        "a.weight": torch.randn(3, 5),
        "b": torch.arange(4, dtype=torch.int64),
        "c": torch.ones(2, dtype=torch.bfloat16),
    }
    state = {"model": model, "optimizer": {"a.weight.exp_avg": torch.zeros(3, 5)}}
    save_state(state, storage_writer=CheckpointWriter(tmp_path / "run", "step-1"), no_dist=True)
    assert export_safetensors(tmp_path / "run", tmp_path / "model.safetensors") == 3
    data = (tmp_path / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__")["checkpoint"] == "step-1"
    assert header.keys() == model.keys()
    assert [header[name]["dtype"] for name in ("a.weight", "b", "c")] == ["F32", "I64", "BF16"]
    for name, tensor in model.items():
        start, end = header[name]["data_offsets"]
        raw = bytearray(data[8 + length + start : 8 + length + end])
        assert torch.equal(torch.frombuffer(raw, dtype=tensor.dtype).reshape(header[name]["shape"]), tensor)
    assert 8 + length + sum(t.nbytes for t in model.values()) == len(data)


def test_nothing_to_export(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint"):
        export_safetensors(tmp_path, tmp_path / "x")
