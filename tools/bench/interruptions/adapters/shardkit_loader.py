"""shardkit: its own loader, with threads in the process of the rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch  # noqa: F401  before the ranks are forked

import shardkit
import shardkit_tools
from bench.interruptions.samples import (
    COLLECTIONS,
    GLOBAL_BATCH,
    SEQUENCE,
    WEIGHTS,
    Adapter,
    Job,
    documents,
)

LANES = (
    "`lanes=12`, so that 1, 2, 3 and 4 ranks share a step. By default, collections this small can get 8 lanes (here "
    "packed text and validation): the loader then refuses 3 ranks and names the numbers of ranks that fit."
)


def write(folder: Path) -> None:
    for name, numbers in COLLECTIONS.items():
        with shardkit.create(
            folder / name, schema={"number": "int64"}, format="arrow", shard_size="2KiB", block_size="512B"
        ) as writer:
            for number in numbers:
                writer.add({"number": number})
    texts = pa.table({"tokens": pa.array(documents(), pa.list_(pa.int32()))})
    pq.write_table(texts, folder / "documents.parquet")
    shardkit_tools.build(
        folder / "documents.parquet", folder / "text", format="arrow", pack={"tokens": SEQUENCE}
    )


def open_plan(job: Job) -> tuple[Any, Any]:
    ds: Any
    settings: dict[str, Any] = {"shuffle": "none"} if job.validates else {}
    if job.collection == "mixture":
        ds = shardkit.open({name: str(job.folder / name) for name in WEIGHTS})
        settings = {"weights": {f"{name}*": weight for name, weight in WEIGHTS.items()}}
    else:
        ds = shardkit.open(job.folder / job.collection)
    return ds, ds.plan(global_batch=GLOBAL_BATCH, lanes=12, seed=job.seed, **settings)


def numbers_of(batch: Any) -> list[int]:
    return batch["tokens" if "tokens" in batch else "number"].ravel().tolist()  # type: ignore[no-any-return]


class Loader(Adapter):
    label = "shardkit, `ds.loader`"
    promise = "Resume with `loader.load_state_dict(state)` on any number of ranks."
    elastic = "yes, if ranks divide `lanes` (12 here)"
    link = "AGENTS.md"
    strength = ""
    notes = LANES + " The number of workers is the number of threads."

    @staticmethod
    def write(folder: Path) -> None:
        write(folder)

    def __init__(self, job: Job) -> None:
        ds, plan = open_plan(job)
        self.loader = ds.loader(plan, rank=job.rank, world=job.world, threads=max(1, job.workers))
        self.batch: Any = None

    def restore(self, states: list[Any]) -> None:
        self.loader.load_state_dict(states[0])

    def epoch(self, number: int, done: int) -> Iterator[list[int]]:
        for batch in self.loader:
            self.batch = batch
            yield numbers_of(batch)

    def state(self) -> Any:
        return self.loader.state_dict(after=self.batch)
