"""Reports on a plan: balance, remainder, passes, locality, memory, mixing and world sizes, without reading samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from shardkit.arrays import Int64s
from shardkit.notebook import page, table

from .amendment import AnyGrid, RestGrid
from .assignment import assign
from .costs import Costs
from .lengths import BucketGrid, JoinedGrid
from .natural import NaturalGrid
from .permutation import Feistel, derive
from .plan import Plan
from .population import BaseOrder, stratum_rows
from .settings import LEAST_LANES, few_lanes, num_blocks
from .weighted import WeightedGrid


@dataclass(frozen=True)
class NodeReads:
    """Shards read by nodes in one epoch, or in one pass over all hands."""

    nodes: int  # number of nodes; each has an equal number of neighbouring lanes
    shards: tuple[int, ...]  # number of distinct shards read by each node
    bytes: tuple[int, ...]  # bytes of these shards; -1 if the population does not know their sizes
    per_shard: float  # shards summed over nodes, divided by the distinct shards of all nodes; at least 1.0


def lane_shards(plan: Plan, lane: int, epoch: int = 0) -> Int64s:
    """Return the distinct shards with rows of a lane in an epoch, or in pass ``epoch`` with explicit weights."""
    return np.unique(np.concatenate([_grid_shards(grid, lane, epoch) for grid in parts(plan.grid)]))


def parts(grid: AnyGrid) -> list[NaturalGrid | WeightedGrid]:
    """Return the natural and weighted grids that a grid is made of."""
    if isinstance(grid, BucketGrid):
        return list(grid.grids)
    if isinstance(grid, (RestGrid, JoinedGrid)):
        return parts(grid.after if isinstance(grid, RestGrid) else grid.inner)
    return [grid]


def _grid_shards(grid: NaturalGrid | WeightedGrid, lane: int, epoch: int) -> Int64s:
    if isinstance(grid, NaturalGrid):
        hand = grid.hands(epoch, (lane,))
        return np.unique(grid.order.pieces(hand.group, hand.lo, hand.hi).shard)
    over_all = grid.dealt_over_all()
    strata = np.flatnonzero((grid.rows > 0) & ~over_all)
    lo, hi = grid.tapes.hands(lane, strata, np.full(len(strata), epoch))
    common = np.flatnonzero((grid.rows > 0) & over_all)  # any lane may draw any row of these
    strata, lo = np.concatenate((strata, common)), np.concatenate((lo, np.zeros_like(common)))
    return np.unique(grid.order.pieces(strata, lo, np.concatenate((hi, grid.rows[common]))).shard)


def node_reads(plan: Plan, nodes: int, shards: Sequence[Int64s] | None = None, epoch: int = 0) -> NodeReads:
    """Return the shards and bytes that each of ``nodes`` nodes reads; ``shards`` lists the shards of each lane."""
    each = [lane_shards(plan, lane, epoch) for lane in range(plan.lanes)] if shards is None else shards
    owners = assign(plan.lanes, nodes, nodes=range(nodes))
    sets = [
        np.unique(np.concatenate([each[lane] for lane in owners.lanes_of(node)])) for node in range(nodes)
    ]
    size = plan.population.shard_bytes
    whole = len(np.unique(np.concatenate(sets)))
    return NodeReads(
        nodes,
        tuple(len(s) for s in sets),
        tuple(-1 if size is None else int(size[s].sum()) for s in sets),
        sum(len(s) for s in sets) / max(1, whole),
    )


def describe_plan(plan: Plan, *, nodes: Sequence[int] = (1, 2, 4, 8), steps: int = 256) -> dict[str, object]:
    """Return the report of `shardkit plan` as plain values."""
    shards = [lane_shards(plan, lane) for lane in range(plan.lanes)]
    mine, full = mixing(plan, steps)
    rows = stratum_rows(plan.population)
    return {
        "digest": plan.digest,
        "manifest": plan.population.identity,
        "global_batch": plan.global_batch,
        "lanes": plan.lanes,
        "few_lanes": few_lanes(plan.population, plan.global_batch) if plan.lanes < LEAST_LANES else "",
        "cell_size": plan.cell_size,
        "rows": sum(rows),
        "shards": plan.population.num_shards,
        "blocks": num_blocks(plan.population),
        "steps_per_epoch": plan.steps_per_epoch,
        "loop_steps": plan.loop_steps,
        "remainder": {"mode": plan.settings.remainder, "rows": _remainder(plan)},
        "balance": balance(plan, steps),
        "strata": _strata(plan, rows),
        "shards_per_lane": {"least": min(map(len, shards)), "most": max(map(len, shards))},
        "nodes": [asdict(node_reads(plan, n, shards)) for n in nodes if n <= plan.lanes],
        "working_set": _working_set(plan),
        "lengths": _lengths(plan),
        "mixing": {"plan": asdict(mine), "full_shuffle": asdict(full)},
        "worlds": [{"ranks": r, "efficiency": e} for r, e in enumerate(efficiency(plan.lanes), 1)],
    }


def plan_page(plan: Plan) -> str:
    """Render the plan for a notebook: first cells of its grid, balance over a few steps, locality."""
    lanes = range(min(plan.lanes, 8))
    steps = range(plan.from_step, plan.from_step + min(4, plan.loop_steps))
    cells = ((step, *(_samples(plan.cell(step, lane)) for lane in lanes)) for step in steps)
    even = balance(plan, 16)
    shards = [lane_shards(plan, lane) for lane in range(plan.lanes)]
    reads = [node_reads(plan, nodes, shards) for nodes in (1, 2, 4, 8) if nodes <= plan.lanes]
    length = f"{plan.steps_per_epoch:,} steps an epoch" if plan.steps_per_epoch else "endless"
    said = f"{plan.global_batch:,} samples a step over {plan.lanes:,} lanes of {plan.cell_size:,}, {length}"
    return page(
        "plan", plan.digest[:12], said,
        table(["step", *(f"lane {lane}" for lane in lanes)], cells),
        table(["balance", "off by at most", "bound"],
              [(f"strata in a {part}", even[part], even[f"{part}_bound"]) for part in ("batch", "cell")]),
        table(["nodes", "shards a node reads", "nodes a shard is read by"],
              [(one.nodes, max(one.shards), f"{one.per_shard:.2f}") for one in reads]),
    )  # fmt: skip


def _samples(cell: Int64s) -> str:
    shown = ", ".join(str(number) for number in cell[:3] if number >= 0)
    return f"{shown}, …" if len(cell) > 3 else shown


def efficiency(lanes: int) -> list[float]:
    """Return the share of the ranks' time that is used, for each world size 1..L.

    The rank with the most lanes determines the time of a step.
    """
    return [lanes / (ranks * -(-lanes // ranks)) for ranks in range(1, lanes + 1)]


def expected_counts(plan: Plan) -> NDArray[np.float64]:
    """Return the expected number of samples of each stratum in a global batch: float64[strata]."""
    masses = np.array(
        plan.settings.stages[0][1] if plan.settings.stages else stratum_rows(plan.population), dtype=float
    )
    expected: NDArray[np.float64] = masses * (plan.global_batch / masses.sum())
    return expected


def stratum_counts(plan: Plan, steps: Sequence[int]) -> Int64s:
    """Count the samples of each stratum in cells: (steps, lanes, strata) int64."""
    out = np.zeros((len(steps), plan.lanes, len(plan.population.strata)), dtype=np.int64)
    for place, step in enumerate(steps):
        cells = plan.step(step)
        lane, slot = np.nonzero(cells >= 0)
        np.add.at(out[place], (lane, plan.grid.order.strata_of(cells[lane, slot])), 1)
    return out


def balance(plan: Plan, steps: int) -> dict[str, object]:
    """Return the largest deviations from expected counts over strata expected at least once per global batch."""
    full = plan.population.rows // plan.global_batch if plan.steps_per_pass else plan.loop_steps
    chosen = sorted({plan.from_step + k * full // steps for k in range(steps)}) if full else []
    expected = expected_counts(plan)
    common = np.flatnonzero(expected >= 1)
    batch = cell = 0.0
    for first in range(0, len(chosen), 32):
        counts = stratum_counts(plan, chosen[first : first + 32])[:, :, common]
        batch = max(batch, float(np.abs(counts.sum(axis=1) - expected[common]).max(initial=0)))
        cell = max(cell, float(np.abs(counts - expected[common] / plan.lanes).max(initial=0)))
    return {
        "steps": len(chosen),
        "batch": round(batch, 3),
        "batch_bound": 2,
        "cell": round(cell, 3),
        "cell_bound": round(1 + 2 / plan.lanes, 3),
        "rare_strata": int(((expected > 0) & (expected < 1)).sum()),
    }


def _remainder(plan: Plan) -> int:
    return plan.population.rows % plan.global_batch if plan.steps_per_pass else 0


def _strata(plan: Plan, rows: Sequence[int]) -> list[dict[str, object]]:
    expected = expected_counts(plan)
    natural = not plan.settings.stages
    return [
        {
            "name": name,
            "rows": rows[s],
            "weight": None if natural else plan.settings.stages[0][1][s],
            "per_batch": round(float(expected[s]), 3),
            # passes over the stratum's rows in one epoch or loop
            "passes": 1.0 if natural else round(float(expected[s]) * plan.loop_steps / max(1, rows[s]), 3),
        }
        for s, name in enumerate(plan.population.strata)
        if rows[s]
    ]


def _lengths(plan: Plan) -> dict[str, object]:
    """Return the effect on padding of grouping by length or of joining rows."""
    if isinstance(plan.grid, BucketGrid):
        groups = [{"longest": b.longest, "cell_size": b.cell_size} for b in plan.grid.buckets]
        return {"groups": groups, **plan.grid.padding()}
    return (
        {"rows_per_sequence": plan.grid.join, "filled": plan.grid.filled}
        if isinstance(plan.grid, JoinedGrid)
        else {}
    )


def _working_set(plan: Plan) -> dict[str, object]:
    """Return the open blocks of a lane: its windows, and two windows per slot for strata rarer than one per cell."""
    blocks = max(_open_blocks(grid) for grid in parts(plan.grid))
    size = plan.population.shard_bytes
    each = -1 if size is None else int(size.sum()) // max(1, num_blocks(plan.population))
    return {
        "window_blocks": plan.settings.window_blocks,
        "blocks_per_lane": blocks,
        "bytes_per_lane": -1 if each < 0 else blocks * each,
        "bytes_all_lanes": -1 if each < 0 else blocks * each * plan.lanes,
    }


def _open_blocks(grid: NaturalGrid | WeightedGrid) -> int:
    if isinstance(grid, NaturalGrid):
        return _count_blocks(
            np.array(grid.groups.masses, dtype=float), grid.windows, grid.cell_size, 2 * grid.cell_size
        )
    parts = [(w.masses, (w.global_batch or grid.global_batch) // grid.lanes) for w in grid.weights]
    return max(_count_blocks(np.array(m, dtype=float), grid.tapes.windows, size, len(m)) for m, size in parts)


def _count_blocks(masses: NDArray[np.float64], windows: Int64s, cell_size: int, most: int) -> int:
    """Return the blocks in windows of groups that every cell draws from, and of at most ``most`` other groups."""
    often = cell_size * masses >= masses.sum()
    few = min(most, int((~often & (masses > 0)).sum()))
    return int(windows[often].sum() + few * (windows[~often].max() if (~often).any() else 0))


# ---- mixing, compared with a full shuffle of the same rows


@dataclass(frozen=True)
class Mixing:
    """Measures of how well a stream of batches is mixed."""

    shards_per_batch: float  # mean number of distinct shards in a batch
    label_run: float  # mean length of runs of one stratum in the stream
    # entropy, in bits, of log2 of the distance between sample numbers of consecutive samples
    distance_bits: float


def measure(order: BaseOrder, batches: Int64s) -> Mixing:
    """Measure the mixing of sample numbers (steps, B)."""
    segment = order.segments_of(batches.ravel()).reshape(batches.shape)
    shard = np.sort(order.population.segment_shard[segment], axis=1)
    label = order.population.segment_stratum[segment].ravel()
    flat = batches.ravel()
    distance = np.abs(np.diff(flat))
    # 4 classes per octave: fine enough to distinguish streams, coarse enough that every class has entries
    classes = np.floor(np.log2(np.maximum(1, distance).astype(np.float64)) * 4).astype(np.int64)
    share = np.bincount(classes) / max(1, len(classes))
    share = share[share > 0]
    return Mixing(
        float(1 + (np.diff(shard, axis=1) > 0).sum(axis=1).mean()),
        len(label) / (1 + int((np.diff(label) != 0).sum())),
        float(-(share * np.log2(share)).sum()),
    )


def full_shuffle(rows: int, steps: int, global_batch: int, seed: int = 0) -> Int64s:
    """Return the first steps of an unstratified full shuffle: (steps, B) int64."""
    first = np.arange(min(rows, steps * global_batch), dtype=np.int64)
    return Feistel(derive(seed, rows), rows)(first)[: len(first) // global_batch * global_batch].reshape(
        -1, global_batch
    )


def mixing(plan: Plan, steps: int) -> tuple[Mixing, Mixing]:
    """Measure the first full steps of the plan, and as many steps of a full shuffle of its rows."""
    steps = max(1, min(steps, plan.population.rows // plan.global_batch))
    batches = plan.steps(plan.from_step, plan.from_step + steps).reshape(steps, -1)
    batches = batches[(batches >= 0).all(axis=1)]
    order = plan.grid.order
    if not len(batches):
        nothing = Mixing(0.0, 0.0, 0.0)
        return nothing, nothing
    return measure(order, batches), measure(
        order, full_shuffle(plan.population.rows, steps, plan.global_batch)
    )


# ---- how long ranks wait for the rank with the most expensive samples (SPEC.md §11)

_RUNS, _RUN = 8, 16  # number of runs of steps examined in an epoch, and steps per run


def rank_skew(cells: NDArray[np.float64], ranks: int) -> NDArray[np.float64]:
    """Return the cost of the most expensive rank over the mean cost of all ranks: (steps,) float64.

    ``cells`` is (steps, lanes); rank r of R has lanes ⌊r·L/R⌋ to ⌊(r+1)·L/R⌋ − 1.
    """
    lanes = cells.shape[1]
    shares = np.add.reduceat(cells, np.arange(ranks) * lanes // ranks, axis=1)
    skew: NDArray[np.float64] = shares.max(axis=1) / shares.mean(axis=1)
    return skew


def predicted_waits(plan: Plan, costs: Costs, worlds: Sequence[int]) -> list[dict[str, float]]:
    """Predict the skew between ranks for each world size, with the plan and with the same plan without costs.

    Examines up to 128 steps of the epoch. If the most expensive rank determines the time of a step, the mean skew is
    the time of a step relative to equal costs on all ranks.

    Returns:
        For each world size ``ranks``, the mean skew ``plan`` and ``plain`` (without costs), and the 95th percentiles
        ``plan_p95`` and ``plain_p95``.
    """
    full = plan.population.rows // plan.global_batch
    firsts = sorted({max(0, min(full - _RUN, number * full // _RUNS)) for number in range(_RUNS)})
    spans = [range(first, min(full, first + _RUN)) for first in firsts]
    cells = {
        name: np.concatenate([costs.of_cells(one.steps(span.start, span.stop)) for span in spans if span])
        for name, one in (("plain", plan.without_costs()), ("plan", plan))
    }
    found = []
    for ranks in worlds:
        row: dict[str, float] = {"ranks": ranks}
        for name, each in cells.items():
            skew = rank_skew(each, ranks)
            row[name] = round(float(skew.mean()), 3)
            row[f"{name}_p95"] = round(float(np.quantile(skew, 0.95)), 3)
        found.append(row)
    return found
