"""webdataset over JPEGs: shuffle buffer of 1,000, Pillow, the transforms of torchvision's training recipe."""

# mypy: ignore-errors
# the packages are optional
from __future__ import annotations

from typing import Any

from .images_torchvision import recipe


def build(workload: Any, scale: float, directory: str) -> None:
    from pathlib import Path

    import webdataset as wds

    Path(directory).mkdir(parents=True)
    pictures = sorted((Path(directory).parent / "pictures").rglob("*.jpg"))
    with wds.ShardWriter(f"{directory}/%05d.tar", maxsize=32 << 20) as writer:
        for path in pictures:
            writer.write({"__key__": path.stem, "jpg": path.read_bytes(), "cls": int(path.parent.name)})


class _Reader:
    def __init__(self, workload: Any, directory: str, workers: int) -> None:
        from pathlib import Path

        import webdataset as wds

        urls = [str(path) for path in sorted(Path(directory).glob("*.tar"))]
        augment = recipe()

        def pipeline() -> Any:
            data = wds.WebDataset(urls, shardshuffle=len(urls), empty_check=False).shuffle(1000)
            data = data.decode("pil").to_tuple("jpg", "cls").map_tuple(augment, _same)
            return wds.WebLoader(
                data.batched(workload.batch, partial=False), batch_size=None, num_workers=workers
            )

        self.epoch = lambda: (images for images, _ in pipeline())


def _same(value: Any) -> Any:
    return value


def open_reader(workload: Any, scale: float, directory: str, workers: int) -> _Reader:
    return _Reader(workload, directory, workers)
