"""Steps of abnormal loss, and the samples in them (SPEC.md, "Spikes")."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardkit.audit.plans import RunPlan
from shardkit.audit.run_record import RunRecord
from shardkit.audit.trace import samples_of_step
from shardkit.errors import FormatError
from shardkit.ledger.losses import Losses
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


@dataclass(frozen=True)
class SampleLoss:
    """A sample of a step with its loss, or with the loss of its cell.

    Attributes:
        loss: as noted by the trainer.
        sample: number of the sample in the dataset.
        key: key of the sample.
        stratum: its stratum.
        source: (file, row) from which it was built; None if the build did not record it.
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
    found: list[Spike] = []
    for first in range(0, len(steps), window):
        own = means[first : first + window]
        before = means[max(0, first - window) : max(first, window)]
        before = before[np.isfinite(before)]
        if not len(before):
            before = np.zeros(1)
        expected = float(np.median(before))
        spread = _NORMAL * float(np.median(np.abs(before - expected)))
        spread = max(spread, 1e-6 * abs(expected), np.finfo(np.float64).tiny)
        scores = np.where(np.isfinite(own), (own - expected) / spread, np.inf)
        found += [
            Spike(int(steps[first + place]), float(own[place]), expected, float(scores[place]))
            for place in np.flatnonzero(scores > threshold).tolist()
        ]
    return sorted(found, key=lambda one: (-one.score, one.step))


def losses_of_step(
    record: RunRecord, plans: dict[int, RunPlan], losses: Losses, step: int
) -> tuple[list[SampleLoss], list[Share]]:
    """Return the samples of a step, the largest loss first, and the shares of its strata.

    Raises:
        NotFoundError: the run did not consume the step, or nothing was noted for it.
        FormatError: losses are noted for places that the step does not have.
    """
    samples = samples_of_step(record, plans, step)
    number = next(number for number, first, end in record.legs() if first <= step < end)
    plan = plans[number].plan
    places, values, is_by_cell = losses.of_step(step)
    noted = dict(zip(places.tolist(), values.tolist(), strict=True))
    strata = plan.population.strata
    of = plan.grid.order.strata_of(np.array([one.sample for one in samples], dtype=np.int64)).tolist()
    # one loss per place, or one per lane
    where = [one.lane if is_by_cell else one.lane * plan.cell_size + one.slot for one in samples]
    unknown = noted.keys() - set(where)
    if unknown:
        raise FormatError(
            f"step {step}: losses are noted for {len(unknown)} places that the step does not have, such as "
            f"{'lane' if is_by_cell else 'place'} {min(unknown)}; were they written by another run?"
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
