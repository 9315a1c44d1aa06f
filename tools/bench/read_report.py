"""Figures of the read benchmark as text."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Sequence
from typing import Any

__all__ = ["report", "spread", "versions"]

NAMES = {
    "shardkit_reader": "**shardkit**",
    "shardkit_compact": "**shardkit**, lanes=4, window_blocks=8",
    "memmap": "memory map + gather under DataLoader (no checks, no resume)",
    "mosaicml": "MosaicML Streaming",
    "litdata_reader": "LitData",
    "webdataset_reader": "webdataset",
    "hf_map": "HF datasets, map",
    "hf_iterable": "HF datasets, iterable",
    "grain_reader": "Grain + ArrayRecord",
    "lance_reader": "Lance",
}
YARDSTICKS = {"blobs": "sequential read + XXH3", "text": "zstd decompression"}
HEAD = (
    "| reader | workers | samples/s, median (range) | of the limit | CPU µs per sample | of the limit, by CPU | "
    "first batch, s | resume, s | peak MiB |"
)
PACKAGES = ("shardkit", "torch", "numpy", "pyarrow", "mosaicml-streaming", "litdata", "webdataset", "datasets", "grain",
            "array-record", "pylance")  # fmt: skip


def spread(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median, lowest and highest rate of some epochs, and what they cost."""
    good = [a for a in answers if "error" not in a and a.get("samples")]
    if not good:
        return {"error": answers[0].get("error", "no samples") if answers else "not run"}
    rates = [a["samples"] / a["seconds"] for a in good]
    return {
        "median": statistics.median(rates),
        "lowest": min(rates),
        "highest": max(rates),
        "cpu_us_per_sample": statistics.median(a["cpu_s"] / a["samples"] for a in good) * 1e6,
        "samples": good[0]["samples"],
        "peak_rss": max(a.get("peak_rss", 0) for a in good),
    }


def versions(python: str) -> dict[str, str]:
    """Installed versions of what may be measured."""
    program = (
        "import importlib.metadata as m, json, sys\nd = {}\nfor n in sys.argv[1:]:\n  try: d[n] = m.version(n)\n"
        "  except m.PackageNotFoundError: pass\nprint(json.dumps(d))"
    )
    done = subprocess.run([python, "-c", program, *PACKAGES], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def report(facts: dict[str, Any], results: dict[str, Any]) -> str:
    """Markdown: one table per workload."""
    head = (
        f"# Reading, {facts['date']}\n\n{facts['cpus']} shared virtual cores ({facts['machine']}), load average "
        f"{facts['load_before']:.1f} before and {facts['load_after']:.1f} after: rates suffer from neighbours, CPU per "
        f"sample much less. Python {facts['python']}; scale {facts['scale']}, {facts['repeats']} interleaved "
        "repeats, warm page cache, shuffled order, every sample touched. shardkit verifies every block in every epoch "
        "(XXH3); "
        "the peers verify nothing.\n\n"
        f"Versions: {_listed(facts['versions'])}. Peers: {_listed(facts['peer_versions'])}."
    )
    return (
        "\n".join([head] + [line for name, result in results.items() for line in _table(name, result)]) + "\n"
    )


def _listed(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _table(name: str, result: dict[str, Any]) -> list[str]:
    yardstick = YARDSTICKS.get(name, "numpy.take gather")
    base = result["limits"][yardstick]
    lines = [
        f"\n## {name}: {result['rows']:,} samples, batch {result['batch']}\n",
        HEAD,
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for limit, rate in result["limits"].items():
        mark = "**" if limit == yardstick else ""
        lines.append(f"| {mark}limit: {limit}{mark} | – | {_speed(rate, base)} | | | |")
    for key, one in result["readers"].items():
        reader, workers = key.split("/")
        if "error" in one:
            lines.append(f"| {NAMES[reader]} | {workers} | failed: {one['error'][:80]} | | | | | | |")
            continue
        resume = f"{one['resume_s']:.2f}" if one.get("resume_s") is not None else "cannot"
        rest = f"{one['first_batch_s']:.2f} | {resume} | {one['peak_rss'] / 2**20:.0f}"
        lines.append(f"| {NAMES[reader]} | {workers} | {_speed(one, base, cpu=workers == '0')} | {rest} |")
    return lines


def _speed(one: dict[str, Any], base: dict[str, Any], *, cpu: bool = True) -> str:
    cost = one["cpu_us_per_sample"]
    by_cpu = f"{cost:.2f} | {base['cpu_us_per_sample'] / cost:.2f}" if cpu and cost else "– | –"
    rates = f"{one['median']:,.0f} ({one['lowest']:,.0f}–{one['highest']:,.0f})"
    return f"{rates} | {one['median'] / base['median']:.2f} | {by_cpu}"
