"""Distribution of lanes at the start: ranks report the bytes on their nodes, the leader assigns (SPEC.md §9)."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.documents import decode_plain, encode
from shardkit.ledger import bind_assignment, bound_assignment
from shardkit.loader.agreement import Exchange, agree
from shardkit.loader.ranks import Holders, LaneShares, Topology
from shardkit.loader.settings import LoaderConfig, LoaderSetup, Sources
from shardkit.loader.sharing import ServedCache, find_address, holders_of
from shardkit.plan import Assignment, Plan, assign
from shardkit.plan.assignment import LaneOfBlock
from shardkit.reading.cache.catalogue import cached_places
from shardkit.reading.located_store import LocatedStore
from shardkit.telemetry.pages import parse_listen

__all__ = ["bytes_nearby", "compare_and_deal", "deal"]

_MAX_BYTES = 1 << 26
_SLAB = 1 << 18  # blocks looked up at once


def compare_and_deal(
    setup: LoaderSetup, fixed: LaneShares | None, own: Sequence[int]
) -> tuple[LaneShares | None, ServedCache | None]:
    """Check that all ranks read the same data, distribute the lanes, and serve this node's cache.

    Args:
        setup: setup of the loader.
        fixed: fixed shares; None if the lanes of this rank were chosen.
        own: lanes of this rank, from `fixed` or chosen.

    Returns:
        The distribution (`fixed` without other ranks or with chosen lanes), and the served cache, if any.
    """
    plan, config, (rank, world, _) = setup.plan, setup.config, setup.topology
    exchange = Exchange.of_process_group() if config.store is None else Exchange(config.store, rank, world)
    if exchange is None:
        return fixed, None
    from importlib.metadata import version  # slow to import, and needed by several ranks only

    asked = config.assignment
    mine = {"software": version("shardkit"), "manifest": setup.sources.manifest, "plan": plan.digest,
            "world": world, "fields": setup.fields, "chosen": fixed is None, "lanes": own,
            "assignment": asked.digest if isinstance(asked, Assignment) else asked,
            **({"decoders": setup.made_by} if setup.made_by else {})}  # fmt: skip
    found = agree(exchange, mine, lanes=plan.lanes, shared=config.mesh is not None)
    if world == 1 or isinstance(asked, Assignment) or any(one["chosen"] for one in found):
        return fixed, None
    served = None
    if config.share and config.cache is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        served = ServedCache(config.cache, find_address(config.share, exchange.store))
    address = "" if served is None else served.address
    return deal(plan, setup.sources, config, setup.topology, exchange, address), served


def deal(
    plan: Plan,
    sources: Sources,
    config: LoaderConfig,
    topology: Topology,
    exchange: Exchange,
    address: str = "",
) -> LaneShares:
    """Distribute the lanes; called on every rank, it returns the same assignment on each.

    The leader takes the assignment that the run's ledger recorded for the same ranks on the same nodes. Without one it
    assigns lanes to the nodes that hold most of their bytes, and records the assignment before it publishes it.
    `address` is the HOST:PORT at which other nodes read this node's cache; "" if it is not served.
    """
    node = platform.node()
    if config.cache is not None:  # ranks of one machine with different cache directories are different nodes
        node += ":" + os.path.abspath(config.cache)
    near = bytes_nearby(plan, sources, config.cache)
    held = np.flatnonzero(near)  # usually a small part of all lanes
    mine = {"rank": topology.rank, "node": node, "lanes": held.tolist(), "bytes": near[held].tolist(),
            "cache": address}  # fmt: skip
    exchange.put(f"nearby/{exchange.rank}", encode(mine))
    if exchange.rank == 0:
        told = [
            decode_plain(exchange.get(f"nearby/{rank}", rank), max_bytes=_MAX_BYTES)
            for rank in range(exchange.world)
        ]
        dealt = _decide(plan, topology.world, told, config)
        caches, asked = holders_of(told, [dealt.nodes[owner].split("|") for owner in dealt.assignment.owner])
        said: dict[str, Any] = {"owner": dealt.assignment.owner, "nodes": list(dealt.nodes)}
        said |= {"caches": list(caches.items()), "asked": asked} if caches else {}
        exchange.put("dealt", encode(said))
        return replace(dealt, holders=_others(said, node))
    heard = decode_plain(exchange.get("dealt", 0), max_bytes=_MAX_BYTES)
    assignment = Assignment(tuple(heard["owner"]), _node_numbers(heard["nodes"]))
    return LaneShares(assignment, heard["nodes"], holders=_others(heard, node))


def _others(heard: Mapping[str, Any], node: str) -> Holders | None:
    """Return the caches that this node may ask, without its own; None if there are none."""
    caches = heard.get("caches", ())
    if not any(other != node for other, _ in caches):
        return None
    for _, address in caches:
        parse_listen(address)
    own = [number for number, (other, _) in enumerate(caches) if other == node]
    return Holders(
        [f"http://{address}" for _, address in caches],
        [[number for number in those if number not in own] for those in heard["asked"]],
    )


def _decide(plan: Plan, world: int, told: Sequence[Mapping[str, Any]], config: LoaderConfig) -> LaneShares:
    """Assign lanes on the leader; ranks of one data-parallel coordinate count as one, on all of their nodes."""
    at: list[set[str]] = [set() for _ in range(world)]
    has: dict[str, NDArray[np.int64]] = {}
    for one in told:
        at[one["rank"]].add(one["node"])
        found = has.setdefault(one["node"], np.zeros(plan.lanes, dtype=np.int64))
        found[one["lanes"]] = np.maximum(found[one["lanes"]], one["bytes"])
    nodes = ["|".join(sorted(those)) for those in at]
    nearby = {
        node: np.sum([has[one] for one in those], axis=0) for node, those in zip(nodes, at, strict=True)
    }
    number = _node_numbers(nodes)
    fixed = config.assignment == "fixed"
    if fixed:
        return LaneShares(Assignment(assign(plan.lanes, world).owner, number), nodes, nearby)
    owner = None if config.run is None else bound_assignment(config.run, lanes=plan.lanes, nodes=nodes)
    if owner is None:
        table = np.stack([nearby[node] for node in dict.fromkeys(nodes)], axis=1)
        dealt = assign(plan.lanes, world, nodes=number, local_bytes=table if table.any() else None)
        owner = dealt.owner
    if config.run is not None:
        bind_assignment(config.run, owners=owner, nodes=nodes)
    return LaneShares(Assignment(owner, number), nodes, nearby)


def _node_numbers(nodes: Sequence[str]) -> tuple[int, ...]:
    known = list(dict.fromkeys(nodes))
    return tuple(known.index(node) for node in nodes)


def bytes_nearby(plan: Plan, sources: Sources, cache: Path | None) -> NDArray[np.int64]:
    """Return int64[lanes]: bytes of each lane's blocks in the cache or in a copy on this machine.

    The cache's catalogue is read; no index is read and no folder is listed.
    """
    found = np.zeros(plan.lanes, dtype=np.int64)
    rows, copied = sources.rows, _copied_here(sources)
    places, sizes = (np.zeros(0, np.uint64), np.zeros(0, np.int64)) if cache is None else cached_places(cache)
    if not len(places) and not copied.any():
        return found
    order = np.argsort(places)
    # a sentinel at the end keeps every index from searchsorted valid
    places, sizes = np.append(places[order], np.uint64(0)), np.append(sizes[order], 0)
    typical = sources.reader.stored_bytes // max(1, rows.blocks)
    lane_of = LaneOfBlock(plan.population, plan.lanes, rows.segment_blocks)
    for first in range(0, rows.blocks, _SLAB):
        block = np.arange(first, min(rows.blocks, first + _SLAB))
        shard = np.searchsorted(rows.shard_first_block, block, side="right") - 1
        wanted = sources.reader.places(shard, block - rows.shard_first_block[shard])
        which = np.searchsorted(places[:-1], wanted)
        here = np.where(places[which] == wanted, sizes[which], 0)
        here = np.where(copied[shard], typical, here)
        there = np.flatnonzero(here)
        np.add.at(found, lane_of(block[there]), here[there])
    return found


def _copied_here(sources: Sources) -> NDArray[np.bool_]:
    """Return bool[shards]: True for shards with a copy on this host's disk that is read before the root.

    A location belongs to this host if its failure domain is the host name.
    """
    shards = len(sources.rows.shard_first_block) - 1
    found = np.zeros(shards, dtype=np.bool_)
    host = platform.node()
    if not any(
        location.domain == host
        for store in sources.reader.stores
        if isinstance(store, LocatedStore)
        for location in store.locations
    ):
        return found
    for shard in range(shards):
        store = sources.reader.located(shard)
        if store is not None:
            found[shard] = any(
                one.domain == host
                and one.rank < store.locations[0].rank
                and one.store.local_path(sources.reader.shard_name(shard)) is not None
                for one in store.locations[1:]
            )
    return found
