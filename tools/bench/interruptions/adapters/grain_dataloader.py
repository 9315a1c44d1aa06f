"""Grain: DataLoader with an IndexSampler over ArrayRecord files."""

# mypy: ignore-errors
# the package is in an environment of its own
from __future__ import annotations

import grain

from bench.interruptions.adapters.grain_elastic import parse, source, write
from bench.interruptions.samples import Adapter, rest_of


class Parse(grain.transforms.Map):
    """Turn a record into its number."""

    def map(self, element):
        return parse(element)


class Loader(Adapter):
    label = "Grain DataLoader"
    promise = (
        "When restoring from a state, DataLoaderIterator checks what is the minimum last_seen_index (among the last "
        "seen indices for all workers.) and which worker processed that index."
    )
    elastic = "no"
    link = "https://github.com/google/grain/blob/main/grain/_src/python/data_loader.py"
    strength = "It is made for JAX, and its transformations run in worker processes."
    notes = "No workers, except where their number changes. Each rank saves; rank r loads state r modulo their number."
    lacks = {"mixture": "mixtures are of grain datasets", "text": "packing is for grain datasets"}
    workers = 0

    @staticmethod
    def write(folder):
        write(folder)

    def __init__(self, job):
        self.job = job
        data = source(job, job.collection)
        sampler = grain.samplers.IndexSampler(
            num_records=len(data), num_epochs=1 if job.validates else None, shuffle=not job.validates, seed=job.seed,
            shard_options=grain.sharding.ShardOptions(job.rank, job.world, drop_remainder=not job.validates),
        )  # fmt: skip
        self.loader = grain.DataLoader(
            data_source=data, sampler=sampler, worker_count=job.workers,
            operations=[Parse(), grain.transforms.Batch(job.batch, drop_remainder=not job.validates)],
        )  # fmt: skip
        self.iterator = iter(self.loader)

    def restore(self, states):
        self.iterator.set_state(states[self.job.rank % len(states)])

    def epoch(self, number, done):
        if self.job.validates:
            yield from (batch.tolist() for batch in self.loader)
        else:
            yield from rest_of((batch.tolist() for batch in self.iterator), done)

    def state(self):
        return self.iterator.get_state()
