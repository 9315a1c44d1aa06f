"""`shardkit bench`: this machine's limits and shardkit's share of them; what got worse since a recorded result."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from shardkit.errors import FormatError, NotFoundError, UsageError
from shardkit.exit_codes import ExitCode
from shardkit.stores.file_operations import explained
from shardkit_tools import console, options
from shardkit_tools.benchmarks.results import (
    LEAST_ROUNDS,
    MOST_MARGIN,
    Comparison,
    Ratio,
    Result,
    compare,
    load_result,
)
from shardkit_tools.benchmarks.suite import PARTS, SCALE, measure
from shardkit_tools.console import count_text
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
    if recorded is None:
        code = ExitCode.DONE if result.ratios else ExitCode.FAILED
        console.present(as_json, result.to_json, lambda: _print_result(result), code)
        return
    found = compare(result, recorded)
    document = {
        "exit_code": found.exit_code,
        "notes": found.notes,
        "findings": [console.plain(one) | {"name": one.name, "change": one.change} for one in found.findings],
    }
    console.present(
        as_json,
        lambda: result.to_json() | {"comparison": document},
        lambda: _print_comparison(found),
        found.exit_code,
    )


def _measured(
    only: str, recorded: Result | None, scale: float | None, repeats: int | None, scratch: str | None
) -> Result:
    facts = recorded.facts if recorded is not None else {}
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


def _print_result(result: Result) -> None:
    by_name = {ratio.key: ratio for ratio in result.ratios}
    for contest in dict.fromkeys(ratio.contest for ratio in result.ratios):
        console.print_heading(contest)
        console.print_table(["", ">of it (range)", ">by CPU (range)", "*of what"], [
            (ratio.of, _told(ratio), _told(by_name.get((*ratio.key[:3], "cpu"))), f"{ratio.kind}: {ratio.to}")
            for ratio in result.ratios if ratio.contest == contest and ratio.clock == "wall"
        ])  # fmt: skip
    if result.failures:
        console.print_heading("Could not be measured")
        for name, reason in result.failures.items():
            console.print_line(f"{name}: {_last_line(reason)}")
    facts = result.facts
    console.print_line()
    console.print_facts([
        ("figures", "shardkit's rate over the other's in the same round; 1 is as fast, larger is better"),
        ("rounds", f"{facts['repeats']} of each, in turn, at scale {facts['scale']}"),
        ("machine", f"{facts['cpus']} × {facts['processor']}"),
        ("load", f"{facts['load_before']} before, {facts['load_after']} after"),
    ])  # fmt: skip


_MISSING = (
    ("too noisy", f"too noisy to tell: under {LEAST_ROUNDS} rounds, or over {MOST_MARGIN:.0%} apart; record again"),
    ("not measured", "recorded, not measured now"),
    ("new", "measured, not recorded"),
)  # fmt: skip


def _print_comparison(comparison: Comparison) -> None:
    for note in comparison.notes:
        console.print_line(f"note: {note}")
    compared = comparison.of("worse", "better", "same")
    if compared:
        console.print_table(["", "ratio", ">recorded", ">now (range)", ">change", ">noise"], [
            (one.verdict, one.name, _number(one.recorded.median) if one.recorded else "–", _told(one.now),
             f"{one.change or 0:+.0%}", f"±{one.margin:.0%}")
            for verdict in ("worse", "better", "same") for one in comparison.of(verdict)
        ])  # fmt: skip
    for one in comparison.of("failed", "other conditions"):
        console.print_line(f"{one.verdict}: {one.name}: {_last_line(one.reason)}")
    for verdict, meaning in _MISSING:
        if found := comparison.of(verdict):
            more = ", …" if len(found) > 1 else ""
            console.print_line(f"{meaning}: {count_text(len(found), 'ratio')} ({found[0].name}{more})")
    console.print_line()
    worse, better, same = (len(comparison.of(verdict)) for verdict in ("worse", "better", "same"))
    told = f"{worse} worse, {better} better, {same} the same within the noise"
    if comparison.exit_code == ExitCode.UNCHECKED:
        told = f"could not compare: {told}, {len(comparison.of('failed'))} failed"
    console.print_line(told)


def _told(ratio: Ratio | None) -> str:
    if ratio is None:
        return "–"
    return f"{_number(ratio.median)} ({_number(ratio.lowest)}–{_number(ratio.highest)})"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else "no reason was told"
