"""Rank and world size of this process, and the checks that its ranks can share the lanes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ConfigurationError
from shardkit.plan import Assignment, Plan, assign
from shardkit.ranges import Range, shown

__all__ = [
    "Holders",
    "LaneShares",
    "Topology",
    "check_lanes",
    "check_shares",
    "find_topology",
    "fixed_shares",
]

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


class Holders(NamedTuple):
    """Caches of other nodes that this node may read.

    Attributes:
        urls: URLs of their servers.
        lanes: lane → indices into `urls` of the caches to ask for its blocks, in this order.
    """

    urls: Sequence[str]
    lanes: Sequence[Sequence[int]]


@dataclass(frozen=True)
class LaneShares:
    """The distribution of lanes to ranks at the start.

    Attributes:
        assignment: lanes of each data-parallel rank.
        nodes: the node of each rank; empty if unknown.
        nearby: node → int64[lanes], bytes of each lane stored there; empty except on the leader.
        holders: caches that this node may read; None if nodes do not share their caches.
    """

    assignment: Assignment
    nodes: Sequence[str] = ()
    nearby: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    holders: Holders | None = None


def fixed_shares(plan: Plan, world: int, given: object = None) -> LaneShares:
    """Return the given Assignment, or fixed shares without one; no communication is needed."""
    if not isinstance(given, Assignment):
        return LaneShares(assign(plan.lanes, world))
    if (len(given.owner), given.ranks) != (plan.lanes, world):
        raise ConfigurationError(
            f"assignment= deals {len(given.owner)} lanes to {given.ranks} ranks; the plan has {plan.lanes} lanes, and "
            f"{world} ranks share them"
        )
    return LaneShares(given)


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
