"""`shardkit train`: the bundled trainer."""

from __future__ import annotations

from typing import Annotated

import typer

from shardkit.errors import ConfigurationError
from shardkit_tools import console
from shardkit_tools.options import argument, option


def _print_settings(asked: bool) -> None:
    if not asked:
        return
    from shardkit_trainer.configuration import Configuration, describe

    console.print_table(["setting", "default", "expected", "*meaning"], describe(Configuration))
    raise typer.Exit


def train(
    config: Annotated[
        str | None, argument("CONFIG", "A TOML file with the run's settings, or a run's run.json.")
    ] = None,
    overrides: Annotated[
        list[str] | None, argument("[KEY=VALUE]…", "Settings over the file's: optimizer.lr=0.001")
    ] = None,
    nproc: Annotated[int, option("--nproc", "Ranks on this machine.", min=1)] = 1,
    restarts: Annotated[
        int, option("--restarts", "How often ranks are started again after one has died.", min=0)
    ] = 0,
    allow_changes: Annotated[
        str,
        option(
            "--allow-changes KEY,…",
            "Go on although these settings differ from the start before and change the data or the model.",
        ),
    ] = "",
    join: Annotated[
        str, option("--join RUN", "Add --nproc ranks to those that train in RUN, here or on another machine.")
    ] = "",
    leave: Annotated[
        tuple[str, int] | None,
        typer.Option(
            "--leave", metavar="RUN RANK", help="Let one rank of RUN end: the others take over its lanes."
        ),
    ] = None,
    settings: Annotated[
        bool,
        option(
            "--settings", "List every setting, and what it may be.", is_eager=True, callback=_print_settings
        ),
    ] = False,
) -> None:
    """Train a model on a dataset, resuming from the run directory's newest checkpoint.

    The run directory keeps the settings, checkpoints, metrics and the ledger. Ctrl-C saves and stops; the same command,
    with any --nproc, goes on from there. What differs from the start before is printed; what changes the data or the
    model is refused unless --allow-changes names it.

    A run with parallel.recovery=in-process goes on when a rank dies, and takes in and lets go ranks between two steps:
    shardkit train --join RUN --nproc 1, shardkit train --leave RUN 0.

    Example: shardkit train examples/stdlib_gpt.toml run.steps=200 --nproc 2
    """
    import shardkit_trainer as trainer

    if leave is not None:
        console.print_line(trainer.leave(*leave))
        return
    given = list(overrides or [])
    if join and config is not None and "=" in config:
        given.insert(0, config)
        config = None
    if config is None and not join:
        raise ConfigurationError(
            "expected a configuration: shardkit train CONFIG [KEY=VALUE]…, or --join RUN"
        )
    allowed = [key.strip() for key in allow_changes.split(",") if key.strip()]
    if join:
        code = trainer.join(config, join, given, nproc=nproc, restarts=restarts)
    else:
        code = trainer.launch(config, given, nproc=nproc, restarts=restarts, allow_changes=allowed)
    if code:
        raise typer.Exit(code)
