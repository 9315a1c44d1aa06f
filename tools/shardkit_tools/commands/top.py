"""`shardkit top`: a run in the terminal, live."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.live import Live

from shardkit_tools import console, options
from shardkit_tools.observing.run_view import view_run
from shardkit_tools.observing.terminal import print_plain, terminal_page
from shardkit_tools.options import argument, option
from shardkit_tools.texts import is_terminal


def top(
    run: Annotated[str, argument("RUN", "The run directory.")],
    once: Annotated[bool, option("--once", "Show it once and end; so does a pipe.")] = False,
    interval: Annotated[float, option("--interval SECONDS", "Between two looks.", min=0.2)] = 1.0,
    as_json: options.JsonFlag = False,
) -> None:
    """Watch a run: what it waits for, every rank, what is unusual, what happened last. Ctrl-C ends it.

    All of it is read from the run directory, so it works from any machine that sees it, during the run and after.
    "own work" is what a rank does by itself in a step, "data wait" the share of its time that it waits for samples,
    "peers" for other ranks, "bound by" what takes most of it. Wider terminals show more columns. The
    bottleneck is that of the rank that waits least for others.

    Example: shardkit top runs/mine
    """
    path, document = Path(run), view_run(Path(run))
    screen = Console(highlight=False, markup=False, emoji=False)
    if as_json:
        console.print_json(document)
    elif not is_terminal():
        print_plain(document)
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
        screen.print(
            terminal_page(view_run(path), screen.width)
        )  # what was seen last stays in the scroll-back
        raise
