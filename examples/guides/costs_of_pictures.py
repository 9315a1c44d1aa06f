"""Pictures of any size, balanced by the cost of their patches, so that ranks wait less for each other.

    python examples/guides/costs_of_pictures.py

What to know:

* A vision transformer at native resolution has (height / 16) · (width / 16) tokens per picture. Store that number as a
  field when you build. A cost is any expression of fields: ``"patches"`` if the multilayer perceptron dominates, or
  for example ``"patches**2 // 16 + 64 * patches"`` if attention matters.
* Without such a field, use ``bytes(image)``, which is roughly proportional to the patches, or ``height * width`` if
  these are fields. ``shardkit rebuild ROOT --cost EXPR`` writes the costs of rows next to existing shards. It reads the
  shards only if the expression needs values, and does not rewrite them.
* For text and pictures in one dataset, use ``"patches + len(tokens)"``. A field that a row lacks counts as 0.
* In a trainer's TOML file, set ``cost = "patches"`` in ``[data]``. `shardkit top` shows how far the most expensive rank
  was above the mean in the last steps, with and without the arrangement.
"""

from __future__ import annotations

import random

import numpy as np

import shardkit as sk
from guide_shell import shardkit, workplace

SIDES = (64, 96, 128, 192, 256, 384)


def main() -> None:
    with workplace(__doc__):
        draw = random.Random(0)
        with sk.create(
            "data", schema={"image": "uint8[*]", "patches": "int32"}
        ) as writer:  # pixels, for brevity
            for number in range(4_000):
                height, width = draw.choices(SIDES, weights=[8, 6, 4, 2, 1, 1], k=2)
                patches = (height // 16) * (width // 16)
                writer.add({"image": np.full(patches, number % 251, np.uint8), "patches": patches})

        shardkit("rebuild", "data", "--cost", "patches**2 // 16 + 64 * patches")
        cost = sk.open("data").manifest.costs[0].expression
        shardkit("plan", "data", "--global-batch", 128, "--lanes", 16, "--cost", cost)

        dataset = sk.open("data")
        plan = dataset.plan(global_batch=128, lanes=16, cost=cost)
        with dataset.loader(plan, rank=0, world=4, tensors=False) as loader:
            for _, batch in zip(range(3), loader, strict=False):
                print(f"step {batch.step}: {batch['patches'].sum()} patches on rank 0 of 4")


if __name__ == "__main__":
    main()
