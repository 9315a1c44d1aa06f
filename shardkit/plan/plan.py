"""Plans: the pure function from manifest and settings to a grid of cells."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardkit.errors import PlanError
from shardkit.formats.canonical_json import dumps
from shardkit.notebook import Shown
from shardkit.ranges import Range

from .amendment import AnyGrid, Change, Leg, RestGrid, amended
from .costs import BALANCES, Costs
from .lengths import BucketGrid, JoinedGrid, find_buckets, joined, rows_per_sequence
from .natural import NaturalGrid
from .population import Population, stratum_rows
from .settings import (
    GLOBAL_BATCH,
    Settings,
    WeightsLike,
    default_cost_window,
    default_lanes,
    default_window_blocks,
    resolve_stages,
    whole,
)
from .weighted import WeightedGrid

PLAN_VERSION = 1
"""Version of the construction, part of every digest; increase it with any change that moves a sample."""


class Plan(Shown):
    """Grid of cells: for each step and lane, ``cell_size`` sample numbers.

    Steps count over the whole run; `epoch_of` gives the epoch of a step. Sample numbers count the manifest's selected
    rows in manifest order. All methods are pure and thread-safe and cost the same at any step.

    An amended plan equals its parent before ``from_step``. Its properties apply from that step on.
    """

    def __init__(
        self, leg: Leg, parent: Plan | None = None, change: Mapping[str, object] | None = None
    ) -> None:
        self._leg, self.parent = leg, parent
        self._change = None if parent is None else dict(change or {})
        self._digest = self._hashed(None if parent is None else parent.digest, self._change)

    def _hashed(
        self, parent: str | None, change: Mapping[str, object] | None, settings: Settings | None = None
    ) -> str:
        identity: dict[str, object] = {"plan": PLAN_VERSION, "manifest": self.population.identity}
        identity["settings"] = (settings or self.settings).canonical()
        if parent is not None:
            identity["parent"], identity["change"] = parent, change
        return hashlib.sha256(dumps(identity)).hexdigest()

    @property
    def settings(self) -> Settings:
        """Resolved settings."""
        return self._leg.settings

    @property
    def population(self) -> Population:
        """Selected rows that the plan distributes."""
        return self._leg.population

    @property
    def grid(self) -> AnyGrid:
        """Grid from `from_step` on, for reports."""
        return self._leg.grid

    @property
    def from_step(self) -> int:
        """First step at which the plan differs from its parent; 0 without a parent."""
        return self._leg.from_step

    def __repr__(self) -> str:
        return f"Plan(global_batch={self.global_batch}, lanes={self.lanes}, digest={self.digest[:12]})"

    @property
    def global_batch(self) -> int:
        """B: number of samples of a full step."""
        return self.settings.global_batch

    @property
    def lanes(self) -> int:
        """L: number of columns of the grid, and the largest number of ranks."""
        return self.settings.lanes

    @property
    def cell_size(self) -> int:
        """m: samples of a full cell; with group_by of the largest cell, with sequence the rows of all sequences."""
        grid = self._leg.grid
        return grid.width if isinstance(grid, (BucketGrid, JoinedGrid)) else self.global_batch // self.lanes

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch: the setting ``epoch_steps`` or `steps_per_pass`; None with weights and neither."""
        return self.settings.epoch_steps or self.steps_per_pass

    @property
    def steps_per_pass(self) -> int | None:
        """Steps of a pass over all rows, including the short step; None with explicit weights."""
        grid = self._leg.grid
        if self.settings.stages or isinstance(grid, WeightedGrid):
            return None
        if isinstance(grid, JoinedGrid):
            return grid.bounds(0)[1]
        return (grid.after if isinstance(grid, RestGrid) else grid).steps_per_epoch

    @property
    def loop_steps(self) -> int:
        """Steps of a loop over the plan: an epoch, or ceil(N / B) steps if epochs are undefined."""
        grid = self._leg.grid
        if isinstance(grid, JoinedGrid):
            return self.steps_per_epoch or grid.bounds(0)[1]
        return self.steps_per_epoch or -(-self.population.rows // self.global_batch)

    def epoch_bounds(self, step: int) -> tuple[int, int]:
        """Return the first and end step of the epoch, or loop, that contains a step; also for amended plans."""
        return self.bounds(step, passes=self.settings.epoch_steps is None)

    def epoch_of(self, step: int) -> int:
        """Return the number of the epoch, or loop, that contains a step, counted from 0."""
        if self.parent is None:
            return step // self.loop_steps
        if step < self.from_step:
            return self.parent.epoch_of(step)
        first, last = self.epoch_bounds(self.from_step)
        before = -1 if self.from_step == 0 else self.parent.epoch_of(self.from_step - 1)
        number = before if first < self.from_step else before + 1
        return number if step < last else number + 1 + (step - last) // self.loop_steps

    def is_cut_at(self, step: int) -> bool:
        """Return True if an amendment ends an epoch early at this step."""
        if self.parent is None:
            return False
        if step != self.from_step:
            return step < self.from_step and self.parent.is_cut_at(step)
        return step > 0 and self.epoch_bounds(step)[0] == step < self.parent.epoch_bounds(step - 1)[1]

    def bounds(self, step: int, *, passes: bool) -> tuple[int, int]:
        """Return the first and end step of the pass over all rows, or of the loop, that contains a step.

        Args:
            step: step of the run.
            passes: True for passes over all rows, False for loops of `loop_steps`.
        """
        continues = passes and self._leg.continues
        if self.parent is not None and step < self.from_step:
            first, last = self.parent.bounds(step, passes=passes)
            goes_on = last > self.from_step and continues
            return first, self._own_bounds(self.from_step, passes)[1] if goes_on else min(
                last, self.from_step
            )
        first, last = self._own_bounds(step, passes)
        if self.parent is not None and first <= self.from_step:
            before = self.parent.bounds(max(0, self.from_step - 1), passes=passes)
            first = before[0] if continues and before[1] > self.from_step else self.from_step
        return first, last

    def _own_bounds(self, step: int, passes: bool) -> tuple[int, int]:
        if not passes or isinstance(self._leg.grid, WeightedGrid):
            first = step - step % self.loop_steps
            return first, first + self.loop_steps
        first, last = self._leg.grid.bounds(step - self._leg.origin)
        return first + self._leg.origin, last + self._leg.origin

    @property
    def open_blocks(self) -> int:
        """Approximate number of blocks that a lane has open at a time, for its windows (SPEC.md §4)."""
        settings, size = self.settings, self.global_batch // self.lanes
        strata = len(self.population.strata)
        if strata <= 1:
            # windows of cells begin inside a block
            return settings.window_blocks + (settings.cost is not None)
        # a stratum drawn in few cells has at least one open block; at most two such strata are open per slot
        return max(settings.window_blocks, 2 * size) + min(strata, size)

    @property
    def digest(self) -> str:
        """Hex SHA-256 of settings, manifest id and amendments; plans with equal digests have equal cells."""
        return self._digest

    def cell(self, step: int, lane: int) -> NDArray[np.int64]:
        """Return the sample numbers of a cell: (m,) int64, read-only; empty slots (-1) come last.

        Examples:
            >>> plan.lanes, plan.cell(step=3, lane=0).shape
            (5, (4,))
        """
        samples: NDArray[np.int64] = self.cells(step, step + 1, lane)[0]
        return samples

    def step(self, step: int) -> NDArray[np.int64]:
        """Return the sample numbers of a step: (L, m) int64, with the cell of lane l in row l.

        Examples:
            >>> samples = plan.step(3)  # of all ranks
            >>> samples.size
            20
        """
        samples: NDArray[np.int64] = self.steps(step, step + 1)[0]
        return samples

    def cells(self, start: int, stop: int, lane: int) -> NDArray[np.int64]:
        """Return the cells of one lane for steps [start, stop): (stop - start, m) int64, read-only.

        Raises:
            PlanError: a step or the lane is out of range, or an amendment changes the cell size inside the range.
        """
        if self.parent is not None and start < self.from_step:
            before = self.parent.cells(start, min(stop, self.from_step), lane)
            if stop <= self.from_step:
                return before
            if before.shape[1] != self.cell_size:
                raise PlanError(
                    f"plan: steps [{start}, {stop}) cross step {self.from_step}, where cells change from "
                    f"{before.shape[1]} to {self.cell_size} samples; ask for both sides"
                )
            return np.concatenate((before, self.cells(self.from_step, stop, lane)))
        if not 0 <= start <= stop:
            raise PlanError(f"plan: steps [{start}, {stop}), expected 0 <= start <= stop")
        if not 0 <= lane < self.lanes:
            raise PlanError(f"plan: lane is {lane}, expected 0 <= lane < {self.lanes}")
        if stop == start:
            return np.empty((0, self.cell_size), dtype=np.int64)
        return self._leg.grid.cells(start - self._leg.origin, stop - self._leg.origin, lane)

    def steps(self, start: int, stop: int, lanes: Sequence[int] | None = None) -> NDArray[np.int64]:
        """Return the cells of lanes for steps [start, stop): (steps, len(lanes), m) int64; all lanes by default."""
        if self.parent is not None and stop <= self.from_step:
            return self.parent.steps(start, stop, lanes)
        chosen = range(self.lanes) if lanes is None else lanes
        grid, origin = self._leg.grid, self._leg.origin
        whole = self.parent is None or start >= self.from_step
        if isinstance(grid, NaturalGrid) and whole and 0 <= start <= stop and self._has_lanes(chosen):
            return grid.steps(start - origin, stop - origin, chosen)
        out = np.empty((max(0, stop - start), len(chosen), self.cell_size), dtype=np.int64)
        for place, lane in enumerate(chosen):
            out[:, place] = self.cells(start, stop, lane)
        return out

    def _has_lanes(self, lanes: Sequence[int]) -> bool:
        return not lanes or (min(lanes) >= 0 and max(lanes) < self.lanes)

    def blocks(self, start: int, stop: int, lanes: Sequence[int] | None = None) -> NDArray[np.int64]:
        """Return the distinct blocks that steps [start, stop) read: (shard, block in the shard), (n, 2) int64, sorted.

        Blocks restart at every segment. Block numbers are approximate if only some rows are selected.
        """
        samples = self.steps(start, stop, lanes).ravel()
        return self._leg.grid.order.blocks_of(samples[samples >= 0])

    def cell_digest(self, step: int, lane: int) -> str:
        """Return the digest of a cell; see the function `cell_digest`.

        Examples:
            >>> plan.cell_digest(3, 0) == ds.plan(global_batch=20, seed=0).cell_digest(3, 0)
            True
        """
        return cell_digest(self.cell(step, lane))

    def locate(self, sample: int, epoch: int = 0) -> tuple[int, int, int] | None:
        """Return the position of a sample in an epoch: (step of the run, lane, slot).

        With explicit weights, ``epoch`` counts the passes of the sample's stratum. The result is None if the epoch
        drops the sample or its stratum is not drawn.

        Examples:
            >>> step, lane, slot = plan.locate(sample=17)
            >>> int(plan.step(step)[lane, slot])
            17
        """
        if not 0 <= sample < self.population.rows:
            raise PlanError(f"plan: sample is {sample}, expected 0 <= sample < {self.population.rows}")
        if self.parent is not None and self.parent.population.identity == self.population.identity:
            found = self.parent.locate(sample, epoch)
            if found is not None and found[0] < self.from_step:
                return found
        found = self._leg.grid.locate(sample, epoch)
        if found is None or found[0] + self._leg.origin < self.from_step:
            return None
        return found[0] + self._leg.origin, found[1], found[2]

    def without_costs(self) -> Plan:
        """Return the plan of the same settings without costs, from `from_step` on, for comparison."""
        plain = replace(self.settings, cost=None, balance=None)
        grid = NaturalGrid(self.population, plain)
        return Plan(self._leg._replace(settings=plain, grid=grid))

    def history(self) -> list[dict[str, object]]:
        """Return the first plan and each amendment, as values for canonical JSON.

        Each entry has ``manifest`` (its id), ``settings`` from that step on, and ``change``, the requested change, or
        None for the first plan.
        """
        own: dict[str, object] = {
            "manifest": self.population.identity,
            "settings": self.settings.canonical(),
            "change": self._change,
        }
        return [own] if self.parent is None else [*self.parent.history(), own]

    def accepts(self, digest: str, step: int) -> bool:
        """Return True if a loader state at ``step`` of the plan with this digest is valid for this plan.

        The digest must be that of this plan, or of an ancestor from which this plan does not differ before ``step``.
        """
        plan: Plan | None = self
        while plan is not None:
            if plan.digest == digest:
                return True
            if step > plan.from_step:
                return False
            plan = plan.parent
        return False

    def amend(
        self,
        *,
        from_step: int | None = None,
        weights: WeightsLike | None = None,
        manifest: Population | None = None,
        removed: ArrayLike | None = None,
        global_batch: int | None = None,
        lanes: int | None = None,
        skip: tuple[int, int] | None = None,
    ) -> Plan:
        """Return a plan that equals this one before a step and differs from there on.

        The digest of the result includes the digest of this plan. With the same manifest, streams continue: no row
        recurs in a lane before that lane's pass ends.

        Args:
            from_step: first step that may differ.
            weights: as for `make_plan`; the plan is endless from there on.
            manifest: other rows; streams restart, unless `removed` is given. See `shardkit.Dataset.amend`.
            removed: ascending sample numbers of this plan that `manifest` does not have; it must have all others, in
                the same order. Passes then continue with the rows that they have left.
            global_batch: another B. Lanes change only if they do not divide it.
            lanes: another L. With another B or L, the rest of the epoch is distributed again.
            skip: (a, b): leave out steps a to b - 1 of this plan; step a of the result is step b of this plan.

        Raises:
            PlanError: nothing changes, steps contradict each other, or the plan does not support the change.

        Examples:
            >>> changed = plan.amend(from_step=4, global_batch=40)
            >>> bool((changed.step(3) == plan.step(3)).all()), changed.step(4).size
            (True, 40)
        """
        if skip is not None and from_step not in (None, skip[0]):
            raise PlanError(
                f"plan: skip is {skip} from step {from_step}, expected ({from_step}, a later step)"
            )
        start = skip[0] if from_step is None and skip is not None else from_step
        if start is None:
            raise PlanError(
                "plan: amend needs the first step that may differ: pass from_step=, such as "
                "from_step=loader.state_dict()['step']"
            )
        start = whole("plan: from_step", start, Range(self.from_step, 2**63 - 1))
        if skip is not None:
            skip = (start, whole("plan: skip to a later step", skip[1], Range(start + 1, 2**63 - 1)))
        changes = (weights, manifest, removed, global_batch, lanes, skip)
        if all(one is None for one in changes):
            raise PlanError(
                "plan: the amendment changes nothing; name weights, manifest, global_batch, lanes or skip"
            )
        if global_batch is not None:
            global_batch = whole("plan: global_batch", global_batch, GLOBAL_BATCH)
        lanes = None if lanes is None else whole("plan: lanes", lanes, GLOBAL_BATCH)
        gone = None if removed is None else self._checked_removal(manifest, removed)
        change = Change(
            from_step=start,
            position=start if skip is None else skip[1],
            weights=weights,
            population=manifest,
            removed=gone,
            global_batch=global_batch,
            lanes=lanes,
        )
        said: dict[str, object] = {
            "from_step": start,
            "skip": skip,
            "lanes": lanes,
            "global_batch": global_batch,
            "weights": weights is not None,
        }
        if gone is not None:
            said["removed"] = len(gone)
        return Plan(amended(self._leg, change), self, said)

    def _checked_removal(self, manifest: Population | None, removed: ArrayLike) -> NDArray[np.int64]:
        gone = np.asarray(removed, dtype=np.int64)
        if manifest is None:
            raise PlanError("plan: removed needs manifest=, the version without these samples")
        rows = self.population.rows
        if gone.ndim != 1 or (np.diff(gone, prepend=-1) <= 0).any() or (len(gone) and gone[-1] >= rows):
            raise PlanError(f"plan: removed must be ascending sample numbers below {rows}")
        unknown = sorted(set(manifest.strata) - set(self.population.strata))
        if manifest.rows != rows - len(gone) or unknown:
            raise PlanError(
                f"plan: the other version has {manifest.rows} samples"
                + (f" and the stratum {unknown[0]!r}" if unknown else "")
                + f", expected the {rows} samples of this plan without {len(gone)}"
            )
        return gone


def cell_digest(samples: NDArray[np.int64]) -> str:
    """Return the hex of the first 16 bytes of SHA-256 over a cell's sample numbers, little-endian int64, without -1.

    The ledger records these digests.
    """
    filled = samples[samples >= 0].astype("<i8")
    return hashlib.sha256(filled.tobytes()).hexdigest()[:32]


def make_plan(
    population: Population,
    *,
    global_batch: int,
    seed: int = 0,
    lanes: int | None = None,
    remainder: str = "drop",
    window_blocks: int | None = None,
    shuffle: str = "window",
    weights: WeightsLike | None = None,
    stages: Sequence[tuple[int, WeightsLike | None]] | None = None,
    epoch_steps: int | None = None,
    group_by: Mapping[str, int] | None = None,
    sequence: int | None = None,
    row_tokens: int | None = None,
    cost: Costs | None = None,
    balance: str | None = None,
) -> Plan:
    """Make the plan of a population.

    Args:
        population: the selected rows of a manifest.
        global_batch: B, number of samples of a step over all ranks.
        seed: seed of all shuffles.
        lanes: L, a divisor of B; by default chosen to suit most world sizes.
        remainder: ``"drop"`` leaves fewer than B rows out of each epoch, different rows each time; ``"short"`` ends the
            epoch with a short step.
        window_blocks: number of blocks that a lane has open, over all its strata. By default 4 to 16, so that all lanes
            take about 256 MiB. With ``cost`` 16 to 64, or up to 128 for cells of more than 8 samples.
        shuffle: ``"window"``, ``"full"`` (each lane's hand as a whole) or ``"none"``.
        weights: mapping from globs over strata to the weight of each matching stratum; 1 for all other strata. The plan
            is then endless, with pass after pass over each stratum. Fractions are scaled to integers exactly:
            ``{"a": 0.7, "b": 0.3}`` is 7 to 3.
        stages: later (from_step, weights) in ascending order; weights of None are proportional to rows.
        epoch_steps: steps of an epoch, that is, of a loop over the plan. It does not change the order of rows. The
            default is a pass over all rows, or ceil(N / B) steps with explicit weights.
        group_by: mapping from globs over strata to the greatest length of their samples. All samples of a step are of
            one group. A cell of the longest group has B / L samples; cells of other groups have more samples, within
            the same number of tokens.
        sequence: tokens of a training sequence. Consecutive rows are joined, and B counts sequences.
        row_tokens: tokens of a row, for ``sequence``.
        cost: cost of each sample. Cells in a lane's window then have nearly equal cost. Requires natural weights and
            ``shuffle="window"``.
        balance: ``"spread"`` (default) puts expensive cells of neighbouring lanes in different steps, so that steps
            cost nearly the same, and so do ranks of several lanes. ``"align"`` puts them in the same steps, so that
            ranks of one lane cost the same too, while steps differ.

    Raises:
        PlanError: a setting is out of range, or the epoch has no full step.
    """
    global_batch = whole("plan: global_batch", global_batch, GLOBAL_BATCH)
    resolved = resolve_stages(weights, stages, population.strata, stratum_rows(population))
    join = None if sequence is None else rows_per_sequence(sequence, row_tokens)
    units = population if join is None else joined(population, join)
    lanes = default_lanes(units, global_batch) if lanes is None else whole("plan: lanes", lanes, GLOBAL_BATCH)
    if window_blocks is None and cost is None:
        window_blocks = default_window_blocks(population, lanes)
    elif window_blocks is None:
        window_blocks = default_cost_window(population, lanes, global_batch // lanes)
    settings = Settings(
        global_batch=global_batch,
        lanes=lanes,
        seed=seed,
        remainder=remainder,
        window_blocks=window_blocks,
        shuffle=shuffle,
        stages=resolved,
        epoch_steps=epoch_steps,
        join=join,
        cost=None if cost is None else cost.text,
        balance=balance if cost is None else balance or BALANCES[0],
    )
    if cost is not None or balance is not None:
        _check_cost(cost, settings, population, group_by)
    if group_by is not None:
        if resolved or join is not None:
            raise PlanError("plan: group_by goes neither with weights nor with sequence; leave one out")
        settings = replace(settings, buckets=find_buckets(group_by, population.strata))
    return plan_of(settings, population, cost)


def plan_of(settings: Settings, population: Population, cost: Costs | None = None) -> Plan:
    """Make a plan from resolved settings; ``cost`` is required if they have a cost."""
    if not population.rows:
        raise PlanError("plan: the dataset has no selected row")
    for _, weights in settings.stages:
        if len(weights) != len(population.strata):
            raise PlanError(f"plan: {len(weights)} weights for {len(population.strata)} strata")
    units = population if settings.join is None else joined(population, settings.join)
    grid: AnyGrid
    if settings.buckets:
        grid = BucketGrid(population, settings)
    elif settings.stages:
        grid = WeightedGrid(units, settings)
    else:
        grid = NaturalGrid(units, settings, costs=cost)
    if isinstance(grid, NaturalGrid | WeightedGrid) and settings.join is not None:
        grid = JoinedGrid(grid, population, settings.join)
    return Plan(Leg(settings, population, grid))


def _check_cost(
    cost: Costs | None, settings: Settings, population: Population, group_by: Mapping[str, int] | None
) -> None:
    """Raise PlanError for settings that cannot be combined with cost."""
    if cost is None:
        raise PlanError(f"plan: balance is {settings.balance!r}, expected it only with cost")
    others = {
        "weights or stages": bool(settings.stages),
        "group_by": group_by is not None,
        "sequence": settings.join is not None,
        f"shuffle={settings.shuffle!r}": settings.shuffle != "window",
    }
    found = ", ".join(name for name, is_there in others.items() if is_there)
    if found:
        raise PlanError(f"plan: cost does not go with {found}; leave one out")
    if len(cost.codes) != population.rows:
        raise PlanError(f"plan: cost is of {len(cost.codes)} samples, expected {population.rows}")
