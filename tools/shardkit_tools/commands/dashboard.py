"""`shardkit dashboard`: a run on a page of this machine, live, for everybody who has the address with its token.

What protects it: it listens on 127.0.0.1; every path begins with a random token, and everything else is the same 404;
the Host header must name this machine, so that no page elsewhere can reach it by a name that it points here; the
content policy allows this server's own script and style and nothing else; the page only ever sets text, never markup;
files come from a fixed table, no path is made from an address; texts are redacted and escaped before they leave.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from shardkit.credentials import redact_document, redactor
from shardkit.telemetry.pages import NOT_FOUND, Answer, PageServer
from shardkit.telemetry.records import check_run, read_run
from shardkit.telemetry.serving import health, run_metrics
from shardkit_tools import console
from shardkit_tools.console import clean
from shardkit_tools.observing.run_view import anomaly_text, grouped_events, view_run
from shardkit_tools.options import argument, option

HOST: Final = "127.0.0.1"
_FILES: Final = {
    "": ("index.html", "text/html; charset=utf-8"),
    "dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
    "charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "style.css": ("style.css", "text/css; charset=utf-8"),
}
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_RANKS: Final = 64
_LINES: Final = 8
_LANES: Final = 512
_FRESH_S: Final = 0.5


def dashboard_server(run: Path, token: str, port: int = 0) -> PageServer:
    """The server of a run's page."""
    check_run(run)
    folder = importlib.resources.files("shardkit_tools.observing").joinpath("page")
    files = {name: (200, kind, folder.joinpath(file).read_bytes()) for name, (file, kind) in _FILES.items()}
    redacted, lock = redactor(), threading.Lock()

    @functools.lru_cache(maxsize=1)
    def document(_: int) -> bytes:
        shown = redact_document(page_document(view_run(run)), lambda text: clean(redacted(text)))
        return json.dumps(shown).encode()

    def latest() -> Answer:
        with lock:  # it is read once in a while however many look
            return 200, "application/json", document(int(time.monotonic() / _FRESH_S))

    pages: dict[str, Callable[[], Answer]] = {
        "data.json": latest,
        "healthz": lambda: health(read_run(run), time.time()),
        "metrics": lambda: run_metrics(read_run(run), time.time()),
    }

    def answer(path: str) -> Answer:
        given, _, name = path.removeprefix("/").partition("/")
        if not secrets.compare_digest(given.encode(), token.encode()):
            return NOT_FOUND
        return pages[name]() if name in pages else files.get(name, NOT_FOUND)

    return PageServer(HOST, port, answer, _HEADERS)


def page_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of the page, with bounded sizes."""
    ranks, lanes = document["ranks"], document["lane_owners"]
    telling = sorted(ranks, key=lambda row: -row["busy_step_s"])[:_RANKS]
    heaviest = sorted(document["lane_loads"], key=lambda row: -row[2])[:_LANES]
    series = document["series"]
    return {
        **document,
        "ranks": sorted(telling, key=lambda row: int(row["rank"])),
        "hidden_ranks": len(ranks) - len(telling),
        "series": {**series, "busy_by_rank": _few_lines(series.get("busy_by_rank", {}))},
        "cell_s_by_rank": {str(row["rank"]): row["cell_s"] for row in ranks},
        "lane_owners": lanes[:_LANES],
        "lane_history": [{**row, "owners": row["owners"][:_LANES]} for row in document["lane_history"]],
        "lane_loads": sorted(heaviest),
        "num_lanes": len(lanes),
        "anomalies": [{**one, "text": anomaly_text(one)} for one in document["anomalies"]],
        "events": grouped_events(document["events"]),
    }


def _few_lines(by_rank: Mapping[str, list[float | None]]) -> dict[str, list[float | None]]:
    """All of few ranks; of many the busiest, the median and the least busy at each point."""
    if len(by_rank) <= _LINES:
        return dict(by_rank)
    columns = [
        sorted(one for one in column if one is not None) for column in zip(*by_rank.values(), strict=True)
    ]
    return {
        name: [column[place(len(column))] if column else None for column in columns]
        for name, place in (("most", lambda n: n - 1), ("median", lambda n: n // 2), ("least", lambda _: 0))
    }


def dashboard(
    run: Annotated[str, argument("RUN", "The run directory.")],
    port: Annotated[int, option("--port N", "Port; 0: a free one.", min=0, max=65535)] = 0,
    open_browser: Annotated[bool, option("--open", "Open the page in the browser too.")] = False,
) -> None:
    """Show a run on a live page, on 127.0.0.1, until Ctrl-C.

    The address holds a random token: only who has it sees the page. It shows numbers, names of shards and events,
    never bytes of samples. From another machine: ssh -L 8451:127.0.0.1:8451 NODE, and --port 8451 there. The same
    address has metrics (for Prometheus) and healthz.

    Example: shardkit dashboard runs/mine --port 8451
    """
    token = secrets.token_urlsafe(24)
    server = dashboard_server(Path(run), token, port)
    address = f"http://{HOST}:{server.port}/{token}/"
    console.print_line(f"{run} is shown at {address}")
    console.print_line("Ctrl-C ends it")
    if open_browser:
        typer.launch(address)
    server.serve()
