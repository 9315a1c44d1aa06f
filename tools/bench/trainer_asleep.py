"""A classifier whose cells cost 10 ms of sleep each, 20 ms on the rank that SHARDKIT_BENCH_SLOW names.

Computing ranks that share cores slow each other down; sleeping ranks do not.
"""

from __future__ import annotations

import os
import time
from typing import Any

from shardkit_trainer.configuration import ModelConfig
from shardkit_trainer.tasks import ClassifierTask, Inputs

CELL_S = 0.010


class Asleep(ClassifierTask):
    """The built-in classifier with a sleep before each cell."""

    def prepare(self, cell: Any, seed: int) -> Inputs:
        slow = os.environ.get("RANK", "0") == os.environ.get("SHARDKIT_BENCH_SLOW")
        time.sleep(CELL_S * (2 if slow else 1))
        return super().prepare(cell, seed)


def make(config: ModelConfig, dataset: Any) -> Asleep:
    """Make the classifier."""
    return Asleep(config, dataset)
