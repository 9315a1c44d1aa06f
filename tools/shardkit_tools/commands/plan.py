"""`shardkit plan`: a cell, a step, or what a plan will do, from the manifest alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

import shardkit
from shardkit.errors import UsageError
from shardkit.plan import Plan
from shardkit_tools import console, options
from shardkit_tools.console import bytes_text, count_text, range_text
from shardkit_tools.options import option

_SHOWN = 12
_USUAL_WORLDS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256)  # shown although they may not divide the lanes


def plan(
    root: options.VersionArgument,
    global_batch: Annotated[int, option("--global-batch -b N", "Samples per step over all ranks.")] = 256,
    seed: Annotated[int, option("--seed N", "Seed of every shuffle.")] = 0,
    lanes: Annotated[
        int | None,
        option(
            "--lanes N",
            "Columns of the grid; default: a divisor of the batch that suits most numbers of ranks.",
        ),
    ] = None,
    weights: Annotated[
        str, option("--weights JSON", 'Weights of strata by pattern, such as {"web/*": 3}.')
    ] = "",
    remainder: Annotated[
        Literal["drop", "short"],
        option("--remainder drop|short", "Drop the samples that fill no step, or end with a short step."),
    ] = "drop",
    shuffle: Annotated[
        Literal["window", "full", "none"],
        option(
            "--shuffle window|full|none",
            "Mix the samples of a lane within its window of blocks, over its whole part, or not at all.",
        ),
    ] = "window",
    window_blocks: Annotated[
        int | None, option("--window-blocks N", "Blocks that a lane keeps open.")
    ] = None,
    cost: Annotated[
        str,
        option(
            "EXPR",
            'Cost of a sample, such as "len(tokens)**2", to predict how long ranks wait for each other.',
        ),
    ] = "",
    balance: Annotated[
        Literal["spread", "align"],
        option(
            "--balance spread|align",
            "With --cost: spread costly samples over the steps, or put those of all lanes into the same steps.",
        ),
    ] = "spread",
    step: Annotated[
        int | None, option("--step K", "Print this step's sample numbers instead of the report.")
    ] = None,
    lane: Annotated[int | None, option("--lane N", "With --step: only this lane's cell.")] = None,
    nodes: Annotated[str, option("--nodes N,…", "Numbers of nodes for which locality is shown.")] = "1,2,4,8",
    plot: Annotated[
        Path | None, option("--plot FILE", "Draw lanes, strata and distances into this picture.")
    ] = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Show what a plan will do: balance, locality, memory, mixing, waits and world sizes; no sample is read.

    Mixing compares the first batches with a full shuffle of all rows: different shards in a batch, consecutive
    samples of one stratum, and the entropy of the distances in the dataset between consecutive samples. A plan is well
    mixed if its figures are close to the full shuffle. docs/words.md explains every line.

    Example: shardkit plan data/cats --global-batch 512 --plot plan.png
    """
    settings: dict[str, Any] = {"lanes": lanes, "remainder": remainder, "shuffle": shuffle,
                                "weights": _weights(weights)}  # fmt: skip
    if window_blocks is not None:
        settings["window_blocks"] = window_blocks
    if cost:
        settings |= {"cost": cost, "balance": balance}
    counts = [part.strip() for part in nodes.split(",") if part.strip()]
    if not all(part.isascii() and part.isdecimal() and int(part[:9]) > 0 for part in counts):
        raise UsageError(f"--nodes {nodes!r}: expected whole numbers from 1 on, such as 1,2,8")
    dataset = shardkit.open(root)
    made = dataset.plan(global_batch, seed=seed, **settings)
    if step is not None:
        _print_step(made, step, lane, as_json)
        return
    from shardkit.dataset.costs import costs_of
    from shardkit.plan.report import describe_plan, predicted_waits

    report = describe_plan(made, nodes=[int(part) for part in counts])
    if cost:
        worlds = [ranks for ranks in _USUAL_WORLDS if 1 < ranks <= made.lanes]
        waits = predicted_waits(made, costs_of(dataset, cost), worlds)
        report["cost"] = {"expression": made.settings.cost, "balance": balance, "worlds": waits}
    if plot is not None:
        plt = console.pyplot("plan")
        console.save_figure(plt, plan_figure(made, plt), plot)
    console.present(as_json, lambda: report, lambda: _print_report(report, dataset.manifest.labels))


def _weights(text: str) -> dict[str, int] | None:
    if not text:
        return None
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise UsageError(f'--weights {text!r}: expected a JSON object such as {{"web/*": 3}}')
    return parsed


def _print_step(made: Plan, step: int, lane: int | None, as_json: bool) -> None:
    lanes = range(made.lanes) if lane is None else [lane]
    cells = {one: (made.cell_digest(step, one), made.cell(step, one)) for one in lanes}
    shown = {one: (digest, cell[cell >= 0].tolist()) for one, (digest, cell) in cells.items()}
    if as_json:
        listed = [{"lane": one, "digest": digest, "samples": cell} for one, (digest, cell) in shown.items()]
        console.print_json({"step": step, "plan": made.digest, "cells": listed})
    else:
        rows = [(one, digest[:12], " ".join(map(str, cell))) for one, (digest, cell) in shown.items()]
        console.print_table(["lane", "digest", "samples"], rows)


def _print_report(report: dict[str, Any], labels: Mapping[str, str]) -> None:
    _print_facts(report)
    if report["few_lanes"]:
        console.print_line(f"note: {report['few_lanes']}")
    console.print_table(["*stratum", "rows", "per batch", "passes"], [
        (labels.get(one["name"], one["name"]), count_text(one["rows"]), f"{one['per_batch']:g}", f"{one['passes']:g}")
        for one in report["strata"]
    ], heading="Strata", most=_SHOWN)  # fmt: skip
    console.print_table(["nodes", "shards per node", "reads per shard", "most bytes"], [
        (one["nodes"], range_text(str(min(one["shards"])), str(max(one["shards"]))), f"{one['per_shard']:.3f}",
         bytes_text(max(one["bytes"])) if max(one["bytes"]) >= 0 else "unknown")
        for one in report["nodes"]
    ], heading="Nodes")  # fmt: skip
    mixed = report["mixing"]
    console.print_table(["", "plan", "full shuffle"], [
        (name, f"{mixed['plan'][key]:.2f}", f"{mixed['full_shuffle'][key]:.2f}")
        for name, key in (("shards per batch", "shards_per_batch"), ("stratum run", "label_run"),
                          ("distance of neighbours, bits", "distance_bits"))
    ], heading="Mixing")  # fmt: skip
    console.print_line("well mixed if the plan is close to the full shuffle; --help explains the figures")
    if "cost" in report:
        found = report["cost"]
        names = ("plain", "plan", "plain_p95", "plan_p95")
        console.print_table(
            ["ranks", "without", found["balance"], "without, p95", f"{found['balance']}, p95"],
            [(one["ranks"], *(f"{one[name]:.2f}" for name in names)) for one in found["worlds"]],
            heading=f"Cost {found['expression']}: dearest rank over the mean one",
        )
    console.print_table(["ranks", "lanes of a rank", "busy"], [
        (one["ranks"], -(-report["lanes"] // one["ranks"]), f"{100 * one['efficiency']:.0f} %")
        for one in report["worlds"] if one["efficiency"] == 1 or one["ranks"] in _USUAL_WORLDS
    ], heading="World sizes")  # fmt: skip
    worst = min(report["worlds"], key=lambda one: float(one["efficiency"]))
    console.print_line(
        f"least busy: {100 * worst['efficiency']:.0f} % at {worst['ranks']} ranks; below 100 %, ranks have unequal "
        "numbers of lanes, and a loop of your own needs uneven=True"
    )


def _print_facts(report: dict[str, Any]) -> None:
    balance, left, working = (report[name] for name in ("balance", "remainder", "working_set"))
    steps, total = report["steps_per_epoch"], working["bytes_all_lanes"]
    kept = "left out, other ones in each epoch" if left["mode"] == "drop" else "in a short last step"
    in_bytes = "" if total < 0 else f", {bytes_text(total)} over all lanes"
    console.print_facts([
        ("plan", report["digest"][:16]),
        ("step", f"{report['global_batch']} samples: {report['lanes']} lanes of {report['cell_size']}"),
        ("epoch", f"{count_text(steps)} steps" if steps else f"endless; a loop is {report['loop_steps']} steps"),
        ("remainder", f"{left['rows']} rows {kept}" if left["rows"] else "none"),
        ("batch balance", f"within {balance['batch']} of the expected count (bound {balance['batch_bound']})"),
        ("cell balance", f"within {balance['cell']} (bound {balance['cell_bound']})"),
        ("rare strata", f"{balance['rare_strata']}, spread together" if balance["rare_strata"] else "none"),
        ("shards per lane", range_text(*map(str, report["shards_per_lane"].values()))),
        ("working set", f"{working['blocks_per_lane']} blocks per lane at most{in_bytes}"),
    ])  # fmt: skip


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
