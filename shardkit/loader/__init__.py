"""Delivers a plan's cells: verified, in order, resumable (SPEC.md).

The stages are plan → load → gather → decode and transform → deliver. A `LoaderSetup` holds what is read and how; it
never changes. A `Pipeline` reads steps in order. `LoaderResources` holds what is open in a process: the pipeline, its
threads, workers, journal and memory. Code that watches a running loader or changes its settings holds a `LiveLoader`.
Nothing here imports torch at import time.
"""

from shardkit.loader.batch import Batch
from shardkit.loader.loader import Loader
from shardkit.loader.settings import LoaderConfig, Rebalancing, Sources, Topology, find_topology
from shardkit.loader.states import check_state
from shardkit.loader.transforms import sample_generator, stack_samples

__all__ = [
    "Batch",
    "Loader",
    "LoaderConfig",
    "Rebalancing",
    "Sources",
    "Topology",
    "check_state",
    "find_topology",
    "sample_generator",
    "stack_samples",
]
