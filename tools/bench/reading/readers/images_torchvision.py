"""torchvision: ImageFolder under DataLoader with shuffle=True and the transforms of its training recipe."""

# mypy: ignore-errors
# the packages are optional
from __future__ import annotations

from typing import Any


def build(workload: Any, scale: float, directory: str) -> None:
    """The pictures lie in a folder per class, as ImageFolder wants them; a copy, so that every reader has its own."""
    import shutil
    from pathlib import Path

    shutil.copytree(Path(directory).parent / "pictures", directory)


def recipe() -> Any:
    from torchvision import transforms

    return transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )


class _Reader:
    def __init__(self, workload: Any, directory: str, workers: int) -> None:
        from torch.utils.data import DataLoader
        from torchvision.datasets import ImageFolder

        data = ImageFolder(directory, recipe())
        loader = DataLoader(data, workload.batch, shuffle=True, num_workers=workers, drop_last=True)
        self.epoch = lambda: (images for images, _ in loader)


def open_reader(workload: Any, scale: float, directory: str, workers: int) -> _Reader:
    return _Reader(workload, directory, workers)
