"""Skew of cost: the dearest rank of a step over the mean one, by order of the plan, cells, ranks and cost.

    python tools/bench/costs.py --out tools/bench/results/costs

Documents have lognormal lengths (median 600 tokens, log sd 1.2, at most 8,192) as int32 in blocks of 256 KiB, drawn row
by row; their cost is n or n². Plans are those of the product at default windows; 64 lanes for 8 to 64 ranks, 512 for 64
to 512. Rank r of R has lanes r·L/R to (r+1)·L/R − 1, as the product assigns them where no rank has anything yet. *LPT*
gives the rows of each batch of the plan without costs to its ranks, dearest first, each to the rank that has least: it
knows the whole batch and the world, and counts of rows may differ. *Saved* is the share of what LPT takes off the plan
without costs. p95 is of the dearest rank over the mean one, step by step; the step time is the sum of the dearest
ranks' costs over that of the mean ones': the time of a step is that of its dearest rank, and nothing else is computed.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.machine import machine_facts
from shardkit.plan import Costs, Plan, Population, encode_costs, make_plan
from shardkit.plan.report import rank_skew
from shardkit.plan.settings import default_cost_window

BLOCK_BYTES, TOKEN_BYTES = 256 << 10, 4
LEAST_STEPS, WINDOWS = 256, 3
LPT_STEPS = 64
ORDERS = ("random", "spread", "align", "LPT")


def lengths(rows: int, seed: int) -> NDArray[np.int64]:
    drawn = np.exp(np.log(600) + 1.2 * np.random.default_rng(seed).standard_normal(rows))
    found: NDArray[np.int64] = np.clip(drawn, 1, 8192).astype(np.int64)
    return found


def longest_first(costs: NDArray[np.float64], ranks: int) -> float:
    """Skew of a batch whose rows go, dearest first, each to the rank that has least."""
    heap = [0.0] * ranks
    for cost in -np.sort(-costs):
        heapq.heapreplace(heap, heap[0] + float(cost))
    return max(heap) * ranks / float(costs.sum())


def measure(
    lanes: int, size: int, power: int, worlds: list[int], seed: int, windows: int | None = None
) -> Iterator[dict[str, Any]]:
    """Rows of results of one dataset; `windows` in place of the default."""
    sample = lengths(1 << 16, seed)
    per_block = max(1, round(BLOCK_BYTES / (float(sample.mean()) * TOKEN_BYTES)))
    some = replace(Population.of("", ["all"], [(0, 0, 1)], 1), mean_block_bytes=BLOCK_BYTES)
    windows = windows or default_cost_window(some, lanes, size)
    steps = max(LEAST_STEPS, WINDOWS * windows * per_block // size)
    rows = lanes * size * steps
    costs = lengths(rows, seed) ** power
    blocks = -(-rows // (64 * per_block))  # of shards of 64 blocks
    segments = [(n, 0, min(64 * per_block, rows - n * 64 * per_block)) for n in range(blocks)]
    people = Population.of(f"sha256:{lanes} {size} {seed}", ["all"], segments, per_block)
    chosen: dict[str, Any] = {
        "global_batch": lanes * size,
        "lanes": lanes,
        "seed": seed,
        "window_blocks": windows,
    }
    cost = Costs(f"length**{power}", encode_costs(costs))
    plans: dict[str, Plan] = {"random": make_plan(people, **chosen)}
    for balance in ("spread", "align"):
        plans[balance] = make_plan(people, cost=cost, balance=balance, **chosen)
    exact = costs.astype(np.float64)
    cells = {name: exact[plan.steps(0, steps)].sum(axis=2) for name, plan in plans.items()}
    batches = [exact[plans["random"].step(step).ravel()] for step in range(0, steps, -(-steps // LPT_STEPS))]
    totals = {name: each.sum(axis=1) for name, each in cells.items()}
    totals["LPT"] = np.array([batch.sum() for batch in batches])
    for ranks in worlds:
        skew = {name: rank_skew(each, ranks) for name, each in cells.items()}
        skew["LPT"] = np.array([longest_first(batch, ranks) for batch in batches])
        p95 = {name: float(np.quantile(each, 0.95)) for name, each in skew.items()}
        time = {name: float(np.average(each, weights=totals[name])) for name, each in skew.items()}
        yield {
            "lanes": lanes, "size": size, "power": power, "ranks": ranks, "seed": seed, "window_blocks": windows,
            "p95": p95, "time": time, "saved": saved(p95), "time_saved": saved(time),
            "spread_of_steps": {n: float(c.sum(axis=1).std() / c.sum(axis=1).mean()) for n, c in cells.items()},
        }  # fmt: skip


def saved(found: dict[str, float]) -> dict[str, float | None]:
    """Share of what LPT saves; None where a row alone is dearer than a rank's share, so that it saves nothing."""
    plain = found["random"]
    gain = plain - found["LPT"]
    return {name: (plain - one) / gain if gain > 0.1 * plain else None for name, one in found.items()}


_HEAD = (
    *("cost", "cell", "lanes", "window", "ranks", "random, p95", "spread", "align", "LPT", "spread saves"),
    *("align saves", "step time: random, spread, align, LPT", "spread saves", "align saves"),
)


def page(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """The results as a table: means over seeds, ranges of what is saved."""
    out = [
        "# Skew of cost", "", (__doc__ or "").strip().split("\n\n")[-1].replace("\n", " "), "",
        f"{len({row['seed'] for row in rows})} seeds: means, and of what is saved the least and the most; "
        + str(facts["date"]),
        "", f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|",
    ]  # fmt: skip
    key = ("power", "size", "lanes", "window_blocks", "ranks")
    for at, group in itertools.groupby(sorted(rows, key=lambda row: tuple(row[k] for k in key)),
                                       key=lambda row: tuple(row[k] for k in key)):  # fmt: skip
        same = list(group)
        p95 = [f"{np.mean([row['p95'][name] for row in same]):.2f}" for name in ORDERS]
        shares = []
        for measure, name in itertools.product(("saved", "time_saved"), ("spread", "align")):
            each = [row[measure][name] for row in same]
            shares.append(
                f"{np.mean(each):.2f} ({min(each):.2f} … {max(each):.2f})" if None not in each else "–"
            )
        times = ", ".join(f"{np.mean([row['time'][name] for row in same]):.2f}" for name in ORDERS)
        cost = "n" if at[0] == 1 else "n²"
        cells = [cost, *map(str, at[1:]), *p95, *shares[:2], times, *shares[2:]]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--out", help="NAME of NAME.md and NAME.json")
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 8, 16, 32])
    given = options.parse_args()
    rows: list[dict[str, Any]] = []
    facts = machine_facts()
    for seed in range(given.seeds):  # whole tables first: what is written after each seed is one
        for lanes, worlds in ((64, [8, 16, 32, 64]), (512, [64, 128, 256, 512])):
            for size, power in itertools.product(given.sizes, (1, 2)):
                rows += measure(lanes, size, power, worlds, seed)
                print(f"{lanes} lanes, cells of {size}, n**{power}, seed {seed}", file=sys.stderr)
        if given.out:
            Path(f"{given.out}.md").write_text(page(rows, facts), encoding="utf-8")
            Path(f"{given.out}.json").write_text(
                json.dumps({"facts": facts, "rows": rows}, separators=(",", ":")) + "\n"
            )
    print(page(rows, facts))


if __name__ == "__main__":
    main()
