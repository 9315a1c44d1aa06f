"""Megatron-Energon: savable loader over WebDataset tars that its own preparation indexes."""

# mypy: ignore-errors
# the package is in an environment of its own
from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path

import torch
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from megatron.energon.cli.main import main

from bench.interruptions.adapters.webdataset_tars import write
from bench.interruptions.samples import BUFFER, GLOBAL_BATCH, WEIGHTS, Adapter, rest_of


@dataclasses.dataclass
class Numbered(Sample):
    """A sample, or a batch of them."""

    number: int


@stateless
def cook(sample):
    return Numbered(**basic_sample_keys(sample), number=int(sample["cls"]))


class Encoder(DefaultTaskEncoder[Numbered, Numbered, Numbered, Numbered]):
    """Turns a sample of a tar into its number."""

    cookers = [Cooker(cook)]


def energon(*arguments):
    """Run a command of energon in this process: another one would import torch again."""
    try:
        main([*map(str, arguments)], standalone_mode=False)
    except Exception as error:
        raise RuntimeError(f"energon {arguments[0]}: {type(error).__name__}: {error}") from error


class Loader(Adapter):
    label = "Megatron-Energon"
    promise = (
        "The product world_size * num_workers must stay the same across runs, such that the global number of workers "
        "stays the same"
    )
    elastic = "while ranks × workers is constant"
    link = "https://nvidia.github.io/Megatron-Energon/advanced/repro_scaling.html"
    strength = (
        "Blends and joins multimodal datasets, and your own functions pack and batch them, all in the state."
    )
    notes = (
        f"`shuffle_buffer_size={BUFFER}`; each rank saves, and `energon checkpoint redist` makes the states of another "
        "number of ranks. An epoch is 84 steps of an endless stream."
        " From one rank to several (2×2 → 1×4 → 4×1, tried once), redist refuse"
        "s a single state file, so the measured order ends on one rank."
    )
    lacks = {"text": "packing is a function that the user writes"}

    @staticmethod
    def write(folder):
        write(folder)
        for data in sorted(folder.iterdir()):
            energon(
                "prepare", data, "--non-interactive", "--split-parts", "train:.*", "--split-parts", "val:.*",
                "--sample-type", "CrudeWebdataset", "--num-workers", "1", "--no-progress",
            )  # fmt: skip
        rows = "".join(
            f"      - weight: {weight}\n        path: ./{name}\n" for name, weight in WEIGHTS.items()
        )
        (folder / "mixture.yaml").write_text(
            f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n{rows}"
        )

    def __init__(self, job):
        self.job = job
        config = WorkerConfig(
            rank=job.rank, world_size=job.world, num_workers=job.workers, seed_offset=job.seed
        )
        if job.validates:
            self.loader = get_loader(
                get_val_dataset(
                    job.folder / "validation",
                    worker_config=config,
                    batch_size=job.batch,
                    task_encoder=Encoder(),
                )
            )
            return
        # the micro batch that the page on reproducible scaling asks for
        all_workers = job.world * max(1, job.workers)
        constant = all_workers == job.first_world * max(1, job.first_workers)
        first = GLOBAL_BATCH // (job.first_world * max(1, job.first_workers))
        self.micro = first if constant else math.gcd(job.batch, first)  # a larger one is refused
        path = "mixture.yaml" if job.collection == "mixture" else job.collection
        self.loader = get_savable_loader(
            get_train_dataset(
                job.folder / path, worker_config=config, batch_size=self.micro, shuffle_buffer_size=BUFFER,
                max_samples_per_sequence=100, task_encoder=Encoder(),
            )
        )  # fmt: skip

    def restore(self, states):
        if len(states) != self.job.world:
            states = self._redistributed(states)
        self.loader.restore_state_rank(states[self.job.rank])

    def _redistributed(self, states):
        with tempfile.TemporaryDirectory() as scratch:
            before, after = Path(scratch, "before"), Path(scratch, "after")
            before.mkdir()
            after.mkdir()
            files = [before / f"rank{rank}.pth" for rank in range(len(states))]
            for file, state in zip(files, states, strict=True):
                torch.save(state, file)
            energon("checkpoint", "redist", *files, after, "--new-world-size", self.job.world)
            return [
                torch.load(after / f"rank{rank}.pth", weights_only=False) for rank in range(self.job.world)
            ]

    def epoch(self, number, done):
        if self.job.validates:
            yield from ([int(one) for one in batch.number] for batch in self.loader)
            return
        if not hasattr(self, "stream"):
            self.stream = self._steps()
        yield from rest_of(self.stream, done)

    def _steps(self):
        step = []
        for batch in self.loader:
            step += [int(one) for one in batch.number]
            if len(step) == self.job.batch:
                yield step
                step = []

    def state(self):
        return self.loader.save_state_rank()
