"""MosaicML Streaming: StreamingDataset in StreamingDataLoader; the ranks form a process group, as in a trainer."""

# mypy: ignore-errors
# the package is in an environment of its own
from __future__ import annotations

import torch.distributed as distributed
from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

from bench.interruptions.samples import COLLECTIONS, COUNT, WEIGHTS, Adapter


class Loader(Adapter):
    label = "MosaicML Streaming"
    promise = "Samples are in the same order regardless of the number of GPUs, nodes, or CPU workers."
    elastic = "yes"
    link = "https://docs.mosaicml.com/projects/streaming"
    strength = "It is the loader of Composer, and also reads shards of JSON lines and CSV."
    notes = (
        "The state of rank 0 is loaded on every rank. Once, on a busy machine, `load_state_dict` raised `cannot mmap "
        "an empty file`, because a rank attached to shared memory that another was creating; that run was repeated."
    )
    lacks = {"text": "no packing while reading"}

    @staticmethod
    def write(folder):
        for name, numbers in COLLECTIONS.items():
            with MDSWriter(out=str(folder / name), columns={"number": "int"}, size_limit=1 << 11) as writer:
                for number in numbers:
                    writer.write({"number": number})

    def __init__(self, job):
        if job.world > 1 and not distributed.is_initialized():
            distributed.init_process_group("gloo")
        if not job.validates:
            clean_stale_shared_memory()  # of the killed processes, which Streaming advises
        if job.collection == "mixture":
            total = sum(WEIGHTS.values())
            streams = [
                Stream(local=str(job.folder / name), proportion=weight / total)
                for name, weight in WEIGHTS.items()
            ]
            where = {"streams": streams, "epoch_size": COUNT}
        else:
            where = {"local": str(job.folder / job.collection)}
        data = StreamingDataset(
            **where, shuffle=not job.validates, shuffle_seed=job.seed + 1, batch_size=job.batch
        )
        self.loader = StreamingDataLoader(data, batch_size=job.batch, num_workers=job.workers)

    def restore(self, states):
        self.loader.load_state_dict(states[0])

    def epoch(self, number, done):
        for batch in self.loader:
            yield batch["number"].tolist()

    def state(self):
        return self.loader.state_dict()
