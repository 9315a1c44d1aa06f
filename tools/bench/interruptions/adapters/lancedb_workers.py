"""LanceDB with worker processes, started by a fork server, as its warning about forks advises."""

# mypy: ignore-errors
# the package is in an environment of its own
from __future__ import annotations

from bench.interruptions.adapters.lancedb_streaming import Loader as WithoutWorkers


class Loader(WithoutWorkers):
    label = "LanceDB, with workers"
    promise = (
        "With num_workers > 0, calling state_dict() often raises RuntimeError. In this case, use StreamingDataLoader "
        "for multi-worker prefetch and exact resumability."
    )
    link = "https://docs.lancedb.com/training/checkpointing"
    notes = (
        WithoutWorkers.notes
        + " States are saved every 12 steps, when all workers have had the same number of turns."
    )
    lacks = {"mixture": "no weighted mixture"}
    workers = 2
    align = 12
