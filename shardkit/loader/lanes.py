"""Lanes of several ranks: assigned at the start and by `Loader.resize`, and moved from slow ranks (SPEC.md §8 and §9).

At the start ranks compare their data and report the bytes on their nodes; the leader assigns, and a node may serve its
cache to others. During the run they write their cell times and read decisions. Ranks communicate through the process
group's store, without collectives; the decisions themselves are pure functions of `shardkit.plan.assignment`.
"""

from __future__ import annotations

import json
import os
import platform
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.documents import decode_plain, encode
from shardkit.errors import ConfigurationError
from shardkit.ledger import bind_assignment, bound_assignment
from shardkit.loader.agreement import Exchange, agree
from shardkit.loader.settings import (
    LoaderConfig,
    LoaderSetup,
    Rebalancing,
    Sources,
    Topology,
    find_topology,
    fixed_assignment,
)
from shardkit.loader.sharing import Holders, find_address, holders_of, serve_cache
from shardkit.plan import Assignment, Plan, assign
from shardkit.plan.assignment import Decision, LaneOfBlock, RankTelemetry, in_force, rebalance
from shardkit.reading.cache.catalogue import cached_places
from shardkit.reading.cache.serving import CacheServer
from shardkit.reading.located_store import LocatedStore
from shardkit.telemetry.pages import parse_listen

__all__ = ["LaneShares", "Rebalancer", "bytes_nearby", "make_rebalancer", "resized_lanes", "share_lanes"]

Record = Callable[..., None]
_MAX_BYTES = 1 << 26
_SLAB = 1 << 18  # blocks looked up at once


@dataclass(frozen=True)
class LaneShares:
    """The distribution of lanes to ranks at the start."""

    assignment: Assignment
    nodes: Sequence[str] = ()  # the node of each rank; empty if unknown
    # node → int64[lanes], bytes of each lane stored there; empty except on the leader
    nearby: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    holders: Holders | None = None  # caches that this node may read; None if nodes do not share their caches
    served: CacheServer | None = None  # this node's cache, if this process serves it to other nodes


def share_lanes(setup: LoaderSetup, fixed: Assignment | None, own: Sequence[int]) -> LaneShares | None:
    """Check that all ranks read the same data, distribute the lanes, and serve this node's cache.

    Args:
        setup: setup of the loader.
        fixed: assignment of all lanes that holds without communication; None if this rank's lanes were chosen.
        own: lanes of this rank, from `fixed` or chosen.

    Returns:
        The distribution: `fixed` without other ranks or if lanes were chosen; None if this rank's lanes were chosen.
    """
    plan, config, (rank, world, _) = setup.plan, setup.config, setup.topology
    shares = None if fixed is None else LaneShares(fixed)
    exchange = None
    if config.store is not None:
        exchange = Exchange(config.store, rank, world)
    elif setup.topology.is_shared:
        exchange = Exchange.of_process_group()
    if exchange is None:
        return shares
    from importlib.metadata import version  # slow to import, and needed by several ranks only

    asked = config.assignment
    mine = {"software": version("shardkit"), "manifest": setup.sources.manifest, "plan": plan.digest,
            "world": world, "fields": setup.fields, "chosen": fixed is None, "lanes": own,
            "assignment": asked.digest if isinstance(asked, Assignment) else asked,
            **({"decoders": setup.made_by} if setup.made_by else {})}  # fmt: skip
    found = agree(exchange, mine, lanes=plan.lanes, shared=config.mesh is not None)
    if world == 1 or isinstance(asked, Assignment) or any(one["chosen"] for one in found):
        return shares
    served = None
    if config.share and config.cache is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        served = serve_cache(config.cache, find_address(config.share, exchange.store))
    address = "" if served is None else served.url.removeprefix("http://")
    dealt = _deal(plan, setup.sources, config, setup.topology, exchange, address)
    return replace(dealt, served=served)


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
    assignment = fixed_assignment(plan, topology, config)
    return topology, assignment, list(assignment.lanes_of(topology.rank))


# ---- at the start


def _deal(
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


# ---- during the run


class Rebalancer:
    """One rank's part of rebalancing: it publishes its cell times and reads which lanes it works.

    Rank 0 of `exchange` decides; `record` is called with (step, **details) to journal a decision before it is
    published. `moves` is the number of decisions that this rank has applied.
    """

    def __init__(
        self,
        settings: Rebalancing,
        exchange: Exchange,
        *,
        rank: int,
        dealt: LaneShares,
        record: Record,
    ) -> None:
        self._settings, self._exchange, self._rank, self._record = settings, exchange, rank, record
        self._dealt, self._world = dealt.assignment, dealt.assignment.ranks
        self._node = dealt.nodes[rank] if dealt.nodes else platform.node()
        self._nearby = dealt.nearby
        self._loop = 0  # number of seeks to another step; part of the keys
        self._next = 0
        self._begin(0)

    def _begin(self, step: int) -> None:
        """Restore the lanes of the start and forget telemetry and decisions, in the same way on every rank."""
        self._first = step
        self._start = self._current = self._dealt
        self._journal: list[Decision] = []  # decisions made; only on the leader
        self.moves = 0
        self._forget()

    def _forget(self) -> None:
        """Clear the telemetry, which describes only the rank's present lanes."""
        kept = self._settings.every
        self._compute: deque[float] = deque(maxlen=kept)
        self._wait: deque[float] = deque(maxlen=kept)
        self._silent = 0

    # ---- what the loader calls

    def seek(self, step: int) -> None:
        """Continue at `step`; if it is not the next step, restore the lanes of the start."""
        if step != self._next:
            self._loop += 1
            self._next = step
            self._begin(step)

    def lanes_now(self) -> list[int]:
        """Return this rank's lanes at the last step passed to `lanes_at`."""
        return list(self._current.lanes_of(self._rank))

    def lanes_ahead(self, step: int) -> list[int]:
        """Return this rank's lanes at the next step, or at the first step of the next loop, without side effects."""
        if step != self._next:
            return list(self._dealt.lanes_of(self._rank))
        moved = self._next_assignment(step)
        return self.lanes_now() if moved is None else list(moved.lanes_of(self._rank))

    def lanes_at(self, step: int) -> list[int]:
        """Apply decisions, publish telemetry and return this rank's lanes at `step`.

        Called for every step in order, before it is handed out.
        """
        every = self._settings.every
        moved = self._next_assignment(step)
        if moved is not None:
            self._current = moved
            self.moves += 1
            self._forget()
        if step % every == 0:
            self._tell(step)
            if self._exchange.rank == 0:
                self._decide(step)
        self._next = step + 1
        return self.lanes_now()

    def finished(self, cells: int, computed_s: float, waited_s: float) -> None:
        """Note that the trainer has finished a step of `cells` cells of this rank.

        `computed_s` is the time of the rank's part of it, negative if not reported; `waited_s` the time that the
        trainer waited for the step.
        """
        if cells and computed_s >= 0:
            self._compute.append(computed_s / cells)
            self._wait.append(waited_s / cells)
            self._silent = 0
            return
        self._silent += 1
        if self._silent == self._settings.every and not self._compute:
            warnings.warn(
                "shardkit: rebalance=True learns nothing: nobody says when a rank has computed its part. Call "
                "loader.watch(model) once, or loader.computed() before ranks wait for each other in every step",
                RuntimeWarning,
                stacklevel=2,
            )

    # ---- messages

    def _key(self, kind: str, number: int) -> str:
        return f"{self._loop}/{kind}/{number}"

    def _tell(self, step: int) -> None:
        if self._compute:
            told = {"step": step, "moves": self.moves, "node": self._node, "compute_s": list(self._compute),
                    "wait_s": list(self._wait)}  # fmt: skip
            self._exchange.put(self._key("telemetry", self._rank), json.dumps(told).encode())

    def _decide(self, step: int) -> None:
        """Publish the leader's decision for step + lead, also if nothing changes."""
        decision = self._decision(step)
        text = ""
        if decision is not None:
            self._journal.append(decision)
            moved = decision.assignment
            text = json.dumps({"from_step": moved.from_step, "owner": moved.owner})
            before = in_force(self._start, self._journal[:-1], step).owner
            self._record(
                step, number=decision.number, from_step=moved.from_step, owner=list(moved.owner),
                moved=sum(a != b for a, b in zip(before, moved.owner, strict=True)),
                before_us=round(1e6 * decision.before_s), expected_us=round(1e6 * decision.expected_s),
                undoes=decision.undoes,
            )  # fmt: skip
        self._exchange.put(self._key("decision", step), text.encode())

    def _decision(self, step: int) -> Decision | None:
        told = self._telemetry()
        if told is None:
            return None
        names = sorted({one["node"] for one in told})
        nodes = tuple(names.index(one["node"]) for one in told)
        self._start = Assignment(self._start.owner, nodes)
        self._journal = [
            Decision(d.number, d.decided_at, Assignment(d.assignment.owner, nodes, d.assignment.from_step),
                     d.before_s, d.expected_s, d.undoes) for d in self._journal
        ]  # fmt: skip
        seen = [RankTelemetry(tuple(one["compute_s"]), tuple(one["wait_s"])) for one in told]
        near = [self._nearby.get(name) for name in names]
        table = None
        if any(one is not None for one in near):
            none = np.zeros(len(self._start.owner), dtype=np.int64)
            table = np.stack([none if one is None else one for one in near], axis=1)
        return rebalance(
            step, seen, self._start, self._journal, local_bytes=table, rules=self._settings.rules
        )

    def _telemetry(self) -> list[dict[str, Any]] | None:
        """Return the telemetry of all ranks for their present lanes; None if a rank has not published it."""
        values = self._exchange.get_all([self._key("telemetry", rank) for rank in range(self._world)])
        if values is None:
            return None
        told = [json.loads(value) for value in values]
        return told if all(one["moves"] == self.moves for one in told) else None

    def _next_assignment(self, step: int) -> Assignment | None:
        """Return the assignment that takes effect at `step`; None if nothing changes.

        Raises:
            RunError: the leader has not published its decision in time.
        """
        asked = step - self._settings.rules.lead
        if asked < self._first or asked % self._settings.every:
            return None
        text = self._exchange.get(
            self._key("decision", asked), 0, late=f"has not come to step {asked}",
            advice="ranks that rebalance must take the same steps",
        )  # fmt: skip
        if not text:
            return None
        told = json.loads(text)
        return Assignment(tuple(told["owner"]), (0,) * self._world, told["from_step"])


def make_rebalancer(
    settings: Rebalancing | None, *, rank: int, dealt: LaneShares, record: Record
) -> Rebalancer | None:
    """Return a rebalancer on the given store or on the process group's; None without settings or other ranks.

    All processes must make their loaders in the same order, as for the comparison at the start.
    """
    world = dealt.assignment.ranks
    if settings is None or world == 1:
        return None
    exchange: Exchange | None
    if settings.store is not None:
        exchange = Exchange(settings.store, rank, world, patience_s=settings.timeout_s)
    else:
        # each of the ranks of one data-parallel coordinate has a rebalancer; a single process decides
        exchange = Exchange.of_process_group("rebalance", settings.timeout_s)
    if exchange is None:
        raise ConfigurationError(
            f"rebalance=True with {world} ranks needs torch.distributed to be initialised: they talk through its "
            "store; or pass rebalance=Rebalancing(store=…)"
        )
    return Rebalancer(settings, exchange, rank=rank, dealt=dealt, record=record)
