"""Reductions of gradients over gloo: fp32, bf16, int8, top-k, PowerSGD, exact; the bare all-reduce beside.

    python tools/bench/reduce.py [--ranks 2] [--elements 65536 1048576 16777216] [--repeats 5] [--out FILE.json]

All take turns, after a round that does not count. The figures are effective: bytes of the float32 gradient per second
of the slowest rank, whatever travelled. `shardkit bench --against FILE.json` compares with what --out writes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from shardkit_tools.benchmarks.reducing import reduce_contest
from shardkit_tools.benchmarks.results import Result, ratios_of
from shardkit_tools.benchmarks.rounds import Held, hold
from shardkit_tools.benchmarks.suite import machine_facts


def table(held: Held) -> str:
    """Markdown: one row per reduction."""
    lines = [
        f"## {held.conditions['elements']:,} float32 on {held.conditions['ranks']} ranks\n",
        "| reduction | MB/s, median (range) | of the bare all-reduce | CPU ms per MB, all ranks |",
        "|---|---|---|---|",
    ]
    ratios = {r.of: r for r in ratios_of(held) if r.clock == "wall"}
    for name, rounds in held.rounds.items():
        rates = sorted(one.amount / one.seconds / 1e6 for one in rounds)
        cpu = statistics.median(one.cpu_s * 1e3 / (one.amount / 1e6) for one in rounds)
        ratio = ratios.get(name)
        share = f"{ratio.median:.2f} ({ratio.lowest:.2f}–{ratio.highest:.2f})" if ratio else "1"
        lines.append(
            f"| {name} | {statistics.median(rates):,.0f} ({rates[0]:,.0f}–{rates[-1]:,.0f}) | {share} | {cpu:.2f} |"
        )
    return "\n".join([*lines, *(f"\n{name} failed: {why}" for name, why in held.failures.items())])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--elements", type=int, nargs="*", default=[1 << 16, 1 << 20, 1 << 24])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    ratios, rates = [], {}
    for elements in given.elements:
        with reduce_contest(elements, ranks=given.ranks) as contest:
            held = hold(contest, given.repeats, lambda text: None)
        ratios += ratios_of(held)
        rates[held.name] = held.rounds
        print(table(held) + "\n", flush=True)
    if given.out:
        facts = {**machine_facts(), "parts": ["reduce"], "scale": 1.0, "repeats": given.repeats}
        given.out.write_text(json.dumps(Result(facts, ratios, {}, rates).to_json(), indent=1) + "\n")


if __name__ == "__main__":
    main()
