"""Settings of a loader, where its rows come from, and what follows from both."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from shardkit.errors import ConfigurationError, MissingDependency
from shardkit.formats import Schema, presence_of
from shardkit.loader.batch import MissingValues
from shardkit.loader.ranks import Dealt, Holders, Topology, check_chosen, check_shares, fixed_shares
from shardkit.loader.rebalancing import Rebalancing
from shardkit.loader.transforms import BatchTransform, Decoder, RowDecoder, SampleTransform
from shardkit.plan import Assignment, Plan
from shardkit.ranges import Range, shown
from shardkit.reading.blocks import BlockReader, RowMap

if TYPE_CHECKING:
    from shardkit.telemetry import TelemetrySettings
    from shardkit.telemetry.recorder import EventLog

__all__ = ["LoaderConfig", "LoaderSetup", "OnError", "OnStall", "Sources", "Workers"]

Workers: TypeAlias = Literal["threads", "processes"]
"""What transforms run in."""

OnError: TypeAlias = Literal["raise", "substitute", "mask"]
"""What becomes of a verified sample that does not decode."""

OnStall: TypeAlias = Callable[[Mapping[str, Any]], None]
"""Takes what a stall waits for: rank, lane, shard, stage."""

_RANGES = {
    "memory": Range(1 << 20, 1 << 50), "cache_size": Range(0, 1 << 60), "threads": Range(1, 4096),
    "prefetch": Range(0, 10**6), "device_prefetch": Range(1, 64), "stride": Range(1, 10**6), "offset": Range(0, 10**6),
}  # fmt: skip
"""Of whole numbers that a loader is told."""

_KINDS: Sequence[tuple[str, str, Callable[[Any], bool]]] = [
    *((name, "True or False", lambda value: type(value) is bool) for name in ("by_cell", "uneven", "restart")),
    ("tensors", "True, False or None", lambda value: value is None or type(value) is bool),
    ("fields", "a list of field names", lambda value: not isinstance(value, str | bytes)),
    ("transform", "a function", lambda value: value is None or callable(value)),
    ("batch_transform", "a function", lambda value: value is None or callable(value)),
    ("store", "a torch store", lambda value: value is None or hasattr(value, "multi_get")),
    ("workers", "'threads' or 'processes'", lambda value: value in ("threads", "processes")),
    ("on_error", "'raise' or 'substitute' or 'mask'", lambda value: value in ("raise", "substitute", "mask")),
    ("assignment", "'near', 'fixed' or an Assignment",
     lambda value: isinstance(value, Assignment) or value in ("near", "fixed")),
    ("rebalance", "True, False or a Rebalancing", lambda value: value is None or isinstance(value, Rebalancing)),
]  # fmt: skip
"""Settings that are no numbers: name, what is expected, and a check."""

_AHEAD: Final = 0.25  # of the windows, for what comes next
_LEAST: Final = 1 << 20
_PAGE: Final = 4096
_WHOLE: Final = 2 << 30  # where rows of all blocks are mixed, and only the whole dataset would do


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the rows come from: made by `Dataset.loader`."""

    manifest: str  # "sha256:…"
    schema: Schema  # the stored columns
    rows: RowMap
    reader: BlockReader
    block_bytes: Callable[[int], int]  # upper bound of a block's raw bytes by dataset-wide number
    mean_block_bytes: int  # raw, of all blocks
    row_bytes: Callable[[Sequence[str]], int]  # typical bytes of these fields of a row
    fetch: Callable[[int], dict[str, Any]]  # one verified sample
    describe: Callable[[int], str]  # number, key and source of a sample, for messages


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """Settings of a loader; see `Dataset.loader` for their meaning."""

    rank: int | None = None
    world: int | None = None
    mesh: Any = None
    lanes: Sequence[int] | None = None
    fields: Sequence[str] | None = None
    by_cell: bool = False
    uneven: bool = False
    assignment: Literal["near", "fixed"] | Assignment = "near"
    store: Any = None  # of torch, in place of the process group's
    rebalance: Rebalancing | None = None
    memory: int | None = None  # of the rank; what its windows need where None
    threads: int | None = None
    prefetch: int | None = None
    tensors: bool | None = None
    device: Any = None  # of torch
    device_prefetch: int = 2
    decode: Mapping[str, str | Decoder] = field(default_factory=dict)
    transform: SampleTransform | None = None
    batch_transform: BatchTransform | None = None
    workers: Workers = "threads"
    on_error: OnError = "raise"
    stall_s: float = 60.0
    on_stall: OnStall | None = None
    run: Path | None = None
    cache: Path | None = None
    share: bool | str = False  # the cache, with other nodes of the process group; HOST:PORT to listen on
    cache_size: int | None = None  # bytes; most of the disk's free room where None
    telemetry: TelemetrySettings | Literal[True] | None = True  # where there is a `run`
    stride: int = 1  # hand out every stride-th step from the offset-th on: how DataLoader workers share them
    offset: int = 0
    fill: Mapping[str, Any] = field(default_factory=dict)
    restart: bool = False  # every loop begins at the start of its epoch

    @property
    def num_threads(self) -> int:
        """Threads that read blocks and work rows: by default one per processor that this process may use, at most 8.

        Not one less: no batch is handed out before the first blocks are loaded, and these threads wait as soon as the
        window is full.
        """
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.threads or max(1, min(8, usable))

    @property
    def runs_user_code(self) -> bool:
        """Whether functions of the user work rows."""
        functions = [one for one in self.decode.values() if callable(one) and not isinstance(one, RowDecoder)]
        return self.transform is not None or bool(functions)

    @property
    def rows_are_seeded(self) -> bool:
        """Whether each row has the global generators for itself: in processes, or while the trainer waits for it."""
        if not self.runs_user_code:
            return False
        return self.workers == "processes" or (self.num_threads == 1 and not self.prefetch)

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            if (value := getattr(self, name)) is not None:
                allowed.check(name, value)
        Range(0, 604_800, above=True).check("stall_s", self.stall_s, float)
        for name, what, is_right in _KINDS:
            if not is_right(value := getattr(self, name)):
                raise ConfigurationError(f"{name}={shown(value)}: {what} is expected")
        if self.offset >= self.stride:
            raise ConfigurationError(f"offset={self.offset}: a number below stride={self.stride} is expected")
        if self.rebalance is not None:
            self._check_rebalance()
        if self.device is not None and (self.stride != 1 or self.tensors is False):
            raise ConfigurationError(
                f"device={self.device!r} is for tensors of one process: leave out stride= and tensors=False"
            )
        if self.share and self.cache is None:
            raise ConfigurationError(f"share={self.share!r} gives out this node's cache: pass cache= with it")
        if self.store is not None and self.rank is None:
            raise ConfigurationError("store= is for ranks that are given: pass rank= and world= with it")

    def _check_rebalance(self) -> None:
        if not self.uneven:
            raise ConfigurationError(
                "rebalance moves lanes, so that ranks hold unequal numbers of samples: pass uneven=True and multiply "
                "the loss by batch.weight"
            )
        if self.lanes is not None or self.stride != 1:
            raise ConfigurationError(
                "rebalance deals the lanes itself, in one process per rank: leave out lanes= and stride="
            )


def gathered_fields(schema: Schema, config: LoaderConfig) -> list[str]:
    """Columns that are gathered, in the order asked for; after an optional field its presence column."""
    fields = list(schema if config.fields is None else config.fields)
    for name in fields:
        if name not in schema:
            raise ConfigurationError(f"fields: {name!r} is not in the schema; it has {', '.join(schema)}")
    gathered = dict.fromkeys(fields)
    for name in fields:
        if schema[name].optional:
            gathered[presence_of(name)] = None
    return list(gathered)


def first_lanes(plan: Plan, topology: Topology, config: LoaderConfig) -> tuple[Dealt | None, list[int]]:
    """Fixed shares, None if lanes were chosen, and the lanes of this rank, before ranks talk."""
    if config.lanes is not None:
        return None, check_chosen(plan.lanes, config.lanes)
    check_shares(plan, topology.world, uneven=config.uneven)
    dealt = fixed_shares(plan, topology.world, config.assignment)
    return dealt, list(dealt.assignment.lanes_of(topology.rank))


def makes_tensors(config: LoaderConfig) -> bool:
    """Whether batches hold torch tensors; imports torch if they were asked for before it was imported."""
    wanted = "torch" in sys.modules if config.tensors is None else config.tensors
    if not wanted and config.device is None:
        return False
    try:
        __import__("torch")
    except ImportError as error:
        raise MissingDependency(
            'ds.loader(tensors=True) needs torch; run: pip install "shardkit[train]", or take numpy arrays: '
            "tensors=False"
        ) from error
    return True


@dataclass(frozen=True, kw_only=True)
class LoaderSetup:
    """What one loader reads, and how: all that does not change while it lives, shared by its parts.

    Attributes:
        fields: stored columns that are gathered, in this order.
        tensors: whether batches hold torch tensors.
        missing: what becomes of rows that have no value of a field.
        holders: caches of other nodes that blocks may come from.
    """

    plan: Plan
    sources: Sources
    config: LoaderConfig
    topology: Topology
    fields: Sequence[str]
    tensors: bool
    missing: MissingValues
    holders: Holders | None = None

    @cached_property
    def events(self) -> EventLog:
        """Of the run; goes nowhere without one."""
        from shardkit.telemetry.recorder import EventLog  # here, for a loader that is not watched has none

        return EventLog(self.config.run, self.topology.rank)

    def memory_needed(self, lanes: int) -> int:
        """Bytes of the blocks that so many lanes mix rows of at a time, and a quarter more.

        With less the same blocks are read over and over. Nobody needs more than the whole dataset; with
        ``shuffle="full"`` nothing less would do, and nothing is asked for.
        """
        plan, sources = self.plan, self.sources
        blocks = 0 if plan.settings.shuffle == "full" else min(sources.rows.blocks, lanes * plan.open_blocks)
        size = -(-max(1, sources.mean_block_bytes) // _PAGE) * _PAGE
        return max(_LEAST, int(blocks * size * (1 + _AHEAD)))

    def memory_bound(self, lanes: int) -> int:
        """Bytes that the blocks of one process may take; `config.memory` is that of a rank, shared by its workers."""
        config, plan, sources = self.config, self.plan, self.sources
        needed = self.memory_needed(lanes)
        if config.memory is None:
            whole = min(_WHOLE, sources.rows.blocks * 2 * sources.mean_block_bytes)
            return max(needed, whole) if plan.settings.shuffle == "full" else needed
        bound = config.memory // config.stride
        if bound < needed:
            workers = f" for each of {config.stride} workers" if config.stride > 1 else ""
            raise ConfigurationError(
                f"memory={config.memory} is {bound} bytes{workers}; {lanes} lanes mix rows of {plan.open_blocks} "
                f"blocks of {sources.mean_block_bytes} bytes each and need {needed}{workers}: leave memory out, pass "
                f"at least {needed * config.stride}, or give the plan fewer lanes or a smaller window_blocks"
            )
        return bound
