"""The `shardkit` command: which subcommands there are, and what becomes of errors.

Exit codes: 0 done; 1 an error of the data, the store or the settings, told in one message; 2 a wrong command
line; 3 and more where a command says so; 130 after Ctrl-C. Only what shardkit did not raise on purpose shows
a traceback.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

import shardkit
from shardkit.errors import ShardkitError
from shardkit_tools.help_pages import CommandPage, GroupPage

__all__ = ["COMMANDS", "make_app", "run"]

COMMANDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Make a dataset", ("build", "adopt")),
    ("Look at it", ("ls", "show", "log", "diff", "cat", "find")),
    ("Make versions of it", ("tag", "select", "merge", "rebuild", "remove")),
    ("Keep it safe", ("replicate", "place", "scrub", "repair", "gc")),
    ("Check it, hand it on", ("verify", "audit", "serve", "export")),
    ("Train on it", ("plan", "train")),
    ("Watch a run", ("top", "dashboard", "report", "rehearse")),
    ("Size it, tune it", ("bench", "tune", "simulate")),
    ("Get to know shardkit", ("demo",)),
)
"""Headings and the modules of `shardkit_tools.commands` below them; each holds a function of the module's name, or a
group of commands."""

_INTRODUCTION = """Sharded, checksummed training data, from source files to optimizer step.

A dataset is a ROOT (a folder); its versions are ROOT@REF, such as data/cats@val, or ROOT@sha256:… by id.

Exit codes: 0 done, 1 error, 2 wrong command line, 130 interrupted; verify: 1 repaired, 2 data lost, 3 could
not check; audit: 1 explained, 2 violated, 3 could not check.

Example: shardkit build photos/ data/cats --stratify label && shardkit show data/cats
"""


def make_app(only: str | None = None) -> typer.Typer:
    """The command line as a typer app.

    Args:
        only: load this subcommand alone, so that a quick command does not wait for the imports of a slow one.
    """
    app = typer.Typer(
        name="shardkit",
        help=_INTRODUCTION,
        no_args_is_help=False,
        invoke_without_command=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        cls=GroupPage,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(cls=GroupPage)(_overview)
    for heading, names in COMMANDS:
        for name in names:
            module = f"shardkit_tools.commands.{name}"
            if only in (None, name) and importlib.util.find_spec(module) is not None:
                command = getattr(importlib.import_module(module), name)
                if isinstance(command, typer.Typer):
                    app.add_typer(command, rich_help_panel=heading)
                else:
                    app.command(name, cls=CommandPage, rich_help_panel=heading)(command)
    return app


def _overview(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version of shardkit.")] = False,
) -> None:
    """Show the page of all commands when none is given."""
    if version:
        typer.echo(f"shardkit {shardkit.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


_overview.__doc__ = _INTRODUCTION


def run(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `shardkit` command; ends the process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    known = {name for _, names in COMMANDS for name in names}
    try:
        make_app(given[0] if given and given[0] in known else None)(given)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        _leave_quietly()
    except ShardkitError as error:
        _fail(f"{error}", 2 if error.kind in ("usage", "configuration") else 1)
    except MemoryError:
        _fail(
            "memory ran out; use fewer --jobs or a smaller --memory where the command has them, or raise the limit "
            "(ulimit, container), then run the same command again",
            1,
        )
    except Exception:  # noqa: BLE001 - the last line of defence: say that it is ours, and show where
        traceback.print_exc()
        _fail(
            "this is a bug in shardkit; please report it with the lines above and the command: "
            f"{_shown(given)}",
            70,
        )


def _fail(message: str, code: int) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"shardkit: {message}\n")
    raise SystemExit(code)


def _leave_quietly() -> None:
    # Whoever read our output has gone. Python would complain once more when it flushes at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(141)


def _shown(arguments: Sequence[str]) -> str:
    return " ".join(["shardkit", *arguments])
