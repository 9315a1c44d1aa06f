"""Delivers a plan's cells: verified, in order, resumable.

loader        — the loader itself: iteration, state, statistics
pipeline      — plan → load → gather → transform → queue, on a thread, in order
schedule      — the near future of a rank as data (pure)
block_window  — the blocks in memory, loaded ahead by deadline within a byte budget
gather        — rows of many blocks into one buffer per field
transforms    — user functions and their randomness
batch         — what is handed out
ranks         — which rank of how many this is
"""

from shardkit.loader.batch import Batch
from shardkit.loader.loader import Loader, LoaderConfig, Sources
from shardkit.loader.ranks import Topology, find_topology
from shardkit.loader.transforms import sample_generator, stack_samples

__all__ = [
    "Batch",
    "Loader",
    "LoaderConfig",
    "Sources",
    "Topology",
    "find_topology",
    "sample_generator",
    "stack_samples",
]
