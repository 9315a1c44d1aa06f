"""The losses of a run as a table of samples."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from shardkit.dataset.run_plans import Versions, recorded_plan_of
from shardkit.dataset.samples import numbers_in
from shardkit.errors import FormatError, IntegrityError, NotFoundError
from shardkit.extras import shell_word
from shardkit.ledger import merge_journals
from shardkit.ledger.decisions import apply_decisions, recorded_decisions
from shardkit.ledger.ledger import consecutive
from shardkit.ledger.losses import Losses
from shardkit.plan import Plan

_STEPS = 1024  # steps that are read at once


def losses_table(dataset: Any, run: str | os.PathLike[str]) -> pa.Table:
    """Return the table of `Dataset.losses`."""
    ledger, _ = merge_journals(Path(run))
    documents = ledger.event_documents()
    losses, versions = Losses(ledger), Versions(dataset)
    plans = {event["number"]: event for event in documents if event["kind"] == "plan"}
    batches = [pa.RecordBatch.from_pylist([], schema=_SCHEMA)]
    for records in consecutive(ledger.branch_records()):
        event = plans[int(records[0]["plan"])]
        digest, history = event["plan"], event.get("history")
        if not history:
            raise NotFoundError(f"{run}: the settings of the plan {digest[:12]}… are not recorded")
        plan = recorded_plan_of(versions, history)
        if plan.digest != digest:
            raise IntegrityError(
                f"{run}: the recorded settings do not make the plan {digest[:12]}…; run: "
                f"shardkit audit {shell_word(run)}"
            )
        if plan.decided is not None:
            apply_decisions(plan, recorded_decisions(documents, digest))
        borders = _borders(plan, int(records[0]["step"]), int(records[-1]["step"]) + 1)
        for first, end in itertools.pairwise(borders):
            batches += [
                _batch(versions, plan, losses, at, min(end, at + _STEPS)) for at in range(first, end, _STEPS)
            ]
    return pa.Table.from_batches(batches).unify_dictionaries()


_SCHEMA = pa.schema([
    ("step", pa.int64()), ("sample", pa.int64()), ("stratum", pa.dictionary(pa.int32(), pa.string())),
    ("loss", pa.float32()),
])  # fmt: skip


def _borders(plan: Plan, first: int, end: int) -> list[int]:
    """Return first, end and the steps between them at which an amendment may change the size of cells."""
    inside: list[int] = []
    found: Plan | None = plan
    while found is not None:
        inside.append(found.from_step)
        found = found.parent
    return [first, *sorted({step for step in inside if first < step < end}), end]


def _batch(versions: Versions[Any], plan: Plan, losses: Losses, first: int, end: int) -> pa.RecordBatch:
    rows = losses.of_steps(first, end)
    cells = plan.steps(first, end)  # (steps, lanes, m)
    flat = cells.reshape(len(cells), -1)
    values = np.full(flat.shape, np.nan, dtype=np.float32)
    is_noted = np.zeros(flat.shape, dtype=np.bool_)
    if (is_wrong := rows.places >= flat.shape[1]).any():
        wrong = int(rows.steps[is_wrong][0])
        raise FormatError(f"step {wrong}: losses are noted for places that the step does not have")
    values[rows.steps - first, rows.places] = rows.losses
    is_noted[rows.steps - first, rows.places] = True
    step, place = np.nonzero(is_noted & (flat >= 0))
    samples = flat[step, place]
    numbers = samples
    if plan.population.identity != versions.first.manifest.id:
        numbers = numbers_in(versions.at(plan.population.identity), versions.first, samples)
    strata = pa.DictionaryArray.from_arrays(
        pa.array(plan.grid.order.strata_of(samples), pa.int32()),
        pa.array(plan.population.strata, pa.string()),
    )
    columns = [
        pa.array(step + first), pa.array(numbers, mask=numbers < 0), strata, pa.array(values[step, place]),
    ]  # fmt: skip
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)
