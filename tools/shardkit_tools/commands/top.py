"""`shardkit top`: a run in the terminal, live."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shardkit_tools import console, options
from shardkit_tools.console import bytes_text, clean, count_text, duration_text, is_terminal
from shardkit_tools.observing.run_view import anomaly_text, clock_text, grouped_events, view_run
from shardkit_tools.options import argument, option

_EVENTS: Final = 8
_ANOMALIES: Final = 6
_BARS: Final = "▁▂▃▄▅▆▇█"
_SPARKS: Final = 60
_SPARK_TEXT: Final = 45
_SILENT_S: Final = 15
_PIPE_WIDTH: Final = 1_000
_STATES: Final = {"running": "green", "ended": "dim", "silent": "bold red"}

Document = Mapping[str, Any]


def terminal_page(document: Document, width: int, most_ranks: int = 32) -> RenderableType:
    """For rich: as many columns of the ranks as a terminal of that width has room for."""
    unusual, blank = document["anomalies"], Text()
    shares = Text(f"   {_shares(document)}", style="dim")
    parts: list[RenderableType] = [
        _headline(document),
        Text(_bottleneck(document), style="bold").append(shares),
    ]
    if sparks := _sparkline(document, width):
        parts.append(Text(sparks, style="cyan"))
    parts += [blank, _rank_table(document["ranks"], {one["rank"] for one in unusual}, most_ranks, width)]
    if unusual:
        parts += [
            blank,
            *(Text("▲ ", "bold yellow").append(_anomaly_line(one)) for one in unusual[:_ANOMALIES]),
        ]
    if len(unusual) > _ANOMALIES:
        parts.append(Text(f"… and {len(unusual) - _ANOMALIES} more", style="dim"))
    if document["events"]:
        parts += [
            blank,
            Text("Events", style="bold"),
            *map(_event_line, grouped_events(document["events"])[-_EVENTS:]),
        ]
    return Group(*parts)


def _headline(document: Document) -> Text:
    state = document["state"]
    line = Text.assemble((clean(str(document["run"])), "bold"), "  ", (state, _STATES.get(state, "yellow")))
    steps = f" of {count_text(document['steps'])}" if document["steps"] else ""
    facts = [f"step {count_text(document['step'])}{steps}", count_text(document["world"], "rank"),
             f"{document['samples_per_s']:,.0f} samples/s"]  # fmt: skip
    if document["loss"] is not None:
        facts.append(f"loss {document['loss']:.4f}")
    if failures := int(document["verification_failures"]):
        facts.append(f"{count_text(failures, 'block')} failed verification")
    if document["replication_lag_bytes"] is not None:
        facts.append(f"{bytes_text(int(document['replication_lag_bytes']))} below policy")
    if (skew := document["cost_skew"]) is not None:
        facts.append(
            f"dearest rank {skew['plan_p95']:.2f} × the mean, {skew['plain_p95']:.2f} × without costs"
        )
    return line.append("".join(f"  {fact}" for fact in facts))


def _bottleneck(document: Document) -> str:
    found = document["bottleneck"]
    if found is None:
        return "no steps yet"
    return f"{found['text']} (rank {found['rank']})" if document["world"] > 1 else str(found["text"])


def _shares(document: Document) -> str:
    shares = document["bottleneck"]["shares"] if document["bottleneck"] is not None else {}
    return "  ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items() if share >= 0.005)


def _sparkline(document: Document, width: int) -> str:
    values = [value or 0.0 for value in document["series"].get("samples_per_s", ())]
    values = values[-max(8, min(_SPARKS, width - _SPARK_TEXT)) :]
    most = max(values, default=0.0)
    if not most or len(values) < 4:
        return ""
    marks = "".join(_BARS[min(len(_BARS) - 1, int(len(_BARS) * value / most))] for value in values)
    seconds = document["series"]["width_s"] * len(values)
    return f"{marks}  samples/s, last {duration_text(seconds)}, most {most:,.0f}"


def _anomaly_line(anomaly: Mapping[str, Any]) -> Text:
    line = Text.assemble((f"{anomaly['kind']}: ", "bold yellow"), anomaly_text(anomaly))
    return line.append(f" → {anomaly['action']}: {anomaly['advice']}", style="dim")


def _event_line(event: Mapping[str, Any]) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")  # a line each: more of them stand in a small terminal
    line.append(f"{clock_text(event['time'])}  ", style="dim")
    rank = event.get("rank")
    line.append(f"{'' if rank is None or rank == -1 else f'rank {clean(str(rank))}':<9}")
    line.append(f"{clean(str(event['event'])):<16} ", style="bold" if event["event"] == "anomaly" else "cyan")
    return line.append(event["text"]).append(f" ×{event['count']}" if event["count"] > 1 else "", style="dim")


_COLUMNS: Final = (">rank", "host", "state", "stage", ">step", "lanes", ">samples/s", ">step time", ">own work",
                   ">per cell", ">data wait", ">peers", "bound by", ">read/s", ">memory")  # fmt: skip
_BY_WORTH: Final = ("rank", "step", "data wait", "bound by", "state", "own work", "samples/s", "stage", "step time",
                    "peers", "lanes", "host", "per cell", "memory", "read/s")  # fmt: skip
_GAP: Final = 2


def _rank_row(row: Mapping[str, Any]) -> list[str]:
    lanes = f"{row['num_lanes']}: {row['lanes']}" if row["num_lanes"] else "–"
    state = "silent" if row["state"] != "ended" and row["age_s"] > _SILENT_S else row["state"]
    shares = row["shares"]
    bound = max(shares, key=shares.__getitem__, default="")
    return [
        str(row["rank"]), clean(row["host"]), clean(state), clean(row["stage"]) or "–", count_text(row["step"]),
        lanes if len(lanes) <= 20 else lanes[:19] + "…", f"{row['samples_per_s']:,.0f}",
        *(_time_text(row[name]) for name in ("step_s", "busy_step_s", "cell_s")),
        f"{100 * row['data_share']:.0f} %",
        f"{100 * row['wait_share']:.0f} %", f"{bound} {100 * shares[bound]:.0f} %" if bound else "–",
        bytes_text(int(row["bytes_per_s"])), bytes_text(int(row["memory_bytes"])),
    ]  # fmt: skip


def _time_text(seconds: float | None) -> str:
    return "not measured" if seconds is None else duration_text(seconds) if seconds else "–"


def _rank_table(
    rows: Sequence[Mapping[str, Any]], unusual: set[int], most: int, width: int
) -> RenderableType:
    shown = _most_telling(rows, most)
    cells = [_rank_row(row) for row in shown]
    fits = _fitting(cells, width)
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim", pad_edge=False)
    for place in fits:
        column = _COLUMNS[place]
        table.add_column(column.lstrip(">"), justify="right" if column[0] == ">" else "left", no_wrap=True)
    for row, texts in zip(shown, cells, strict=True):
        style = "yellow" if row["rank"] in unusual else ""
        table.add_row(*(Text(texts[place]) for place in fits), style=style)
    if len(rows) <= most:
        return table
    return Group(table, Text(f"… and {len(rows) - most} ranks that work less per step", style="dim"))


def _fitting(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the columns that fit whole into the terminal, chosen in the order of their importance."""
    names = [column.lstrip(">") for column in _COLUMNS]
    left, fits = width + _GAP, []
    for place in map(names.index, _BY_WORTH):
        needed = max(map(cell_len, [names[place], *(row[place] for row in rows)])) + _GAP
        if needed <= left:
            left -= needed
            fits.append(place)
    return sorted(fits)


def _most_telling(rows: Sequence[Mapping[str, Any]], most: int) -> Sequence[Mapping[str, Any]]:
    """Return the ranks to show: all of them if few, otherwise the slowest and the silent ones."""

    def worth(row: Mapping[str, Any]) -> tuple[float, float]:
        return (-row["age_s"] if row["age_s"] > _SILENT_S else 0, -(row["busy_step_s"] or 0))

    return (
        rows
        if len(rows) <= most
        else sorted(sorted(rows, key=worth)[:most], key=lambda row: int(row["rank"]))
    )


def top(
    run: Annotated[str, argument("RUN", "The run directory.")],
    once: Annotated[bool, option("--once", "Show it once and end; so does a pipe.")] = False,
    interval: Annotated[float, option("--interval SECONDS", "Between two looks.", min=0.2)] = 1.0,
    as_json: options.JsonFlag = False,
) -> None:
    """Watch a run: its bottleneck, every rank, anomalies and the latest events. Ctrl-C ends it.

    Everything is read from the run directory, so it works from any machine that sees it, during the run and after.
    "own work" is what a rank does by itself in a step, "data wait" the share of its time that it waits for samples,
    "peers" for other ranks, "bound by" what takes most of it. Wider terminals show more columns. The
    bottleneck is taken from the rank that waits least for others.

    Example: shardkit top runs/mine
    """
    path, document = Path(run), view_run(Path(run))
    is_piped = not is_terminal()
    screen = Console(highlight=False, markup=False, emoji=False, width=_PIPE_WIDTH if is_piped else None)
    if as_json:
        console.print_json(document)
    elif is_piped:  # every column, every rank
        screen.print(terminal_page(document, _PIPE_WIDTH, len(document["ranks"])))
    elif once:
        screen.print(terminal_page(document, screen.width))
    else:
        _watch(path, interval, screen)


def _watch(path: Path, interval: float, screen: Console) -> None:
    try:
        with Live(console=screen, screen=True, auto_refresh=False) as live:
            while True:
                page = terminal_page(view_run(path), screen.width, max(4, screen.height - 16))
                live.update(page, refresh=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        screen.print(terminal_page(view_run(path), screen.width))  # the last page stays in the scroll-back
        raise
