"""Assignment of lanes to ranks, and rebalancing when ranks are slow: pure functions (SPEC.md §7)."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardkit.arrays import Int64s
from shardkit.errors import PlanError
from shardkit.ranges import Range

from .population import Population
from .settings import check_range

DATA_AXES = ("dp", "data", "replicate", "dp_replicate", "dp_shard", "fsdp", "shard", "ddp")
"""Names of mesh axes along which ranks read different data. Along all other axes (tensor, pipeline, expert, context)
ranks read the same data."""

_LEVELS = 1 << 10  # local bytes are rounded to 1024ths of the largest entry: float64 sums are exact
_MOVE = 1 << 20
_SLACK = 0.02  # share of the step time that lanes may cost to be near their bytes
_EXACT = 4096  # most lanes for the linear assignment, whose time grows with their cube (2.5 s)


@dataclass(frozen=True)
class Assignment:
    """Owners of lanes from a step on.

    Attributes:
        owner: rank of each lane.
        node_of: node of each rank.
        from_step: first step of the run at which the assignment applies.
    """

    owner: tuple[int, ...]
    node_of: tuple[int, ...]
    from_step: int = 0

    def lanes_of(self, rank: int) -> tuple[int, ...]:
        """Return the lanes of a rank in ascending order, which is their order in its batches."""
        return tuple(lane for lane, owner in enumerate(self.owner) if owner == rank)

    def shares(self) -> list[list[int]]:
        """Return the lanes of every rank."""
        found: list[list[int]] = [[] for _ in self.node_of]
        for lane, owner in enumerate(self.owner):
            found[owner].append(lane)
        return found

    @property
    def ranks(self) -> int:
        """Number of ranks, including ranks without lanes."""
        return len(self.node_of)

    @property
    def even(self) -> bool:
        """True if all ranks have the same number of lanes."""
        counts = np.bincount(self.owner, minlength=self.ranks)
        return bool((counts == counts[0]).all())

    @property
    def digest(self) -> str:
        """Hex SHA-256 of owners and step; ranks compare it before they start."""
        words = np.array([self.from_step, *self.owner], dtype="<i8")
        return hashlib.sha256(words.tobytes()).hexdigest()


def assign(
    lanes: int,
    ranks: int,
    *,
    nodes: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
    local_bytes: ArrayLike | None = None,
    previous: Assignment | None = None,
    was: Sequence[int | None] | None = None,
    from_step: int = 0,
    prefer: str = "bytes",
) -> Assignment:
    """Assign lanes to ranks.

    Criteria, most important first: shares are proportional to speeds as closely as whole lanes allow, and each rank
    with a speed above 0 gets at least one lane; the most bytes are local; the fewest lanes move, preferably within a
    node; lanes of a node are neighbours. The result depends only on the arguments. Without optional arguments the
    result is *fixed shares*: rank r has lanes ⌊r·L/R⌋ to ⌊(r+1)·L/R⌋ − 1.

    Args:
        lanes: L.
        ranks: R, at most L.
        nodes: node of each rank; all ranks on one node by default.
        speeds: cells per second of each rank, in any unit; equal by default. A rank with speed 0 gets no lane.
        local_bytes: (lanes, nodes) bytes of each lane that each node already stores.
        previous: the assignment until now.
        was: rank in ``previous`` of each present rank (None for a new rank); the same number by default.
        from_step: first step at which the result applies.
        prefer: ``"bytes"``, or ``"moves"`` to prefer fewest moves to most local bytes. A lane that must move then goes
            to a rank whose node stores its bytes, if the slowest rank takes at most 2 % longer.

    Raises:
        PlanError: there are more ranks than lanes, or an argument has the wrong length.
    """
    node_of = tuple(nodes) if nodes is not None else (0,) * ranks
    if not 1 <= ranks <= lanes:
        raise PlanError(
            f"assignment: {ranks} ranks for {lanes} lanes, expected 1 to {lanes}; take more lanes"
        )
    if (
        len(node_of) != ranks
        or (speeds is not None and len(speeds) != ranks)
        or (was is not None and len(was) != ranks)
    ):
        raise PlanError(f"assignment: nodes, speeds and was need {ranks} entries, one for each rank")
    before = _owners_now(lanes, ranks, previous, was)
    if speeds is None and previous is None:
        share = [(rank + 1) * lanes // ranks - rank * lanes // ranks for rank in range(ranks)]
    else:
        held = np.bincount(before[before >= 0], minlength=ranks)
        paces = [1.0] * ranks if speeds is None else list(speeds)
        share = quotas(lanes, paces, held.tolist())
        if local_bytes is not None and prefer == "moves" and all(held[r] for r in range(ranks) if share[r]):
            ends = max(n / pace for n, pace in zip(share, paces, strict=True) if n) * (1 + _SLACK)
            share = [min(lanes, int(ends * pace)) for pace in paces]  # upper limits: local bytes decide
    by_node = sorted(range(ranks), key=lambda r: (node_of[r], r))
    slot_rank = np.repeat(by_node, [share[r] for r in by_node])  # one column per lane that a rank may get
    if local_bytes is None and previous is None:  # only neighbourhood counts: lanes in order
        return Assignment(tuple(slot_rank.tolist()), node_of, from_step)
    column_node = np.array(node_of)[slot_rank]
    if local_bytes is not None:
        table = np.asarray(local_bytes, dtype=np.float64)
        if table.ndim != 2 or table.shape[0] != lanes or table.shape[1] <= max(node_of):
            raise PlanError(f"assignment: local_bytes has shape {table.shape}, expected ({lanes}, nodes)")
    if lanes > _EXACT:
        wanted = _levels(table) if local_bytes is not None else np.zeros((lanes, max(node_of) + 1))
        return Assignment(_greedily(before, slot_rank, node_of, wanted, prefer), node_of, from_step)
    lane = np.arange(lanes)
    place = np.arange(len(slot_rank)) * lanes // len(slot_rank)
    cost = np.abs(lane[:, None] - place[None, :]).astype(np.float64) / lanes  # distance of neighbours
    was_node = np.where(before >= 0, np.array(node_of)[np.maximum(before, 0)], -1)
    moved = (before[:, None] != slot_rank) + (was_node[:, None] != column_node).astype(np.int64)
    moves = np.where(before[:, None] >= 0, moved, 0) * float(
        lanes
    )  # one move outweighs the neighbourhood of all lanes
    if local_bytes is None:
        cost += moves
    else:
        levels = _levels(table)[:, column_node]
        if prefer == "bytes":
            cost += moves - levels * (_MOVE * 4)
        else:
            cost += moves * (2 * _LEVELS * lanes) - levels * lanes
    from scipy.optimize import linear_sum_assignment  # 40 MiB; plans with fixed shares do not need it

    _, columns = linear_sum_assignment(cost)
    return Assignment(tuple(int(r) for r in slot_rank[columns]), node_of, from_step)


def _levels(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round entries down to 1024ths of the largest entry."""
    levels: NDArray[np.float64] = np.floor(table * (_LEVELS / max(1.0, table.max())))
    return levels


def _greedily(
    before: NDArray[np.int64],
    slot_rank: NDArray[np.int64],
    node_of: Sequence[int],
    wanted: NDArray[np.float64],
    prefer: str,
) -> tuple[int, ...]:
    """Return the owners of very many lanes: each lane goes to the node with room that stores most of its bytes.

    Lanes are assigned in descending order of local bytes. The result is optimal if the bytes of every lane are stored
    on one node, as after a restart. Lanes without local bytes keep their rank if it has room. The remaining lanes fill
    the remaining room in order, so that lanes of a node are neighbours.
    """
    nodes = np.array(node_of)
    room = np.bincount(slot_rank, minlength=len(nodes))  # of each rank
    node_room = np.bincount(nodes, room, wanted.shape[1]).astype(np.int64)
    lane, at = np.nonzero(wanted)
    most = np.lexsort((at, lane, -wanted[lane, at]))
    held = np.flatnonzero(before >= 0)
    choices = [(lane[most], at[most]), (held, nodes[before[held]])]
    node = np.full(len(before), -1, dtype=np.int64)
    for lanes, places in choices if prefer == "bytes" else reversed(choices):
        for one, place in zip(lanes.tolist(), places.tolist(), strict=True):
            if node[one] < 0 and node_room[place] > 0:
                node[one] = place
                node_room[place] -= 1
    left = np.flatnonzero(node < 0)
    node[left] = np.repeat(np.arange(len(node_room)), node_room)[: len(left)]

    owner = np.where((before >= 0) & (nodes[before] == node), before, -1)
    by_owner = np.argsort(owner, kind="stable")
    owner[by_owner[_number_in_run(owner[by_owner]) >= room[owner[by_owner]]]] = -1
    room = room - np.bincount(owner[owner >= 0], minlength=len(room))
    slots = np.repeat(np.argsort(nodes, kind="stable"), room[np.argsort(nodes, kind="stable")])
    free = np.flatnonzero(owner < 0)
    free = free[np.argsort(node[free], kind="stable")]
    owner[free] = slots[np.searchsorted(nodes[slots], node[free]) + _number_in_run(node[free])]
    return tuple(owner.tolist())


def _number_in_run(ordered: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each entry of a sorted array the number of equal entries before it."""
    numbers: NDArray[np.int64] = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
    return numbers


def quotas(lanes: int, speeds: Sequence[float], held: Sequence[int] | None = None) -> list[int]:
    """Return the number of lanes of each rank that minimizes the largest finishing time, lanes / speed.

    Every rank with a speed above 0 gets at least one lane. Each further lane goes to the rank that would finish it
    first; ties go to the rank that holds more lanes now, then to the lower rank. The greedy choice is optimal for
    identical jobs on machines of different speed.
    """
    working = [r for r, s in enumerate(speeds) if s > 0]
    if not working or len(working) > lanes or any(s < 0 for s in speeds):
        raise PlanError(f"assignment: {len(working)} ranks with a speed above 0 for {lanes} lanes")
    have = held or [0] * len(speeds)
    share = [0] * len(speeds)
    waiting = []
    for r in working:
        share[r] = 1
        waiting.append((2 / speeds[r], 1 - have[r], r))
    heapq.heapify(waiting)
    for _ in range(lanes - len(working)):
        r = waiting[0][2]
        share[r] += 1
        heapq.heapreplace(waiting, ((share[r] + 1) / speeds[r], share[r] - have[r], r))
    return share


def _owners_now(
    lanes: int, ranks: int, previous: Assignment | None, was: Sequence[int | None] | None
) -> NDArray[np.int64]:
    """Return the present rank that already owns each lane, or -1."""
    if previous is None:
        return np.full(lanes, -1, dtype=np.int64)
    if len(previous.owner) != lanes:
        raise PlanError(f"assignment: previous one has {len(previous.owner)} lanes, expected {lanes}")
    now = {old: rank for rank, old in enumerate(range(ranks) if was is None else was) if old is not None}
    return np.array([now.get(old, -1) for old in previous.owner], dtype=np.int64)


def data_coordinates(
    mesh: ArrayLike, names: Sequence[str], data_axes: Sequence[str] = DATA_AXES
) -> dict[int, tuple[int, int]]:
    """Return the data-parallel rank and world size of every rank of a device mesh.

    Ranks that differ along data axes read different lanes. Ranks that differ only along other axes read the same lanes.

    Args:
        mesh: array of global ranks, one axis per name.
        names: axis names.
        data_axes: names of axes along which data differs.

    Returns:
        global rank -> (data rank, data world).

    Raises:
        PlanError: names and axes do not match.
    """
    ranks = np.asarray(mesh)
    if ranks.ndim != len(names) or len(set(names)) != len(names):
        raise PlanError(
            f"mesh: {ranks.ndim} axes and names {tuple(names)}, expected one different name per axis"
        )
    axes = [i for i, name in enumerate(names) if name in data_axes]
    world = int(np.prod([ranks.shape[i] for i in axes], dtype=np.int64))
    out = {}
    for place in np.ndindex(ranks.shape):
        coordinate = 0
        for i in axes:
            coordinate = coordinate * ranks.shape[i] + place[i]
        out[int(ranks[place])] = (coordinate, world)
    return out


# ---- rebalancing


class RankTelemetry(NamedTuple):
    """Recent times of one rank."""

    compute_s: tuple[float, ...]  # seconds per cell spent computing, one entry per recent step
    wait_s: tuple[float, ...] = ()  # seconds per cell spent waiting for data, one entry per recent step

    @property
    def cell_s(self) -> float:
        """Seconds per cell; medians, so that single slow steps have no effect."""
        return _median(self.compute_s) + (_median(self.wait_s) if self.wait_s else 0.0)

    @property
    def doubt(self) -> float:
        """Relative standard error of `cell_s`, estimated from median absolute deviations."""
        error = 0.0
        for values in (self.compute_s, self.wait_s):
            if values:
                middle = _median(values)
                # normal distribution: 1.4826 is sigma / median deviation, 1.2533 error of a median / of a mean
                error += (
                    1.4826 * 1.2533 * _median([abs(v - middle) for v in values]) / len(values) ** 0.5
                ) ** 2
        return error**0.5 / self.cell_s if self.cell_s else 0.0


def _median(values: Sequence[float]) -> float:
    from statistics import median  # its imports take longer than making a plan

    return median(values)


class Decision(NamedTuple):
    """A journaled change of owners, which every rank applies at the same later step."""

    number: int  # sequence number, from 1
    decided_at: int  # step at which the decision was made
    assignment: Assignment  # owners from ``assignment.from_step`` on
    before_s: float  # measured seconds per step before the decision
    expected_s: float  # expected seconds per step after the decision
    undoes: int = 0  # number of the decision that this one reverts, or 0


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Thresholds of rebalancing."""

    lead: int = 8  # steps between a decision and its effect, so that every rank receives it in time
    settle: int = 32  # steps after an effect without a new decision; telemetry must be from these steps
    # smallest expected saving, as a share of the step time; twice the relative standard error is added
    gain: float = 0.1
    # share by which the step time may exceed the time before a decision; otherwise it is undone
    worse: float = 0.05
    backoff: int = 512  # steps without a decision after one was undone; doubled each further time

    def __post_init__(self) -> None:
        for name, least in (("lead", 1), ("settle", 0), ("backoff", 0)):
            check_range(f"rebalancing: {name}", getattr(self, name), Range(least, 10**9))
        check_range("rebalancing: gain", self.gain, Range(0, 1, above=True, below=True), float)
        check_range("rebalancing: worse", self.worse, Range(0, 1000), float)


def step_seconds(assignment: Assignment, telemetry: Sequence[RankTelemetry]) -> float:
    """Return the seconds per step: lanes times seconds per cell of the slowest rank."""
    return max(len(assignment.lanes_of(r)) * t.cell_s for r, t in enumerate(telemetry))


def in_force(start: Assignment, journal: Sequence[Decision], step: int) -> Assignment:
    """Return the assignment at a step, from the journal of decisions."""
    current = start
    for decision in journal:
        if decision.assignment.from_step <= step:
            current = decision.assignment
    return current


def rebalance(
    step: int,
    telemetry: Sequence[RankTelemetry],
    start: Assignment,
    journal: Sequence[Decision] = (),
    *,
    local_bytes: ArrayLike | None = None,
    rules: Rules | None = None,
) -> Decision | None:
    """Decide whether to move lanes away from slow ranks.

    `quotas` minimizes the largest time of a rank, lanes times seconds per cell. Lanes that move go to ranks whose nodes
    store their bytes. Nothing changes while a decision is pending or recent, if noise could explain the gain, or soon
    after a decision was undone.

    Returns:
        The next decision, which must be journaled before it is published, or None.
    """
    rules = rules or Rules()
    current = in_force(start, journal, step)
    last = journal[-1] if journal else None
    if last is not None and step < last.assignment.from_step + rules.settle:
        return None
    now, doubt = step_seconds(current, telemetry), 2 * max(t.doubt for t in telemetry)
    number, effect = len(journal) + 1, step + rules.lead
    if last is not None and not last.undoes and now > last.before_s * (1 + rules.worse + doubt):
        before = in_force(start, journal[:-1], step)
        back = Assignment(before.owner, before.node_of, effect)
        # undo only if the old owners are better by present times: a rank may have become slow since
        if step_seconds(back, telemetry) < now:
            return Decision(number, step, back, now, step_seconds(back, telemetry), last.number)
    undone = [d for d in journal if d.undoes]
    if undone and step < undone[-1].assignment.from_step + rules.backoff * 2 ** (len(undone) - 1):
        return None
    speeds = [1.0 / t.cell_s for t in telemetry]
    lanes = len(current.owner)
    held = [len(current.lanes_of(r)) for r in range(current.ranks)]
    share = quotas(lanes, speeds, held)
    expected = max(n * t.cell_s for n, t in zip(share, telemetry, strict=True))
    if expected > now * (1 - rules.gain - doubt):
        return None
    moved = assign(
        lanes,
        current.ranks,
        nodes=current.node_of,
        speeds=speeds,
        local_bytes=local_bytes,
        previous=current,
        from_step=effect,
        prefer="moves",
    )
    return Decision(number, step, moved, now, step_seconds(moved, telemetry))


class LaneOfBlock:
    """Function from blocks to the lanes whose hands contain most of their rows, in every epoch (SPEC.md §8).

    The lane is computed without hands, because hands begin at l/L of their base orders. It can be wrong by one block at
    borders of hands. It is not valid for the rest of an epoch after a change of lanes, nor for strata with few rows
    per lane, which all lanes draw from.

    Args:
        population: rows of the plan.
        lanes: L.
        blocks: int64[segments], number of blocks of each segment.
    """

    def __init__(self, population: Population, lanes: int, blocks: Int64s) -> None:
        rows, stratum = population.segment_rows, population.segment_stratum
        order = np.argsort(stratum, kind="stable")
        ends = np.cumsum(rows[order])
        total = np.bincount(stratum, rows, len(population.strata)).astype(np.int64)
        self._begin = np.empty_like(ends)  # position of each segment in the base order of its stratum
        self._begin[order] = ends - rows[order] - (np.cumsum(total) - total)[stratum[order]]
        self._rows, self._total, self._lanes = rows, np.maximum(1, total)[stratum], lanes
        self._blocks, self._first = blocks, np.cumsum(blocks) - blocks

    def __call__(self, block: Int64s) -> Int64s:
        """Return the lane of each block: int64[n] for int64[n] block numbers in the dataset."""
        segment = np.searchsorted(self._first, block, side="right") - 1
        twice = 2 * (block - self._first[segment]) + 1
        middle = self._begin[segment] + self._rows[segment] * twice // (2 * self._blocks[segment])
        found: Int64s = np.minimum(middle * self._lanes // self._total[segment], self._lanes - 1)
        return found
