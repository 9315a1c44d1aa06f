"""Train on images: the ImageNet recipe of a ResNet in ten lines, and a run that resumes in the middle of an epoch.

    python examples/guides/training_on_images.py

The recipe, after `shardkit build train data/imagenet --stratify label`, with any model and loss::

    ds = shardkit.open("data/imagenet")
    plan = ds.plan(global_batch=256, seed=0)
    decode = {"image": images.random_resized_crop(224, flip=0.5, normalise="imagenet")}
    loader = ds.loader(plan, decode=decode, run="runs/resnet50")
    for epoch in range(90):
        for batch in loader:
            loss = cross_entropy(model(batch["image"]), batch["label"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

What to know for real data:

* Validation is ``images.resize_center_crop(256, 224, normalise="imagenet")`` over another split.
* For more augmentation, use torchvision in ``transform=``, run in processes. Each sample is seeded from
  (seed, step, lane, slot), so any number of ranks and workers makes the same pictures, resumed or not::

      augment = v2.Compose([v2.TrivialAugmentWide(), v2.RandomErasing(0.1)])  # torchvision.transforms.v2

      def transform(sample, rng):
          return {**sample, "image": augment(torch.from_numpy(sample["image"]))}

      loader = ds.loader(plan, decode=decode, transform=transform, workers="processes")

  ``v2.MixUp`` and ``v2.CutMix`` mix whole batches: call them in the training loop. A function that draws only from
  ``rng``, the sample's generator, can run in threads.
* For photographs from phones, ``random_resized_crop(224, orient=True)`` applies the EXIF orientation.
* Threads (``threads=``, one per processor by default) decode each picture directly into its row of the batch.
* The run's ledger records the decoders and their versions; ``shardkit audit`` shows them.
* shardkit does not decode video and sound: see clips_of_videos.py for torchcodec.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from PIL import Image
from torch import nn

import shardkit as sk
from guide_shell import shardkit, workplace
from shardkit import images


def make_tiles(folder: Path) -> None:
    """Write 288 tiles of two photographs, of a temple and of a flower."""
    for name in ("china", "flower"):
        (folder / name).mkdir(parents=True)
        with Image.open(Path(sklearn.__file__).parent / "datasets" / "images" / f"{name}.jpg") as photograph:
            for number in range(144):
                left, top = 34 * (number % 16), 36 * (number // 16)
                tile = photograph.crop((left, top, left + 96, top + 96))
                tile.save(folder / name / f"{number:03d}.jpg", quality=92)


class Block(nn.Module):
    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(inside, out, 3, 2, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()
        )
        self.second = nn.Sequential(nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out))
        self.short = nn.Conv2d(inside, out, 1, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(self.first(x)) + self.short(x))


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a ResNet of three blocks and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(3, 16), Block(16, 32), Block(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                          nn.Linear(64, 2))  # fmt: skip
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(ds: Any, steps: int, saved: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train up to ``steps`` steps, from the beginning or from a saved state; return the state."""
    model, optimizer = make_model()
    plan = ds.plan(global_batch=24, lanes=4, seed=0)
    decode = {"image": images.random_resized_crop(32, flip=0.5, normalise="imagenet")}
    with ds.loader(plan, decode=decode) as loader:
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["loader"])
        while loader.handed_out < steps:
            for batch in loader:
                loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                if loader.handed_out == steps:
                    break
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "loader": loader.state_dict(),
        }


@torch.no_grad()
def correct(ds: Any, saved: dict[str, Any]) -> float:
    """Return the share of a split's tiles that the model classifies correctly."""
    model, _ = make_model()
    model.load_state_dict(saved["model"])
    model.eval()
    decode = {"image": images.resize_center_crop(36, 32, normalise="imagenet")}
    with ds.loader(ds.plan(global_batch=8, lanes=1), decode=decode) as loader:
        hits = [(model(batch["image"]).argmax(1) == batch["label"]).float().mean().item() for batch in loader]
    return float(np.mean(hits))


def main() -> None:
    with workplace(__doc__):
        torch.set_num_threads(1)
        make_tiles(Path("tiles"))
        shardkit(
            "build",
            "tiles",
            "data/tiles",
            "--stratify",
            "label",
            "--split",
            "train=0.85,val=0.15",
            "--jobs",
            1,
        )
        ds, val = sk.open("data/tiles@train"), sk.open("data/tiles@val")
        steps = len(ds.loader(ds.plan(global_batch=24, lanes=4, seed=0)))
        whole = train(ds, 4 * steps)
        print(f"named right, of tiles held out: {correct(val, whole):.2f}")
        stopped = train(ds, 2 * steps + steps // 2)  # in the middle of the third epoch
        resumed = train(ds, 4 * steps, stopped)
        equal = all(torch.equal(one, resumed["model"][name]) for name, one in whole["model"].items())
        print(
            f"stopped after step {stopped['loader']['step']} and resumed: "
            + ("the same weights" if equal else "other")
        )


if __name__ == "__main__":
    main()
