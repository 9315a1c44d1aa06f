"""Steps of abnormal loss, and the samples in them (SPEC.md, "Spikes")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from shardkit.arrays import Float64s
from shardkit.audit.plans import RunPlan, leg_of
from shardkit.audit.run_record import RunRecord
from shardkit.audit.trace import samples_of_step
from shardkit.errors import FormatError
from shardkit.ledger.losses import Losses, LossRows
from shardkit.plan import Plan
from shardkit.plan.population import stratum_rows

_NORMAL = 1.4826
"""Standard deviation of a normal distribution, divided by its median absolute deviation."""


@dataclass(frozen=True)
class Spike:
    """A step whose loss is abnormal.

    Attributes:
        step: number of the step in the run.
        loss: mean loss of the step; NaN if a loss is.
        expected: median loss of the steps before it.
        score: difference of both in robust standard deviations; infinite if the loss is not finite.
    """

    step: int
    loss: float
    expected: float
    score: float


def _levels(groups: Float64s) -> tuple[Float64s, Float64s]:
    """Return the median and the robust standard deviation of each row, (n,) float64; NaN is left out.

    The deviation is at least a millionth of the median.
    """
    whole = ~np.isnan(groups).any(axis=1)
    expected, spread = np.zeros(len(groups)), np.zeros(len(groups))
    expected[whole] = np.median(groups[whole], axis=1)
    spread[whole] = np.median(np.abs(groups[whole] - expected[whole, None]), axis=1)
    for row in np.flatnonzero(~whole).tolist():
        values = groups[row][~np.isnan(groups[row])]
        if len(values):
            expected[row] = np.median(values)
            spread[row] = np.median(np.abs(values - expected[row]))
    least = np.maximum(1e-6 * np.abs(expected), np.finfo(np.float64).tiny)
    return expected, np.maximum(_NORMAL * spread, least)


@dataclass(frozen=True)
class SampleLoss:
    """A sample of a step with its loss, or with the loss of its cell.

    Attributes:
        loss: as noted by the trainer.
        sample: number of the sample in the dataset.
        key: key of the sample.
        stratum: its stratum.
        source: (file, row) from which it was built or adopted; None if it is not recorded.
        lane, slot: place in the step.
    """

    loss: float
    sample: int
    key: str
    stratum: str
    source: tuple[str, int] | None
    lane: int
    slot: int


@dataclass(frozen=True)
class Share:
    """The share of a stratum in a step.

    Attributes:
        stratum: name of the stratum.
        samples: number of its samples in the step.
        share, expected: its share of the step's samples, and its share by the plan.
        loss: mean loss of its samples.
    """

    stratum: str
    samples: int
    share: float
    expected: float
    loss: float


def find_spikes(losses: Losses, *, threshold: float = 6.0, window: int = 100) -> list[Spike]:
    """Return the steps whose loss is above the median of earlier steps by `threshold` robust standard deviations.

    Steps are taken in groups of `window`. Each group is compared with the group before it, the first with itself:
    median and median absolute deviation (Hampel 1974) of a group do not depend on a spike in it. A loss that is not
    finite is always a spike.

    Returns:
        The spikes, the largest score first.
    """
    steps, means = losses.steps, losses.means
    groups = -(-len(steps) // window)
    padded = np.full(groups * window, np.nan)  # the last group may be short
    padded[: len(means)] = means
    padded[~np.isfinite(padded)] = np.nan
    expected, spread = _levels(padded.reshape(groups, window))
    expected = np.repeat(np.concatenate((expected[:1], expected[:-1])), window)[: len(means)]
    spread = np.repeat(np.concatenate((spread[:1], spread[:-1])), window)[: len(means)]
    scores = np.where(np.isfinite(means), (means - expected) / spread, np.inf)
    found = [
        Spike(int(steps[place]), float(means[place]), float(expected[place]), float(scores[place]))
        for place in np.flatnonzero(scores > threshold).tolist()
    ]
    return sorted(found, key=lambda one: (-one.score, one.step))


class RankedLoss(NamedTuple):
    """A loss, and how far it is from the losses of near steps.

    Attributes:
        step: number of the step in the run.
        place: place in the step's grid, lane · cell size + slot.
        loss: as noted by the trainer.
        score: distance from the median loss of near steps, in their robust standard deviations; infinite if the loss
            is not finite.
    """

    step: int
    place: int
    loss: float
    score: float


def rank_samples(losses: Losses, *, top: int, window: int = 100) -> list[RankedLoss]:
    """Return the losses of samples that are most abnormal in the whole run.

    Steps are taken in groups of `window`. Each loss is compared with the median of all losses of its group, in robust
    standard deviations (1.4826 · median absolute deviation), so early steps do not outrank later ones.

    Args:
        losses: of a run.
        top: number of losses to return.
        window: number of steps in a group.

    Returns:
        The losses, the largest score first.
    """
    best: list[RankedLoss] = []
    for first in range(0, len(losses.steps), window):
        last = min(len(losses.steps), first + window) - 1
        rows = losses.of_steps(int(losses.steps[first]), int(losses.steps[last]) + 1)
        best = _with_best(best, rows, top)
    return best


def _with_best(best: list[RankedLoss], rows: LossRows, top: int) -> list[RankedLoss]:
    """Return the ``top`` best of ranked losses and of the losses of a group."""
    values = rows.losses.astype(np.float64)
    finite = np.isfinite(values)
    (expected,), (spread,) = _levels(np.where(finite, values, np.nan)[None])
    scores = np.where(finite, (values - expected) / spread, np.inf)
    found = np.flatnonzero(scores > best[-1].score) if len(best) == top else np.arange(len(scores))
    if len(found) > top:
        least = np.partition(scores[found], len(found) - top)[len(found) - top]
        found = found[scores[found] >= least]
    order = np.lexsort((rows.places[found], rows.steps[found], -scores[found]))[:top]
    more = [
        RankedLoss(int(rows.steps[i]), int(rows.places[i]), float(rows.losses[i]), float(scores[i]))
        for i in found[order].tolist()
    ]
    return sorted([*best, *more], key=lambda one: (-one.score, one.step, one.place))[:top]


def describe_ranked(
    record: RunRecord, plans: dict[int, RunPlan], losses: Losses, ranked: Sequence[RankedLoss]
) -> list[dict[str, object]]:
    """Return ranked losses with their samples as plain values."""
    of_step = {step: losses_of_step(record, plans, losses, step)[0] for step in {one.step for one in ranked}}
    found: list[dict[str, object]] = []
    for one in ranked:
        size = leg_of(record, plans, one.step).known_plan.plan.cell_size
        found += [
            {"step": one.step, "score": one.score, **asdict(sample)}
            for sample in of_step[one.step]
            if sample.lane * size + sample.slot == one.place
        ]
    return found


def losses_of_step(
    record: RunRecord, plans: dict[int, RunPlan], losses: Losses, step: int
) -> tuple[list[SampleLoss], list[Share]]:
    """Return the samples of a step, the largest loss first, and the shares of its strata.

    Raises:
        NotFoundError: the run did not consume the step, or nothing was noted for it.
        FormatError: losses are noted for places that the step does not have.
    """
    samples, plan = samples_of_step(record, plans, step), leg_of(record, plans, step).known_plan.plan
    places, values = losses.of_step(step)
    noted = dict(zip(places.tolist(), values.tolist(), strict=True))
    strata = plan.population.strata
    of = plan.grid.order.strata_of(np.array([one.sample for one in samples], dtype=np.int64)).tolist()
    where = [one.lane * plan.cell_size + one.slot for one in samples]
    unknown = noted.keys() - set(where)
    if unknown:
        raise FormatError(
            f"step {step}: losses are noted for {len(unknown)} places that the step does not have, such as place "
            f"{min(unknown)}; were they written by another run?"
        )
    found = [
        SampleLoss(noted[place], one.sample, one.key, strata[stratum], one.source, one.lane, one.slot)
        for place, one, stratum in zip(where, samples, of, strict=True)
        if place in noted
    ]
    found.sort(key=lambda one: (-one.loss if np.isfinite(one.loss) else -np.inf, one.sample))
    return found, _shares(plan, step, found)


def _shares(plan: Plan, step: int, found: list[SampleLoss]) -> list[Share]:
    masses = stratum_rows(plan.population)
    for from_step, weights in plan.settings.stages:
        if from_step <= step:
            masses = list(weights)
    expected = dict(zip(plan.population.strata, masses, strict=True))
    total = max(1, sum(masses))
    by_stratum: dict[str, list[float]] = {}
    for one in found:
        by_stratum.setdefault(one.stratum, []).append(one.loss)
    shares = [
        Share(name, len(own), len(own) / len(found), expected[name] / total, sum(own) / len(own))
        for name, own in by_stratum.items()
    ]
    return sorted(shares, key=lambda one: -one.loss)
