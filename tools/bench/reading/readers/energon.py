"""Megatron-Energon: webdataset tars indexed by its own preparation, shuffle buffer of 1,000, savable loader.

Its reader seeks in the tars, so text is not compressed.
"""

# mypy: ignore-errors
# the packages are optional
from __future__ import annotations

from typing import Any

import numpy as np

_FORMAT = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


def build(workload: Any, scale: float, directory: str) -> None:
    from pathlib import Path

    import webdataset as wds
    from megatron.energon.flavors import BaseWebdatasetFactory

    root = Path(directory)
    root.mkdir(parents=True)
    suffix = {"": "bin", "str": "txt"}.get(workload.dtype, "npy")
    with wds.ShardWriter(f"{directory}/%05d.tar", maxsize=256 << 20) as writer:
        for number, sample in enumerate(workload.samples(scale)):
            row = {"__key__": f"{number:09d}", suffix: sample[workload.field]}
            writer.write(row | ({"cls": sample["label"]} if workload.label else {}))
    shards = sorted(path.name for path in root.glob("*.tar"))
    BaseWebdatasetFactory.prepare_dataset(root, shards, split_parts_ratio=[("train", 1.0)], workers=2)
    (root / ".nv-meta" / "dataset.yaml").write_text(_FORMAT)


class _Reader:
    def __init__(self, workload: Any, directory: str, workers: int) -> None:
        import megatron.energon as energon

        directory = directory.replace("s3://", "msc://")  # the profile of its client is named as the bucket
        suffix = {"": "bin", "str": "txt"}.get(workload.dtype, "npy")
        decoded = workload.dtype != ""

        class Encoder(energon.DefaultTaskEncoder):
            if not decoded:
                decoder = None
            cookers = (energon.Cooker(energon.stateless(lambda sample: sample)),)

            @energon.stateless
            def encode_sample(self, sample: Any) -> Any:
                return sample  # still a dict: its restore key makes the position

            @energon.stateless
            def batch(self, samples: Any) -> Any:
                values = [sample[suffix] for sample in samples]
                keys = [sample["__restore_key__"] for sample in samples]
                return {
                    "__restore_key__": tuple(keys),
                    "values": np.stack(values) if workload.shape else values,
                }

        def make() -> Any:
            data = energon.get_train_dataset(
                directory, worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=workers),
                batch_size=workload.batch, shuffle_buffer_size=1000, max_samples_per_sequence=100,
                task_encoder=Encoder(), repeat=False,
            )  # fmt: skip
            return energon.get_savable_loader(data)

        self.make = make

    def epoch(self) -> Any:
        return (batch["values"] for batch in self.make())


def open_reader(workload: Any, scale: float, directory: str, workers: int) -> _Reader:
    return _Reader(workload, directory, workers)
