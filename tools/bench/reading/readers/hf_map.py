"""HF datasets, map-style: Arrow on disk, numpy format, DataLoader with shuffle=True and batched __getitems__."""

# mypy: ignore-errors
# the packages are optional
from __future__ import annotations

from typing import Any


def features(workload: Any) -> Any:
    import datasets

    kinds: dict[str, Any] = {"": datasets.Value("binary"), "str": datasets.Value("string")}
    kind = kinds.get(workload.dtype)
    kind = kind or datasets.List(datasets.Value(workload.dtype), length=workload.shape[0])
    label = {"label": datasets.Value("int64")} if workload.label else {}
    return datasets.Features({workload.field: kind} | label)


def build(workload: Any, scale: float, directory: str) -> None:
    import datasets

    data = datasets.Dataset.from_generator(lambda: workload.samples(scale), features=features(workload),
                                           cache_dir=f"{directory}-cache",
                                           fingerprint=f"{workload.name}{scale}")  # fmt: skip
    data.save_to_disk(directory, num_shards=4)
    import shutil

    shutil.rmtree(f"{directory}-cache", ignore_errors=True)


def load(workload: Any, directory: str) -> Any:
    import datasets

    data = datasets.load_from_disk(directory)
    return data.with_format("numpy") if workload.shape else data


class _Reader:
    def __init__(self, workload: Any, directory: str, workers: int) -> None:
        from torch.utils.data import DataLoader

        data = load(workload, directory)
        self.field = workload.field
        self.epoch = lambda: (
            [row[self.field] for row in batch]
            for batch in DataLoader(data, batch_size=workload.batch, shuffle=True, num_workers=workers,
                                    collate_fn=lambda rows: rows)
        )  # fmt: skip


def open_reader(workload: Any, scale: float, directory: str, workers: int) -> _Reader:
    return _Reader(workload, directory, workers)
