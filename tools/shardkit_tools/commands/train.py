"""`shardkit train`: the bundled trainer."""

from __future__ import annotations

from typing import Annotated

import typer

from shardkit.errors import ConfigurationError

__all__ = ["train"]


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
) -> None:
    """Train a model on a dataset, resuming from the run directory's newest checkpoint.

    The run directory keeps the settings, checkpoints, metrics and the ledger. Ctrl-C saves and stops; the same command,
    with any --nproc, goes on from there.

    Example: shardkit train examples/stdlib_gpt.toml run.steps=200 --nproc 2
    """
    from shardkit_trainer import launch

    settings = list(overrides or [])
    for setting in settings:
        if "=" not in setting:
            raise ConfigurationError(f"{setting!r}: expected section.key=value after the configuration file")
    code = launch(config, settings, nproc=nproc, restarts=restarts)
    if code:
        raise typer.Exit(code)
