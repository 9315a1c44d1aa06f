"""Which lanes and fields a rank reads, and how much memory that takes."""

from __future__ import annotations

from typing import Final

from shardkit.errors import ConfigurationError
from shardkit.formats import Schema
from shardkit.loader.ranks import Topology
from shardkit.loader.settings import LoaderConfig, Sources
from shardkit.plan import Plan

__all__ = ["memory_bound", "memory_needed", "own_fields", "own_lanes"]

_AHEAD: Final = 0.25  # of the windows, for what comes next
_LEAST: Final = 1 << 20
_PAGE: Final = 4096
_WHOLE: Final = 2 << 30  # where rows of all blocks are mixed, and only the whole dataset would do


def own_fields(schema: Schema, config: LoaderConfig) -> list[str]:
    """Fields that are gathered, in the order asked for."""
    fields = list(schema) if config.fields is None else list(config.fields)
    for name in fields:
        if name not in schema:
            raise ConfigurationError(f"fields: {name!r} is not in the schema; it has {', '.join(schema)}")
    return fields


def own_lanes(plan: Plan, topology: Topology, config: LoaderConfig) -> list[int]:
    """The lanes of this rank: contiguous runs, so that neighbouring shards stay on one node."""
    lanes, world = plan.lanes, topology.world
    if config.lanes is not None:
        own = sorted(config.lanes)
        if len(set(own)) != len(own) or (own and not 0 <= own[0] <= own[-1] < lanes):
            raise ConfigurationError(
                f"lanes={list(config.lanes)}: distinct numbers from 0 to {lanes - 1} are expected"
            )
        return own
    if world > lanes:
        raise ConfigurationError(
            f"{world} ranks cannot share {lanes} lanes; make the plan with lanes={world} or more, or use fewer ranks"
        )
    if lanes % world and not config.uneven:
        fitting = ", ".join(str(n) for n in range(1, lanes + 1) if lanes % n == 0)
        raise ConfigurationError(
            f"{lanes} lanes do not divide evenly over {world} ranks, and a trainer that averages over ranks would get "
            f"wrong gradients. World sizes that fit: {fitting}. Or pass uneven=True and multiply the loss by "
            "batch.weight"
        )
    if not config.uneven and world > 1 and _has_short_step(plan):
        raise ConfigurationError(
            "the last step of each epoch is short and would give ranks unequal batches; make the plan with "
            'remainder="drop", or pass uneven=True and multiply the loss by batch.weight'
        )
    rank = topology.rank
    return list(range(rank * lanes // world, (rank + 1) * lanes // world))


def _has_short_step(plan: Plan) -> bool:
    length = plan.steps_per_epoch
    if not length:
        return False
    return bool((plan.step(length - 1) < 0).any())


def memory_needed(plan: Plan, lanes: int, sources: Sources) -> int:
    """Bytes of the blocks that so many lanes mix rows of at a time, and a quarter more.

    With less the same blocks are read over and over. Nobody needs more than the whole dataset; with ``shuffle="full"``
    nothing less would do, and nothing is asked for.
    """
    blocks = sources.rows.blocks
    if plan.settings.shuffle != "full":
        blocks = min(blocks, lanes * plan.open_blocks)
    else:
        blocks = 0
    size = -(-max(1, sources.mean_block_bytes) // _PAGE) * _PAGE
    return max(_LEAST, int(blocks * size * (1 + _AHEAD)))


def memory_bound(config: LoaderConfig, plan: Plan, lanes: int, sources: Sources) -> int:
    """Bytes that the blocks of one process may take; `config.memory` is that of a rank, shared by its workers.

    Raises:
        ConfigurationError: less than the windows need.
    """
    needed = memory_needed(plan, lanes, sources)
    if config.memory is None:
        whole = min(_WHOLE, sources.rows.blocks * 2 * sources.mean_block_bytes)
        return max(needed, whole) if plan.settings.shuffle == "full" else needed
    bound = config.memory // config.stride
    if bound < needed:
        workers = f" for each of {config.stride} workers" if config.stride > 1 else ""
        raise ConfigurationError(
            f"memory={config.memory} is {bound} bytes{workers}; {lanes} lanes mix rows of {plan.open_blocks} blocks of "
            f"{sources.mean_block_bytes} bytes each and need {needed}{workers}: leave memory out, pass at least "
            f"{needed * config.stride}, or give the plan fewer lanes or a smaller window_blocks"
        )
    return bound
