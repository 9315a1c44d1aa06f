"""Operating a cluster: what to look at while runs go on, what to rehearse, what to keep, what to throw away.

    python examples/guides/operating_a_cluster.py

A run is files. Everything below works from any machine that sees the run directory, during the run and after it.

    while it runs       shardkit top RUN · shardkit dashboard RUN · /metrics, /healthz (log.listen) · RUN/control.toml
                        in a loop of your own call loader.watch(model) once: then slow ranks are told from waiting ones
    before it breaks    shardkit rehearse RUN --kill-node node-7 · shardkit place ROOT --copies 2 · shardkit scrub ROOT
    when it broke       shardkit report RUN --since 2h · shardkit audit RUN · shardkit repair ROOT --from-run RUN
    every week          shardkit gc ROOT --delete · shardkit bench --against before.json

Who starts ranks again is the scheduler's business: examples/deployment has Kubernetes, Slurm and plain ssh.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import shardkit as sk
from guide_shell import shardkit, workplace


def make_dataset() -> None:
    """600 rows."""
    with sk.create("data/cats", schema={"x": "int64[64]"}, shard_size="64KiB", block_size="8KiB") as writer:
        for number in range(600):
            writer.add({"x": [number] * 64})


def train(steps: int) -> None:
    """Some steps of two ranks, one after the other: enough for a run directory."""
    dataset = sk.open("data/cats")
    plan = dataset.plan(global_batch=24, lanes=4, seed=0)
    for rank in range(2):
        with dataset.loader(plan, rank=rank, world=2, run="runs/cats", tensors=False) as loader:
            for step, _batch in enumerate(loader, 1):
                if step == steps:
                    break


def main() -> None:
    os.environ["FORGOTTEN_SECRET_KEY"] = "canary-0001"  # what must not be in a report
    with workplace(__doc__):
        make_dataset()
        train(steps=20)

        # One look instead of a live view; --json is for scripts.
        shardkit("top", "runs/cats", "--once")
        # What would it cost to lose a node now? Nothing happens to the run.
        shardkit("rehearse", "runs/cats", "--kill-rank", 1)
        shardkit(
            "rehearse", "runs/cats", "--kill-location", "root", expect=5
        )  # the only copy: data would be lost
        Path("rack-2").mkdir()
        shardkit("place", "data/cats", "--location", "mirror=rack-2/cats,domain=rack-2", "--copies", 2)
        shardkit("rehearse", "runs/cats", "--kill-location", "root")

        # Two in the morning: one archive that explains the last hours, without credentials.
        shardkit("report", "runs/cats", "--since", "2h", "--no-stacks", "-o", "report.tar.gz")
        shutil.unpack_archive("report.tar.gz", "report")
        packed = [path for path in Path("report").rglob("*") if path.is_file()]
        assert not any(b"canary-0001" in path.read_bytes() for path in packed)

        # What no version needs: --delete marks it first, and deletes it a week later.
        shardkit("gc", "data/cats")
        # Is this machine, with this release, as good as before? Ratios, so that a busy hour does not matter.
        shardkit("bench", "--only", "plan", "--scale", 0.01, "--repeats", 3, "--out", "before.json")
        shardkit(
            "bench", "--against", "before.json", "--result", "before.json", expect=(0, 3)
        )  # 3: all noise
        assert json.loads(Path("before.json").read_text())["ratios"]


if __name__ == "__main__":
    main()
