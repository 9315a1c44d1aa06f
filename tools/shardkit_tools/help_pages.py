"""Format help pages: usage, description, options by topic and an example, in at most 100 columns."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Sequence
from typing import Any, Final

from typer.core import TyperCommand, TyperGroup

FIRST_CONTACT_S: Final = 8.0
"""Default number of seconds to wait for the first answer of a store."""

_OF_ALL_COMMANDS: Final = (
    "--timeout SECONDS",
    f"Give up on a store that has not answered once by then ({FIRST_CONTACT_S:g} s).",
)
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
