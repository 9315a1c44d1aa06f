"""`shardkit rehearse`: what a loss would mean, worked out on paper before it happens; nothing of the run is touched.

The run's plan is made again from its ledger, the present owners of its lanes come from its telemetry, the new
ones from the same `assign` that a restart uses (where nodes cache, each is taken to have what it works), and what lies
where is asked of the locations themselves (HEAD, never a write).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np

from shardkit.audit import RunPlan, find_plans, load_run
from shardkit.audit.run_record import read_checkpoints
from shardkit.dataset import Dataset
from shardkit.errors import ShardkitError, StateError, UsageError
from shardkit.exit_codes import ExitCode
from shardkit.ledger import Ledger
from shardkit.ledger.bindings import DEALT
from shardkit.plan import assign
from shardkit.plan.locality import lane_shards
from shardkit.reading.objects import Location
from shardkit.repository.location_table import open_locations
from shardkit.telemetry import Record, read_run
from shardkit.telemetry.records import check_run
from shardkit_tools import console, options
from shardkit_tools.console import bytes_text, count_text
from shardkit_tools.options import argument, option

_LANES_SHOWN: Final = 40
_LOST_SHOWN: Final = 10
_MOST_ASKED: Final = 2_000
_THREADS: Final = 16


@dataclass
class Rehearsal:
    """What would happen; ranks are numbered as now."""

    step: int = 0  # at which the run is
    dead: list[int] = field(default_factory=list)  # ranks that die
    nodes: list[str] = field(default_factory=list)  # that die
    locations: list[str] = field(default_factory=list)  # that die with them, or were named
    survivors: list[int] = field(default_factory=list)
    moves: dict[int, tuple[int, int]] = field(default_factory=dict)  # lane → (rank now, rank then)
    lanes_per_rank: tuple[int, int] = (0, 0)  # the most on one, before and after: a step takes as much longer
    steps_repeated: int | None = None  # from the newest checkpoint to now; None where there is no checkpoint
    read_again: tuple[int, int] = (0, 0)  # shards and bytes of the moved lanes in this epoch
    sources: dict[str, tuple[int, int]] = field(default_factory=dict)  # location → its part of `read_again`
    asked: tuple[int, int] = (0, 0)  # how many shards the locations were asked for, of how many
    lost: list[str] = field(default_factory=list)  # object names that no other location has
    memory_bytes: int = 0  # blocks in the memory of dead ranks
    notes: list[str] = field(default_factory=list)  # what could not be found out, and why

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        moves = [{"lane": lane, "from": a, "to": b} for lane, (a, b) in self.moves.items()]
        return vars(self) | {"moves": moves}


def rehearse_loss(
    run: Path, *, nodes: Sequence[str], ranks: Sequence[int] = (), locations: Sequence[str] = ()
) -> Rehearsal:
    """Lose nodes, ranks or locations, on paper."""
    check_run(run)
    last = {rank: records[-1] for rank, records in read_run(run, tail_bytes=64 << 10).ranks.items()}
    if not last:
        raise StateError(
            f"run {run} has no telemetry, which says who works which lane; start it with telemetry on"
        )
    dead = _dead(last, nodes, ranks)
    found = Rehearsal(
        step=max(int(one.value("loader.step")) for one in last.values()),
        dead=dead,
        nodes=sorted(nodes),
        survivors=[rank for rank in last if rank not in dead],
        memory_bytes=int(sum(last[rank].value("loader.window_bytes") for rank in dead)),
    )
    plan = _newest_plan(run)
    _move_lanes(found, last, plan, near=_is_near(run, last))
    _ask_locations(found, plan, locations)
    checkpoints, broken = read_checkpoints(run)
    if checkpoints:
        found.steps_repeated = max(0, found.step - max(one.step for one in checkpoints))
    found.notes += [f"checkpoint {name}: {text}" for name, text in broken]
    return found


def _dead(last: Mapping[int, Record], nodes: Sequence[str], ranks: Sequence[int]) -> list[int]:
    hosts = sorted({record.host for record in last.values()})
    for node in nodes:
        if node not in hosts:
            raise UsageError(f"node {node!r} has no rank of this run; its nodes are {', '.join(hosts)}")
    for rank in ranks:
        if rank not in last:
            raise UsageError(f"rank {rank} is not in this run; its ranks are 0 to {max(last)}")
    return sorted(rank for rank, record in last.items() if record.host in nodes or rank in ranks)


def _newest_plan(run: Path) -> RunPlan:
    record = load_run(run)
    plans = find_plans(record)
    if not plans:
        why = "; ".join(finding.text for finding in record.findings) or "no step is recorded"
        raise StateError(f"the plan of the run cannot be made again: {why}")
    return plans[max(plans)]


def _is_near(run: Path, last: Mapping[int, Record]) -> bool:
    """Whether the next start deals lanes to where their blocks are cached."""
    dealt = any(event.get("kind") == DEALT for event in Ledger(run).event_documents())
    return dealt and any(
        one.value(f"reads.cache_{what}") for one in last.values() for what in ("hits", "misses")
    )


def _move_lanes(found: Rehearsal, last: Mapping[int, Record], plan: RunPlan, *, near: bool) -> None:
    """The assignment of the next start on the ranks that are left."""
    lanes = plan.plan.lanes
    owners = {lane: rank for rank, record in last.items() for lane in record.lanes}
    owner = [owners.get(lane, -1) for lane in range(lanes)]
    if -1 in owner:
        raise StateError(
            f"lane {owner.index(-1)} has no owner in the telemetry; wait for the run to take a step"
        )
    before = max(map(owner.count, last))
    if not found.survivors:
        found.lanes_per_rank = (before, 0)
        found.notes.append("no rank is left: the run stops, and any number of ranks can resume it")
        return
    if len(found.survivors) > lanes:
        found.notes.append("more ranks are left than there are lanes")
    hosts = [last[rank].host for rank in found.survivors]
    nodes = sorted(set(hosts))
    held = np.array([[last[rank].host == node for node in nodes] for rank in owner])
    placed: tuple[Any, Any] = ([nodes.index(host) for host in hosts], held) if near else (None, None)
    then = assign(lanes, len(found.survivors), nodes=placed[0], local_bytes=placed[1])
    new = [found.survivors[rank] for rank in then.owner]
    found.moves = {lane: (a, b) for lane, (a, b) in enumerate(zip(owner, new, strict=True)) if a != b}
    found.lanes_per_rank = (before, max(map(new.count, found.survivors)))


def _ask_locations(found: Rehearsal, plan: RunPlan, named: Sequence[str]) -> None:
    """Where what is needed again lies, and what lies nowhere else."""
    dataset: Dataset = plan.dataset
    table, reader = dataset.table, dataset.reader
    epoch = found.step // max(1, plan.plan.loop_steps)
    moved = [lane_shards(plan.plan, lane, epoch) for lane in found.moves]
    again = np.unique(np.concatenate(moved)) if moved else np.empty(0, dtype=np.int64)
    found.read_again = len(again), int(table.size[again].sum())
    try:
        known = open_locations(dataset.repository.store, dataset.repository.id)
    except ShardkitError as error:
        found.notes.append(f"the locations of the dataset cannot be opened: {error}")
        return
    names = [one.name for one in known]
    for name in named:
        if name not in names:
            raise UsageError(
                f"location {name!r} is not known to {dataset.repository.url}; its locations are {', '.join(names)}"
            )
    dead = [one for one in known if one.name in named or one.domain in found.nodes]
    found.locations = [one.name for one in dead]
    alive = sorted((one for one in known if one not in dead), key=lambda one: one.rank)
    # all that dies with a location, or else what has to be read again
    shards = np.arange(len(table)) if dead else again
    found.asked = min(_MOST_ASKED, len(shards)), len(shards)
    if len(shards) > _MOST_ASKED:
        shards = shards[np.linspace(0, len(shards) - 1, _MOST_ASKED).astype(np.int64)]
        found.notes.append(f"{_MOST_ASKED} shards of {found.asked[1]} were looked for, evenly spread")
    objects = [reader.shard_name(int(shard)) for shard in shards]
    with ThreadPoolExecutor(_THREADS) as pool:
        places = list(pool.map(lambda name: _first_with(alive, name), objects))
    found.lost = [name for name, place in zip(objects, places, strict=True) if place is None]
    wanted = set(again.tolist())
    for shard, place in zip(shards.tolist(), places, strict=True):
        if place is not None and shard in wanted:
            count, size = found.sources.get(place, (0, 0))
            found.sources[place] = count + 1, size + int(table.size[shard])


def _first_with(locations: Sequence[Location], name: str) -> str | None:
    """The first location that says it has an object."""
    for location in locations:
        try:
            if location.holds == "objects" and location.store.head(name) is not None:
                return location.name
        except ShardkitError:
            continue
    return None


def rehearse(
    run: Annotated[str, argument("RUN", "The run directory.")],
    kill_node: Annotated[
        list[str] | None, option("--kill-node HOST", "A node that dies; may be given again.")
    ] = None,
    kill_rank: Annotated[list[int] | None, option("--kill-rank N", "A single rank that dies.")] = None,
    kill_location: Annotated[
        list[str] | None,
        option("--kill-location NAME", "A location of the dataset that is lost with all it holds."),
    ] = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Rehearse a loss: which lanes move, what is read again and from where, which steps are repeated, what is lost.

    Nothing happens to the run: its plan is made again from its ledger, and locations are only asked what they
    have. A location whose failure domain is a dead node dies with it. Exit code 5: data would be lost; run shardkit
    replicate ROOT while it is still there.

    Example: shardkit rehearse runs/mine --kill-node node-7
    """
    if not (kill_node or kill_rank or kill_location):
        raise UsageError("name what is lost: --kill-node HOST, --kill-rank N or --kill-location NAME")
    found = rehearse_loss(
        Path(run), nodes=kill_node or (), ranks=kill_rank or (), locations=kill_location or ()
    )
    code = ExitCode.NO if found.lost else ExitCode.DONE
    console.present(as_json, found.to_json, lambda: _print(found), code)


def _print(found: Rehearsal) -> None:
    what = [*(f"node {node}" for node in found.nodes), *(f"rank {rank}" for rank in found.dead if not found.nodes),
            *(f"location {name}" for name in found.locations)]  # fmt: skip
    console.print_line(f"If {', '.join(what)} died at step {count_text(found.step)}")
    before, after = found.lanes_per_rank
    slower = f"a step takes {after / before:.2f} times as long at the same pace" if after else "the run stops"
    shards, size = found.read_again
    console.print_facts([
        ("ranks left", f"{len(found.survivors)} of {len(found.survivors) + len(found.dead)}"),
        ("lanes that move", f"{len(found.moves)}; most on a rank {before} → {after}: {slower}"),
        ("steps repeated", "all: there is no checkpoint" if found.steps_repeated is None else
         f"{count_text(found.steps_repeated)} since the newest checkpoint; they see the same samples"),
        ("read again", f"{count_text(shards, 'shard')}, {bytes_text(size)}, in the epoch under way"),
        ("memory lost", f"{bytes_text(found.memory_bytes)} of verified blocks, which are read again"),
        ("data lost", f"{count_text(len(found.lost), 'shard')} of {count_text(found.asked[0])} looked for" if found.lost
         else "none"),
    ])  # fmt: skip
    if found.sources:
        console.print_heading("Read again from")
        rows = [(name, count_text(count), bytes_text(size)) for name, (count, size) in found.sources.items()]
        console.print_table(["location", ">shards", ">bytes"], rows)
    if found.moves:
        console.print_heading("Lanes")
        moves = [(lane, f"rank {old}", f"rank {new}") for lane, (old, new) in found.moves.items()]
        console.print_table([">lane", "from", "to"], moves[:_LANES_SHOWN])
        console.print_more(len(moves) - _LANES_SHOWN, "; --json has all")
    if found.lost:
        console.print_heading("Lost: no other location has")
        console.print_list(found.lost, _LOST_SHOWN)
        console.print_line("run: shardkit replicate ROOT, while it is still there")
    for note in found.notes:
        console.print_line(f"note: {note}")
