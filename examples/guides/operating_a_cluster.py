"""Operate a cluster: monitor runs, protect and repair data, and delete old versions.

    python examples/guides/operating_a_cluster.py

A run is a directory of files. All commands work on any machine that can read it, during the run and afterwards.

    during a run        shardkit top RUN · shardkit dashboard RUN · /metrics, /healthz (log.listen) · RUN/control.toml
                        in your own loop call loader.watch(model) once, to distinguish slow ranks from waiting ones
    before a failure    shardkit place ROOT --copies 2 · shardkit replicate ROOT · shardkit scrub ROOT
    after a failure     shardkit audit RUN · shardkit repair ROOT --from-run RUN
    every week          shardkit gc ROOT --delete

The scheduler restarts ranks: examples/deployment contains files for Kubernetes, Slurm and plain ssh.
"""

from __future__ import annotations

from pathlib import Path

import shardkit as sk
from guide_shell import shardkit, workplace


def make_dataset() -> None:
    """Write 600 rows."""
    with sk.create("data/cats", schema={"x": "int64[64]"}, shard_size="64KiB", block_size="8KiB") as writer:
        for number in range(600):
            writer.add({"x": [number] * 64})


def train(steps: int) -> None:
    """Read some steps with two ranks, one after the other, to fill a run directory."""
    dataset = sk.open("data/cats")
    plan = dataset.plan(global_batch=24, lanes=4, seed=0)
    for rank in range(2):
        with dataset.loader(plan, rank=rank, world=2, run="runs/cats", tensors=False) as loader:
            for step, _batch in enumerate(loader, 1):
                if step == steps:
                    break


def main() -> None:
    with workplace(__doc__):
        make_dataset()
        train(steps=20)

        # Print once instead of a live view; --json is for scripts.
        shardkit("top", "runs/cats", "--once")
        # A second copy in another failure domain, so that losing the root loses no data.
        Path("rack-2").mkdir()
        shardkit("place", "data/cats", "--location", "mirror=rack-2/cats,domain=rack-2", "--copies", 2)
        shardkit("replicate", "data/cats", "--dry-run")
        shardkit("audit", "runs/cats")
        # Without --delete, gc only lists objects that no version needs.
        shardkit("gc", "data/cats")


if __name__ == "__main__":
    main()
