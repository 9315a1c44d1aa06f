"""WebDataset with resampled shards: there is no state, and samples come at random by design."""

# mypy: ignore-errors
# the package is in an environment of its own
from __future__ import annotations

import webdataset as wds

from bench.interruptions.adapters.webdataset_tars import write
from bench.interruptions.samples import BUFFER, WEIGHTS, Adapter, rest_of


def urls(job, name):
    return sorted(map(str, (job.folder / name).glob("*.tar")))


def batches(data, job):
    return data.decode().to_tuple("cls").batched(job.batch, partial=job.validates)


def validation(job):
    data = wds.WebDataset(
        urls(job, "validation"), shardshuffle=False, nodesplitter=wds.split_by_node, empty_check=False
    )
    return wds.WebLoader(batches(data, job), batch_size=None, num_workers=job.workers)


class Loader(Adapter):
    label = "WebDataset, resampled"
    promise = "for multinode training, webdataset is usually used with shard resampling"
    elastic = "no; no state is documented"
    link = "https://github.com/webdataset/webdataset#readme"
    strength = "It reads plain tars without an index, and a pipeline is a list of functions."
    notes = f"`resampled=True`, `shuffle({BUFFER})`; an epoch is 84 steps of an endless stream."
    lacks = {"text": "no packing"}
    random = True

    @staticmethod
    def write(folder):
        write(folder)

    def __init__(self, job):
        self.job = job
        if job.validates:
            self.loader = validation(job)
            return

        def one(name):
            return wds.WebDataset(
                urls(job, name),
                resampled=True,
                shardshuffle=False,
                nodesplitter=wds.split_by_node,
                seed=job.seed,
            )

        if job.collection == "mixture":
            mixed = wds.RandomMix([one(name) for name in WEIGHTS], list(WEIGHTS.values()))
            data = wds.DataPipeline(mixed).compose(
                wds.shuffle(BUFFER), wds.decode(), wds.to_tuple("cls"), wds.batched(job.batch, partial=False)
            )
        else:
            data = batches(one(job.collection).shuffle(BUFFER), job)
        self.loader = wds.WebLoader(data, batch_size=None, num_workers=job.workers)

    def restore(self, states):
        pass

    def epoch(self, number, done):
        found = ([int(value) for value in batch[0]] for batch in self.loader)
        yield from found if self.job.validates else rest_of(found, done)

    def state(self):
        return None
