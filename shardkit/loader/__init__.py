"""Delivers a plan's cells: verified, in order, resumable (SPEC.md).

The stages are plan → load → gather → decode and transform → deliver. A `LoaderSetup` holds what is read and how; it
never changes. `LoaderResources` holds what is open in a process: threads, workers, journal and memory. A `Pipeline`
reads some steps once. Code that watches or steers a running loader holds a `LiveLoader`. Imports between the modules
have no cycles, `schedule` is pure, and nothing here imports torch at import time.
"""

from shardkit.loader.batch import Batch
from shardkit.loader.live import check_state
from shardkit.loader.loader import Loader
from shardkit.loader.ranks import Topology, find_topology
from shardkit.loader.rebalancing import Rebalancing
from shardkit.loader.settings import LoaderConfig, Sources
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
