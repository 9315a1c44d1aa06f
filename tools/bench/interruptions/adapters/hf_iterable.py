"""Hugging Face datasets, streaming: shuffle buffer, split_dataset_by_node, StatefulDataLoader of torchdata."""

# mypy: ignore-errors
# the package is in an environment of its own
from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import disable_progress_bars, interleave_datasets, load_dataset
from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader

from bench.interruptions.samples import BUFFER, COLLECTIONS, WEIGHTS, Adapter, parts

disable_progress_bars()


class Loader(Adapter):
    label = "HF datasets, iterable"
    promise = (
        "Resuming returns exactly where the checkpoint was saved except in two cases: 1. examples from shuffle buffers "
        "are lost when resuming and the buffers are refilled with new data […]"
    )
    elastic = "no"
    link = "https://huggingface.co/docs/datasets/package_reference/main_classes#datasets.IterableDataset.load_state_dict"
    strength = "Datasets of the hub are streamed without a download or a build."
    notes = (
        f"24 Parquet files, `shuffle(buffer_size={BUFFER}, max_buffer_input_shards=1)`; with the default, 24 files are "
        "too few shards for several workers. Each rank saves; rank r loads state r modulo the number of states."
    )
    lacks = {"text": "no packing in the loader"}
    documented = "samples of the shuffle buffer are lost"
    shuffles = True

    @staticmethod
    def write(folder):
        for name, numbers in COLLECTIONS.items():
            (folder / name).mkdir()
            for at, part in enumerate(parts(numbers)):
                pq.write_table(pa.table({"number": list(part)}), folder / name / f"{at:02d}.parquet")

    def __init__(self, job):
        def one(name):
            files = sorted(map(str, (job.folder / name).glob("*.parquet")))
            return load_dataset("parquet", data_files=files, split="train", streaming=True)

        self.job = job
        if job.collection == "mixture":
            total = sum(WEIGHTS.values())
            data = interleave_datasets(
                [one(name) for name in WEIGHTS], seed=job.seed,
                probabilities=[weight / total for weight in WEIGHTS.values()], stopping_strategy="all_exhausted",
            )  # fmt: skip
        else:
            data = one(job.collection)
        if self.shuffles and not job.validates:
            data = data.shuffle(seed=job.seed, buffer_size=BUFFER, max_buffer_input_shards=1)
        data = split_dataset_by_node(data, rank=job.rank, world_size=job.world)
        data.set_epoch(job.epoch)
        self.loader = StatefulDataLoader(
            data, batch_size=job.batch, num_workers=job.workers, drop_last=not job.validates, collate_fn=list
        )

    def restore(self, states):
        self.loader.load_state_dict(states[self.job.rank % len(states)])

    def epoch(self, number, done):
        self.loader.dataset.set_epoch(number)
        for batch in self.loader:
            yield [sample["number"] for sample in batch]

    def state(self):
        return self.loader.state_dict()
