"""`shardkit plan`: a cell, a step, or what a plan will do, from the manifest alone."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import shardkit
from shardkit.errors import PlanError, UsageError
from shardkit.plan import Plan
from shardkit_tools import console, options
from shardkit_tools.texts import bytes_text, count_text

_SHOWN = 12
_USUAL_WORLDS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256)  # shown although they may not divide the lanes


class Balance(StrEnum):
    """How windows are arranged by what samples cost."""

    SPREAD = "spread"
    ALIGN = "align"


def plan(
    root: options.VersionArgument,
    global_batch: Annotated[
        int, typer.Option("--global-batch", "-b", help="Samples per step over all ranks.")
    ] = 256,
    seed: Annotated[int, typer.Option(help="Of every shuffle.")] = 0,
    lanes: Annotated[
        int | None,
        typer.Option(help="Columns of the grid; by default a divisor of the batch that most worlds share."),
    ] = None,
    weights: Annotated[str, typer.Option(help='Weights by glob over strata, as JSON: {"web/*": 3}.')] = "",
    remainder: Annotated[str, typer.Option(help="drop or short.")] = "drop",
    shuffle: Annotated[str, typer.Option(help="window, full or none.")] = "window",
    window_blocks: Annotated[int | None, typer.Option(help="Blocks that a lane keeps open.")] = None,
    cost: Annotated[
        str,
        typer.Option(
            metavar="EXPR",
            help='What a sample costs, such as "len(tokens)**2": tells how long ranks would wait for each other.',
        ),
    ] = "",
    balance: Annotated[Balance, typer.Option(help="With --cost: how windows are arranged.")] = Balance.SPREAD,
    step: Annotated[
        int | None, typer.Option(help="Print this step's sample numbers instead of the report.")
    ] = None,
    lane: Annotated[int | None, typer.Option(help="With --step: only this lane's cell.")] = None,
    nodes: Annotated[str, typer.Option(help="Node counts to tell locality for.")] = "1,2,4,8",
    plot: Annotated[
        Path | None, typer.Option(help="Draw lanes, strata and distances into this picture.")
    ] = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Show what a plan will do: balance, locality, memory, mixing, waits and world sizes; no sample is read.

    Example: shardkit plan data/cats --global-batch 512 --plot plan.png
    """
    settings: dict[str, Any] = {
        "lanes": lanes,
        "remainder": remainder,
        "shuffle": shuffle,
        "weights": _weights(weights),
    }
    if window_blocks is not None:
        settings["window_blocks"] = window_blocks
    dataset = shardkit.open(root)
    costed = {"cost": cost, "balance": balance.value} if cost else {}
    made = dataset.plan(global_batch, seed=seed, **settings, **costed)
    if step is not None:
        _print_step(made, step, lane, as_json)
        return
    from shardkit.dataset.costs import costs_of
    from shardkit.plan.report import describe_plan
    from shardkit.plan.waits import predicted_waits

    counts = [part.strip() for part in nodes.split(",") if part.strip()]
    if not all(part.isascii() and part.isdecimal() and int(part[:9]) > 0 for part in counts):
        raise UsageError(f"--nodes {nodes!r}: expected whole numbers from 1 on, such as 1,2,8")
    report = describe_plan(made, nodes=[int(part) for part in counts])
    if cost:
        worlds = [ranks for ranks in _USUAL_WORLDS if 1 < ranks <= made.lanes]
        waits = predicted_waits(made, costs_of(dataset, cost), worlds)
        report["cost"] = {"expression": made.settings.cost, "balance": balance.value, "worlds": waits}
    if plot is not None:
        _draw(made, plot)
    if as_json:
        console.print_json(report)
        return
    _print_report(report)


def _weights(text: str) -> dict[str, int] | None:
    if not text:
        return None
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise PlanError(f'plan: weights is {text!r}, expected a JSON object such as {{"web/*": 3}}')
    return parsed


def _print_step(made: Plan, step: int, lane: int | None, as_json: bool) -> None:
    lanes = range(made.lanes) if lane is None else [lane]
    cells = {one: made.cell(step, one) for one in lanes}
    if as_json:
        console.print_json({
            "step": step,
            "plan": made.digest,
            "cells": [{"lane": one, "digest": made.cell_digest(step, one), "samples": cell[cell >= 0].tolist()}
                      for one, cell in cells.items()],
        })  # fmt: skip
        return
    rows = [[str(one), made.cell_digest(step, one)[:12], " ".join(map(str, cell[cell >= 0]))]
            for one, cell in cells.items()]  # fmt: skip
    console.print_table(["lane", "digest", "samples"], rows)


def _print_report(report: dict[str, Any]) -> None:
    balance, left, working, mixed = (
        report["balance"],
        report["remainder"],
        report["working_set"],
        report["mixing"],
    )
    steps = report["steps_per_epoch"]
    kept = "left out, others each epoch" if left["mode"] == "drop" else "in a short last step"
    facts = [
        ("plan", report["digest"][:16]),
        ("step", f"{report['global_batch']} samples: {report['lanes']} lanes of {report['cell_size']}"),
        ("epoch", f"{count_text(steps)} steps" if steps else f"endless; a loop is {report['loop_steps']} steps"),
        ("remainder", f"{left['rows']} rows {kept}" if left["rows"] else "none"),
        ("batch balance", f"within {balance['batch']} of the expected count (bound {balance['batch_bound']})"),
        ("cell balance", f"within {balance['cell']} (bound {balance['cell_bound']})"),
        ("rare strata", f"{balance['rare_strata']}, dealt together" if balance["rare_strata"] else "none"),
        ("shards per lane", f"{report['shards_per_lane']['least']} to {report['shards_per_lane']['most']}"),
        ("working set", f"{working['blocks_per_lane']} blocks per lane at most" + _bytes(working["bytes_all_lanes"])),
    ]  # fmt: skip
    console.print_facts(facts)
    if report["few_lanes"]:
        console.print_line(f"note: {report['few_lanes']}")
    console.print_heading("Strata")
    shown = report["strata"][:_SHOWN]
    rows = [[s["name"], count_text(s["rows"]), f"{s['per_batch']:g}", f"{s['passes']:g}"] for s in shown]
    console.print_table(["stratum", "rows", "per batch", "passes"], rows)
    if len(report["strata"]) > len(shown):
        console.print_line(f"and {len(report['strata']) - len(shown)} more")
    console.print_heading("Nodes")
    console.print_table(["nodes", "shards per node", "reads per shard", "most bytes"], [
        [str(n["nodes"]), f"{min(n['shards'])} to {max(n['shards'])}", f"{n['per_shard']:.3f}",
         bytes_text(max(n["bytes"])) if max(n["bytes"]) >= 0 else "unknown"] for n in report["nodes"]])  # fmt: skip
    console.print_heading("Mixing")
    console.print_table(["", "plan", "full shuffle"], [
        [name, f"{mixed['plan'][key]:.2f}", f"{mixed['full_shuffle'][key]:.2f}"]
        for name, key in (("shards per batch", "shards_per_batch"), ("stratum run", "label_run"),
                          ("distance of neighbours, bits", "distance_bits"))])  # fmt: skip
    if "cost" in report:
        _print_waits(report["cost"])
    console.print_heading("World sizes")
    console.print_table(["ranks", "lanes of a rank", "busy"], [
        [str(w["ranks"]), str(-(-report["lanes"] // w["ranks"])), f"{w['efficiency']:.0%}"]
        for w in report["worlds"] if w["efficiency"] == 1 or w["ranks"] in _USUAL_WORLDS])  # fmt: skip
    worst = min(report["worlds"], key=lambda w: float(w["efficiency"]))
    console.print_line(
        f"least busy: {worst['efficiency']:.0%} at {worst['ranks']} ranks; below 100%, ranks have unequal lanes: "
        "pass uneven=True in a loop of your own; shardkit train needs nothing"
    )


def _print_waits(found: dict[str, Any]) -> None:
    console.print_heading(f"Cost {found['expression']}: dearest rank over the mean one")
    names = ("plain", "plan", "plain_p95", "plan_p95")
    rows = [[str(one["ranks"]), *(f"{one[name]:.2f}" for name in names)] for one in found["worlds"]]
    console.print_table(
        ["ranks", "without", found["balance"], "without, p95", f"{found['balance']}, p95"], rows
    )


def _bytes(total: int) -> str:
    return "" if total < 0 else f", {bytes_text(total)} over all lanes"


def _draw(made: Plan, path: Path) -> None:
    plt = console.pyplot("plan")
    figure = plan_figure(made, plt)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plan_figure(made: Plan, plt: Any) -> Any:
    """Lanes and steps, strata of batches, distances of neighbours; axes say steps, lanes, shards and counts."""
    from shardkit.plan.report import stratum_counts

    steps = sorted({made.from_step + k * made.loop_steps // 200 for k in range(200)})
    cells = np.stack([made.step(k) for k in steps])
    first = np.maximum(cells[:, :, 0], 0)
    shard = made.population.segment_shard[made.grid.order.segments_of(first.ravel())].reshape(first.shape)
    counts = stratum_counts(made, steps).sum(axis=1)
    figure, (grid, strata, distance) = plt.subplots(3, 1, figsize=(10, 12), layout="constrained")
    stop = made.from_step + made.loop_steps
    # an edge is half a step, or half a lane, before the first: whole numbers are in the middle of what they name
    around = (steps[0] - 0.5, max(stop, steps[-1] + 1) - 0.5, made.lanes - 0.5, -0.5)
    picture = grid.imshow(shard.T, aspect="auto", interpolation="nearest", cmap="viridis", extent=around)
    bar = figure.colorbar(picture, ax=grid, label="shard")
    grid.set(title="lanes × steps, by shard of the first sample", xlabel="step", ylabel="lane")
    mark = "o" if len(steps) < 20 else None
    for s in np.argsort(-counts.sum(axis=0))[:20]:
        strata.plot(steps, counts[:, s], label=made.population.strata[s], linewidth=0.8, marker=mark)
    strata.set(
        title="samples of a stratum per batch (20 largest strata)",
        xlabel="step",
        ylabel="samples",
        ylim=(0, None),
    )
    strata.legend(fontsize=6, ncols=4)
    far = np.abs(np.diff(cells[cells >= 0]))
    edges = np.unique(np.geomspace(1, max(2, int(far.max(initial=1)) + 1), 61).astype(np.int64)) - 0.5
    distance.hist(far, bins=edges)
    distance.set(
        title="how far apart neighbours of a batch lie in the dataset", xlabel="samples", ylabel="pairs"
    )
    distance.set_xscale("log")
    distance.xaxis.set_major_formatter(
        plt.FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else "")
    )
    whole = (grid.xaxis, grid.yaxis, strata.xaxis, strata.yaxis, distance.yaxis, bar.ax.yaxis)
    for axis in whole:
        axis.set_major_locator(plt.MaxNLocator(integer=True, min_n_ticks=1))
    return figure
