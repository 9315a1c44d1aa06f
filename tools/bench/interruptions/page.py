"""Write docs/interruptions.md and the chart of README from the results.

python tools/bench/interruptions/page.py [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[0] = str(ROOT / "tools")
from bench.interruptions.chart import COLOURS, answers, chart, constant_only, documented_loss, words_of  # noqa: E402
from bench.interruptions.environments import ENVIRONMENTS  # noqa: E402
from bench.interruptions.scenarios import QUESTIONS, SCENARIOS  # noqa: E402

RESULTS = ROOT / "tools" / "bench" / "results" / "interruptions"
PAGE = ROOT / "docs" / "interruptions.md"
HEAD = Path(__file__).with_name("page_head.txt")
COUNTS = ("lost", "repeated", "fewer", "tail", "moved")


def cell(result: dict[str, Any], key: str) -> str:
    """Return the cell of a table: the answers, with the number of seeds of each if they differ."""
    if any(need in result["lacks"] for need in SCENARIOS[key].needs):
        return "–"
    found = answers(result, key)
    if not found:
        return "not run"
    if result["random"]:
        return "random by design"
    if len(found) == 1:
        words = _words(result, key, next(iter(found)))
    else:
        words = ", ".join(f"{_words(result, key, answer)} ({count})" for answer, count in found.items())
    if loss := documented_loss(result, key):
        words += f"; documented: {loss}"
    if key == "ranks" and constant_only(result):
        words += "; **exact** while ranks × workers is constant"
    return words


def _words(result: dict[str, Any], key: str, answer: str) -> str:
    words = words_of(result, key, answer)
    return f"**{words}**" if answer == "exact" else words


def span(values: list[int]) -> str:
    """Return the least and the most of some counts."""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def rows_of_counts(result: dict[str, Any]) -> list[str]:
    """Return the rows of the table of a loader."""
    rows = []
    for key, scenario in SCENARIOS.items():
        runs = list(result["runs"].get(key, {}).values())
        counted = [run for run in runs if "lost" in run]
        if not runs:
            continue
        numbers = [span([run.get(name, 0) for run in counted]) if counted else "" for name in COUNTS]
        equal = (
            " of ".join(span([run[key] for run in counted]) for key in ("equal_steps", "steps"))
            if counted
            else ""
        )
        if result["random"]:
            kinds = f"random by design ({len(runs)})"
        else:
            found = answers(result, key).items()
            kinds = ", ".join(f"{_words(result, key, answer)} ({count})" for answer, count in found)
        rows.append(f"| {scenario.title} | {kinds} | {' | '.join([*numbers, equal])} |")
    return rows


def errors_of(result: dict[str, Any]) -> list[str]:
    """Return the errors of a loader. Errors that differ in numbers only are one, shown with the first numbers."""
    texts: dict[str, str] = {}
    found: dict[str, list[str]] = {}
    for key, scenario in SCENARIOS.items():
        for run in result["runs"].get(key, {}).values():
            if "error" in run:
                text = f"{run['phase']}: `{run['error'].replace('`', chr(39))}`"
                where = found.setdefault(texts.setdefault(re.sub(r"[0-9]+", "", text), text), [])
                if scenario.title not in where:
                    where.append(scenario.title)
    return [f"* {error} ({'; '.join(where)})" for error, where in found.items()]


def section(result: dict[str, Any]) -> list[str]:
    """Return the part of the page about one loader."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    runs = [run for of in result["runs"].values() for run in of.values()]
    for torch in sorted({run["torch"] for run in runs if "torch" in run}):
        versions += (
            f", and {sum(run.get('torch') == torch for run in runs)} of {len(runs)} runs with torch {torch}"
        )
    link = result["link"] if ":" in result["link"] else f"../{result['link']}"
    lines = ["", f"### {result['label']}", "", f"> “{result['promise']}” ([source]({link}))", ""]
    lines += [f"Measured on {result['date']} with {versions}."]
    lines += [result["notes"]] if result["notes"] else []
    lines += [f"Better than shardkit: {result['strength']}"] if result["strength"] else []
    without = {name: why for name, why in result["lacks"].items() if name != "workers"}
    lines += (
        [f"Not measured: {'; '.join(f'{name} ({why})' for name, why in without.items())}."] if without else []
    )
    lines += [
        "",
        "| scenario | answer (seeds) | lost | repeated | less often | remainder | moved | equal steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += rows_of_counts(result)
    errors = errors_of(result)
    return lines + (["", *errors] if errors else [])


def page(results: list[dict[str, Any]]) -> str:
    """Return the page."""
    lines = [HEAD.read_text(encoding="utf-8").rstrip(), "", "## Three questions", ""]
    lines += [
        "| loader | "
        + " | ".join(SCENARIOS[key].title for key in QUESTIONS)
        + " | documented for other ranks | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        seeds = span([len(result["runs"].get(key, {})) for key in QUESTIONS if cell(result, key) != "–"])
        cells = " | ".join(cell(result, key) for key in QUESTIONS)
        lines.append(f"| {result['label']} | {cells} | {result['elastic']} | {seeds} |")
    others = [key for key in SCENARIOS if key not in QUESTIONS and key != "constant"]
    lines += ["", "## Harder scenes", ""]
    lines += [
        "| loader | " + " | ".join(SCENARIOS[key].title for key in others) + " |",
        "|---" * (len(others) + 1) + "|",
    ]
    lines += [
        f"| {result['label']} | " + " | ".join(cell(result, key) for key in others) + " |"
        for result in results
    ]
    lines += [
        "",
        "A dash means that it was not measured; the reason is under **Counts**.",
    ]
    lines += ["", "## Counts"]
    for result in results:
        lines += section(result)
    return "\n".join(lines) + "\n"


def read_results() -> list[dict[str, Any]]:
    """Return the results of all loaders that were measured, in the order of the page."""
    files = [RESULTS / f"{name}.json" for name in ENVIRONMENTS if name != "broken"]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]


def files() -> dict[Path, str]:
    """Return the page and the charts by path."""
    results = read_results()
    charts = {
        PAGE.with_name(f"interruptions-{name}.svg"): chart(results, colours)
        for name, colours in COLOURS.items()
    }
    return {PAGE: page(results), **charts}


def write() -> None:
    """Write the page and the charts."""
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        write()
        return
    for path, text in files().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not what the results say; run: python tools/bench/interruptions/page.py")


if __name__ == "__main__":
    main()
