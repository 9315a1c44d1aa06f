"""Which rank works which lanes: a linear assignment (SPEC.md §7)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardkit.errors import PlanError

__all__ = ["DATA_AXES", "Assignment", "assign", "data_coordinates", "quotas"]

DATA_AXES = ("dp", "data", "replicate", "dp_replicate", "dp_shard", "fsdp", "shard", "ddp")
"""Names of mesh axes along which ranks read different data; along all others (tensor, pipeline, expert, context) they
share it."""

_LEVELS = 1 << 10  # local bytes count in 1024ths of the largest entry: sums of costs stay exact in float64
_MOVE = 1 << 20
_SLACK = 0.02  # what a step may take longer where lanes move to their bytes


@dataclass(frozen=True)
class Assignment:
    """Owners of lanes, in force from a step on.

    Attributes:
        owner: the rank of each lane.
        node_of: the node of each rank.
        from_step: step of the run.
    """

    owner: tuple[int, ...]
    node_of: tuple[int, ...]
    from_step: int = 0

    def lanes_of(self, rank: int) -> tuple[int, ...]:
        """Lanes of a rank, ascending: the order of its batches."""
        return tuple(lane for lane, owner in enumerate(self.owner) if owner == rank)

    def shares(self) -> list[list[int]]:
        """`lanes_of` every rank."""
        found: list[list[int]] = [[] for _ in self.node_of]
        for lane, owner in enumerate(self.owner):
            found[owner].append(lane)
        return found

    @property
    def ranks(self) -> int:
        """Ranks of the world, those without a lane included."""
        return len(self.node_of)

    @property
    def even(self) -> bool:
        """Every rank works equally many lanes."""
        counts = np.bincount(self.owner, minlength=self.ranks)
        return bool((counts == counts[0]).all())

    @property
    def digest(self) -> str:
        """Hex SHA-256 of owners and step: what ranks compare before they start."""
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
    """Deal lanes to ranks.

    In this order: shares follow the speeds as nearly as whole lanes allow (each rank with a speed above 0 gets at least
    one), most bytes are local, fewest lanes move (and rather inside a node), lanes of a node are neighbours. The result
    depends on nothing else. Lanes and ranks alone give *fixed shares*: rank r has lanes ⌊r·L/R⌋ to ⌊(r+1)·L/R⌋ − 1.

    Args:
        lanes: L.
        ranks: R, at most L.
        nodes: node of each rank; all on one by default.
        speeds: cells per second of each rank, in any unit; equal by default. 0 takes a rank out.
        local_bytes: (lanes, nodes) bytes of each lane that lie on each node already.
        previous: what held so far.
        was: rank in ``previous`` of each rank now (None for a new one); the same number by default.
        from_step: step from which it holds.
        prefer: ``"bytes"``, or ``"moves"`` to weigh fewest moves above most local bytes: a lane that must move goes to
            a rank that has its bytes, where the slowest rank then takes no longer, within 2 %.

    Raises:
        PlanError: more ranks than lanes, or arguments of other lengths.
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
            share = [min(lanes, int(ends * pace)) for pace in paces]  # at most: bytes say who takes how many
    by_node = sorted(range(ranks), key=lambda r: (node_of[r], r))
    slot_rank = np.repeat(by_node, [share[r] for r in by_node])  # a column for each lane that a rank may get
    if local_bytes is None and previous is None:  # nothing but neighbours to weigh: they go in order
        return Assignment(tuple(slot_rank.tolist()), node_of, from_step)
    column_node = np.array(node_of)[slot_rank]
    lane = np.arange(lanes)
    place = np.arange(len(slot_rank)) * lanes // len(slot_rank)
    cost = np.abs(lane[:, None] - place[None, :]).astype(np.float64) / lanes  # neighbours last
    was_node = np.where(before >= 0, np.array(node_of)[np.maximum(before, 0)], -1)
    moved = (before[:, None] != slot_rank) + (was_node[:, None] != column_node).astype(np.int64)
    moves = np.where(before[:, None] >= 0, moved, 0) * float(
        lanes
    )  # one outweighs the neighbours of all lanes
    if local_bytes is None:
        cost += moves
    else:
        table = np.asarray(local_bytes, dtype=np.float64)
        if table.ndim != 2 or table.shape[0] != lanes or table.shape[1] <= max(node_of):
            raise PlanError(f"assignment: local_bytes has shape {table.shape}, expected ({lanes}, nodes)")
        levels = np.floor(table[:, column_node] * (_LEVELS / max(1.0, table.max())))
        if prefer == "bytes":
            cost += moves - levels * (_MOVE * 4)
        else:
            cost += moves * (2 * _LEVELS * lanes) - levels * lanes
    from scipy.optimize import linear_sum_assignment  # a plan alone does without scipy: 40 MiB

    _, columns = linear_sum_assignment(cost)
    return Assignment(tuple(int(r) for r in slot_rank[columns]), node_of, from_step)


def quotas(lanes: int, speeds: Sequence[float], held: Sequence[int] | None = None) -> list[int]:
    """Whole lanes for each rank: the largest finishing time lanes / speed is least, and every rank has work.

    Greedy: each further lane goes to the rank that would finish it first; of equal ones to that which holds more lanes
    now, then to the lower rank. (Optimal for identical jobs on related machines.)
    """
    working = [r for r, s in enumerate(speeds) if s > 0]
    if not working or len(working) > lanes or any(s < 0 for s in speeds):
        raise PlanError(f"assignment: {len(working)} ranks with a speed above 0 for {lanes} lanes")
    have = held or [0] * len(speeds)
    share = [1 if r in set(working) else 0 for r in range(len(speeds))]
    for _ in range(lanes - len(working)):
        best = min(working, key=lambda r: ((share[r] + 1) / speeds[r], share[r] - have[r], r))
        share[best] += 1
    return share


def _owners_now(
    lanes: int, ranks: int, previous: Assignment | None, was: Sequence[int | None] | None
) -> NDArray[np.int64]:
    """The present rank that owns each lane already; -1 where none of them does."""
    owner = np.full(lanes, -1, dtype=np.int64)
    if previous is None:
        return owner
    if len(previous.owner) != lanes:
        raise PlanError(f"assignment: previous one has {len(previous.owner)} lanes, expected {lanes}")
    for rank in range(ranks):
        old = rank if was is None else was[rank]
        if old is not None:
            owner[np.array(previous.owner) == old] = rank
    return owner


def data_coordinates(
    mesh: ArrayLike, names: Sequence[str], data_axes: Sequence[str] = DATA_AXES
) -> dict[int, tuple[int, int]]:
    """Data-parallel rank and world of every rank of a device mesh.

    Ranks that differ along data axes read different lanes; ranks that differ along others share them.

    Args:
        mesh: array of global ranks, one axis per name.
        names: axis names.
        data_axes: those along which data differs.

    Returns:
        global rank -> (data rank, data world).

    Raises:
        PlanError: names and axes do not match, or no axis is a data axis and yet the mesh has several ranks on it.
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
