"""`shardkit dashboard`: a run on a page of this machine, live."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from shardkit_tools import console
from shardkit_tools.observing.web import HOST, dashboard_server
from shardkit_tools.options import argument, option


def dashboard(
    run: Annotated[str, argument("RUN", "The run directory.")],
    port: Annotated[int, option("--port", "Where to listen; 0 takes a free port.", min=0, max=65535)] = 0,
    open_browser: Annotated[bool, option("--open", "Open the page in the browser too.")] = False,
) -> None:
    """Show a run on a live page, on 127.0.0.1, until Ctrl-C.

    The address holds a random token: only who has it sees the page. It shows numbers, names of shards and events,
    never bytes of samples. From another machine: ssh -L 8451:127.0.0.1:8451 NODE, and --port 8451 there. Below the same
    address lie metrics (for Prometheus) and healthz.

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
