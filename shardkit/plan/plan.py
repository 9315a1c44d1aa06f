"""The plan: the pure function from manifest and settings to a grid of cells."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import PlanError
from shardkit.formats.canonical_json import dumps

from .natural import NaturalGrid
from .population import Population
from .settings import DEFAULT_WINDOW_BLOCKS, Settings, default_lanes
from .strata import group_strata, stratum_rows
from .weighted import WeightedGrid, Weights
from .weights import WeightsLike, resolve_stages

__all__ = ["Plan", "make_plan"]

PLAN_VERSION = 1
"""Part of every digest; a change of the construction that moves a sample must raise it."""


class Grid(Protocol):
    """What a plan is made of."""

    def cells(self, start: int, stop: int, lane: int) -> NDArray[np.int64]:
        """Cells of one lane for steps [start, stop): (steps, m) int64."""

    def locate(self, sample: int, number: int) -> tuple[int, int, int] | None:
        """(step, lane, slot) of a sample in an epoch or pass."""


class Plan:
    """Who reads what, when: ``lanes`` columns by steps, each cell ``cell_size`` sample numbers.

    Steps count over the whole run; epoch ``step // steps_per_epoch``. All methods are pure, cost the same at
    any step, and may be called by many threads at once. Sample numbers count the manifest's selected rows in
    manifest order.
    """

    def __init__(self, settings: Settings, population: Population, grid: Grid) -> None:
        self.settings, self.population, self._grid = settings, population, grid
        self._digest = hashlib.sha256(
            dumps({"plan": PLAN_VERSION, "manifest": population.identity, "settings": settings.canonical()})
        ).hexdigest()

    def __repr__(self) -> str:
        return f"Plan(global_batch={self.global_batch}, lanes={self.lanes}, digest={self.digest[:12]})"

    @property
    def global_batch(self) -> int:
        """B: samples of a full step."""
        return self.settings.global_batch

    @property
    def lanes(self) -> int:
        """L: columns of the grid; the most ranks that can work."""
        return self.settings.lanes

    @property
    def cell_size(self) -> int:
        """m: samples of a full cell."""
        return self.global_batch // self.lanes

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch, the short one included; with explicit weights `epoch_steps`, or None."""
        return (
            self._grid.steps_per_epoch if isinstance(self._grid, NaturalGrid) else self.settings.epoch_steps
        )

    @property
    def loop_steps(self) -> int:
        """Steps after which a loop over the plan ends: an epoch, or ceil(N / B) where there is none."""
        return self.steps_per_epoch or -(-self.population.rows // self.global_batch)

    @property
    def digest(self) -> str:
        """Hex SHA-256 of settings and manifest id: plans with equal digests have equal cells."""
        return self._digest

    def cell(self, step: int, lane: int) -> NDArray[np.int64]:
        """Sample numbers of a cell: (m,) int64, -1 last in the empty slots of a short step; read-only."""
        self._check(step, lane)
        samples: NDArray[np.int64] = self._grid.cells(step, step + 1, lane)[0]
        return samples

    def step(self, step: int) -> NDArray[np.int64]:
        """Sample numbers of a step: (L, m) int64, row l is lane l's cell."""
        samples: NDArray[np.int64] = self.steps(step, step + 1)[0]
        return samples

    def cells(self, start: int, stop: int, lane: int) -> NDArray[np.int64]:
        """Cells of one lane for steps [start, stop): (stop - start, m) int64, read-only."""
        self._check(start, lane)
        if stop < start:
            raise PlanError(f"plan: steps [{start}, {stop}) end before they begin")
        if stop == start:
            return np.empty((0, self.cell_size), dtype=np.int64)
        return self._grid.cells(start, stop, lane)

    def steps(self, start: int, stop: int, lanes: Sequence[int] | None = None) -> NDArray[np.int64]:
        """Cells of many lanes for steps [start, stop): (steps, len(lanes), m) int64; all lanes by default."""
        chosen = range(self.lanes) if lanes is None else lanes
        out = np.empty((max(0, stop - start), len(chosen), self.cell_size), dtype=np.int64)
        for place, lane in enumerate(chosen):
            out[:, place] = self.cells(start, stop, lane)
        return out

    def cell_digest(self, step: int, lane: int) -> str:
        """Hex of the first 16 bytes of SHA-256 over the cell's sample numbers, little-endian int64.

        -1 left out.
        """
        return cell_digest(self.cell(step, lane))

    def locate(self, sample: int, epoch: int = 0) -> tuple[int, int, int] | None:
        """Where a sample comes in an epoch: (step of the run, lane, slot).

        With explicit weights, ``epoch`` counts the passes of the sample's stratum. None where an epoch drops the
        sample, or where its stratum is not drawn.
        """
        if not 0 <= sample < self.population.rows:
            raise PlanError(f"plan: sample is {sample}, expected 0 <= sample < {self.population.rows}")
        return self._grid.locate(sample, epoch)

    def _check(self, step: int, lane: int) -> None:
        if step < 0:
            raise PlanError(f"plan: step is {step}, expected step >= 0")
        if not 0 <= lane < self.lanes:
            raise PlanError(f"plan: lane is {lane}, expected 0 <= lane < {self.lanes}")


def cell_digest(samples: NDArray[np.int64]) -> str:
    """Digest of the samples of a cell as they were gathered: the ledger's unit of proof."""
    filled = samples[samples >= 0].astype("<i8")
    return hashlib.sha256(filled.tobytes()).hexdigest()[:32]


def make_plan(
    population: Population,
    *,
    global_batch: int,
    seed: int = 0,
    lanes: int | None = None,
    remainder: str = "drop",
    window_blocks: int = DEFAULT_WINDOW_BLOCKS,
    shuffle: str = "window",
    weights: WeightsLike | None = None,
    stages: Sequence[tuple[int, WeightsLike | None]] | None = None,
    epoch_steps: int | None = None,
) -> Plan:
    """Plan a population.

    Args:
        population: the selected rows of a manifest.
        global_batch: B, samples of a step over all ranks.
        seed: of all shuffles.
        lanes: L, a divisor of B; see `default_lanes`.
        remainder: ``"drop"`` leaves fewer than B rows out of each epoch, in turn; ``"short"`` ends the epoch
            with them.
        window_blocks: blocks that a lane keeps open, over all its strata.
        shuffle: ``"window"``, ``"full"`` (each lane's hand as a whole) or ``"none"``.
        weights: glob over strata to the integer weight of each stratum that it matches, 1 for all others; rows
            then come round pass after pass, without an end.
        stages: (from_step, weights) that follow, in ascending order; weights None are like the rows.
        epoch_steps: steps of a loop over a plan with explicit weights; ceil(N / B) by default.

    Raises:
        PlanError: a setting is out of range, or the epoch has no full step.
    """
    rows = stratum_rows(population)
    total = sum(rows)
    resolved = resolve_stages(weights, stages, population.strata, rows)
    if epoch_steps is not None and not resolved:
        raise PlanError(f"plan: epoch_steps is {epoch_steps}, expected it only with explicit weights")
    settings = Settings(
        global_batch=global_batch,
        lanes=default_lanes(population, global_batch) if lanes is None else lanes,
        seed=seed,
        remainder=remainder,
        window_blocks=window_blocks,
        shuffle=shuffle,
        stages=resolved,
        epoch_steps=epoch_steps,
    )
    if not total:
        raise PlanError("plan: the dataset has no selected row")
    if resolved:
        return Plan(settings, population, weighted_grid(population, settings))
    if remainder == "drop" and total < global_batch:
        raise PlanError(
            f"plan: {total} rows make no full step of {global_batch}; the largest batch "
            f'that fits is {total}, or take remainder="short"'
        )
    groups = group_strata(population.strata, rows, rows, global_batch)
    grid = NaturalGrid(
        population,
        groups,
        global_batch=global_batch,
        lanes=settings.lanes,
        seed=seed,
        remainder=remainder,
        window_blocks=window_blocks,
        shuffle=shuffle,
    )
    return Plan(settings, population, grid)


def weighted_grid(population: Population, settings: Settings) -> WeightedGrid:
    """The grid of settings with explicit weights."""
    return WeightedGrid(
        population,
        [Weights(*stage) for stage in settings.stages],
        global_batch=settings.global_batch,
        lanes=settings.lanes,
        seed=settings.seed,
        window_blocks=settings.window_blocks,
        shuffle=settings.shuffle,
    )
