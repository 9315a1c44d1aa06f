"""The server of `shardkit dashboard`: one page about one run, for whoever has the address with its token.

What protects it: it listens on 127.0.0.1; every path begins with a random token, and everything else is the same 404;
the Host header must name this machine, so that no page elsewhere can reach it by a name that it points here; the
content policy allows this server's own script and style and nothing else; the page only ever sets text, never markup;
files come from a fixed table, no path is made from an address; texts are redacted and escaped before they leave.
"""

from __future__ import annotations

import importlib.resources
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shardkit.errors import MissingDependency
from shardkit.telemetry.reading import check_run, read_run
from shardkit.telemetry.redaction import redact_document, redactor
from shardkit.telemetry.serving import health, host_allowed, run_metrics
from shardkit_tools.observing.run_view import anomaly_text, event_text, view_run
from shardkit_tools.texts import clean

_FILES: Final = {
    "": ("index.html", "text/html; charset=utf-8"),
    "dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
    "charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "style.css": ("style.css", "text/css; charset=utf-8"),
}
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
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


def require_server() -> Any:
    """uvicorn, or what to install.

    Raises:
        MissingDependency: the extra is not installed.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise MissingDependency(
            "the dashboard needs starlette and uvicorn; run: pip install 'shardkit[dashboard]', or use shardkit top"
        ) from error
    return uvicorn


def make_app(run: Path, token: str) -> Any:
    """The ASGI application.

    Args:
        run: directory.
        token: first part of every path.

    Raises:
        MissingDependency: starlette is not installed.
        NotFoundError: there is no run.
    """
    require_server()
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    check_run(run)
    pages = {name: (_page(file), kind) for name, (file, kind) in _FILES.items()}
    latest = _Latest(run)

    def nothing() -> Response:
        return Response("not found\n", 404, media_type="text/plain")

    def answer(request: Request) -> Any:
        if not host_allowed(request.headers.get("host"), "127.0.0.1"):
            return Response("this server answers to its own name only\n", 403, media_type="text/plain")
        given, _, name = request.url.path.removeprefix("/").partition("/")
        if not secrets.compare_digest(given.encode(), token.encode()):
            return nothing()
        if name == "data.json":
            return JSONResponse(latest.document())
        if name == "healthz":
            found = health(read_run(run), time.time())
            return JSONResponse(found, 200 if found["healthy"] else 503)
        if name == "metrics":
            return _metrics(run)
        if name not in pages:
            return nothing()
        body, kind = pages[name]
        return Response(body, headers={"Content-Type": kind})

    def guarded(request: Request) -> Any:
        response = answer(request)
        response.headers.update(_HEADERS)
        return response

    return Starlette(routes=[Route("/{path:path}", guarded, methods=["GET"])])


def _metrics(run: Path) -> Any:
    from starlette.responses import Response

    try:
        return Response(run_metrics(read_run(run), time.time()), media_type="text/plain; version=0.0.4")
    except MissingDependency as error:
        return Response(f"{error}\n", 503, media_type="text/plain")


def _page(name: str) -> bytes:
    return importlib.resources.files("shardkit_tools.observing").joinpath("page", name).read_bytes()


class _Latest:
    """The document, read at most twice a second however many look."""

    def __init__(self, run: Path) -> None:
        self._run, self._lock = run, threading.Lock()
        self._redact = redactor()
        self._document: dict[str, Any] = {}
        self._read_at = 0.0

    def document(self) -> dict[str, Any]:
        with self._lock:
            if time.monotonic() - self._read_at >= _FRESH_S:
                self._document = redact_document(page_document(view_run(self._run)), self._redact)
                self._read_at = time.monotonic()
            return self._document


def page_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """What the page is sent: bounded, every text on one line and printable."""
    shown = dict(document)
    ranks = list(document["ranks"])
    telling = sorted(ranks, key=lambda row: -row["busy_step_s"])[:_RANKS]
    shown["ranks"] = sorted(telling, key=lambda row: row["rank"])
    shown["hidden_ranks"] = len(ranks) - len(telling)
    series = dict(document["series"])
    series["busy_by_rank"] = _few_lines(series.get("busy_by_rank", {}))
    shown["series"] = series
    shown["cell_s_by_rank"] = {str(row["rank"]): row["cell_s"] for row in ranks}
    shown["lane_owners"] = document["lane_owners"][:_LANES]
    shown["lane_history"] = [{**row, "owners": row["owners"][:_LANES]} for row in document["lane_history"]]
    heaviest = sorted(document["lane_loads"], key=lambda row: -row[2])[:_LANES]
    shown["lane_loads"] = sorted(heaviest)
    shown["num_lanes"] = len(document["lane_owners"])
    shown["anomalies"] = [{**one, "text": anomaly_text(one)} for one in document["anomalies"]]
    shown["events"] = [
        {"time": event["time"], "rank": event.get("rank"), "event": event["event"], "text": event_text(event)}
        for event in document["events"]
    ]
    return _cleaned(shown)  # type: ignore[no-any-return]


def _few_lines(by_rank: Mapping[str, list[float | None]]) -> dict[str, list[float | None]]:
    """All of few ranks; of many the busiest, the median and the least busy at each point."""
    if len(by_rank) <= _LINES:
        return dict(by_rank)
    columns = [
        sorted(value for value in column if value is not None)
        for column in zip(*by_rank.values(), strict=True)
    ]
    return {
        name: [column[place(len(column))] if column else None for column in columns]
        for name, place in (("most", lambda n: n - 1), ("median", lambda n: n // 2), ("least", lambda _: 0))
    }


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean(str(name)): _cleaned(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cleaned(one) for one in value]
    return value
