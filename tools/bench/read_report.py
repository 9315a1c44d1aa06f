"""Figures of the read benchmark as text."""

from __future__ import annotations

from typing import Any

from shardkit_tools.benchmarks.reading.limits import yardstick_of
from shardkit_tools.benchmarks.reading.readers import PEER_NAMES

__all__ = ["report"]

NAMES = {
    "shardkit_reader": "**shardkit**",
    "shardkit_compact": "**shardkit**, lanes=4, window_blocks=8",
    **PEER_NAMES,
    "memmap": "memory map + gather under DataLoader (no checks, no resume)",
    "spdl_reader": "SPDL over a memory map (no checks, no resume)",
    "ffcv_reader": "FFCV (no checks, no resume)",
}
HEAD = (
    "| reader | workers | samples/s, median (range) | of the limit | CPU µs per sample | of the limit, by CPU | "
    "first batch, s | past torch, s | resume at 50 %, s | peak MiB |"
)


def report(facts: dict[str, Any], results: dict[str, Any]) -> str:
    """Markdown: one table per workload."""
    head = (
        f"# Reading, {facts['date']}\n\n{facts['cpus']} shared virtual cores ({facts['machine']}), load average "
        f"{facts['load_before']:.1f} before and {facts['load_after']:.1f} after: rates suffer from neighbours, CPU per "
        f"sample much less. Python {facts['python']}; scale {facts['scale']}, {facts['repeats']} interleaved "
        "repeats, warm page cache, shuffled order, every sample touched, an epoch left after "
        f"{facts['seconds_per_epoch']:g} s (marked ¹). shardkit verifies every block that it reads (XXH3), and "
        "what fits into its memory bound once more when it is copied, in the second epoch, the first that is timed; "
        "then no more. The peers verify nothing. First batch: of a fresh process, imports included; past torch: "
        "without the import of torch.\n\n"
        f"Versions: {_listed(facts['versions'])}. Peers: {_listed(facts['peer_versions'])}."
    )
    return (
        "\n".join([head] + [line for name, result in results.items() for line in _table(name, result)]) + "\n"
    )


def _listed(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _table(name: str, result: dict[str, Any]) -> list[str]:
    yardstick = yardstick_of(name)
    base = result["limits"][yardstick]
    lines = [
        f"\n## {name}: {result['rows']:,} samples, batch {result['batch']}\n",
        HEAD,
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for limit, rate in result["limits"].items():
        mark = "**" if limit == yardstick else ""
        lines.append(f"| {mark}limit: {limit}{mark} | – | {_speed(rate, base)} | | | | |")
    for key, one in result["readers"].items():
        reader, workers = key.split("/")
        if "error" in one:
            lines.append(f"| {NAMES[reader]} | {workers} | failed: {one['error'][:80]} | | | | | | | |")
            continue
        start = f"{one['first_batch_s']:.2f} | {one['past_torch_s']:.2f}"
        rest = f"{start} | {_resume(one)} | {one['peak_rss'] / 2**20:.0f}"
        lines.append(f"| {NAMES[reader]} | {workers} | {_speed(one, base)} | {rest} |")
    return [*lines, *_verification(result.get("verification", {}))]


def _resume(one: dict[str, Any]) -> str:
    if one.get("resume_s") is None:
        return "cannot"
    share = one.get("resumed_at", 0.5)
    return f"{one['resume_s']:.2f}" + ("" if share > 0.49 else f" (at {share:.0%}: slow to get there)")


def _verification(found: dict[str, Any]) -> list[str]:
    if "wall" not in found:
        return [f"\nVerification was not compared: {found['error']}"] if "error" in found else []
    wall, cpu = (
        f"{found[clock]['median']:+.1%} ({found[clock]['lowest']:+.1%} to {found[clock]['highest']:+.1%})"
        for clock in ("wall", "cpu")
    )
    return [
        f"\nVerification, on against off, {found['pairs']} pairs of epochs: {wall} of the time, {cpu} of the CPU time."
    ]


def _speed(one: dict[str, Any], base: dict[str, Any]) -> str:
    cost = one["cpu_us_per_sample"]
    by_cpu = f"{cost:.2f} | {base['cpu_us_per_sample'] / cost:.2f}" if cost else "– | –"
    mark = "" if one.get("whole", True) else "¹"
    rates = f"{one['median']:,.0f}{mark} ({one['lowest']:,.0f}–{one['highest']:,.0f})"
    return f"{rates} | {one['median'] / base['median']:.2f} | {by_cpu}"
