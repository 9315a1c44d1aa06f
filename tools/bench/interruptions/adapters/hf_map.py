"""Hugging Face datasets, map-style: DistributedSampler of torch, StatefulDataLoader of torchdata."""

# mypy: ignore-errors
# the package is in an environment of its own
from __future__ import annotations

from datasets import Dataset, disable_progress_bars, load_from_disk
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from bench.interruptions.samples import COLLECTIONS, Adapter

disable_progress_bars()


class Loader(Adapter):
    label = "HF datasets, map-style"
    promise = (
        "Under the hood, StatefulDataLoader handles aggregation and distribution of state across multiprocess workers "
        "(but not across ranks)."
    )
    elastic = "no"
    link = "https://github.com/meta-pytorch/data/tree/main/torchdata/stateful_dataloader"
    strength = "Thousands of published datasets are one line away, and rows are read at random."
    notes = "As torchdata: each rank saves, and rank r loads state r modulo the number of states."
    lacks = {"mixture": "mixtures are of iterable datasets", "text": "no packing in the loader"}

    @staticmethod
    def write(folder):
        for name in ("train", "odd", "validation"):
            Dataset.from_dict({"number": list(COLLECTIONS[name])}).save_to_disk(folder / name)

    def __init__(self, job):
        self.job = job
        data = load_from_disk(job.folder / job.collection)
        self.sampler = DistributedSampler(
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
            yield batch["number"].tolist()

    def state(self):
        return self.loader.state_dict()
