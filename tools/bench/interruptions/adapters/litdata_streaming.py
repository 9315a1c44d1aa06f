"""LitData: StreamingDataset in StreamingDataLoader."""

# mypy: ignore-errors
# the package is in an environment of its own
from __future__ import annotations

import numpy as np
import torch
from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset, TokensLoader, optimize

from bench.interruptions.samples import COLLECTIONS, SEQUENCE, WEIGHTS, Adapter, documents


def _same(inputs):
    return inputs


def _tokens(inputs):
    return torch.tensor(inputs, dtype=torch.int32)


class Loader(Adapter):
    label = "LitData"
    promise = (
        "For a StreamingDataset, num_workers and world_size may change: LitData drops a global sample_in_epoch prefix "
        "and restripes the rest (never duplicates remaining IDs). […] CombinedStreamingDataset and "
        "ParallelStreamingDataset resume only with the same world_size, num_workers, and batch_size."
    )
    elastic = "yes, not for mixtures"
    link = "https://github.com/Lightning-AI/litData#pause-resume"
    strength = "Raw files, Parquet and MDS are streamed without a build."
    notes = "The state of rank 0 is loaded on every rank; `drop_last=True`."

    @staticmethod
    def write(folder):
        quick = {"num_workers": 1, "verbose": False, "start_method": "fork"}
        for name, numbers in COLLECTIONS.items():
            optimize(_same, list(numbers), str(folder / name), chunk_size=48, **quick)
        text = {"chunk_size": SEQUENCE * 64, "item_loader": TokensLoader()}
        optimize(_tokens, documents(), str(folder / "text"), **text, **quick)

    def __init__(self, job):
        def one(name, **more):
            return StreamingDataset(str(job.folder / name), seed=job.seed + 42, **more)

        if job.collection == "mixture":
            data = CombinedStreamingDataset(
                [one(name, shuffle=True, drop_last=True) for name in WEIGHTS],
                seed=job.seed + 42, weights=list(WEIGHTS.values()), iterate_over_all=False,
            )  # fmt: skip
        else:
            more = {"item_loader": TokensLoader(SEQUENCE)} if job.collection == "text" else {}
            data = one(job.collection, shuffle=not job.validates, drop_last=not job.validates, **more)
        self.loader = StreamingDataLoader(
            data, batch_size=job.batch, num_workers=job.workers, drop_last=not job.validates
        )

    def restore(self, states):
        self.loader.load_state_dict(states[0])

    def epoch(self, number, done):
        for batch in self.loader:
            yield np.asarray(batch).ravel().tolist()

    def state(self):
        return self.loader.state_dict()
