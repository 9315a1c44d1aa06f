"""A checkpoint's parameters as a safetensors file: for programs that know nothing of shardkit.

The format is 8 bytes of length, a JSON header, and raw little-endian bytes in C order (huggingface/safetensors).
"""

from __future__ import annotations

import json
import struct
import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from shardkit.errors import FormatError
from shardkit.torch import CheckpointReader, read_checkpoint_manifest

__all__ = ["export_safetensors"]

TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def export_safetensors(directory: str | Path, path: str | Path, name: str | None = None) -> int:
    """Write the model of a run's checkpoint (default: the newest) to ``path``; returns how many tensors.

    Works without a process group, whatever strategy and number of ranks the checkpoint was saved with.

    Raises:
        NotFoundError, IntegrityError: there is no such checkpoint, or it is damaged.
    """
    manifest = read_checkpoint_manifest(str(directory), name)
    saved = {fqn: entry for fqn, entry in manifest["tensors"].items() if fqn.startswith("model.")}
    if not saved:
        raise FormatError(f"checkpoint {manifest['name']} has no tensors under model.; nothing to export")
    tensors = {
        fqn: torch.empty(e["shape"], dtype=getattr(torch, e["dtype"])) for fqn, e in sorted(saved.items())
    }
    reader = CheckpointReader(str(directory), manifest["name"])
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        load_state(tensors, storage_reader=reader, no_dist=True)
    header: dict[str, object] = {"__metadata__": {"checkpoint": manifest["name"], "format": "pt"}}
    end = 0
    for fqn, tensor in tensors.items():
        span = [end, end + tensor.nbytes]
        dtype = TYPES[str(tensor.dtype).removeprefix("torch.")]
        header[fqn.removeprefix("model.")] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": span,
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return len(tensors)
