"""`shardkit bench`: this machine's limits and shardkit's share of them; what got worse since a recorded result."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from shardkit.errors import FormatError, NotFoundError, UsageError
from shardkit.exit_codes import ExitCode
from shardkit.stores.file_operations import explained
from shardkit_tools import console, options
from shardkit_tools.benchmarks.results import (
    LEAST_ROUNDS,
    MOST_MARGIN,
    Comparison,
    Finding,
    Ratio,
    Result,
    compare,
    load_result,
)
from shardkit_tools.benchmarks.suite import PARTS, SCALE, measure


def bench(
    only: Annotated[
        str, typer.Option("--only", metavar="PART,…", help=f"Of {', '.join(PARTS)}; default: all.")
    ] = "",
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="RESULT",
            help="Compare ratios with a recorded result; measure what it measured.",
        ),
    ] = None,
    result_file: Annotated[
        Path | None,
        typer.Option("--result", metavar="RESULT", help="Compare this recorded result instead of measuring."),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            "--scale", metavar="SHARE", help=f"Share of the full sizes; default: {SCALE}, or as recorded."
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option("--repeats", min=1, metavar="N", help="Rounds of each; default: 5, or as recorded."),
    ] = None,
    scratch: Annotated[
        str | None,
        typer.Option(
            "--scratch", metavar="FOLDER", help="On the disk to be measured; default: that of /tmp."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Record the result here.")] = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Measure reading, building, planning and reducing here, as ratios to this machine's limits.

    Limit and shardkit take turns, so a busy minute hits all of them; figures are ratios, never times. With
    --against: what got worse than recorded, beyond the noise that the recorded rounds showed. Exit codes then: 0 the
    same or better, 3 could not compare, 5 slower.

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
            out.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    comparison = compare(result, recorded) if recorded is not None else None
    if as_json:
        console.print_json(_document(result, comparison))
    elif comparison is not None:
        _print_comparison(comparison)
    else:
        _print_result(result)
    if comparison is not None:
        raise typer.Exit(comparison.exit_code)
    if not result.ratios:
        raise typer.Exit(ExitCode.FAILED)


def _measured(
    only: str,
    recorded: Result | None,
    scale: float | None,
    repeats: int | None,
    scratch: str | None,
) -> Result:
    facts = dict(recorded.facts) if recorded is not None else {}
    parts = _parts(only) if only else [p for p in PARTS if p in facts.get("parts", ())]
    parts = parts or list(PARTS)
    share = scale if scale is not None else float(facts.get("scale", SCALE))
    if not math.isfinite(share) or not 0 < share <= 10:
        raise UsageError(f"--scale {share}: expected a share above 0, such as {SCALE}; 1 takes hours")
    with console.long_work() as status:
        return measure(
            parts,
            scale=share,
            repeats=repeats or int(facts.get("repeats", 5)),
            scratch=scratch,
            told=status.show,
        )


def _parts(text: str) -> list[str]:
    given = [name.strip() for name in text.split(",")]
    for name in given:
        if name not in PARTS:
            raise UsageError(f"--only {name!r}: expected some of {', '.join(PARTS)}")
    return [part for part in PARTS if part in given]


def _print_result(result: Result) -> None:
    by_name = {ratio.key: ratio for ratio in result.ratios}
    for contest in dict.fromkeys(ratio.contest for ratio in result.ratios):
        console.print_heading(contest)
        rows = []
        for ratio in result.ratios:
            if ratio.contest == contest and ratio.clock == "wall":
                by_cpu = by_name.get((*ratio.key[:3], "cpu"))
                rows.append(
                    [ratio.of, _told(ratio), _told(by_cpu) if by_cpu else "–", f"{ratio.kind}: {ratio.to}"]
                )
        console.print_table(["", ">of it (range)", ">by CPU (range)", "*of what"], rows)
    _print_failures(result)
    console.print_line()
    console.print_facts(
        [
            ("figures", "shardkit's rate over the other's in the same round; 1 is as fast, larger is better"),
            ("rounds", f"{result.facts['repeats']} of each, in turn, at scale {result.facts['scale']}"),
            ("machine", f"{result.facts['cpus']} × {result.facts['processor']}"),
            ("load", f"{result.facts['load_before']} before, {result.facts['load_after']} after"),
        ]
    )


def _print_failures(result: Result) -> None:
    if result.failures:
        console.print_heading("Could not be measured")
        for name, reason in result.failures.items():
            console.print_line(f"{name}: {_first_line(reason)}")


def _print_comparison(comparison: Comparison) -> None:
    for note in comparison.notes:
        console.print_line(f"note: {note}")
    compared = comparison.of("worse", "same", "better")
    if compared:
        order = {"worse": 0, "better": 1, "same": 2}
        console.print_table(
            ["", "ratio", ">recorded", ">now (range)", ">change", ">noise"],
            [
                [f.verdict, f.name, _short(f.recorded), _told(f.now), f"{f.change:+.0%}", f"±{f.margin:.0%}"]
                for f in sorted(compared, key=lambda f: order[f.verdict])
                if f.change is not None
            ],
        )
    for verdict in ("failed", "other conditions"):
        for finding in comparison.of(verdict):
            console.print_line(f"{verdict}: {finding.name}: {_first_line(finding.reason)}")
    if found := comparison.of("too noisy"):
        console.print_line(
            f"too noisy to tell: {len(found)} ratios whose recorded rounds are fewer than {LEAST_ROUNDS} or more than "
            f"{MOST_MARGIN:.0%} apart; "
            "record anew on a quieter machine"
        )
    for verdict, meaning in (
        ("not measured", "recorded, not measured now"),
        ("new", "measured, not recorded"),
    ):
        if found := comparison.of(verdict):
            console.print_line(
                f"{meaning}: {len(found)} ratios ({found[0].name}{', …' if len(found) > 1 else ''})"
            )
    console.print_line()
    console.print_line(_summary(comparison))


def _summary(comparison: Comparison) -> str:
    worse, better, same = (comparison.of(verdict) for verdict in ("worse", "better", "same"))
    told = f"{len(worse)} worse, {len(better)} better, {len(same)} the same within the noise"
    if comparison.exit_code == ExitCode.UNCHECKED:
        return f"could not compare: {told}, {len(comparison.of('failed'))} failed"
    return told


def _told(ratio: Ratio | None) -> str:
    if ratio is None:
        return "–"
    return f"{_number(ratio.median)} ({_number(ratio.lowest)}–{_number(ratio.highest)})"


def _short(ratio: Ratio | None) -> str:
    return _number(ratio.median) if ratio is not None else "–"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else "no reason was told"


def _document(result: Result, comparison: Comparison | None) -> dict[str, Any]:
    document = result.to_json()
    if comparison is not None:
        document["comparison"] = {
            "exit_code": comparison.exit_code,
            "notes": list(comparison.notes),
            "findings": [_finding(finding) for finding in comparison.findings],
        }
    return document


def _finding(finding: Finding) -> dict[str, Any]:
    def ratio(one: Ratio | None) -> dict[str, Any] | None:
        return {**dataclasses.asdict(one), "conditions": dict(one.conditions)} if one is not None else None

    return {
        "name": finding.name,
        "verdict": finding.verdict,
        "margin": finding.margin,
        "change": finding.change,
        "reason": finding.reason,
        "recorded": ratio(finding.recorded),
        "now": ratio(finding.now),
    }
