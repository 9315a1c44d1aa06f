"""From recorded settings back to a plan: what a replay starts from, in this process and in others."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardkit.errors import ConfigurationError, PlanError
from shardkit.plan import Plan, Population, make_plan

__all__ = ["PlanRecipe", "configured_settings", "recipe_of"]

_PLAIN = ("global_batch", "lanes", "seed", "remainder", "window_blocks", "shuffle", "epoch_steps")
_KNOWN = {*_PLAIN, "stages", "buckets", "join"}


@dataclass(frozen=True)
class PlanRecipe:
    """A plan that can be made anywhere: a population, and arguments of `make_plan` and `Plan.amend`. Pickles."""

    population: Population
    arguments: dict[str, Any]
    amendments: tuple[dict[str, Any], ...] = ()

    def make(self) -> Plan:
        """The plan."""
        plan = make_plan(self.population, **self.arguments)
        for amendment in self.amendments:
            plan = plan.amend(**amendment)
        return plan


def recipe_of(history: Sequence[Mapping[str, Any]], population_of: Callable[[str], Population]) -> PlanRecipe:
    """From what the ledger recorded (`plan.history()`).

    Args:
        history: the first plan's settings, then each amendment.
        population_of: the rows of a manifest, by its id.

    Raises:
        PlanError: settings that this version does not know.
        ShardkitError: a manifest that the plan was over is not to be had.
    """
    first, *rest = history
    population = before = population_of(first["manifest"])
    amendments = []
    for one in rest:
        now = before if one["manifest"] == before.identity else population_of(one["manifest"])
        amendment = _amendment(now, one)
        if now is not before:
            amendment["manifest"] = before = now
        amendments.append(amendment)
    return PlanRecipe(population, _arguments(population, first["settings"]), tuple(amendments))


def _amendment(population: Population, one: Mapping[str, Any]) -> dict[str, Any]:
    change = one["change"]
    asked = {
        name: change[name] for name in ("from_step", "lanes", "global_batch") if change.get(name) is not None
    }
    if change.get("skip") is not None:
        asked["skip"] = tuple(change["skip"])
    if change.get("weights"):
        asked["weights"] = _by_name(population, one["settings"]["stages"][0][1])
    return asked


def _arguments(population: Population, settings: Mapping[str, Any]) -> dict[str, Any]:
    unknown = {name for name in set(settings) - _KNOWN if settings[name] not in (None, [], {})}
    if unknown:
        raise PlanError(
            f"plan settings {', '.join(sorted(unknown))} are not known here; use the version of the run"
        )
    arguments = {name: settings[name] for name in _PLAIN if settings.get(name) is not None}
    stages = [(int(step), _by_name(population, weights)) for step, weights in settings.get("stages") or ()]
    if stages:
        arguments["weights"] = stages[0][1]
        arguments["stages"] = stages[1:]
    if settings.get("buckets"):
        arguments["group_by"] = {
            glob.escape(population.strata[stratum]): int(longest)
            for longest, strata in settings["buckets"]
            for stratum in strata
        }
    if settings.get("join"):
        arguments |= {
            "sequence": int(settings["join"]),
            "row_tokens": 1,
        }  # only their quotient is part of the plan
    return arguments


def configured_settings(population: Population, configuration: Mapping[str, Any]) -> list[PlanRecipe]:
    """From the configuration in the bundled trainer's ``run.json``: the plan that it begins with, then each stage's.

    Raises:
        ConfigurationError: it has no data section.
    """
    data = configuration.get("data")
    if not isinstance(data, Mapping) or "global_batch" not in data:
        raise ConfigurationError(
            "run.json: configuration.data.global_batch is missing; was it written by hand?"
        )
    arguments = {"global_batch": data["global_batch"], "seed": data.get("seed", 0)}
    chosen = {name: data.get(name) for name in ("lanes", "weights", "window_blocks")}
    arguments |= {name: value for name, value in chosen.items() if value}
    recipes = [PlanRecipe(population, arguments)]
    for stage in data.get("stages") or ():
        change = {name: stage[name] for name in ("from_step", "global_batch", "weights") if stage.get(name)}
        recipes.append(PlanRecipe(population, arguments, (*recipes[-1].amendments, change)))
    return recipes


def _by_name(population: Population, weights: list[int]) -> dict[str, int]:
    """Resolved weights as a mapping that resolves to the same."""
    return {glob.escape(name): int(weight) for name, weight in zip(population.strata, weights, strict=True)}
