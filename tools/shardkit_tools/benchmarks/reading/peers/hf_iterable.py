"""HF datasets, iterable: shuffle buffer of 1,000, batched, under DataLoader; resumes, but for its shuffle buffer."""

# mypy: ignore-errors
# the packages are optional
from __future__ import annotations

from typing import Any

from .hf_map import build, load

__all__ = ["build", "open_reader"]


class _Reader:
    def __init__(self, workload: Any, directory: str, workers: int) -> None:
        from torch.utils.data import DataLoader

        data = load(workload, directory).to_iterable_dataset(num_shards=4).shuffle(seed=0, buffer_size=1000)
        data = data.batch(workload.batch)
        self.data, self.field = data, workload.field
        self.epoch = lambda: (b[self.field] for b in DataLoader(data, batch_size=None, num_workers=workers))
        if not workers:  # what was in the shuffle buffer is skipped
            self.position, self.resume = self._position, self._resume

    def _position(self, steps: Any) -> Any:
        batches = iter(self.data)
        for _ in steps:
            next(batches)
        return self.data.state_dict()

    def _resume(self, position: Any) -> Any:
        self.data.load_state_dict(position)
        return (batch[self.field] for batch in self.data)


def open_reader(workload: Any, scale: float, directory: str, workers: int) -> _Reader:
    """The reader of a workload that was built."""
    return _Reader(workload, directory, workers)
