"""Settings of a loader, the rank that it works for, the sources of its rows, and values derived from them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from shardkit.errors import ConfigurationError
from shardkit.formats import Schema
from shardkit.loader.batch import MissingValues, gathered_fields, makes_tensors
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
from shardkit.plan import Assignment, Mixer, Plan, assign
from shardkit.plan.assignment import Rules
from shardkit.ranges import Range, shown
from shardkit.reading.blocks import BlockReader, RowMap

if TYPE_CHECKING:
    from shardkit.loader.device import DeviceOutput
    from shardkit.loader.mixing import Mixing
    from shardkit.loader.sharing import Holders
    from shardkit.telemetry import TelemetrySettings
    from shardkit.telemetry.recorder import EventLog

__all__ = [
    "LoaderConfig",
    "LoaderSetup",
    "OnError",
    "OnStall",
    "Rebalancing",
    "Sources",
    "Topology",
    "Workers",
    "check_lanes",
    "find_topology",
    "fixed_assignment",
    "make_setup",
]

Workers: TypeAlias = Literal["threads", "processes"]
"""Workers that run decoders and transforms."""

OnError: TypeAlias = Literal["raise", "substitute", "mask"]
"""Treatment of a verified sample that does not decode."""

OnStall: TypeAlias = Callable[[Mapping[str, Any]], None]
"""Called with the facts of a stall, such as rank, step, lane, shard and stage."""

_RANGES = {
    "memory": Range(1 << 20, 1 << 50), "cache_size": Range(1 << 20, 1 << 60), "threads": Range(1, 4096),
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


class Sources(msgspec.Struct, frozen=True, kw_only=True, eq=False):
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
class Rebalancing:
    """Settings of rebalancing; ``rebalance=True`` stands for the defaults.

    Attributes:
        every: steps between two evaluations of the telemetry; each evaluates at most that many steps.
        rules: conditions for moving lanes.
        store: torch store that all ranks share and nothing else uses; by default a prefix of the process group's store.
        timeout_s: seconds that a rank waits for a decision of the leader. Ranks that train in step do not wait.
    """

    every: int = 16
    rules: Rules = field(default_factory=Rules)
    store: Any = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        Range(1, 10**6).check("rebalancing: every", self.every)
        Range(0, 604_800, above=True).check("rebalancing: timeout_s", self.timeout_s, float)


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


# ---- ranks and their lanes

# Launchers that start several processes but may leave RANK unset. With a default of rank 0 of 1 every process would
# train on all data.
_LAUNCHERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")


# Names of data-parallel mesh dimensions in torch's own trainers.
_DATA_PARALLEL = frozenset(
    {"dp", "ddp", "fsdp", "data", "dp_replicate", "dp_shard", "replicate", "shard", "batch"}
)


_RANK, _WORLD = Range(0, 2**31 - 1), Range(1, 2**31 - 1)


class Topology(NamedTuple):
    """Rank and world size of this process, as torch defines them."""

    rank: int
    world: int
    source: str  # where the numbers come from, for messages

    @property
    def is_shared(self) -> bool:
        """True if the ranks can communicate through torch's process group."""
        return self.source in ("the process group", "the device mesh")


def find_topology(
    rank: int | None, world: int | None, environ: Mapping[str, str] | None = None, mesh: Any = None
) -> Topology:
    """Return rank and world size from the arguments, the process group, or RANK and WORLD_SIZE, in this order.

    Without any of them this is the only process, rank 0 of 1. With `mesh`, a torch DeviceMesh, the data-parallel
    coordinate is the rank, so ranks that differ only in tensor, pipeline or context parallelism read the same cells.

    Raises:
        ConfigurationError: two sources contradict each other, one number of a pair is missing, or a launcher started
            several processes without setting their ranks.
    """
    environ = os.environ if environ is None else environ
    if mesh is not None:
        if rank is not None or world is not None:
            raise ConfigurationError("mesh= and rank=, world= contradict each other: give one of them")
        return _from_mesh(mesh)
    found = [
        t for t in (_from_arguments(rank, world), _from_process_group(), _from_environment(environ)) if t
    ]
    if not found:
        for name in _LAUNCHERS:
            if environ.get(name, "1") not in ("", "1"):
                raise ConfigurationError(
                    f"{name} is {environ[name]} but RANK and WORLD_SIZE are not set: each of these processes would "
                    "read everything. Start with torchrun, or pass rank= and world= to ds.loader"
                )
        return Topology(0, 1, "a lone process")
    first = found[0]
    for other in found[1:]:
        if (other.rank, other.world) != (first.rank, first.world) and first.source != "the arguments":
            raise ConfigurationError(
                f"{first.source} says rank {first.rank} of {first.world}, {other.source} says rank {other.rank} of "
                f"{other.world}; pass rank= and world= to ds.loader to say which is right"
            )
    if not 0 <= first.rank < first.world:
        raise ConfigurationError(f"rank {first.rank} of {first.world} ({first.source}) is impossible")
    return first


def check_lanes(lanes: int, chosen: Sequence[int]) -> list[int]:
    """Return the lanes chosen by the caller, ascending.

    Raises:
        ConfigurationError: they are not distinct numbers from 0 to `lanes` − 1.
    """
    try:
        own = sorted(int(Range(0, lanes - 1).check("lanes", lane)) for lane in chosen)
    except TypeError:  # no sequence
        raise ConfigurationError(f"lanes={shown(chosen)}: a list of lane numbers is expected") from None
    if len(set(own)) != len(own):
        raise ConfigurationError(f"lanes={list(chosen)}: distinct numbers from 0 to {lanes - 1} are expected")
    return own


def check_shares(plan: Plan, world: int, *, uneven: bool) -> None:
    """Raise ConfigurationError unless `world` ranks can share the lanes, in equal parts unless `uneven`."""
    lanes = plan.lanes
    if world > lanes:
        raise ConfigurationError(
            f"{world} ranks cannot share {lanes} lanes; make the plan with lanes={world} or more, or use fewer ranks"
        )
    if lanes % world and not uneven:
        fitting = ", ".join(str(n) for n in range(1, lanes + 1) if lanes % n == 0)
        raise ConfigurationError(
            f"{lanes} lanes do not divide evenly over {world} ranks, and a trainer that averages over ranks would get "
            f"wrong gradients. World sizes that fit: {fitting}. Or pass uneven=True and multiply the loss by "
            "batch.weight"
        )
    if not uneven and world > 1 and _has_short_step(plan):
        raise ConfigurationError(
            "the last step of each epoch is short and would give ranks unequal batches; make the plan with "
            'remainder="drop", or pass uneven=True and multiply the loss by batch.weight'
        )


def fixed_assignment(plan: Plan, topology: Topology, config: LoaderConfig) -> Assignment:
    """Return the given assignment of lanes, or fixed shares without one; no communication is needed.

    Raises:
        ConfigurationError: the ranks cannot share the lanes.
    """
    given, world = config.assignment, topology.world
    check_shares(plan, world, uneven=config.uneven)
    if not isinstance(given, Assignment):
        return assign(plan.lanes, world)
    if (len(given.owner), given.ranks) != (plan.lanes, world):
        raise ConfigurationError(
            f"assignment= deals {len(given.owner)} lanes to {given.ranks} ranks; the plan has {plan.lanes} lanes, and "
            f"{world} ranks share them"
        )
    return given


def _has_short_step(plan: Plan) -> bool:
    length = plan.steps_per_pass
    return bool(length and (plan.step(length - 1) < 0).any())


def _from_arguments(rank: int | None, world: int | None) -> Topology | None:
    if (rank is None) != (world is None):
        raise ConfigurationError(f"rank={rank} and world={world}: give both or neither")
    if rank is None or world is None:
        return None
    return Topology(_RANK.check("rank", rank), _WORLD.check("world", world), "the arguments")


def _from_mesh(mesh: Any) -> Topology:
    """Return the coordinate over the mesh's data-parallel dimensions, the outermost dimension first."""
    if not hasattr(mesh, "mesh_dim_names"):
        raise ConfigurationError(f"mesh={shown(mesh)}: a torch DeviceMesh is expected")
    names = tuple(mesh.mesh_dim_names or ())
    chosen = [d for d in range(mesh.ndim) if mesh.ndim == 1 or (names and names[d] in _DATA_PARALLEL)]
    if not chosen:
        raise ConfigurationError(
            f"mesh with dimensions {names or mesh.ndim}: none is called {', '.join(sorted(_DATA_PARALLEL))}; pass the "
            'part that data is dealt over, such as mesh["dp"]'
        )
    rank, world = 0, 1
    for dimension in chosen:
        rank = rank * mesh.size(dimension) + mesh.get_local_rank(dimension)
        world *= mesh.size(dimension)
    return Topology(rank, world, "the device mesh")


def _from_process_group() -> Topology | None:
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return Topology(distributed.get_rank(), distributed.get_world_size(), "the process group")


def _from_environment(environ: Mapping[str, str]) -> Topology | None:
    rank, world = environ.get("RANK"), environ.get("WORLD_SIZE")
    if rank is None and world is None:
        return None
    try:
        return Topology(int(rank or ""), int(world or ""), "the environment (RANK, WORLD_SIZE)")
    except ValueError:
        raise ConfigurationError(
            f"RANK={rank!r} and WORLD_SIZE={world!r}: two whole numbers are expected; start with torchrun"
        ) from None


# ---- what the components of a loader share


class LoaderSetup(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """The constant part of a loader, shared by its components: the data it reads and its settings."""

    plan: Plan
    sources: Sources
    config: LoaderConfig
    topology: Topology
    fields: Sequence[str]  # columns to gather, in this order
    tensors: bool  # batches hold torch tensors
    missing: MissingValues
    function: RowFunction | None = None  # applied to each row; None if no rows are decoded or transformed
    device: DeviceOutput | None = None  # delivers batches on a device; None if they stay on the host
    holders: Holders | None = None  # caches of other nodes that blocks may come from
    mixing: Mixing | None = None  # decides the weights of the plan; None if they are known

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


def make_setup(plan: Plan, sources: Sources, config: LoaderConfig) -> LoaderSetup:
    """Return the constant part of a loader.

    Raises:
        ConfigurationError: settings contradict each other, the schema or this machine.
        MissingDependency: torch or a decoder is not installed.
    """
    topology = find_topology(config.rank, config.world, mesh=config.mesh)
    fields = gathered_fields(sources.schema, config.fields)
    mixing = device = None
    if config.mixer is not None:
        from shardkit.loader.mixing import make_mixing  # most loaders have no mixer

        mixing = make_mixing(config.mixer, plan, config.run, topology.rank, topology.world, config.store)
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
        plan=plan, sources=msgspec.structs.replace(sources, reader=sources.reader.for_fields(fields)), config=config,
        topology=topology, fields=fields,
        tensors=makes_tensors(config.tensors, on_device=config.device is not None),
        missing=MissingValues(sources.schema, fields, config.fill), function=function, device=device, mixing=mixing,
    )  # fmt: skip
