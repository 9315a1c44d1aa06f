"""Settings of a loader, the sources of its rows, and values derived from both."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from shardkit.errors import ConfigurationError, MissingDependency
from shardkit.extras import install_command
from shardkit.formats import Schema, presence_of
from shardkit.loader.batch import MissingValues
from shardkit.loader.ranks import (
    Holders,
    LaneShares,
    Topology,
    check_lanes,
    check_shares,
    find_topology,
    fixed_shares,
)
from shardkit.loader.rebalancing import Rebalancing
from shardkit.loader.transforms import (
    BatchTransform,
    Decoder,
    RowDecoder,
    RowFunction,
    SampleTransform,
    find_decoders,
    split_decoders,
    with_generator,
)
from shardkit.plan import Assignment, Mixer, Plan
from shardkit.ranges import Range, shown
from shardkit.reading.blocks import BlockReader, RowMap

if TYPE_CHECKING:
    from shardkit.loader.device import DeviceOutput
    from shardkit.loader.mixing import Mixing
    from shardkit.telemetry import TelemetrySettings
    from shardkit.telemetry.recorder import EventLog

__all__ = ["LoaderConfig", "LoaderSetup", "OnError", "OnStall", "Sources", "Workers"]

Workers: TypeAlias = Literal["threads", "processes"]
"""Workers that run decoders and transforms."""

OnError: TypeAlias = Literal["raise", "substitute", "mask"]
"""Treatment of a verified sample that does not decode."""

OnStall: TypeAlias = Callable[[Mapping[str, Any]], None]
"""Called with the facts of a stall, such as rank, step, lane, shard and stage."""

_RANGES = {
    "memory": Range(1 << 20, 1 << 50), "cache_size": Range(0, 1 << 60), "threads": Range(1, 4096),
    "prefetch": Range(0, 10**6), "device_prefetch": Range(1, 64), "stride": Range(1, 10**6), "offset": Range(0, 10**6),
}  # fmt: skip
"""Allowed ranges of integer settings."""
_NEEDED: Final = ("device_prefetch", "stride", "offset")
"""Integer settings that cannot be None."""


def _one_of(*choices: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in choices  # an array equals each of its items


_KINDS: Sequence[tuple[str, str, Callable[[Any], bool]]] = [
    *((name, "True or False", lambda value: type(value) is bool) for name in ("by_cell", "uneven", "restart")),
    ("tensors", "True, False or None", lambda value: value is None or type(value) is bool),
    ("fields", "a list of field names",
     lambda value: value is None or isinstance(value, list | tuple | AbstractSet | Mapping)),
    ("decode", "a mapping of field to decoder", lambda value: isinstance(value, Mapping)),
    ("fill", "a mapping of field to value", lambda value: isinstance(value, Mapping)),
    ("share", "True, False or HOST:PORT", lambda value: isinstance(value, bool | str)),
    ("transform", "a function", lambda value: value is None or callable(value)),
    ("batch_transform", "a function", lambda value: value is None or callable(value)),
    ("store", "a torch store", lambda value: value is None or hasattr(value, "multi_get")),
    ("workers", "'threads' or 'processes'", _one_of("threads", "processes")),
    ("on_error", "'raise' or 'substitute' or 'mask'", _one_of("raise", "substitute", "mask")),
    ("assignment", "'near', 'fixed' or an Assignment",
     lambda value: isinstance(value, Assignment) or _one_of("near", "fixed")(value)),
    ("mixer", "a Mixer, such as ADO(every=512) or FunctionMixer(function=…, every=…)",
     lambda value: value is None or all(hasattr(value, name) for name in ("every", "text", "needs_losses"))),
    ("rebalance", "True, False or a Rebalancing", lambda value: value is None or isinstance(value, Rebalancing)),
]  # fmt: skip
"""Checks of other settings: name, expected value, and a predicate."""

_AHEAD: Final = 0.25  # share of the windows that is added for the next blocks
_LEAST: Final = 1 << 20
_PAGE: Final = 4096
_WHOLE: Final = 2 << 30  # default bound if rows of all blocks are mixed


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Access to a dataset's rows and blocks; made by `Dataset.loader`."""

    manifest: str  # "sha256:…"
    schema: Schema  # the stored columns
    rows: RowMap
    reader: BlockReader
    block_bytes: Callable[[int], int]  # upper bound of a block's raw bytes, by dataset-wide block number
    mean_block_bytes: int  # mean raw bytes of a block
    row_bytes: Callable[[Sequence[str]], int]  # typical bytes of the given fields of a row
    fetch: Callable[[int], dict[str, Any]]  # reads one sample, verified
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
    store: Any = None  # torch store used instead of the process group's
    rebalance: Rebalancing | None = None
    memory: int | None = None  # bytes per rank; None for what the windows need
    threads: int | None = None
    prefetch: int | None = None
    tensors: bool | None = None
    device: Any = None  # torch device
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
    share: bool | str = False  # serve the cache to other nodes of the job; HOST:PORT to listen on
    cache_size: int | None = None  # bytes; None for 80 % of the disk's free space
    telemetry: TelemetrySettings | Literal[True] | None = True  # used only with `run`
    stride: int = 1  # deliver every stride-th step from the offset-th on, as DataLoader workers do
    offset: int = 0
    fill: Mapping[str, Any] = field(default_factory=dict)
    restart: bool = False  # every loop begins at the start of its epoch
    mixer: Mixer | None = None  # decides weights of the plan during the run

    @property
    def num_threads(self) -> int:
        """Number of threads that read blocks and work rows; by default one per usable processor, at most 8.

        No processor is reserved for the trainer: it waits while the first blocks are loaded, and the threads wait when
        the window is full.
        """
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.threads or max(1, min(8, usable))

    @property
    def runs_user_code(self) -> bool:
        """True if rows are decoded or transformed by functions of the user."""
        functions = [one for one in self.decode.values() if callable(one) and not isinstance(one, RowDecoder)]
        return self.transform is not None or bool(functions)

    @property
    def rows_are_seeded(self) -> bool:
        """True if the global generators are seeded for each row: in worker processes, or while the trainer waits."""
        if not self.runs_user_code:
            return False
        return self.workers == "processes" or (self.num_threads == 1 and not self.prefetch)

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            if (value := getattr(self, name)) is not None or name in _NEEDED:
                object.__setattr__(self, name, allowed.check(name, value))
        stall_s = Range(0, 604_800, above=True).check("stall_s", self.stall_s, float)
        object.__setattr__(self, "stall_s", stall_s)
        for name, what, is_right in _KINDS:
            if not is_right(value := getattr(self, name)):
                raise ConfigurationError(f"{name}={shown(value)}: {what} is expected")
        if self.transform is not None:
            object.__setattr__(self, "transform", with_generator(self.transform))
        if self.offset >= self.stride:
            raise ConfigurationError(f"offset={self.offset}: a number below stride={self.stride} is expected")
        if self.rebalance is not None:
            self._check_rebalance()
        if self.mixer is not None and (self.stride != 1 or self.restart or self.lanes is not None):
            raise ConfigurationError("mixer= is for a training loop: leave out stride=, restart= and lanes=")
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
    """Return the columns to gather in the requested order, with the presence columns of optional fields at the end."""
    fields = list(schema if config.fields is None else config.fields)
    for name in fields:
        if name not in schema:
            raise ConfigurationError(f"fields: {name!r} is not in the schema; it has {', '.join(schema)}")
    gathered = dict.fromkeys(fields)
    for name in fields:
        if schema[name].optional:
            gathered[presence_of(name)] = None
    return list(gathered)


def first_lanes(plan: Plan, topology: Topology, config: LoaderConfig) -> tuple[LaneShares | None, list[int]]:
    """Return the fixed shares (None if lanes were chosen) and this rank's lanes, without communication."""
    if config.lanes is not None:
        return None, check_lanes(plan.lanes, config.lanes)
    check_shares(plan, topology.world, uneven=config.uneven)
    dealt = fixed_shares(plan, topology.world, config.assignment)
    return dealt, list(dealt.assignment.lanes_of(topology.rank))


def resized_lanes(
    plan: Plan, config: LoaderConfig, rank: int, world: int
) -> tuple[Topology, Assignment, list[int]]:
    """Return ranks, fixed shares and the lanes of `rank` after `Loader.resize`.

    Raises:
        ConfigurationError: `world` ranks cannot share the lanes, or settings decide the lanes.
    """
    if config.mixer is not None:
        raise ConfigurationError(
            "resize: ranks exchange the losses of a mixer; make a loader of the new ranks and load the state"
        )
    for name in ("mesh", "lanes", "rebalance"):
        if getattr(config, name) is not None:
            raise ConfigurationError(
                f"resize: {name}= decides the lanes of this loader; make it without {name}="
            )
    topology = find_topology(rank, world)
    check_shares(plan, topology.world, uneven=config.uneven)
    assignment = fixed_shares(plan, topology.world, config.assignment).assignment
    return topology, assignment, list(assignment.lanes_of(topology.rank))


def makes_tensors(config: LoaderConfig) -> bool:
    """Return True if batches hold torch tensors; import torch if tensors or a device were requested."""
    wanted = "torch" in sys.modules if config.tensors is None else config.tensors
    if not wanted and config.device is None:
        return False
    try:
        __import__("torch")
    except ImportError as error:
        raise MissingDependency(
            f"ds.loader(tensors=True) needs torch; run: {install_command('train')}, or take numpy arrays: "
            "tensors=False"
        ) from error
    return True


@dataclass(frozen=True, kw_only=True)
class LoaderSetup:
    """The constant part of a loader, shared by its components: the data it reads and its settings.

    Attributes:
        plan: assigns samples to steps.
        sources: access to rows and blocks.
        config: settings of the user.
        topology: rank and world size.
        fields: columns to gather, in this order.
        tensors: batches hold torch tensors.
        missing: treatment of rows without a value of an optional field.
        function: function applied to each row; None if no rows are decoded or transformed.
        device: delivers batches on a device; None if they stay on the host.
        holders: caches of other nodes that blocks may come from.
        mixing: decides the weights of the plan; None if they are known.
    """

    plan: Plan
    sources: Sources
    config: LoaderConfig
    topology: Topology
    fields: Sequence[str]
    tensors: bool
    missing: MissingValues
    function: RowFunction | None = None
    device: DeviceOutput | None = None
    holders: Holders | None = None
    mixing: Mixing | None = None

    @cached_property
    def events(self) -> EventLog:
        """Event log of the run; discards events without a run."""
        from shardkit.telemetry.recorder import EventLog  # imported here because most loaders have no run

        return EventLog(self.config.run, self.topology.rank)

    @cached_property
    def made_by(self) -> Mapping[str, str]:
        """Library versions of each row decoder."""
        decoders = {} if self.function is None else self.function.row_decoders
        return {name: one.made_by for name, one in decoders.items()}

    def memory_needed(self, lanes: int) -> int:
        """Return the bytes of the blocks that `lanes` lanes mix at a time, plus a quarter (SPEC.md §2).

        With less memory the same blocks would be read repeatedly. The result is at most the size of the dataset plus a
        quarter. With ``shuffle="full"`` it is the minimum of 1 MiB, because only the whole dataset would be enough.
        """
        plan, sources = self.plan, self.sources
        blocks = 0 if plan.settings.shuffle == "full" else min(sources.rows.blocks, lanes * plan.open_blocks)
        size = -(-max(1, sources.mean_block_bytes) // _PAGE) * _PAGE
        return max(_LEAST, int(blocks * size * (1 + _AHEAD)))

    def memory_bound(self, lanes: int) -> int:
        """Return the bytes that the blocks of one process may take; workers of a rank share `config.memory`.

        Raises:
            ConfigurationError: `config.memory` is less than the lanes need.
        """
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


def make_setup(plan: Plan, sources: Sources, config: LoaderConfig) -> LoaderSetup:
    """Return the constant part of a loader.

    Raises:
        ConfigurationError: settings contradict each other, the schema or this machine.
        MissingDependency: torch or a decoder is not installed.
    """
    topology = find_topology(config.rank, config.world, mesh=config.mesh)
    fields, tensors = gathered_fields(sources.schema, config), makes_tensors(config)
    mixing = device = None
    if config.mixer is not None:
        from shardkit.loader.mixing import make_mixing  # most loaders have no mixer

        mixing = make_mixing(config.mixer, plan, config.run, topology, config.store)
    decoders = find_decoders(config.decode, sources.schema) if config.decode else {}
    if config.device is not None:
        from shardkit.loader.device import DeviceOutput, find_device

        finish: dict[str, Any] = {}
        found = find_device(config.device)
        if config.transform is None and config.batch_transform is None:  # fields are not read on the host
            decoders, finish = split_decoders(decoders, found)
        device = DeviceOutput(device=found, ahead=config.device_prefetch, finish=finish)
    function = None
    if config.decode or config.transform is not None:
        function = RowFunction(
            seed=plan.settings.seed, decoders=decoders, transform=config.transform,
            is_seeded=config.rows_are_seeded,
        )  # fmt: skip
    return LoaderSetup(
        plan=plan, sources=replace(sources, reader=sources.reader.for_fields(fields)), config=config,
        topology=topology, fields=fields, tensors=tensors,
        missing=MissingValues(sources.schema, fields, config.fill), function=function, device=device, mixing=mixing,
    )  # fmt: skip
