"""The view of `shardkit top`: a page of text from a run's document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardkit_tools.observing.run_view import anomaly_text, clock_text, event_text
from shardkit_tools.texts import bytes_text, clean, count_text, duration_text

_EVENTS: Final = 8
_ANOMALIES: Final = 6
_BARS: Final = "▁▂▃▄▅▆▇█"
_SPARKS: Final = 60
_SPARK_TEXT: Final = 45
_STATES: Final = {"running": "green", "ended": "dim", "silent": "bold red"}

Document = Mapping[str, Any]


def terminal_page(document: Document, width: int, most_ranks: int = 32) -> RenderableType:
    """For rich: as many columns of the ranks as a terminal of that width has room for."""
    parts: list[RenderableType] = [_headline(document), _bottleneck_line(document)]
    sparks = _sparkline(document, width)
    if sparks:
        parts.append(Text(sparks, style="cyan"))
    parts += [Text(), _rank_table(document["ranks"], document["anomalies"], most_ranks, width)]
    if document["anomalies"]:
        parts.append(Text())
        for one in document["anomalies"][:_ANOMALIES]:
            line = Text.assemble((f"▲ {one['kind']}: ", "bold yellow"), anomaly_text(one))
            line.append(f"  → {one['action']}: {one['advice']}", style="dim")
            parts.append(line)
        if len(document["anomalies"]) > _ANOMALIES:
            parts.append(Text(f"… and {len(document['anomalies']) - _ANOMALIES} more", style="dim"))
    if document["events"]:
        parts += [Text(), Text("Events", style="bold")]
        parts += [_event_line(event) for event in document["events"][-_EVENTS:]]
    return Group(*parts)


def _headline(document: Document) -> Text:
    line = Text.assemble((clean(str(document["run"])), "bold"), "  ")
    line.append(document["state"], style=_STATES.get(document["state"], "yellow"))
    line.append("".join(f"  {text}" for text in _head_facts(document)))
    return line


def _head_facts(document: Document) -> list[str]:
    steps = f" of {count_text(document['steps'])}" if document["steps"] else ""
    facts = [f"step {count_text(document['step'])}{steps}", count_text(document["world"], "rank"),
             f"{document['samples_per_s']:,.0f} samples/s"]  # fmt: skip
    if document["loss"] is not None:
        facts.append(f"loss {document['loss']:.4f}")
    failures = int(document["verification_failures"])
    if failures:
        facts.append(f"{count_text(failures, 'block')} failed verification")
    if document["replication_lag_bytes"] is not None:
        facts.append(f"{bytes_text(int(document['replication_lag_bytes']))} below policy")
    if document["cost_skew"] is not None:
        skew = document["cost_skew"]
        facts.append(
            f"dearest rank {skew['plan_p95']:.2f} × the mean, {skew['plain_p95']:.2f} × without costs"
        )
    return facts


def _bottleneck_text(document: Document) -> str:
    found = document["bottleneck"]
    if found is None:
        return "no steps yet"
    rank = f" (rank {found['rank']})" if document["world"] > 1 else ""
    return f"{found['text']}{rank}"


def _bottleneck_line(document: Document) -> Text:
    line = Text.assemble((_bottleneck_text(document), "bold"))
    if document["bottleneck"] is not None:
        shares = document["bottleneck"]["shares"]
        line.append("   " + _shares_text(shares), style="dim")
    return line


def _shares_text(shares: Mapping[str, float]) -> str:
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


_COLUMNS: Final = (">rank", "host", "state", "stage", ">step", "lanes", ">samples/s", ">step time", ">own work",
                   ">per cell", ">data wait", ">peers", "bound by", ">read/s", ">memory")  # fmt: skip
_BY_WORTH: Final = ("rank", "step", "data wait", "bound by", "state", "own work", "samples/s", "stage", "step time",
                    "peers", "lanes", "host", "per cell", "memory", "read/s")  # fmt: skip
_GAP: Final = 2


def _rank_row(row: Mapping[str, Any]) -> list[str]:
    lanes = f"{row['num_lanes']}: {row['lanes']}" if row["num_lanes"] else "–"
    state = "silent" if row["state"] != "ended" and row["age_s"] > 15 else row["state"]
    return [
        str(row["rank"]), clean(row["host"]), clean(state), clean(row["stage"]) or "–", count_text(row["step"]),
        lanes if len(lanes) <= 20 else lanes[:19] + "…", f"{row['samples_per_s']:,.0f}", _ms(row["step_s"]),
        _ms(row["busy_step_s"]), _ms(row["cell_s"]), f"{100 * row['data_share']:.0f} %",
        f"{100 * row['wait_share']:.0f} %", _bound_text(row["shares"]),
        bytes_text(int(row["bytes_per_s"])), bytes_text(int(row["memory_bytes"])),
    ]  # fmt: skip


def _bound_text(shares: Mapping[str, float]) -> str:
    name = max(shares, key=shares.__getitem__, default="")
    return f"{name} {100 * shares[name]:.0f} %" if name else "–"


def _ms(seconds: float) -> str:
    if not seconds:
        return "–"
    return f"{1000 * seconds:.1f} ms" if seconds < 10 else duration_text(seconds)


def _rank_table(
    rows: Sequence[Mapping[str, Any]], unusual_ones: Sequence[Mapping[str, Any]], most: int, width: int
) -> RenderableType:
    unusual = {one["rank"] for one in unusual_ones}
    shown = _most_telling(rows, most)
    cells = [_rank_row(row) for row in shown]
    fits = _fitting(cells, width)
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim", pad_edge=False)
    for place in fits:
        column = _COLUMNS[place]
        table.add_column(column.lstrip(">"), justify="right" if column[0] == ">" else "left", no_wrap=True)
    for row, texts in zip(shown, cells, strict=True):
        table.add_row(
            *(Text(texts[place]) for place in fits), style="yellow" if row["rank"] in unusual else ""
        )
    if len(rows) <= most:
        return table
    return Group(table, Text(f"… and {len(rows) - most} ranks that work less per step", style="dim"))


def _fitting(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The columns that a terminal has room for, whole: the most telling are chosen first."""
    left, fits = width + _GAP, []
    for name in _BY_WORTH:
        place = [column.lstrip(">") for column in _COLUMNS].index(name)
        needed = max(map(cell_len, [name, *(row[place] for row in rows)])) + _GAP
        if needed <= left:
            left -= needed
            fits.append(place)
    return sorted(fits)


def _most_telling(rows: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """All of few ranks; of many, those that work longest and those that are silent."""
    if len(rows) <= most:
        return list(rows)
    chosen = sorted(rows, key=lambda row: (-row["age_s"] if row["age_s"] > 15 else 0, -row["busy_step_s"]))[
        :most
    ]
    return sorted(chosen, key=lambda row: int(row["rank"]))


def _event_line(event: Mapping[str, Any]) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")  # a line each: more of them stand in a small terminal
    line.append(f"{clock_text(event['time'])}  ", style="dim")
    rank = event.get("rank")
    line.append(f"{'' if rank is None or rank == -1 else f'rank {clean(str(rank))}':<9}")
    line.append(f"{clean(str(event['event'])):<16} ", style="bold" if event["event"] == "anomaly" else "cyan")
    line.append(event_text(event))
    return line


def plain_page(document: Document) -> list[tuple[str, Any]]:
    """The same for pipes: ("line", text), or ("table", (columns, rows))."""
    page: list[tuple[str, Any]] = [
        ("line", "  ".join([clean(str(document["run"])), document["state"], *_head_facts(document)])),
        ("line", f"bottleneck: {_bottleneck_text(document)}"),
    ]
    if document["bottleneck"] is not None:
        page.append(("line", f"shares: {_shares_text(document['bottleneck']['shares'])}"))
    page += [("line", ""), ("table", (_COLUMNS, [_rank_row(row) for row in document["ranks"]]))]
    if document["anomalies"]:
        page.append(("line", ""))
    for one in document["anomalies"][:_ANOMALIES]:
        page.append(
            ("line", f"anomaly: {one['kind']}: {anomaly_text(one)} → {one['action']}: {one['advice']}")
        )
    if document["events"]:
        page.append(("line", ""))
        for event in document["events"][-_EVENTS:]:
            page.append(("line", "event: " + _event_line(event).plain.rstrip()))
    return page
