"""From recorded settings back to a plan: what a replay starts from, in this process and in others."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardkit.errors import ConfigurationError, PlanError
from shardkit.plan import Plan, Population, make_plan

__all__ = ["PlanRecipe", "configured_settings", "recipe_of"]

_PLAIN = ("global_batch", "lanes", "seed", "remainder", "window_blocks", "shuffle", "epoch_steps")
_KNOWN = {*_PLAIN, "stages"}


@dataclass(frozen=True)
class PlanRecipe:
    """A plan that can be made anywhere: a population and the arguments of `make_plan`. Pickles."""

    population: Population
    arguments: dict[str, Any]

    def make(self) -> Plan:
        """The plan."""
        return make_plan(self.population, **self.arguments)


def recipe_of(population: Population, settings: Mapping[str, Any]) -> PlanRecipe:
    """From the canonical settings that the ledger recorded (`plan.settings.canonical()`).

    Raises:
        PlanError: settings that this version does not know.
    """
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
    return PlanRecipe(population, arguments)


def configured_settings(population: Population, configuration: Mapping[str, Any]) -> PlanRecipe:
    """From the configuration in the bundled trainer's ``run.json``.

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
    return PlanRecipe(population, arguments | {name: value for name, value in chosen.items() if value})


def _by_name(population: Population, weights: list[int]) -> dict[str, int]:
    """Resolved weights as a mapping that resolves to the same."""
    return {glob.escape(name): int(weight) for name, weight in zip(population.strata, weights, strict=True)}
