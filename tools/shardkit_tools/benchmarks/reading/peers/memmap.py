"""What people write themselves: a memory-mapped array, a random permutation, a gather per batch under DataLoader.

Rows of variable size: one file and an offsets array. No verification, no resume.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def build(workload: Any, scale: float, directory: str) -> None:
    root, offsets = Path(directory), [0]
    root.mkdir(parents=True)
    with (root / "rows.bin").open("wb") as file:
        for sample in workload.samples(scale):
            offsets.append(offsets[-1] + file.write(workload.value_bytes(sample)))
    np.save(root / "offsets.npy", np.array(offsets))


class Rows:
    """Rows of the file, by number."""

    def __init__(self, workload: Any, directory: str) -> None:
        root = Path(directory)
        self.offsets = np.load(root / "offsets.npy")
        self.fixed, self.text = bool(workload.shape), workload.dtype == "str"
        self.rows: Any = np.memmap(
            root / "rows.bin", dtype=workload.dtype if self.fixed else np.uint8, mode="r"
        )
        if self.fixed:
            self.rows = self.rows.reshape(-1, *workload.shape)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitems__(self, indices: list[int]) -> Any:
        if self.fixed:
            return self.rows[indices]
        view, parts = self.rows.data, []
        for index in indices:
            part = view[self.offsets[index] : self.offsets[index + 1]]
            parts.append(str(part, "utf-8") if self.text else bytes(part))
        return parts


class _Reader:
    def __init__(self, workload: Any, directory: str, workers: int) -> None:
        from torch.utils.data import DataLoader

        rows: Any = Rows(workload, directory)
        self.epoch = lambda: iter(
            DataLoader(
                rows, batch_size=workload.batch, shuffle=True, num_workers=workers, collate_fn=lambda b: b
            )
        )


def open_reader(workload: Any, scale: float, directory: str, workers: int) -> _Reader:
    return _Reader(workload, directory, workers)
