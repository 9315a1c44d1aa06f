"""LanceDB: StreamingDataset of a table in StreamingDataLoader.

lancedb starts a thread when it is imported, so that each rank imports it itself.
"""

# mypy: ignore-errors
# the package is in an environment of its own
from __future__ import annotations

import multiprocessing

import lance_namespace  # noqa: F401  before the ranks are forked, as torch
import pyarrow as pa
import torch  # noqa: F401

from bench.interruptions.samples import COLLECTIONS, GLOBAL_BATCH, SEQUENCE, STEPS, Adapter, documents

SEPARATOR, PADDING = -1, -2
"""Tokens that the loader adds to packed text, which are not counted."""


class Loader(Adapter):
    label = "LanceDB, without workers"
    promise = (
        "The merge is topology-agnostic: pass the full list of per-rank states in, and hand the identical merged dict "
        "to every rank of the resumed job, regardless of whether the topology grew, shrank, or stayed the same."
    )
    elastic = f"yes, if ranks divide `num_splits` ({GLOBAL_BATCH} here)"
    link = "https://docs.lancedb.com/training/resuming"
    strength = "The table can be filtered and extended between epochs, and rows are found by queries."
    notes = f"`num_splits={GLOBAL_BATCH}`; on other ranks `merge_state_dicts` of all states, as documented."
    lacks = {
        "mixture": "no weighted mixture",
        "workers": "see the row with workers",
    }
    imported_by_ranks = ("lancedb", "lance")
    workers = 0

    @staticmethod
    def write(folder):
        import lancedb

        database = lancedb.connect(str(folder / "tables"))
        for name in ("train", "odd", "validation"):
            database.create_table(name, pa.table({"number": pa.array(COLLECTIONS[name], pa.int64())}))
        database.create_table("text", pa.table({"tokens": pa.array(documents(), pa.list_(pa.int32()))}))

    def __init__(self, job):
        self.job = job
        self._open(job.epoch)

    def _open(self, epoch):
        import lancedb
        from lancedb.streaming import StreamingDataLoader, StreamingDataset

        job = self.job
        self.number = epoch
        table = lancedb.connect(str(job.folder / "tables")).open_table(job.collection)
        pack = {
            "columns": ["tokens"], "pack_sequences": SEQUENCE, "eos_id": SEPARATOR, "pad_id": PADDING,
            "blocks_per_epoch": STEPS * GLOBAL_BATCH,
        }  # fmt: skip
        self.data = StreamingDataset(
            table, num_splits=GLOBAL_BATCH, shuffle=not job.validates, shuffle_seed=job.seed, epoch=epoch,
            rank=job.rank, world_size=job.world, **(pack if job.collection == "text" else {}),
        )  # fmt: skip
        context = {}
        if job.workers:
            # the server starts workers of both epochs and needs no lancedb, whose threads are not safe to fork
            multiprocessing.set_forkserver_preload(["torch", "lance_namespace"])
            context = {"multiprocessing_context": "forkserver"}
        self.loader = StreamingDataLoader(self.data, batch_size=job.batch, num_workers=job.workers, **context)

    def restore(self, states):
        same = len(states) == self.job.world
        self.data.load_state_dict(states[self.job.rank] if same else self.data.merge_state_dicts(states))

    def epoch(self, number, done):
        if number != self.number:
            self._open(number)
        for batch in self.loader:
            if "number" in batch:
                yield batch["number"].tolist()
            else:
                yield [token for token in batch["input_ids"].ravel().tolist() if token >= 0]

    def state(self):
        return self.data.state_dict()
