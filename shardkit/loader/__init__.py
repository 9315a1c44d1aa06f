"""Delivers a plan's cells: verified, in order, resumable (SPEC.md).

loader        — the loader itself: iteration, state, statistics
loop          — one loop over it, and the step after the one handed out
settings      — what a loader is told, and where its rows come from
state         — a step number and two digests
shares        — which lanes and fields a rank reads
machinery     — what it opens in one process: threads, workers, journal
pipeline      — plan → load → gather → transform, ahead of the trainer and in order
background    — an iterator that runs ahead on a thread of its own
schedule      — the near future of a rank as data (pure)
block_window  — the blocks in memory, loaded ahead by deadline within a byte budget
block_loading — blocks read into private memory and verified, some at a time
block_memory  — that memory, recycled
memory_bound  — how much of it a rank's windows need
gather        — rows of many blocks into one buffer per field
block_rows    — both, compiled (optional); plain_rows: the same in Python
prefetcher    — finds and loads what the next steps need
assembly      — a group of steps cut into batches
row_work      — decoding and transforms on threads or processes; rows that do not decode
transforms    — user functions, their randomness, rows and columns
decoders      — by name: images, numpy, json, text
substitutes   — another sample for one that does not decode
batch         — what is handed out
ranks         — which rank of how many this is
agreement     — ranks compare what they are about to read
rebalancing   — lanes that move away from slow ranks
watchdog      — what a stalled step waits for
statistics    — counters of the stages
events        — what went other than planned
telemetry_sources — what the loader reports
run_watch     — records, health, anomalies beside the loader
replication_lag — how far copies are below the policy
control       — settings that change while the run goes on
knobs         — which ones those are
"""

from shardkit.loader.batch import Batch
from shardkit.loader.loader import Loader
from shardkit.loader.ranks import Topology, find_topology
from shardkit.loader.rebalancing import Rebalancing
from shardkit.loader.settings import LoaderConfig, Sources
from shardkit.loader.state import check_state
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
