"""Measure cost skew (dearest rank of a step over the mean rank) by plan order, cell size, ranks and cost.

    python tools/bench/costs.py --out tools/bench/results/costs
    python tools/bench/costs.py --weights --sizes 16 20 --lanes 64 --seeds 2 --out tools/bench/results/costs-weights

Documents have lognormal lengths (median 600 tokens, log sd 1.2, at most 8,192) as int32 in blocks of 256 KiB, drawn row
by row; their cost is n or n². With `--weights`, six of ten shards hold web pages (median 600), three code (1,000), one
books (3,000), with the weights 5, 3 and 2. The plans are made by shardkit with default windows, with 64 lanes for 8 to
64 ranks and 512 lanes for 64 to 512 ranks. Rank r of R has lanes r·L/R to (r+1)·L/R − 1, which is shardkit's initial
assignment. *LPT* assigns the rows of each batch of the plan without costs to the ranks, dearest row first, each to the
rank with the lowest cost so far: it knows the whole batch and the number of ranks, and the row counts of ranks may
differ. *Saved* is the share of LPT's saving over the plan without costs. p95 is the 95th percentile over steps of the
dearest rank's cost over the mean rank's. The step time is the sum over steps of the dearest rank's cost, divided by the
sum of the mean rank's cost: a step lasts as long as its dearest rank needs, and no other time is modelled.
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
PAGES, CODE, BOOKS = 0, 1, 2
SOURCES = ("web", "code", "books")
MEDIANS = np.array([600, 1000, 3000])
SHARDS = [PAGES] * 6 + [CODE] * 3 + [BOOKS]  # sources of ten shards in turn
ORDERS = ("random", "spread", "align", "LPT")


def lengths(source: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Draw the length of each document, given its source."""
    normal = np.random.default_rng(seed).standard_normal(len(source))
    drawn = np.exp(np.log(MEDIANS[source]) + 1.2 * normal)
    found: NDArray[np.int64] = np.clip(drawn, 1, 8192).astype(np.int64)
    return found


def longest_first(costs: NDArray[np.float64], ranks: int) -> float:
    """Return the skew of a batch after assigning its rows, dearest first, to the rank with the lowest cost."""
    heap = [0.0] * ranks
    for cost in -np.sort(-costs):
        heapq.heapreplace(heap, heap[0] + float(cost))
    return max(heap) * ranks / float(costs.sum())


def measure(
    lanes: int, size: int, power: int, worlds: list[int], seed: int, windows: int | None = None,
    *, weights: bool = False,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield the result rows of one dataset, with `weights` of three sources; `windows` replaces the default."""
    shards = np.array(SHARDS if weights else [PAGES])
    sample = lengths(np.resize(shards, 1 << 16), seed)
    per_block = max(1, round(BLOCK_BYTES / (float(sample.mean()) * TOKEN_BYTES)))
    some = replace(Population.of("", ["all"], [(0, 0, 1)], 1), mean_block_bytes=BLOCK_BYTES)
    windows = windows or default_cost_window(some, lanes, size)
    steps = max(LEAST_STEPS, WINDOWS * windows * per_block // size)
    rows = lanes * size * steps
    source = np.resize(shards, -(-rows // (64 * per_block))).repeat(64 * per_block)[:rows]
    costs = lengths(source, seed) ** power
    blocks = -(-rows // (64 * per_block))  # one segment per shard of 64 blocks
    segments = [
        (n, int(shards[n % len(shards)]), min(64 * per_block, rows - n * 64 * per_block))
        for n in range(blocks)
    ]
    names = SOURCES if weights else ("all",)
    people = Population.of(f"sha256:{lanes} {size} {seed}", names, segments, per_block)
    chosen: dict[str, Any] = {
        "global_batch": lanes * size,
        "lanes": lanes,
        "seed": seed,
        "window_blocks": windows,
    }
    if weights:
        chosen["weights"] = {"web": 5, "code": 3, "books": 2}
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
            "p95": p95, "time": time, "saved": saved_share(p95), "time_saved": saved_share(time),
            "spread_of_steps": {n: float(c.sum(axis=1).std() / c.sum(axis=1).mean()) for n, c in cells.items()},
        }  # fmt: skip


def saved_share(found: dict[str, float]) -> dict[str, float | None]:
    """Return the share of LPT's saving; None if LPT saves less than 10 %, as when one row exceeds a rank's share."""
    plain = found["random"]
    gain = plain - found["LPT"]
    return {name: (plain - one) / gain if gain > 0.1 * plain else None for name, one in found.items()}


_HEAD = (
    *("cost", "cell", "lanes", "window", "ranks", "random, p95", "spread", "align", "LPT", "spread saves"),
    *("align saves", "step time: random, spread, align, LPT", "spread saves", "align saves"),
)


def page(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """Return the results as a table: means over seeds, and ranges of the savings."""
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
    options.add_argument("--lanes", type=int, nargs="+", default=[64, 512])
    options.add_argument("--weights", action="store_true", help="three weighted sources")
    given = options.parse_args()
    rows: list[dict[str, Any]] = []
    facts = machine_facts()
    for seed in range(given.seeds):  # seeds are the outer loop, so that each write has whole tables
        for lanes, worlds in ((64, [8, 16, 32, 64]), (512, [64, 128, 256, 512])):
            for size, power in itertools.product(given.sizes if lanes in given.lanes else (), (1, 2)):
                rows += measure(lanes, size, power, worlds, seed, weights=given.weights)
                print(f"{lanes} lanes, cells of {size}, n**{power}, seed {seed}", file=sys.stderr)
        if given.out:
            Path(f"{given.out}.md").write_text(page(rows, facts), encoding="utf-8")
            Path(f"{given.out}.json").write_text(
                json.dumps({"facts": facts, "rows": rows}, separators=(",", ":")) + "\n"
            )
    print(page(rows, facts))


if __name__ == "__main__":
    main()
