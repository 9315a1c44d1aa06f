"""Ranks of a run that only reads: one process each, in lockstep like ranks with collectives, killed where told.

Started as ``python audit_ranks.py JSON``; the ranks are forked before any thread exists.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import shardkit
from shardkit.documents import encode, parse_digest, sha256_digest
from shardkit.ledger import bind_checkpoint, ledger_head
from shardkit.stores.local import open_store
from shardkit.stores.store import object_name
from shardkit.torch.checkpoint_format import encode_value


def save_checkpoint(run: Path, step: int, manifest: str, plan: str, head: dict[str, Any] | None) -> None:
    """A checkpoint as the trainer's SPEC.md §4 has it, with no tensors."""
    meta: dict[str, Any] = {"step": step, "manifest": manifest, "plan": plan}
    if head is not None:
        meta["ledger"] = head
    store, name = open_store(run), f"step-{step:012d}"
    body = encode(
        {
            "format": "shardkit-checkpoint",
            "version": 1,
            "name": name,
            "meta": encode_value(meta, "meta"),
            "tensors": {},
            "values": {},
        }
    )
    digest = sha256_digest(body)
    store.put_new(object_name(digest, "checkpoint"), body)
    bind_checkpoint(run, name=name, checkpoint=digest, step=step)
    ref = {"name": name, "checkpoint": digest, "size": len(body)}
    store.put_new(f"checkpoints/{name}.json", encode({**ref, "digest": sha256_digest(encode(ref))}))
    assert parse_digest(digest)


def work(rank: int, told: dict[str, Any], barrier: Any) -> None:
    """One rank: segments of steps, each with the lanes of its own."""
    dataset = shardkit.open(told["root"])
    plan = dataset.plan(**told["plan"])
    run, world = Path(told["run"]), told["world"]
    for first, last, lanes in told["segments"]:
        with dataset.loader(
            plan,
            rank=rank,
            world=world,
            lanes=lanes[rank],
            uneven=True,
            run=run,
            tensors=False,
            threads=1,
        ) as loader:
            loader.seek(first)
            step = first
            while step < last:
                for batch in loader:
                    assert batch.step == step
                    if told["kill"] == [rank, step]:
                        os.killpg(0, signal.SIGKILL)
                    if told.get("failover") == [rank, step]:
                        journal = loader._open_resources().journal
                        assert journal is not None
                        journal.event(step, "failover", location="mirror", count=1, what="a shard")
                    barrier.wait()  # what a collective does
                    step += 1
                    if rank == 0 and step % told["every"] == 0:
                        save_checkpoint(run, step, dataset.manifest.id, plan.digest, ledger_head(run, step))
                    if step == last:
                        break
            barrier.wait()


def main() -> None:
    told = json.loads(sys.argv[1])
    os.setpgid(0, 0)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(told["world"])
    ranks = [context.Process(target=work, args=(rank, told, barrier)) for rank in range(told["world"])]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


if __name__ == "__main__":
    main()
