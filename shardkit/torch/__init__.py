"""What torch programs use of shardkit: datasets for its DataLoader, checkpoints in shardkit's own store.

``dataset(ds, plan)`` is an ``IterableDataset`` whose stream is the same for any number of workers.

``CheckpointWriter`` and ``CheckpointReader`` are storage plug-ins for ``torch.distributed.checkpoint`` (DCP), so any
trainer that saves through DCP (DDP, FSDP, tensor parallel) can use them::

    dcp.save(state, storage_writer=CheckpointWriter("runs/a", "step-000000000100"))
    dcp.load(state, storage_reader=CheckpointReader("runs/a"))          # the newest; any world size, any sharding

``prune_checkpoints`` keeps the newest few, ``copy_checkpoint`` brings one into a further store, ``export_safetensors``
writes its weights for other programs. ``FlatSlice`` describes a run of a flattened tensor's elements, so that what a
sharded optimizer of one's own holds is saved, and loads into any other sharding.

Layout, invariants and reasons are in the trainer's SPEC.md, "Checkpoints": tensor bytes are content-addressed objects,
the manifest names them by SHA-256 and is written after them, and the ref under ``checkpoints/`` is written last.

What is asked for is imported then: to read a dataset, nothing that writes checkpoints is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint_format import (
        checkpoint_names,
        copy_checkpoint,
        prune_checkpoints,
        read_checkpoint_manifest,
    )
    from .checkpointing import CheckpointReader, CheckpointWriter, FlatSlice, export_safetensors
    from .datasets import DataLoader, PlanDataset, dataset

__all__ = [
    "CheckpointReader",
    "CheckpointWriter",
    "DataLoader",
    "FlatSlice",
    "PlanDataset",
    "checkpoint_names",
    "copy_checkpoint",
    "dataset",
    "export_safetensors",
    "prune_checkpoints",
    "read_checkpoint_manifest",
]

_HOMES = {
    "checkpoint_format": (
        "checkpoint_names",
        "copy_checkpoint",
        "prune_checkpoints",
        "read_checkpoint_manifest",
    ),
    "checkpointing": ("CheckpointReader", "CheckpointWriter", "FlatSlice", "export_safetensors"),
    "datasets": ("DataLoader", "PlanDataset", "dataset"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module 'shardkit.torch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
