"""Packed rows balanced by the cost of their attention, so that ranks wait less for each other.

    python examples/guides/costs_of_packed_rows.py

The same commands, for real data:

    shardkit build 'web/*.jsonl.zst' data/web --format arrow --pack tokens=8192 --cost 'squares(boundaries)'
    shardkit plan data/web --global-batch 512 --cost 'squares(boundaries)'

What to know:

* Rows of one length differ in cost if attention stays inside documents: the attention of a row with one document of
  8,192 tokens costs 64 times that for 64 documents. ``squares(boundaries)`` is the sum of squared document lengths.
* Costs that are linear in tokens are equal for all rows. An expression such as
  ``squares(boundaries) + w * len(boundaries)``, for a model of width w, weighs both. Costs must be below 2**32: for
  long contexts use ``squares(boundaries) // 64``.
* ``--cost`` writes one byte per row next to the shards. ``shardkit rebuild ROOT --cost EXPR`` does so for existing
  shards, without rewriting them.
* The plan arranges each lane's window so that its cells have nearly equal costs. Each lane still reads the same rows,
  each row exactly once, and can resume at any step. `shardkit plan --cost` predicts the savings for your ranks.
* With ``balance="align"``, all lanes draw their expensive cells in the same steps. This is best if each rank has one
  lane, but steps then differ in cost, and gradients vary more.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import shardkit as sk
from guide_shell import shardkit, workplace

COST = "squares(boundaries)"


def main() -> None:
    with workplace(__doc__):
        draw = random.Random(0)
        lengths = [min(512, int(draw.lognormvariate(4, 1.2)) + 1) for _ in range(20_000)]
        lines = [json.dumps({"tokens": [number % 250] * length}) for number, length in enumerate(lengths)]
        Path("documents.jsonl").write_text("\n".join(lines) + "\n")
        shardkit(
            "build", "documents.jsonl", "data", "--schema", "tokens=uint8[*]", "--pack", "tokens=512",
            "--format", "arrow", "--cost", COST, "--jobs", 1,
        )  # fmt: skip

        shardkit("plan", "data", "--global-batch", 256, "--lanes", 32, "--cost", COST)

        dataset = sk.open("data")
        plan = dataset.plan(global_batch=256, lanes=32, cost=COST)
        with dataset.loader(plan, rank=0, world=8, tensors=False) as loader:
            batch = next(iter(loader))
        values, offsets = batch["boundaries"]
        documents = len(values) - len(offsets) + 1
        print(f"step {batch.step}: {len(batch['tokens'])} rows of {documents} documents on rank 0 of 8")


if __name__ == "__main__":
    main()
