"""shardkit over JPEGs: rgb8 by name, crop and flip per sample, normalised per batch; workers are processes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import shardkit

SIZE = 224
_MEAN = np.array([0.485, 0.456, 0.406], np.float32)[:, None, None] * 255
_SCALE = 1 / (np.array([0.229, 0.224, 0.225], np.float32)[:, None, None] * 255)


def crop_and_flip(sample: dict[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
    """Random resized crop (8 to 100 % of the area, ratio 3:4 to 4:3) and flip, drawn as torchvision draws them."""
    from PIL import Image

    height, width = sample["image"].shape[:2]
    left, top, wide, high = _box(height, width, rng)
    image = Image.fromarray(sample["image"][top : top + high, left : left + wide])
    array = np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR))
    return {"image": array[:, ::-1] if rng.random() < 0.5 else array, "label": sample["label"]}


def _box(height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = height * width * rng.uniform(0.08, 1.0)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            return int(rng.integers(width - wide + 1)), int(rng.integers(height - high + 1)), wide, high
    side = min(height, width)
    return (width - side) // 2, (height - side) // 2, side, side


def normalise(fields: dict[str, Any], rngs: Any) -> Mapping[str, Any]:
    """(n, size, size, 3) uint8 → (n, 3, size, size) float32."""
    out = np.empty((len(fields["image"]), 3, SIZE, SIZE), np.float32)
    for place, image in zip(out, fields["image"], strict=True):
        np.subtract(image.transpose(2, 0, 1), _MEAN, out=place)
        place *= _SCALE
    return {**fields, "image": out}


class Images:
    """The reader; `settings` are those of the loader."""

    def __init__(self, directory: str, batch: int, **settings: Any) -> None:
        self.ds = shardkit.open(directory)
        self.plan = self.ds.plan(global_batch=batch)
        self.settings: Any = {
            "decode": {"image": "rgb8"}, "transform": crop_and_flip, "batch_transform": normalise, "tensors": False,
        } | settings  # fmt: skip
        self.loader = self.ds.loader(self.plan, **self.settings)

    def epoch(self) -> Any:
        return (batch["image"] for batch in self.loader)


def build(workload: Any, scale: float, directory: str) -> None:
    pictures = sorted((Path(directory).parent / "pictures").rglob("*.jpg"))
    with shardkit.create(directory, schema={"image": "bytes", "label": "int64"}, format="tar") as writer:
        for path in pictures:
            writer.add({"image": path.read_bytes(), "label": int(path.parent.name)}, key=path.stem)


def open_reader(workload: Any, scale: float, directory: str, workers: int) -> Images:
    kind: dict[str, Any] = {"workers": "processes", "threads": workers} if workers else {}
    return Images(directory, workload.batch, **kind)
