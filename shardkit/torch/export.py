"""A checkpoint's parameters as a safetensors file: for programs that know nothing of shardkit.

The format is 8 bytes of length, a JSON header, and raw little-endian bytes in C order (huggingface/safetensors).
"""

from __future__ import annotations

import json
import os
import struct
import warnings

import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from shardkit.errors import FormatError
from shardkit.stores.store import Store

from .checkpoint_format import as_store, read_checkpoint_manifest
from .checkpointing import CheckpointReader

TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def export_safetensors(
    location: Store | str | os.PathLike[str],
    path: str | os.PathLike[str],
    name: str | None = None,
    *,
    part: str = "model",
) -> int:
    """Write one part of a checkpoint to ``path``, without a process group; returns how many tensors.

    Args:
        location: run directory: a path, a URL or a store.
        path: of the file to write.
        name: of the checkpoint; None takes the newest. Strategy and number of ranks that saved it do not matter.
        part: top-level key of the saved state; names in the file are those below it.

    Raises:
        NotFoundError, IntegrityError: there is no such checkpoint, or it is damaged.
        FormatError: it has no tensors in ``part``.
    """
    store = as_store(location)
    manifest = read_checkpoint_manifest(store, name)
    tensors = {
        fqn: torch.empty(saved["shape"], dtype=getattr(torch, saved["dtype"]))
        for fqn, saved in sorted(manifest["tensors"].items())
        if fqn.startswith(f"{part}.")
    }
    if not tensors:
        raise FormatError(f"checkpoint {manifest['name']} has no tensors under {part}.; nothing to export")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        load_state(tensors, storage_reader=CheckpointReader(store, manifest["name"]), no_dist=True)
    header: dict[str, object] = {"__metadata__": {"checkpoint": manifest["name"], "format": "pt"}}
    end = 0
    for fqn, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        dtype = TYPES[str(tensor.dtype).removeprefix("torch.")]
        described = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header[fqn.removeprefix(f"{part}.")] = described
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return len(tensors)
