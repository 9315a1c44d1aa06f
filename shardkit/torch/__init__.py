"""Datasets for torch's DataLoader, and checkpoints in shardkit's own store.

``dataset(ds, plan)`` is an `IterableDataset` in the order of ``ds.loader`` for any number of workers, and
``DataLoader(dataset, num_workers=4)`` counts its epochs and carries its state.

``CheckpointWriter`` and ``CheckpointReader`` are storage plug-ins for ``torch.distributed.checkpoint`` (DCP), so any
trainer that saves through DCP (DDP, FSDP, tensor parallel) can use them::

    dcp.save(state, storage_writer=CheckpointWriter("runs/a", "step-000000000100"))
    dcp.load(state, storage_reader=CheckpointReader("runs/a"))          # the newest; any world size, any sharding

``prune_checkpoints`` keeps the newest few, ``copy_checkpoint`` copies one to another store, ``export_safetensors``
writes its weights for other programs. ``FlatSlice`` describes a run of a flattened tensor's elements: a sharded
optimizer saves its slice with it, and any other sharding can load it.

The layout of checkpoints and its reasons are in the trainer's SPEC.md, "Checkpoints": tensor bytes are
content-addressed objects, the manifest names them by SHA-256 and is written after them, and the ref under
``checkpoints/`` is written last.
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


def __getattr__(name: str) -> Any:
    """Import a public name when it is used: audits need no torch, and datasets no DCP, which takes a second."""
    for module in ("checkpoint_format", "datasets", "checkpointing") if name in __all__ else ():
        found = getattr(import_module(f"{__name__}.{module}"), name, None)
        if found is not None:
            return found
    raise AttributeError(f"module 'shardkit.torch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
