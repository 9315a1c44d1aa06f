"""Plans: the pure function from manifest and settings to a grid of cells."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardkit.documents import encode
from shardkit.errors import PlanError
from shardkit.notebook import NotebookPage
from shardkit.ranges import Range

from .amendment import AnyGrid, Leg, RestGrid, amend_leg, make_change
from .costs import Costs
from .lengths import BucketGrid, JoinedGrid, joined
from .mixed import MixedGrid, weight_total
from .natural import NaturalGrid
from .population import Population, stratum_rows
from .settings import Settings, WeightsLike, resolve_masses, resolve_stages, whole
from .weighted import WeightedGrid

PLAN_VERSION = 1
"""Version of the construction, part of every digest; increase it with any change that moves a sample."""

_STEPS = Range(0, 2**62)
_EPOCHS = Range(0, 2**31 - 1)  # of `locate`: with weights, positions in later passes exceed int64


class Plan(NotebookPage):
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
        self._digest = self._compute_digest(None if parent is None else parent.digest, self._change)

    def _compute_digest(self, parent: str | None, change: Mapping[str, object] | None) -> str:
        identity: dict[str, object] = {"plan": PLAN_VERSION, "manifest": self.population.identity}
        identity["settings"] = self.settings.canonical()
        if parent is not None:
            identity["parent"], identity["change"] = parent, change
        return hashlib.sha256(encode(identity)).hexdigest()

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
        """Number of steps of a loop over the plan: an epoch, or ceil(N / B) steps if epochs are undefined."""
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
        step = whole("plan: step", step, _STEPS)
        samples: NDArray[np.int64] = self.cells(step, step + 1, lane)[0]
        return samples

    def step(self, step: int) -> NDArray[np.int64]:
        """Return the sample numbers of a step: (L, m) int64, with the cell of lane l in row l.

        Examples:
            >>> samples = plan.step(3)  # of all ranks
            >>> samples.size
            20
        """
        step = whole("plan: step", step, _STEPS)
        samples: NDArray[np.int64] = self.steps(step, step + 1)[0]
        return samples

    def cells(self, start: int, stop: int, lane: int) -> NDArray[np.int64]:
        """Return the cells of one lane for steps [start, stop): (stop - start, m) int64, read-only.

        Raises:
            PlanError: a step or the lane is out of range, or an amendment changes the cell size inside the range.
        """
        start, stop = _span(start, stop)
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
        lane = whole("plan: lane", lane, Range(0, self.lanes - 1))
        if stop == start:
            return np.empty((0, self.cell_size), dtype=np.int64)
        return self._leg.grid.cells(start - self._leg.origin, stop - self._leg.origin, lane)

    def steps(self, start: int, stop: int, lanes: Sequence[int] | None = None) -> NDArray[np.int64]:
        """Return the cells of lanes for steps [start, stop): (steps, len(lanes), m) int64; all lanes by default."""
        start, stop = _span(start, stop)
        if self.parent is not None and stop <= self.from_step:
            return self.parent.steps(start, stop, lanes)
        chosen = range(self.lanes) if lanes is None else lanes
        grid, origin = self._leg.grid, self._leg.origin
        is_one_leg = self.parent is None or start >= self.from_step
        if isinstance(grid, NaturalGrid) and is_one_leg and self._has_lanes(chosen):
            return grid.steps(start - origin, stop - origin, chosen)
        out = np.empty((stop - start, len(chosen), self.cell_size), dtype=np.int64)
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

        ``epoch`` is below 2**31; with explicit weights, it counts the passes of the sample's stratum. The result is
        None if the epoch drops the sample or its stratum is not drawn.

        Examples:
            >>> step, lane, slot = plan.locate(sample=17)
            >>> int(plan.step(step)[lane, slot])
            17
        """
        sample = whole("plan: sample", sample, Range(0, self.population.rows - 1))
        epoch = whole("plan: epoch", epoch, _EPOCHS)
        if self.parent is not None and self.parent.population.identity == self.population.identity:
            found = self.parent.locate(sample, epoch)
            if found is not None and found[0] < self.from_step:
                return found
        found = self._leg.grid.locate(sample, epoch)
        if found is None or found[0] + self._leg.origin < self.from_step:
            return None
        return found[0] + self._leg.origin, found[1], found[2]

    def mixed(self, mixer: str, every: int) -> Plan:
        """Return the plan whose weights a mixer decides while the run takes steps.

        Its first two stages have the weights of this plan. A later stage has no cells before `decide` gives it its
        weights. The digest covers the mixer, and not its decisions. If the plan has the same mixer already, the
        result is a copy without decisions.

        Args:
            mixer: text that determines the mixer.
            every: steps of a stage, a multiple of the lanes.

        Raises:
            PlanError: this plan was amended, or has costs, groups, sequences or stages.

        Examples:
            >>> mixed = plan.mixed("temperature", every=5)
            >>> mixed.decided, mixed.decide((1,) * 10), mixed.decided
            (10, None, 15)
        """
        grid, settings = self._leg.grid, self.settings
        if (settings.mixer, settings.mix_every) == (mixer, every):
            return plan_of(settings, self.population)
        plain = settings.cost is None and (type(grid) is WeightedGrid or isinstance(grid, NaturalGrid))
        if self.parent is not None or not plain or len(settings.stages) > 1:
            raise PlanError(
                "plan: a mixer is for a new plan without cost, group_by, sequence, stages and amendments; make one "
                "with ds.plan(global_batch=…, weights=…)"
            )
        every = whole("plan: every", every, Range(1, 2**31 - 1))
        if every % self.lanes:
            near = sorted({max(1, every // self.lanes) * self.lanes, -(-every // self.lanes) * self.lanes})
            raise PlanError(
                f"plan: the mixer decides every {every} steps, expected a multiple of the {self.lanes} lanes, such as "
                f"{' or '.join(map(str, near))}"
            )
        strata, total = sum(map(bool, stratum_rows(self.population))), weight_total(every, self.global_batch)
        if strata > total:
            raise PlanError(
                f"plan: a stage of {every} steps has {every * self.global_batch} samples, too few for the {strata} "
                "strata that a mixer may give a weight: let it decide less often, or raise global_batch"
            )
        first = settings.stages or resolve_stages(
            None, [(0, None)], self.population.strata, stratum_rows(self.population)
        )
        return plan_of(replace(settings, stages=first, mixer=mixer, mix_every=every), self.population)

    @property
    def decided(self) -> int | None:
        """First step whose weights a mixer has not decided; None without a mixer."""
        grid = self._leg.grid
        return grid.decided * grid.every if isinstance(grid, MixedGrid) else None

    @property
    def mixture(self) -> MixedGrid:
        """Grid of a plan with a mixer, which holds its decisions.

        Raises:
            PlanError: the plan has no mixer.
        """
        grid = self._leg.grid
        if not isinstance(grid, MixedGrid):
            raise PlanError("plan: this plan has no mixer; make it with Plan.mixed")
        return grid

    def decide(self, weights: Sequence[int], drawn: NDArray[np.int64] | None = None) -> None:
        """Give the first undecided stage its weights, one whole number per stratum. Earlier cells do not change.

        Args:
            weights: whole weights.
            drawn: int64[strata], samples that all lanes have drawn by the end of the stage, if they are known.
        """
        self.mixture.decide(resolve_masses(weights, stratum_rows(self.population)), drawn)

    def without_costs(self) -> Plan:
        """Return the plan of the same settings without costs, from `from_step` on, for comparison."""
        plain = replace(self.settings, cost=None, balance=None)
        return Plan(self._leg._replace(settings=plain, grid=plan_of(plain, self.population).grid))

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

        The digest must be the digest of this plan, or of an ancestor that equals this plan before
        ``step``.
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
        change = make_change(
            self._leg,
            from_step=from_step,
            weights=weights,
            manifest=manifest,
            removed=removed,
            global_batch=global_batch,
            lanes=lanes,
            skip=skip,
        )
        return Plan(amend_leg(self._leg, change), self, change.describe())


def cell_digest(samples: NDArray[np.int64]) -> str:
    """Return the hex of the first 16 bytes of SHA-256 over a cell's sample numbers, little-endian int64, without -1.

    The ledger records these digests.
    """
    filled = samples[samples >= 0].astype("<i8")
    return hashlib.sha256(filled.tobytes()).hexdigest()[:32]


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
    elif settings.mixer is not None:
        grid = MixedGrid(units, settings)
    elif settings.stages:
        grid = WeightedGrid(units, settings, costs=cost)
    else:
        grid = NaturalGrid(units, settings, costs=cost)
    if isinstance(grid, NaturalGrid | WeightedGrid) and settings.join is not None:
        grid = JoinedGrid(grid, population, settings.join)
    return Plan(Leg(settings, population, grid))


def _span(start: int, stop: int) -> tuple[int, int]:
    start = whole("plan: first step", start, _STEPS)
    return start, whole("plan: end of the steps", stop, Range(start, _STEPS.high + 1))
