"""`shardkit simulate`: what a plan would read, wait for and cost on a cluster that is not here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from shardkit.errors import ConfigurationError
from shardkit_tools import console, options
from shardkit_tools.console import bytes_text, count_text, duration_text
from shardkit_tools.options import argument, option
from shardkit_tools.simulation.cluster import Cluster, load_cluster, with_changes
from shardkit_tools.simulation.reading import PlannedDataset
from shardkit_tools.simulation.run import DEFAULT_BUDGET, Unit, prepare, simulate_lanes, simulate_shuffle

_OURS, _USUAL = "lanes + plan-aware cache", "full shuffle + LRU"


def simulate(
    cluster: Annotated[Path, argument("CLUSTER", "A description in TOML; see examples/clusters/.")],
    changes: Annotated[list[str] | None, argument("[NAME=VALUE…]", "Further changes for --what-if.")] = None,
    what_if: Annotated[
        list[str] | None, option("NAME=VALUE…", "Simulate a changed cluster too, and show both.")
    ] = None,
    sweep: Annotated[str, option("NAME=A,B,…", "Simulate once for each value, such as nodes=1,8,64.")] = "",
    root: Annotated[str, option("ROOT[@REF]", "Take the samples of this manifest; no sample is read.")] = "",
    rows: Annotated[str, option("N", "Or take so many made-up samples …")] = "",
    shards: Annotated[str, option("N", "… in so many shards …")] = "",
    strata: Annotated[str, option("N", "… of so many strata …")] = "",
    size: Annotated[str, option("--bytes SIZE", "… of so many bytes in all.")] = "",
    compare: Annotated[
        bool, option("--compare/--no-compare", "Also simulate a full shuffle with LRU caches.")
    ] = True,
    unit: Annotated[
        Unit, option("--unit sample|block", "What the full shuffle reads and caches.")
    ] = "sample",
    seed: Annotated[int | None, option("--seed N", "Seed of the plan and of all failures.")] = None,
    budget: Annotated[
        int,
        option(
            "--budget N", "Rows of an epoch that are drawn exactly; more take longer and err less.", min=1
        ),
    ] = DEFAULT_BUDGET,
    plot: Annotated[
        Path | None, option("--plot FILE", "Draw egress, stall, step time and dollars into this picture.")
    ] = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Simulate training on a cluster: stall, egress, requests, dollars, joules, recovery.

    The plan, the assignment of lanes, the cache's eviction and the rebalancing are the real ones; time follows stated
    formulas. Clusters too large to walk whole are sampled, and the error is reported.

    Example: shardkit simulate examples/clusters/pod-1024.toml --what-if copies=2 cache=500GB
    """
    data = {"root": root, "rows": rows, "shards": shards, "strata": strata, "bytes": size}
    given = [f"data.{name}={value}" for name, value in data.items() if value]
    given += [f"seed={seed}"] if seed is not None else []
    described = with_changes(load_cluster(cluster), given)
    wanted = [*(what_if or []), *(changes or [])]
    if wanted and not what_if:
        raise ConfigurationError(f"{wanted[0]!r}: changes follow --what-if")
    results = _run(_scenarios(described, wanted, sweep), budget, unit if compare else None)
    name = sweep.partition("=")[0]
    if plot is not None:
        axis = name or ("epoch" if len(results) == 1 else "scenario")
        _draw(results, f"{axis}: {described.name}", plot)
    if as_json:
        console.print_json({"cluster": described, "scenarios": results})
        return
    first = results[0]["lanes"]
    ways = f"lanes: {_OURS}" + (f"; shuffle: {_USUAL}, reading {unit}s" if compare else "")
    console.print_line(f"{described.name}: {ways}", "bold")
    console.print_document({name: first[name] for name in ("dataset", "plan", "sample", "error")})
    if sweep:
        _print_sweep(name, results)
    else:
        _print_scenarios(described, results)


def _scenarios(described: Cluster, wanted: list[str], sweep: str) -> list[tuple[str, Cluster]]:
    if sweep:
        name, equals, values = sweep.partition("=")
        if not equals or not values:
            raise ConfigurationError(f"--sweep is {sweep!r}: NAME=A,B,… is expected, such as nodes=1,8,64")
        start = with_changes(described, wanted)
        return [(value, with_changes(start, [f"{name}={value}"])) for value in values.split(",")]
    scenarios = [("as described", described)]
    if wanted:
        scenarios.append((f"if {' '.join(wanted)}", with_changes(described, wanted)))
    return scenarios


def _run(scenarios: list[tuple[str, Cluster]], budget: int, unit: Unit | None) -> list[dict[str, Any]]:
    made: dict[tuple[Any, ...], PlannedDataset] = {}
    results = []
    with console.long_work() as status:
        for label, cluster in scenarios:

            def tell(text: str, label: str = label) -> None:
                status.show(f"{label}: {text}")

            work = cluster.work
            key = (cluster.data, work.global_batch, work.lanes, work.seed, work.window_blocks)
            tell("planning")
            if key not in made:
                made[key] = prepare(cluster)
            one: dict[str, Any] = {"label": label}
            one["lanes"] = simulate_lanes(cluster, made[key], budget=budget, tell=tell)
            if unit is not None:
                one["shuffle"] = simulate_shuffle(cluster, made[key], unit=unit, budget=budget, tell=tell)
            results.append(one)
    return results


def _error(error: float | None) -> str:
    return "unknown" if error is None else f"{error * 100:.2g} %"


def _rows(result: dict[str, Any], epoch: int) -> dict[str, str]:
    one, lost = result["epochs"][epoch], result["recovery"]
    return {
        "step": duration_text(one["step_s"]),
        "stall per epoch": f"{duration_text(one['stall_s'])} ({one['stall_share'] * 100:.1f} %)",
        "egress": _bytes(one["egress_bytes"]),
        "requests": count_text(round(one["requests"])),
        "cache hits": f"{one['cache_hit_rate'] * 100:.1f} %",
        "cache per node": _bytes(result["cache_bytes_per_node"]),
        "time to recover": duration_text(lost["seconds"]),
        "dollars per epoch": f"{one['dollars']:,.2f}",
        "  of it requests, egress": f"{one['dollars_requests_and_egress']:,.2f}",
        "joules per epoch": _joules(one["joules"]),
        "epoch": duration_text(one["seconds"]),
    }


def _print_scenarios(cluster: Cluster, results: list[dict[str, Any]]) -> None:
    last = cluster.work.epochs - 1
    epochs = (
        {0: "First epoch, caches cold", last: f"Epoch {last + 1}"} if last else {0: "The epoch, caches cold"}
    )
    for epoch, title in epochs.items():
        console.print_heading(title)
        columns = {
            way if one is results[0] else f"{way}, {one['label']}": _rows(one[way], epoch)
            for one in results
            for way in ("lanes", "shuffle")
            if way in one
        }
        names = next(iter(columns.values()))
        console.print_table(
            ["what", *(f">{column}" for column in columns)],
            [(name, *(column[name] for column in columns.values())) for name in names],
        )
    parts = ("failures", "outages", "stood_s", "rebalancing", "recovery", "restart")
    console.print_line()
    console.print_document({name: results[0]["lanes"][name] for name in parts})


_SWEPT = {">step": "step", ">stall": "stall per epoch", ">egress": "egress", ">requests": "requests",
          ">hits": "cache hits", ">dollars": "dollars per epoch", ">joules": "joules per epoch",
          ">recover": "time to recover"}  # fmt: skip


def _print_sweep(name: str, results: list[dict[str, Any]]) -> None:
    for way, title in (("lanes", _OURS), ("shuffle", _USUAL)):
        cells = [(one["label"], _rows(one[way], -1)) for one in results if way in one]
        if cells:
            console.print_heading(f"{title}, last epoch")
            rows = [(label, *(row[what] for what in _SWEPT.values())) for label, row in cells]
            console.print_table([f">{name}", *_SWEPT], rows)
    console.print_line()
    errors = ", ".join(_error(one["lanes"]["error"]["egress"]) for one in results)
    console.print_line(f"error of egress: ±{errors}")


def _bytes(size: float) -> str:
    return bytes_text(round(size))


def _joules(joules: float) -> str:
    for unit, scale in (("TJ", 1e12), ("GJ", 1e9), ("MJ", 1e6), ("kJ", 1e3)):
        if joules >= scale:
            return f"{joules / scale:.3g} {unit}"
    return f"{joules:.0f} J"


_FIGURES = (
    ("egress_bytes", "egress per epoch, TB", 1e12),
    ("stall_s", "stall per epoch, s", 1.0),
    ("step_s", "seconds per step", 1.0),
    ("dollars", "dollars per epoch", 1.0),
)
_WAYS = (("lanes", "lanes, cache that knows the plan", "o-"), ("shuffle", "full shuffle, LRU", "s--"))


def _draw(results: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """The last epoch of each result against its label; or, of a single one, all its epochs."""
    plt = console.pyplot("simulate")
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    for axis, (name, label, unit) in zip(axes.ravel(), _FIGURES, strict=True):
        for way, legend, style in _WAYS:
            places, values = _series(results, way, name)
            if values:
                axis.plot(places, [v / unit for v in values], style, label=legend)
        axis.set(title=label, xlabel="epoch" if len(results) == 1 else title.partition(":")[0])
        drawn = [v for line in axis.get_lines() for v in line.get_ydata() if v > 0]
        if name == "step_s" and drawn and max(drawn) > 30 * min(drawn):
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0, 0].legend()
    figure.suptitle(title)
    console.save_figure(plt, figure, path)


def _series(results: Sequence[dict[str, Any]], way: str, name: str) -> tuple[list[str], list[float]]:
    if len(results) == 1:
        epochs = results[0].get(way, {}).get("epochs", [])
        return [str(i + 1) for i in range(len(epochs))], [float(one[name]) for one in epochs]
    found = [(one["label"], float(one[way]["epochs"][-1][name])) for one in results if way in one]
    return [label for label, _ in found], [value for _, value in found]
