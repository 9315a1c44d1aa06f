"""The `shardkit` command: the list of subcommands, their help pages, the option ``--timeout``, and error handling.

`shardkit.exit_codes` defines the exit codes. Only unexpected errors show a traceback.
"""

from __future__ import annotations

import errno
import gc
import importlib
import importlib.util
import inspect
import logging
import math
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from importlib.abc import InspectLoader
from types import CodeType
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

import shardkit
from shardkit.credentials import hide_credentials, refuse_credentials
from shardkit.errors import ShardkitError, UsageError
from shardkit.exit_codes import ExitCode, exit_code
from shardkit.ranges import Range
from shardkit.stores.waiting import FIRST_CONTACT
from shardkit_tools import console
from shardkit_tools.console import clean
from shardkit_tools.options import advice_for

FIRST_CONTACT_S: Final = 8.0
"""Default number of seconds to wait for the first answer of a store."""

_OF_ALL_COMMANDS: Final = (
    "--timeout SECONDS",
    f"Give up on a store that has not answered within this time ({FIRST_CONTACT_S:g} s).",
)
_OUTPUT_ERRORS: Final = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_WIDEST = 100
_TERM_WIDEST = 28


class CommandPage(TyperCommand):
    """A subcommand with a help page."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page; called by typer for ``--help``."""
        arguments = [
            (_argument_name(one), getattr(one, "help", None) or "")
            for one in self.params
            if one.param_type_name == "argument"
        ]
        panels: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            record = one.get_help_record(ctx) if one.param_type_name == "option" else None
            if record is not None:
                panels.setdefault(getattr(one, "rich_help_panel", None) or "Options", []).append(record)
        panels.setdefault("Options", []).append(_OF_ALL_COMMANDS)
        ordered = sorted(panels.items(), key=lambda panel: panel[0] == "Options")
        _write(
            formatter,
            " ".join([ctx.command_path, *(name for name, _ in arguments), "[OPTIONS]"]),
            self.help,
            [("Arguments", arguments), *ordered],
        )


class GroupPage(TyperGroup):
    """The overview of all commands, grouped by task."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page; called by typer for ``--help`` and if no command is given."""
        panels: dict[str, list[tuple[str, str]]] = {}
        widest = max((len(name) for name in self.commands), default=0)
        for name, command in self.commands.items():
            heading = getattr(command, "rich_help_panel", None) or "Commands"
            first = inspect.cleandoc(command.help or "").partition("\n\n")[0]
            panels.setdefault(heading, []).append((name.ljust(widest), " ".join(first.split())))
        path = ctx.command_path
        more = (
            "" if ctx.parent else f"; {path} --version\nCompletion in your shell: {path} --install-completion"
        )
        end = f"\nEvery command has a page of its own: {path} COMMAND --help{more}\n"
        _write(formatter, f"{path} COMMAND …", self.help, list(panels.items()), end)


def _write(
    formatter: Any,
    usage: str,
    said: str | None,
    sections: Sequence[tuple[str, Sequence[tuple[str, str]]]],
    end: str = "",
) -> None:
    """Write the usage, the docstring's paragraphs, the terms by topic, and the docstring's final example."""
    text, _, example = inspect.cleandoc(said or "").partition("\n\nExample: ")
    formatter.width = min(_WIDEST, shutil.get_terminal_size().columns) - 1
    formatter.write(f"{usage}\n\n")
    with formatter.indentation():
        formatter.write_text(text)
    for heading, terms in sections:
        if terms:
            formatter.write(f"\n{heading}\n")
            with formatter.indentation():
                formatter.write_dl(terms, _TERM_WIDEST)
    formatter.write(end)
    if example:
        formatter.write("\nExample\n")
        with formatter.indentation():
            formatter.write_text(example)


def _argument_name(argument: Any) -> str:
    name = argument.metavar or (argument.name or "").upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


COMMANDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Make a dataset", ("build", "adopt")),
    ("Look at it", ("ls", "show", "log", "diff", "cat", "find")),
    ("Make versions of it", ("tag", "select", "extend", "merge", "rebuild", "remove")),
    ("Keep it safe", ("replicate", "place", "scrub", "repair", "gc")),
    ("Check it, hand it on", ("verify", "audit", "export")),
    ("Train on it", ("plan", "train", "amend")),
    ("Watch a run", ("top", "dashboard")),
    ("Size it, tune it", ("tune", "simulate")),
)
"""Headings of the overview and their modules of `shardkit_tools.commands`.

A module holds a function of the same name or, if it has subcommands, a typer app `group`.
"""

CHECKS = ("verify", "scrub", "repair", "audit")
"""Commands that check data. If they cannot reach the data, the result is "could not check", not a failure."""

READERS = ("adopt", "extend")
"""Commands that read sources as `build` does, with fewer options."""

_INTRODUCTION = """Sharded, checksummed training data, from source files to optimizer step.

A dataset is a ROOT (a folder); its versions are ROOT@REF, such as data/cats@val, or ROOT@sha256:… by id.

Exit codes: 0 done (clean, or made clean), 1 could not do its work, 2 wrong command line, 3 could not check,
4 damaged and not repaired, lost, or an audit violated, 5 the answer is no, 130 interrupted.

Example: shardkit build photos/ data/cats --stratify label && shardkit show data/cats
"""


class _Program(GroupPage):
    """All commands. Reports interrupts, which typer does not."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; called by typer."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()  # Python's own flush at the end of the process would print an exception
        except KeyboardInterrupt as interrupt:
            _fail(str(interrupt) or "interrupted", exit_code(interrupt))
        except ShardkitError:  # a StoreError is an OSError, of another file
            raise
        except OSError as error:
            if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
                raise
            # Standard output has no reader, or no room. /dev/null prevents a second error at the flush on exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if error.errno == errno.EPIPE:
                raise SystemExit(141) from None
            _fail(f"the output cannot be written: {error.strerror}", ExitCode.FAILED)


def make_app(only: str | None = None) -> typer.Typer:
    """Return the command line as a typer app."""
    app = typer.Typer(
        name="shardkit",
        help=_INTRODUCTION,
        no_args_is_help=False,
        invoke_without_command=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        cls=_Program,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(cls=_Program)(_overview)
    for heading, names in COMMANDS:
        for name in names if only is None else {only} & {*names}:
            module = importlib.import_module(f"shardkit_tools.commands.{name}")
            if hasattr(module, "group"):
                app.add_typer(module.group, name=name, rich_help_panel=heading)
            else:
                app.command(name, cls=CommandPage, rich_help_panel=heading)(getattr(module, name))
    return app


def _overview_app() -> typer.Typer:
    """Return the command line with the help of every command, without importing their modules."""
    app = make_app("")
    for heading, names in COMMANDS:
        for name in names:
            app.command(name, cls=CommandPage, rich_help_panel=heading, help=_docstring(name))(lambda: None)
    return app


def _docstring(name: str) -> str:
    """Return the help of a command from its compiled code.

    Importing all commands would load numpy and pyarrow and take seconds.
    """
    module = f"shardkit_tools.commands.{name}"
    loader = getattr(importlib.util.find_spec(module), "loader", None)
    assert isinstance(loader, InspectLoader), "a command is a module"
    code = loader.get_code(module)
    assert code is not None, "a command is written in Python"
    own = next(one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == name)
    return str(own.co_consts[0])


def _overview(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version of shardkit.")] = False,
) -> None:
    """Show the overview if no command is given."""
    if version:
        typer.echo(f"shardkit {shardkit.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


_overview.__doc__ = _INTRODUCTION


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the `shardkit` command and end the process with its exit code."""
    # Most objects are of imported modules and live to the end: searching them for garbage again and again took a tenth
    # of a short command.
    gc.set_threshold(20_000, 20, 50)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller: no file of a dataset may get its descriptor
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = None
    log = logging.getLogger("shardkit")
    if not any(isinstance(one, console.LogHandler) for one in log.handlers):
        log.addHandler(console.LogHandler())
    try:
        for number, argument in enumerate(given, 1):
            refuse_credentials(argument, f"argument {number}")  # arguments are printed and recorded
        typed = given = _take_timeout(given)
        if "_SHARDKIT_COMPLETE" in os.environ:
            # shell completion: bash sets COMP_WORDS, other shells _TYPER_COMPLETE_ARGS
            typed = (os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()[1:]
        known = {name for _, names in COMMANDS for name in names}
        command = typed[0] if typed and typed[0] in known else None
        # Without a command the overview is shown. For an unknown command typer lists the known ones.
        is_overview = command is None and (not given or given[0].startswith("-"))
        (_overview_app() if is_overview else make_app(command))(given)
    except KeyboardInterrupt as interrupt:
        _fail("interrupted", exit_code(interrupt))
    except ShardkitError as error:
        code, text = exit_code(error, checking=command in CHECKS), str(error)
        if command in READERS:
            program: Any = typer.main.get_command(make_app(command))
            text = advice_for(program.commands[command], text)
        _fail(f"could not check: {text}" if code == ExitCode.UNCHECKED else text, code)
    except MemoryError as error:
        _fail(
            "memory ran out; use fewer --jobs or a smaller --memory where the command has them, or raise the limit "
            "(ulimit, container), then run the same command again",
            exit_code(error),
        )
    except Exception as error:  # noqa: BLE001 - the last line of defence: say that it is ours, and show where
        if not _has_folder():
            _fail(
                "the current folder no longer exists; change to another one, then run it again",
                ExitCode.FAILED,
            )
        traceback.print_exc()
        _fail(
            "this is a bug in shardkit; please report it with the lines above and the command: "
            + " ".join(["shardkit", *given]),
            exit_code(error),
        )
    finally:
        FIRST_CONTACT.limit_s = math.inf


def _has_folder() -> bool:
    """Return False if the current folder was removed: no relative path can be resolved then."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _take_timeout(given: list[str]) -> list[str]:
    """Apply the option ``--timeout SECONDS`` of all commands and return the other arguments."""
    FIRST_CONTACT.limit_s = FIRST_CONTACT_S
    for place, argument in enumerate(given):
        if argument == "--":
            break
        name, equals, text = argument.partition("=")
        if name == "--timeout":
            end = place + (1 if equals else 2)
            text = text if equals else "".join(given[place + 1 : end])
            try:
                FIRST_CONTACT.limit_s = Range(0, 604_800, above=True).check("--timeout", float(text), float)
            except ValueError:
                raise UsageError(f"--timeout {text[:40]!r}: expected seconds, such as 30") from None
            return given[:place] + given[end:]
    return given


def _fail(message: str, code: int) -> NoReturn:
    sys.stdout.flush()
    lines = "\n".join(
        clean(line) for line in hide_credentials(message).split("\n")
    )  # the message contains untrusted names and values
    sys.stderr.write(f"shardkit: {lines}\n")
    raise SystemExit(code)
