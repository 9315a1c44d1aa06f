"""`shardkit train`: the bundled trainer."""

from __future__ import annotations

from typing import Annotated

import typer

from shardkit.errors import ConfigurationError, UsageError
from shardkit_tools import console, options
from shardkit_tools.options import ExcludeOption, SkipOption, WeightsOption, argument, option


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
        list[str] | None,
        argument("[KEY=VALUE]…", "Settings that replace those of the file, such as optimizer.lr=0.001."),
    ] = None,
    nproc: Annotated[int, option("--nproc N", "Ranks on this machine.", min=1)] = 1,
    nnodes: Annotated[
        str,
        option("--nnodes N|MIN:MAX", "Machines that train together; within the range they may come and go."),
    ] = "1",
    rendezvous: Annotated[
        str,
        option(
            "--rendezvous HOST:PORT",
            "Where the machines meet; the first one that is started at HOST serves it.",
        ),
    ] = "",
    max_restarts: Annotated[
        int | None,
        option(
            "--max-restarts N",
            "Failures after which ranks start again from the newest checkpoint; default: 0, with MIN:MAX 3.",
            min=0,
        ),
    ] = None,
    allow_changes: Annotated[
        str,
        option(
            "--allow-changes KEY,…",
            "Continue although these settings, which change the data or the model, differ from the last start.",
        ),
    ] = "",
    resume_from: Annotated[
        str,
        option(
            "--resume-from NAME",
            "Go back to this checkpoint, such as step-41000; later checkpoints are dropped.",
            "Amendments",
        ),
    ] = "",
    skip: SkipOption = "",
    exclude: ExcludeOption = None,
    weights: WeightsOption = None,
    message: options.MessageOption = "",
    settings: Annotated[
        bool,
        option(
            "--settings",
            "List all settings with their defaults and values.",
            is_eager=True,
            callback=_print_settings,
        ),
    ] = False,
) -> None:
    """Train a model on a dataset, resuming from the run directory's newest checkpoint.

    The run directory keeps the settings, checkpoints, metrics and the ledger. Ctrl-C saves and stops; the same command,
    with any --nproc, continues from there. Settings that differ from the previous start are printed; changes to
    the data or the model are refused unless --allow-changes names them.

    Several machines: start the same command on each, with --nnodes MIN:MAX and --rendezvous, and the run directory on
    storage that all of them share. A machine that is started later makes the job larger; one that is stopped or lost
    makes it smaller. Ranks save and restart when the machines change; a lost machine costs the steps since the newest
    checkpoint.

    --resume-from goes back to a checkpoint. --skip, --exclude and --weights amend the plan as `shardkit amend` does,
    from that checkpoint on if they name no step. The same command again continues: it does not go back a second time.

    Example: shardkit train examples/stdlib_gpt.toml run.steps=200 --nproc 2
    """
    import shardkit_trainer as trainer
    from shardkit_trainer.run_directory import check_changes

    if config is None:
        raise ConfigurationError("expected a configuration: shardkit train CONFIG [KEY=VALUE]…")
    allowed = [key.strip() for key in allow_changes.split(",") if key.strip()]
    if skip or exclude is not None or weights or resume_from:
        # they import audits, which most starts do not need
        from shardkit.audit.amendments import amend_run, next_start
        from shardkit_tools.commands.amend import change_request

        request = change_request(
            skip=skip,
            exclude=exclude,
            weights=weights,
            resume_from=_parse_checkpoint(resume_from) if resume_from else None,
        )
        loaded = trainer.load_configuration(config, overrides or [])
        check_changes(loaded, allowed)
        made = amend_run(loaded.run.directory, request, message=message)
        console.print_line(
            f"amendment {made.number}: {made}; continues from {next_start(loaded.run.directory)}"
        )
    code = trainer.launch(
        config, overrides or [], nproc=nproc, nnodes=nnodes, rendezvous=rendezvous, max_restarts=max_restarts,
        allow_changes=allowed,
    )  # fmt: skip
    if code:
        raise typer.Exit(code)


def _parse_checkpoint(name: str) -> int:
    digits = name.removeprefix("step-")
    if digits.isascii() and digits.isdigit() and len(digits) < 19:
        return int(digits)
    raise UsageError(f"--resume-from {name!r}: expected the name of a checkpoint, such as step-41000")
