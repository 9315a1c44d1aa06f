"""HF datasets, iterable: shuffle buffer of 1,000, batched, under DataLoader; resumes, but for its shuffle buffer."""

# mypy: ignore-errors
# the packages are optional
from __future__ import annotations

from typing import Any

from .hf_map import build, load

__all__ = ["build", "open_reader"]


class _Reader:
    def __init__(self, workload: Any, directory: str, workers: int) -> None:
        from datasets import load_dataset
        from torch.utils.data import DataLoader

        if directory.startswith("s3://"):
            files = f"{directory}/*.arrow"
            data = load_dataset("arrow", data_files=files, split="train", streaming=True)
        else:
            data = load(workload, directory).to_iterable_dataset(num_shards=4)
        data = data.shuffle(seed=0, buffer_size=1000)
        data, field = data.batch(workload.batch), workload.field
        self.epoch = lambda: (b[field] for b in DataLoader(data, batch_size=None, num_workers=workers))


def open_reader(workload: Any, scale: float, directory: str, workers: int) -> _Reader:
    """Open the reader of a built workload."""
    return _Reader(workload, directory, workers)
