"""Options of the commands whose work is spread by an engine."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

__all__ = ["AddressOption", "EngineName", "EngineOption"]


class EngineName(StrEnum):
    """Who does the work."""

    LOCAL = "local"
    RAY = "ray"


EngineOption = Annotated[
    EngineName,
    typer.Option(
        "--engine",
        rich_help_panel="Running",
        help="This machine, or a Ray cluster; the result is the same.",
    ),
]

AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        rich_help_panel="Running",
        help="Of a running Ray cluster, or auto; without it --engine ray starts one here.",
    ),
]
