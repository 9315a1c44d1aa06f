"""A rank of torchtitan's trainer on the CPU: its debug model over packed rows of a dataset.

python titan_ranks.py DATA FOLDER LOCAL_BATCH STEPS DIE_AT     # with the environment of torchrun

torchtitan finds accelerators only, reads the memory figures of the device, and masks attention by kernels of CUDA.
This program names the CPU as the device, leaves out the figures, and takes torch's own attention and plain sums.
"""

# mypy: ignore-errors
# torchtitan is optional
from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import config_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from shardkit.integrations.torchtitan import PlanDataLoader  # noqa: E402


class NoMemoryFigures:
    device_name = "cpu"

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))

    def reset_peak_stats(self) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    """Rows are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_) -> None:
        super().__init__()

    encode = decode = get_vocab_size = None


class MortalTrainer(Trainer):
    def should_continue_training(self) -> bool:
        if self.step == self.die_at < self.config.training.steps:
            os._exit(9)
        return super().should_continue_training()


def main(data: str, folder: str, local_batch: int, steps: int, die_at: int) -> None:
    metrics.build_device_memory_monitor = NoMemoryFigures
    distributed.set_pg_timeouts = lambda **_: None  # waits on a CUDA device
    config = config_registry.llama3_debugmodel()
    del config.model_spec.model.layers[1:]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training.seq_len, config.training.steps = 32, steps
    config.training.local_batch_size, config.training.global_batch_size = local_batch, 8
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"  # the others need a newer torch
    config.dataloader = PlanDataLoader.Config(
        dataset_path=data, global_batch=8, run=f"{folder}/run", plan={"lanes": 4, "seed": 3}
    )
    config.tokenizer = NoTokenizer.Config()
    config.checkpoint.enable, config.checkpoint.interval = True, 3
    config.dump_folder = folder
    trainer = MortalTrainer(config)
    trainer.die_at = die_at
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
