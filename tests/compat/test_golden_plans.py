"""Plans of earlier releases, for ever: digests and cells must come out as they were written down.

A new golden plan is a file with "segments", "settings" and empty "digest" and "cells"; run this module as a script to
fill it in. Files that are filled in are never written again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.plan import Plan, Population, make_plan

FOLDER = Path(__file__).parents[1] / "golden" / "plans"
FILES = sorted(FOLDER.glob("*.json"))


def population_of(document: dict[str, Any]) -> Population:
    """Rows of (shard, stratum) from two multipliers: plain arithmetic, no generator of random numbers."""
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
    plan = make_plan(population_of(document), **settings)
    for change in amendments:
        arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in change.items()}
        plan = plan.amend(**arguments)
    return plan


@pytest.mark.parametrize("path", FILES, ids=[f.stem for f in FILES])
def test_a_golden_plan_is_as_it_was(path: Path) -> None:
    document = json.loads(path.read_text())
    plan = plan_of(document)
    assert plan.digest == document["digest"]
    assert document["cells"]
    for step, lane, digest in document["cells"]:
        assert plan.cell_digest(step, lane) == digest


def test_there_is_a_dozen() -> None:
    assert len(FILES) >= 12


def main() -> None:
    for path in FILES:
        document = json.loads(path.read_text())
        if document["digest"]:
            continue
        plan = plan_of(document)
        last = plan.loop_steps
        steps = [0, 1, last // 2, last - 1, last, 7 * last + 3]
        chosen = [(step, lane) for step in steps for lane in sorted({0, plan.lanes // 2, plan.lanes - 1})]
        chosen = [(k, lane) for k, lane in chosen if k >= plan.from_step or plan.parent is None]
        document |= {
            "digest": plan.digest,
            "cells": [[k, lane, plan.cell_digest(k, lane)] for k, lane in chosen],
        }
        path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
