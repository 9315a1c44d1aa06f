"""The plans that a run followed, made again from what it recorded and the manifest alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.audit.recipe import PlanRecipe, configured_settings, recipe_of
from shardkit.audit.replay import cell_digests
from shardkit.audit.run_record import RunRecord
from shardkit.dataset import Dataset, open_dataset
from shardkit.dataset.population import population_of
from shardkit.errors import FormatError, IntegrityError, ShardkitError
from shardkit.plan import Plan, Population
from shardkit.storage import parse_dataset_url

__all__ = ["RunPlan", "find_plans", "open_recorded"]


@dataclass(frozen=True)
class RunPlan:
    """A plan with the dataset that it is over."""

    number: int
    dataset: Dataset
    recipe: PlanRecipe
    plan: Plan

    def cell_digests(self, cells: NDArray[np.int64]) -> tuple[bytes, NDArray[np.int64]]:
        """Digests of the cells of one step in lane order, wherever in a cell the empty slots are."""
        parts = [cell_digests(cell[cell >= 0][None]) for cell in cells]
        return b"".join(one for one, _ in parts), np.concatenate([rows for _, rows in parts])


def find_plans(record: RunRecord, dataset: str | None = None) -> dict[int, RunPlan]:
    """Every plan of the run that can be made again, by number; what cannot, or is another, becomes a finding."""
    found: dict[int, RunPlan] = {}
    _check_settings(record)
    for event in record.plans:
        try:
            opened = open_recorded(record, event, dataset)
        except (IntegrityError, FormatError) as error:
            record.add("violated", "manifest", str(event["manifest"]), str(error))
            continue
        except ShardkitError as error:
            record.add(
                "unknown", "manifest", str(event["manifest"]), f"{error}; say where it is: --dataset ROOT"
            )
            continue
        plan = _make_plan(record, event, opened)
        if plan is not None:
            found[int(event["number"])] = plan
    if not record.plans and record.ledger is not None:
        record.add("unknown", "plan", "ledger", "no step was ever recorded: there is nothing to check")
    return found


def open_recorded(record: RunRecord, event: dict[str, Any], dataset: str | None = None) -> Dataset:
    """The dataset of a recorded plan, at the manifest that the ledger names.

    Raises:
        ShardkitError: it is not there, is damaged, or is another.
    """
    manifest = str(event["manifest"])
    data = record.settings.get("configuration", {}).get("data", {})
    recorded = [str(url) for url in event.get("dataset") or ()]
    if dataset is None and data.get("parts"):
        opened = open_dataset(dict(record.settings.get("parts") or data["parts"]))
    else:
        root = dataset or data.get("dataset") or (recorded[0] if recorded else "")
        opened = open_dataset(f"{parse_dataset_url(root)[0]}@{manifest}")
    if opened.manifest.id != manifest:
        raise IntegrityError(f"the dataset is {opened.manifest.id} now, and the run consumed {manifest}")
    return opened


def _make_plan(record: RunRecord, event: dict[str, Any], dataset: Dataset) -> RunPlan | None:
    population = population_of(dataset.manifest, dataset.table)
    number, expected = int(event["number"]), str(event["plan"])
    subject = f"plan {expected[:12]}…"
    configuration = record.settings.get("configuration")
    candidates: list[tuple[str, PlanRecipe, Plan]] = []

    def rows_of(manifest: str) -> Population:
        if manifest == dataset.manifest.id:
            return population
        earlier = open_dataset(
            f"{dataset.repository.url}@{manifest}"
        )  # the plan went on from another version
        return population_of(earlier.manifest, earlier.table)

    try:
        if event.get("history"):
            recipe = recipe_of(event["history"], rows_of)
            candidates.append(("the ledger's settings", recipe, recipe.make()))
        if (
            configuration and len(event.get("history") or ()) <= 1
        ):  # a configuration knows nothing of amendments
            recipe = configured_settings(population, configuration)
            candidates.append(("run.json", recipe, recipe.make()))
    except ShardkitError as error:
        record.add("unknown", "plan", subject, f"cannot be made again: {error}")
    chosen = next((one for one in candidates if one[2].digest == expected), None)
    for source, _, plan in candidates:
        if plan.digest != expected:
            history = event.get("history") or [{"settings": {}}]
            differing = _differences(history[-1]["settings"], plan)
            record.add(
                "violated", "plan", subject,
                f"{source} make the plan {plan.digest[:12]}…, which is another than the run followed"
                + (f": {differing}" if differing else ""),
            )  # fmt: skip
    if chosen is None:
        if not candidates:
            record.add("unknown", "plan", subject, "its settings are not recorded")
        return None
    return RunPlan(number, dataset, chosen[1], chosen[2])


def _differences(settings: dict[str, Any], plan: Plan) -> str:
    own = plan.settings.canonical()
    return ", ".join(
        f"{name} {settings[name]} in the ledger, {own.get(name)} there"
        for name in sorted(settings)
        if _plain(own.get(name)) != _plain(settings[name])
    )


def _plain(value: object) -> object:
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _check_settings(record: RunRecord) -> None:
    """run.json against the ledger: both name manifest and plan."""
    for name in ("manifest", "plan"):
        stated = record.settings.get(name)
        if stated and record.plans and stated not in [event[name] for event in record.plans]:
            record.add(
                "violated", name, "run.json",
                f"names {name} {stated[:19]}…, and the ledger records {record.plans[0][name][:19]}…",
            )  # fmt: skip
