"""`shardkit bench`: this machine's limits and shardkit's share of them; what got worse since a recorded result."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from shardkit.errors import FormatError, NotFoundError, UsageError
from shardkit.exit_codes import ExitCode
from shardkit.stores.file_operations import explained
from shardkit_tools import console, options
from shardkit_tools.benchmarks.results import Comparison, Result, compare, load_result
from shardkit_tools.benchmarks.suite import PARTS, SCALE, measure
from shardkit_tools.options import option


def bench(
    only: Annotated[str, option("--only PART,…", f"Of {', '.join(PARTS)}; default: all.")] = "",
    against: Annotated[
        Path | None,
        option("--against RESULT", "Compare ratios with a recorded result; measure what it measured."),
    ] = None,
    result_file: Annotated[
        Path | None, option("--result RESULT", "Compare this recorded result instead of measuring.")
    ] = None,
    scale: Annotated[
        float | None, option("--scale SHARE", f"Share of the full sizes; default: {SCALE}, or as recorded.")
    ] = None,
    repeats: Annotated[
        int | None, option("--repeats N", "Rounds of each; default: 5, or as recorded.", min=1)
    ] = None,
    scratch: Annotated[
        str | None, option("--scratch FOLDER", "On the disk to be measured; default: that of /tmp.")
    ] = None,
    out: Annotated[Path | None, option("--out FILE", "Record the result here.")] = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Measure reading, building, planning and reducing here, as ratios to this machine's limits.

    Limit and shardkit take turns, so a busy minute hits all of them; figures are shardkit's rate over the other's in
    the same round: 1 is as fast, larger is better. With --against: what got worse than recorded, beyond the noise that
    the recorded rounds showed. Exit codes then: 0 the same or better, 3 could not compare, 5 slower.

    Example: shardkit bench --out before.json && shardkit bench --against before.json
    """
    if result_file is not None and (against is None or only or out or scale or repeats):
        raise UsageError("--result replaces measuring: give it with --against, and without settings or --out")
    try:
        recorded = load_result(against) if against is not None else None
        given = load_result(result_file) if result_file is not None else None
    except (FormatError, NotFoundError) as error:
        typer.echo(f"shardkit: {error}", err=True)
        raise typer.Exit(ExitCode.UNCHECKED) from None
    result = given or _measured(only, recorded, scale, repeats, scratch)
    if out is not None:
        with explained(f"write {out}", writing=True):
            out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if recorded is None:
        code = ExitCode.DONE if result["ratios"] else ExitCode.FAILED
        console.present(as_json, lambda: result, lambda: _print_result(result), code)
        return
    found = compare(result, recorded)
    document = {**result, "comparison": found}
    console.present(as_json, lambda: document, lambda: _print_comparison(found), found["exit_code"])


def _measured(
    only: str, recorded: Result | None, scale: float | None, repeats: int | None, scratch: str | None
) -> Result:
    facts = recorded["facts"] if recorded is not None else {}
    named = [name.strip() for name in only.split(",")] if only else facts.get("parts", ())
    for name in named:
        if only and name not in PARTS:
            raise UsageError(f"--only {name!r}: expected some of {', '.join(PARTS)}")
    share = scale if scale is not None else float(facts.get("scale", SCALE))
    if not math.isfinite(share) or not 0 < share <= 10:
        raise UsageError(f"--scale {share}: expected a share above 0, such as {SCALE}; 1 takes hours")
    rounds = repeats or int(facts.get("repeats", 5))
    parts = [part for part in PARTS if part in named] or list(PARTS)
    with console.long_work() as status:
        return measure(parts, scale=share, repeats=rounds, scratch=scratch, told=status.show)


_WORSE_FIRST = ("worse", "better", "same", "failed", "other conditions", "too noisy", "not measured", "new")


def _print_result(result: Result) -> None:
    """Figures are shardkit's rate over the other's in the same round: 1 is as fast, larger is better."""
    ratios = [
        {name: value for name, value in one.items() if name != "conditions"} for one in result["ratios"]
    ]
    failures = {name: _last_line(reason) for name, reason in result["failures"].items()}
    page = {"ratios": ratios, "could_not_be_measured": failures, "facts": result["facts"]}
    console.print_document(page, most=None)


def _print_comparison(comparison: Comparison) -> None:
    findings = sorted(comparison["findings"], key=lambda one: _WORSE_FIRST.index(one["verdict"]))
    rows = [
        {
            "verdict": one["verdict"],
            "ratio": one["name"],
            "recorded": one["recorded"] and one["recorded"]["median"],
            "now": one["now"] and one["now"]["median"],
            "change_share": one["change"],
            "noise_share": one["margin"],
            "reason": _last_line(one["reason"]),
        }
        for one in findings
    ]
    console.print_document({"notes": comparison["notes"], "findings": rows}, most=None)
    console.print_line()
    counts = Counter[str](one["verdict"] for one in findings)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _WORSE_FIRST if counts[verdict])
    unchecked = "could not compare: " if comparison["exit_code"] == ExitCode.UNCHECKED else ""
    console.print_line(unchecked + said)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2][:200]
