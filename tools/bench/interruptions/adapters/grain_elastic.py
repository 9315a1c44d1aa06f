"""Grain: ElasticIterator (experimental) over a shuffled MapDataset of ArrayRecord files."""

# mypy: ignore-errors
# the package is in an environment of its own
from __future__ import annotations

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from grain.experimental import ElasticIterator

from bench.interruptions.samples import COLLECTIONS, GLOBAL_BATCH, WEIGHTS, Adapter, parts, rest_of


def write(folder):
    for name, numbers in COLLECTIONS.items():
        (folder / name).mkdir()
        for at, part in enumerate(parts(numbers, 4)):
            writer = ArrayRecordWriter(str(folder / name / f"{at}.array_record"), "group_size:1")
            for number in part:
                writer.write(number.to_bytes(8, "little"))
            writer.close()


def source(job, name):
    return grain.sources.ArrayRecordDataSource(sorted(map(str, (job.folder / name).glob("*.array_record"))))


def parse(record):
    return np.int64(int.from_bytes(record, "little"))


class Loader(Adapter):
    label = "Grain ElasticIterator"
    promise = (
        "State of any shard can be used to restore the state of all of the shards after changes in sharding and global "
        "batch size."
    )
    elastic = "yes"
    link = "https://github.com/google/grain/blob/main/grain/_src/python/dataset/elastic_iterator.py"
    strength = "The state is one number, and the global batch may change without a new plan."
    notes = "Experimental; threads instead of workers, except where the number of workers changes."
    lacks = {
        "text": "the iterator “explicitly disallows many-to-one transformations without a fixed ratio”",
    }
    workers = 0

    @staticmethod
    def write(folder):
        write(folder)

    def __init__(self, job):
        self.job = job
        shard = grain.sharding.ShardOptions(job.rank, job.world)
        if job.validates:
            data = grain.MapDataset.source(source(job, "validation")).map(parse)[job.rank :: job.world]
            self.data = data.batch(job.batch).to_iter_dataset()
            return
        names = list(WEIGHTS) if job.collection == "mixture" else [job.collection]
        sets = [
            grain.MapDataset.source(source(job, name)).seed(job.seed + 1 + at).shuffle().repeat()
            for at, name in enumerate(names)
        ]
        weights = [float(weight) for weight in WEIGHTS.values()]
        data = grain.MapDataset.mix(sets, weights=weights) if len(sets) > 1 else sets[0]
        options = grain.multiprocessing.MultiprocessingOptions(job.workers) if job.workers else None
        self.iterator = iter(
            ElasticIterator(data.map(parse), GLOBAL_BATCH, shard, multiprocessing_options=options)
        )

    def restore(self, states):
        self.iterator.set_state(states[0])

    def epoch(self, number, done):
        if self.job.validates:
            yield from (batch.tolist() for batch in self.data)
        else:
            yield from rest_of((batch.tolist() for batch in self.iterator), done)

    def state(self):
        return self.iterator.get_state()
