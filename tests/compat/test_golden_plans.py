"""Golden plans: digests and cells are the recorded ones.

A golden plan is a file with "segments", "settings" and, for some, "amendments" and "costs"; `python -m
tests.compat.write_golden` records "digest" and "cells".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.plan import Costs, Plan, Population, encode_costs, make_plan

FOLDER = Path(__file__).parents[1] / "golden" / "plans"
FILES = sorted(FOLDER.glob("*.json"))


def population_of(document: dict[str, Any]) -> Population:
    """Return rows of (shard, stratum) made by plain arithmetic, without a generator of random numbers."""
    shape = document["segments"]
    shard, stratum = np.divmod(np.arange(shape["shards"] * shape["strata"]), shape["strata"])
    rows = (
        shape["rows"] * shape["tail"] // (shape["tail"] + stratum * stratum)
        + (shard * 7919 + stratum * 104729) % shape["jitter"]
    )
    if shape["sorted"]:
        rows = np.where(shard * shape["strata"] // shape["shards"] == stratum, rows * shape["strata"], 0)
    names = [f"part{s % 3}/s{s:03d}" for s in range(shape["strata"])]
    blocks = 1 + (np.arange(shape["shards"]) * 31) % shape["block_rows"]
    return Population.of("sha256:golden", names, np.stack([shard, stratum, rows], axis=1), blocks)


def plan_of(document: dict[str, Any]) -> Plan:
    settings: dict[str, Any] = dict(document["settings"])
    settings["stages"] = [(step, weights) for step, weights in settings.pop("stages", [])] or None
    amendments = settings.pop("amendments", [])
    population = population_of(document)
    if document.get("costs"):
        numbers = np.arange(population.rows, dtype=np.int64) * 7919 % 3001 + 1
        settings["cost"] = Costs("squares", encode_costs(numbers**2))
    plan = make_plan(population, **settings)
    for change in amendments:
        arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in change.items()}
        plan = plan.amend(**arguments)
    return plan


@pytest.mark.parametrize("path", FILES, ids=[f.stem for f in FILES])
def test_a_plan_is_as_recorded(path: Path) -> None:
    document = json.loads(path.read_text())
    plan = plan_of(document)
    assert plan.digest == document["digest"]
    assert document["cells"]
    for step, lane, digest in document["cells"]:
        assert plan.cell_digest(step, lane) == digest


def test_there_is_a_dozen() -> None:
    assert len(FILES) >= 12


def write() -> None:
    """Record the digest and some cells of every golden plan."""
    for path in FILES:
        document = json.loads(path.read_text())
        plan = plan_of(document)
        last = plan.loop_steps
        steps = [0, 1, last // 2, last - 1, last, 7 * last + 3]
        places = [(step, lane) for step in steps for lane in sorted({0, plan.lanes // 2, plan.lanes - 1})]
        places = [(k, lane) for k, lane in places if k >= plan.from_step or plan.parent is None]
        document |= {
            "digest": plan.digest,
            "cells": [[k, lane, plan.cell_digest(k, lane)] for k, lane in places],
        }
        path.write_text(json.dumps(document, indent=1) + "\n")
