"""`shardkit train`: the bundled trainer."""

from __future__ import annotations

from typing import Annotated

import typer

from shardkit.errors import ConfigurationError
from shardkit_tools import console


def _print_settings(asked: bool) -> None:
    if not asked:
        return
    from shardkit_trainer.configuration import Configuration
    from shardkit_trainer.typed_settings import describe

    console.print_table(["setting", "default", "expected", "*meaning"], describe(Configuration))
    raise typer.Exit


def train(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A TOML file with the run's settings.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]…", help="Settings over the file's: optimizer.lr=0.001"),
    ] = None,
    nproc: Annotated[
        int, typer.Option("--nproc", min=1, help="Ranks on this machine; more than 1 starts torchrun.")
    ] = 1,
    restarts: Annotated[
        int, typer.Option("--restarts", min=0, help="How often torchrun starts again after a rank has died.")
    ] = 0,
    allow_changes: Annotated[
        str,
        typer.Option(
            "--allow-changes",
            metavar="KEY,…",
            help="Go on although these settings differ from the start before and change the data or the model.",
        ),
    ] = "",
    settings: Annotated[
        bool,
        typer.Option(
            "--settings",
            is_eager=True,
            callback=_print_settings,
            help="List every setting, and what it may be.",
        ),
    ] = False,
) -> None:
    """Train a model on a dataset, resuming from the run directory's newest checkpoint.

    The run directory keeps the settings, checkpoints, metrics and the ledger. Ctrl-C saves and stops; the same command,
    with any --nproc, goes on from there. What differs from the start before is printed; what changes the data or the
    model is refused unless --allow-changes names it.

    Example: shardkit train examples/stdlib_gpt.toml run.steps=200 --nproc 2
    """
    from shardkit_trainer import launch

    given = list(overrides or [])
    for setting in given:
        if "=" not in setting:
            raise ConfigurationError(f"{setting!r}: expected section.key=value after the configuration file")
    allowed = [key.strip() for key in allow_changes.split(",") if key.strip()]
    code = launch(config, given, nproc=nproc, restarts=restarts, allow_changes=allowed)
    if code:
        raise typer.Exit(code)
