"""How commands print: pages and tables for people on a terminal, plain lines elsewhere, one JSON document on demand.

Terminal: ids are shortened, tables fit the window. Elsewhere: everything is whole, columns are separated by
two spaces or more, so that `awk` and `grep` find what they look for. What comes out of a dataset (keys,
class names, text) may hold control characters; they are shown escaped, never sent to the terminal.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from shardkit.errors import MissingDependency, StoreError
from shardkit.exit_codes import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "JsonFlag",
    "LogHandler",
    "StatusLine",
    "bytes_text",
    "clean",
    "count_text",
    "duration_text",
    "is_terminal",
    "long_work",
    "new_file",
    "present",
    "print_facts",
    "print_heading",
    "print_json",
    "print_line",
    "print_more",
    "print_table",
    "pyplot",
    "share_text",
    "short_id",
    "short_ids",
]

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_ID_DIGITS = 12
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def is_terminal() -> bool:
    """Whether a person looks at standard output (TTY_COMPATIBLE=1 says yes where it cannot be seen)."""
    return _console().is_terminal


def print_json(document: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print one JSON document to standard output."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def present(
    as_json: bool, document: Callable[[], Any], page: Callable[[], None], exit_code: int = ExitCode.DONE
) -> None:
    """Print a result for machines or for people; then the command ends, if it has another exit code than 0."""
    if as_json:
        print_json(document())
    else:
        page()
    if exit_code:
        raise typer.Exit(exit_code)


def print_line(text: str = "", style: str = "") -> None:
    """Print a line of text; a terminal wraps it by itself, so that paths and digests can be copied whole."""
    if is_terminal():
        from rich.text import Text

        _console().print(Text(text, style=style), soft_wrap=True)
    else:
        sys.stdout.write(text + "\n")


def print_heading(text: str) -> None:
    """Print what the lines below it are about, after an empty line."""
    print_line()
    print_line(text, "bold")


def print_facts(facts: Sequence[tuple[str, str]], indent: int = 0) -> None:
    """Print names and values, one pair a line."""
    if not facts:
        return
    width = max(len(name) for name, _ in facts)
    if not is_terminal():
        sys.stdout.writelines(f"{' ' * indent}{name:<{width}}  {value}\n" for name, value in facts)
        return
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(Text(name), Text(value))
    _console().print(Padding(grid, (0, 0, 0, indent)))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; a column whose heading starts with `>` is set to the right, one with `*` may be wrapped.

    Args:
        columns: headings.
        rows: as many texts each as there are columns.
    """
    headings = [column.lstrip(">*") for column in columns]
    if not is_terminal():
        _print_plain(columns, headings, rows)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column, heading in zip(columns, headings, strict=True):
        wraps = column.startswith("*")
        table.add_column(
            heading,
            justify="right" if column.startswith(">") else "left",
            no_wrap=not wraps,
            overflow="fold" if wraps else "ellipsis",
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    _console().print(table)


def _print_plain(columns: Sequence[str], headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    lines = [headings, *([cell.replace("\n", ", ") for cell in row] for row in rows)]
    widths = [max(_cells(line[place]) for line in lines) for place in range(len(headings))]
    for line in lines:
        cells = [
            " " * (width - _cells(cell)) + cell
            if column.startswith(">")
            else cell + " " * (width - _cells(cell))
            for column, cell, width in zip(columns, line, widths, strict=True)
        ]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def print_more(left_out: int, where: str = " (--json lists all)") -> None:
    """Say that there is more than was shown, and where; nothing where there is not."""
    if left_out > 0:
        print_line(f"… and {count_text(left_out)} more{where}")


def clean(text: str) -> str:
    """Text on one line, with what is not printable as a backslash escape."""
    return "".join(character if _is_printable(character) else _escaped(character) for character in text)


def short_ids(text: str) -> str:
    """Text with the digests in it shortened on a terminal."""
    return _DIGEST.sub(lambda found: short_id(found[0]), text)


def short_id(digest: str) -> str:
    """A digest as people read it on a terminal; the whole elsewhere."""
    kind, colon, digits = digest.partition(":")
    return f"{kind}{colon}{digits[:_ID_DIGITS]}…" if is_terminal() and len(digits) > _ID_DIGITS else digest


def bytes_text(size: int) -> str:
    """A size with its unit: 812 bytes, 1.46 MiB, 12.3 GiB, 256 MiB."""
    value, unit = float(size), 0
    while value >= 1024 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    if not unit:
        return f"{size} byte{'s' if size != 1 else ''}"
    digits = f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
    return f"{digits.removesuffix('.00').removesuffix('.0')} {_UNITS[unit]}"


def count_text(count: int, noun: str = "", nouns: str = "") -> str:
    """A number with its thousands set apart, and the noun in its number; ``nouns``: where s is not enough."""
    if not noun:
        return f"{count:,}"
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def duration_text(seconds: float) -> str:
    """A time for people: 0.8 s, 42 s, 3:07 min, 5:20 h."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = int(seconds) // 60
    return (
        f"{minutes}:{int(seconds) % 60:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"
    )


def share_text(part: int, whole: int) -> str:
    """A share in per cent, with more digits where it is small."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.{1 if share >= 0.95 or not part else 2 if share >= 0.095 else 3}f} %"


def pyplot(command: str) -> Any:
    """`matplotlib.pyplot`, for pictures in files.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        import matplotlib as mpl

        mpl.use("agg")
        from matplotlib import pyplot as plt
    except ImportError:
        raise MissingDependency(
            f'{command}: --plot needs matplotlib; run: pip install "shardkit[plot]"'
        ) from None
    return plt


def new_file(path: Path) -> BinaryIO:
    """A file that is made, open for writing.

    Raises:
        StoreError: it is there already, or cannot be made.
    """
    try:
        return path.open("xb")
    except OSError as error:
        raise StoreError(f"{path}: cannot be made ({error.strerror}); name a new file in a folder") from error


class LogHandler(logging.Handler):
    """Lines of the library's log on standard error; a status line that stands there makes room."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one."""
        start = "\r\x1b[K" if sys.stderr.isatty() else ""
        sys.stderr.write(f"{start}{clean(record.getMessage())}\n")
        sys.stderr.flush()


class StatusLine:
    """One line of standard error that is kept up to date while somebody looks; nothing elsewhere."""

    def __init__(self) -> None:
        self._is_seen = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def show(self, text: str) -> None:
        """Replace the line."""
        if self._is_seen:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\x1b[K{text[:width]}")
            sys.stderr.flush()

    def clear(self) -> None:
        """Take the line away."""
        self.show("")


@contextlib.contextmanager
def long_work() -> Iterator[StatusLine]:
    """A status line for work that takes its time."""
    status = StatusLine()
    try:
        yield status
    finally:
        status.clear()


def _console() -> Console:
    from rich.console import Console  # where it is needed: pages of help need none of rich

    return Console(highlight=False, markup=False, emoji=False)


def _cells(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def _is_printable(character: str) -> bool:
    return character.isprintable() and unicodedata.category(character) not in ("Cf", "Co")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
