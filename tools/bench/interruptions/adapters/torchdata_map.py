"""torchdata: StatefulDataLoader and StatefulDistributedSampler over a list of samples."""

# mypy: ignore-errors
# the package is in an environment of its own
from __future__ import annotations

from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from bench.interruptions.samples import COLLECTIONS, Adapter


class Loader(Adapter):
    label = "torchdata StatefulDataLoader"
    promise = (
        "Under the hood, StatefulDataLoader handles aggregation and distribution of state across multiprocess workers "
        "(but not across ranks)."
    )
    elastic = "no"
    link = "https://github.com/meta-pytorch/data/tree/main/torchdata/stateful_dataloader"
    strength = "It is a drop-in replacement of torch's DataLoader for any dataset."
    notes = (
        "Each rank saves its state. With more ranks than states, rank r loads state r modulo their number; "
        "the documentation does not say what to do."
    )
    lacks = {"mixture": "no weighted mixture of map datasets", "text": "no packing"}

    @staticmethod
    def write(folder):
        pass

    def __init__(self, job):
        self.job = job
        data = list(COLLECTIONS[job.collection])
        self.sampler = StatefulDistributedSampler(
            data, num_replicas=job.world, rank=job.rank, shuffle=not job.validates, seed=job.seed
        )
        self.sampler.set_epoch(job.epoch)
        self.loader = StatefulDataLoader(
            data,
            batch_size=job.batch,
            sampler=self.sampler,
            num_workers=job.workers,
            drop_last=not job.validates,
        )

    def restore(self, states):
        self.loader.load_state_dict(states[self.job.rank % len(states)])

    def epoch(self, number, done):
        self.sampler.set_epoch(number)
        for batch in self.loader:
            yield batch.tolist()

    def state(self):
        return self.loader.state_dict()
