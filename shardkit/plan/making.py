"""New plans: the settings that arguments and a population determine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardkit.errors import PlanError

from .costs import BALANCES, Costs
from .lengths import find_buckets, joined, rows_per_sequence
from .plan import Plan, plan_of
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
        cost: cost of each sample. Cells in a lane's window then have nearly equal cost. Requires ``shuffle="window"``.
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


def _check_cost(
    cost: Costs | None, settings: Settings, population: Population, group_by: Mapping[str, int] | None
) -> None:
    """Raise PlanError for settings that cannot be combined with cost."""
    if cost is None:
        raise PlanError(f"plan: balance is {settings.balance!r}, expected it only with cost")
    others = {
        "group_by": group_by is not None,
        "sequence": settings.join is not None,
        f"shuffle={settings.shuffle!r}": settings.shuffle != "window",
    }
    found = ", ".join(name for name, is_there in others.items() if is_there)
    if found:
        raise PlanError(f"plan: cost does not go with {found}; leave one out")
    if len(cost.codes) != population.rows:
        raise PlanError(f"plan: cost is of {len(cost.codes)} samples, expected {population.rows}")
