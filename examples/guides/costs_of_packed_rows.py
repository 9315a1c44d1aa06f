"""Packed rows that cost what their attention costs: ranks wait less for each other.

    python examples/guides/costs_of_packed_rows.py

The same commands, for real data:

    shardkit build 'web/*.jsonl.zst' data/web --format arrow --pack tokens=8192 --cost 'squares(boundaries)'
    shardkit plan data/web --global-batch 512 --cost 'squares(boundaries)'

What to know:

* Rows of one length do not cost the same where attention stays inside documents: a row that is one document of 8,192
  tokens costs 64 times one of 64 documents. ``squares(boundaries)`` is the sum of squared document lengths. What is
  linear in tokens is the same for all rows; with a model of width w, ``squares(boundaries) + w * len(boundaries)`` and
  the like weigh both. Costs are below 2**32: ``squares(boundaries) // 64`` for long contexts.
* ``--cost`` writes one byte a row beside the shards; ``shardkit rebuild ROOT --cost EXPR`` does so for shards that lie
  there, and writes none.
* The plan arranges each lane's window so that its cells cost nearly the same. Which rows a lane has, exactly once, and
  resuming at any step stay as they are; `shardkit plan --cost` tells beforehand what it saves for your ranks.
* ``balance="align"`` has all lanes draw their dear cells in the same steps: best where a rank has one lane, but steps
  then differ in cost, and gradients vary more.
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
