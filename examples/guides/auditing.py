"""Auditing: prove which samples a run consumed, compare two runs, trace a sample, show that a list was never used.

    python examples/guides/auditing.py

A loader with ``run=`` writes digests of the cells that its ranks actually *gathered* to the run directory. The bundled
trainer merges and chains them at every checkpoint. Anyone with the manifest can replay the plan and compare, without
reading a sample:

    shardkit audit runs/mine                       # ledger, steps, coverage, checkpoints, data; exit code 0, 3 or 4
    shardkit audit runs/mine --html report.html    # the same as a page
    shardkit audit runs/mine --sign key.pem        # an in-toto statement in a signed envelope
    shardkit audit diff runs/a runs/b              # the first step at which two runs diverge, and why
    shardkit audit trace runs/mine --sample 17     # which steps saw it
    shardkit audit trace runs/mine --exclude takedown.txt

An audit proves which samples a run consumed, with the manifest, the step, the lane and the order of restarts of each.
It does not prove that the gradient of these samples was computed; the trainer's exact mode makes that repeatable.
"""

from __future__ import annotations

import json
from pathlib import Path

import shardkit as sk
from guide_shell import shardkit, workplace

STEPS = 20


def make_dataset() -> None:
    """Write 320 texts of two sources, with a lookup by URL."""
    with sk.create(
        "data/pages", schema={"text": "str", "source": "str", "url": "str"}, stratify="source", lookup="url"
    ) as writer:
        for number in range(320):
            source = "news" if number % 4 else "forum"
            writer.add(
                {"text": f"page {number}", "source": source, "url": f"https://{source}.example/{number}"}
            )


def train(run: str, *, seed: int = 0, crash_at: int | None = None) -> None:
    """Read as a run of two ranks does; with ``crash_at``, stop after that step and continue with one rank."""
    dataset = sk.open("data/pages")
    plan = dataset.plan(global_batch=16, lanes=4, seed=seed)
    for first, last, world in ((0, crash_at or STEPS, 2), (crash_at or STEPS, STEPS, 1)):
        for rank in range(world):
            with dataset.loader(plan, rank=rank, world=world, run=run, tensors=False) as loader:
                loader.seek(first)
                for step, _batch in zip(range(first, last), loader, strict=False):
                    assert step < STEPS


def main() -> None:
    with workplace(__doc__):
        make_dataset()
        train("runs/a")
        train("runs/b", crash_at=7)
        train("runs/c", seed=1)
        shardkit("audit", "runs/a")
        shardkit("audit", "runs/b")  # another number of ranks and a restart: the same steps
        # Two runs with the same history, then two with different seeds.
        shardkit("audit", "diff", "runs/a", "runs/b")
        shardkit("audit", "diff", "runs/a", "runs/c", expect=5)
        # The steps of a sample, and the samples of a list of URLs that should have been left out.
        uses = json.loads(shardkit("audit", "trace", "runs/a", "--sample", 17, "--json"))
        assert uses
        Path("takedown.txt").write_text("https://news.example/1\nhttps://nowhere.example/0\n")
        shardkit("audit", "trace", "runs/a", "--exclude", "takedown.txt", "--field", "url", expect=5)
        # An edited journal is detected.
        journal = min(Path("runs/c/journal").iterdir())
        data = bytearray(journal.read_bytes())
        data[len(data) // 2] ^= 1
        journal.write_bytes(data)
        shardkit("audit", "runs/c", expect=4)


if __name__ == "__main__":
    main()
