"""Help as a page that a person can read: usage, what it does, options by topic, an example; at most 100 columns."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterable
from enum import Enum
from typing import Any

from typer.core import TyperCommand, TyperGroup

_WIDEST = 100
_TERM_WIDEST = 28


class CommandPage(TyperCommand):
    """A subcommand with such a page."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page; called by typer for ``--help``."""
        said, example = _said(self.help or "")
        arguments = [param for param in self.params if param.param_type_name == "argument"]
        options = [param for param in self.get_params(ctx) if param.param_type_name == "option"]
        names = " ".join(_argument_name(argument) for argument in arguments)
        formatter.write(f"{ctx.command_path} {names} [OPTIONS]\n\n{said}\n")
        if arguments:
            formatter.write(_section("Arguments", [(_argument_name(a), _help(a)) for a in arguments]))
        panels: dict[str, list[Any]] = {}
        for option in options:
            panels.setdefault(getattr(option, "rich_help_panel", None) or "Options", []).append(option)
        for panel in sorted(panels, key=lambda panel: panel == "Options"):
            formatter.write(
                _section(panel, [(_option_name(option), _help(option)) for option in panels[panel]])
            )
        if example:
            formatter.write(f"\nExample\n{_indented(example)}\n")


class GroupPage(TyperGroup):
    """The overview of all commands, grouped by task."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page; called by typer for ``--help`` and for no command at all."""
        said, example = _said(self.help or "")
        formatter.write(f"{ctx.command_path} COMMAND …\n\n{said}\n")
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            heading = getattr(command, "rich_help_panel", None) or "Commands"
            first = inspect.cleandoc(command.help or "").partition("\n\n")[0]
            panels.setdefault(heading, []).append((name, " ".join(first.split())))
        widest = max((len(name) for name in self.commands), default=0)
        for heading, commands in panels.items():
            formatter.write(_section(heading, [(name.ljust(widest), text) for name, text in commands]))
        path = ctx.command_path
        version = (
            "" if ctx.parent else f"; {path} --version\nCompletion in your shell: {path} --install-completion"
        )
        formatter.write(
            f"\nEvery command has a page of its own: {ctx.command_path} COMMAND --help{version}\n"
        )
        if example:
            formatter.write(f"\nExample\n{_indented(example)}\n")


def _said(text: str) -> tuple[str, str]:
    """The paragraphs of a docstring, wrapped, and the example at its end."""
    paragraphs = [" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n")]
    example = ""
    if paragraphs and paragraphs[-1].startswith("Example: "):
        example = paragraphs.pop().removeprefix("Example: ")
    return "\n\n".join(_indented(paragraph) for paragraph in paragraphs), example


def _section(heading: str, items: Iterable[tuple[str, str]]) -> str:
    pairs = list(items)
    column = 2 + min(_TERM_WIDEST, max(len(term) for term, _ in pairs)) + 2
    lines = [f"\n{heading}"]
    for term, text in pairs:
        wrapped = textwrap.wrap(text, max(20, _width() - column)) or [""]
        head = f"  {term}"
        if len(head) + 2 > column:
            lines.append(head)
        else:
            lines.append(f"{head:<{column}}{wrapped.pop(0)}".rstrip())
        lines += [" " * column + line for line in wrapped]
    return "\n".join(lines) + "\n"


def _indented(text: str) -> str:
    return textwrap.fill(text, _width(), initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def _argument_name(argument: Any) -> str:
    name = argument.metavar or (argument.name or "").upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _option_name(option: Any) -> str:
    names = ", ".join(sorted([*option.opts], key=len))
    if option.secondary_opts:
        return f"{names} / {', '.join(option.secondary_opts)}"
    if option.is_flag or option.name == "help":
        return names
    return f"{names} {_metavar(option)}"


def _metavar(option: Any) -> str:
    """What stands for the value: given, or told by the default."""
    if option.metavar:
        return str(option.metavar)
    if isinstance(option.default, Enum):
        return "|".join(str(choice.value) for choice in type(option.default))
    return "N" if isinstance(option.default, int) else "TEXT"


def _help(param: Any) -> str:
    text = str(getattr(param, "help", None) or "")
    default = getattr(param.default, "value", param.default)
    is_told = isinstance(default, (str, int)) and not isinstance(default, bool) and default != ""
    if param.param_type_name == "option" and is_told and "default:" not in text:
        text = f"{text} (default: {default})"
    return text


def _width() -> int:
    return min(_WIDEST, shutil.get_terminal_size().columns) - 1
