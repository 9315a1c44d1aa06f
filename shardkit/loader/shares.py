"""Which lanes and fields a rank reads."""

from __future__ import annotations

from shardkit.errors import ConfigurationError
from shardkit.formats import Schema
from shardkit.loader.ranks import Topology
from shardkit.loader.settings import LoaderConfig
from shardkit.plan import Plan

__all__ = ["own_fields", "own_lanes"]


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
