"""WebDataset with each shard once an epoch: the resumed epoch is read from its start, and its steps are skipped."""

# mypy: ignore-errors
# the package is in an environment of its own
from __future__ import annotations

from itertools import islice

import webdataset as wds

from bench.interruptions.adapters.wds_resampled import batches, urls, validation
from bench.interruptions.adapters.webdataset_tars import write
from bench.interruptions.samples import BUFFER, Adapter


class Loader(Adapter):
    label = "WebDataset, each shard once"
    promise = (
        "achieving an exactly balanced number of training samples across many compute nodes for a fixed epoch size is "
        "tricky"
    )
    elastic = "no; no state is documented"
    link = "https://github.com/webdataset/webdataset#readme"
    strength = "It reads plain tars without an index, and a pipeline is a list of functions."
    notes = (
        "There is no state. `split_by_node` and seeded `detshuffle`; steps that were done are read again and skipped, "
        "which the documentation does not describe."
    )
    lacks = {"mixture": "RandomMix is not seeded", "text": "no packing"}

    @staticmethod
    def write(folder):
        write(folder)

    def __init__(self, job):
        self.job = job

    def restore(self, states):
        pass

    def epoch(self, number, done):
        job = self.job
        if job.validates:
            loader = validation(job)
        else:
            seed = 1000 * job.seed + number
            data = wds.WebDataset(
                urls(job, job.collection), shardshuffle=100, detshuffle=True, nodesplitter=wds.split_by_node,
                seed=seed, empty_check=False,
            ).compose(wds.detshuffle(BUFFER, seed=seed))  # fmt: skip
            loader = wds.WebLoader(batches(data, job), batch_size=None, num_workers=job.workers)
        for batch in islice(loader, done, None):
            yield [int(value) for value in batch[0]]

    def state(self):
        return None
