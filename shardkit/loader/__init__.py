"""Delivers a plan's cells: verified, in order, resumable (SPEC.md).

What a plan says comes when, this package fetches: plan → load → gather → decode and transform → hand out. What is read
and how is one `LoaderSetup`, which does not change; what is open in a process (threads, workers, journal, memory) is
`LoaderResources`; one pass over some steps is a `Pipeline`; what watches and steers a running loader holds a
`LiveLoader`. Modules import one another one way; `schedule` is pure. Nothing here imports torch.
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
