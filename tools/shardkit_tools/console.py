"""How commands print: pages and tables for people on a terminal, plain lines elsewhere, one JSON document on demand.

Terminal: ids are shortened, tables fit the window. Elsewhere: everything is whole, columns are separated by
two spaces or more, so that `awk` and `grep` find what they look for. What is not printable is escaped here, whatever
its source. Values as people read them are at the end: sizes, counts, times, shares, digests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import typer

from shardkit.errors import MissingDependency, StoreError
from shardkit.exit_codes import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_ID_DIGITS = 12
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SIZES = ("size", "block_size", "shard_size")  # other names of bytes
_LISTED = 20  # of a list that are printed
_LINE = 100  # characters of a list that stand on one line


def print_json(document: object) -> None:
    """Print one JSON document to standard output; see `plain`."""
    sys.stdout.write(json.dumps(plain(document), indent=2, ensure_ascii=False) + "\n")


def plain(value: Any) -> Any:
    """A value as JSON has it: dataclasses and named tuples are objects of their fields, what is infinite is null."""
    if dataclasses.is_dataclass(value):
        value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return None if value == math.inf else value


def present(
    as_json: bool,
    document: Callable[[], Any],
    page: Callable[[], None] | None = None,
    exit_code: int = ExitCode.DONE,
) -> None:
    """Print a result for machines or for people; then the command ends, if it has another exit code than 0."""
    if as_json:
        print_json(document())
    elif page is None:
        print_document(document())
    else:
        page()
    if exit_code:
        raise typer.Exit(exit_code)


def print_line(text: str = "", style: str = "") -> None:
    """Print a line of text; a terminal wraps it by itself, so that paths and digests can be copied whole."""
    if is_terminal():
        from rich.text import Text

        _console().print(Text(clean(text), style=style), soft_wrap=True)
    else:
        sys.stdout.write(clean(text) + "\n")


def print_heading(text: str) -> None:
    """Print what the lines below it are about, after an empty line."""
    print_line()
    print_line(text, "bold")


def print_facts(facts: Iterable[tuple[str, object]], indent: int = 0) -> None:
    """Print names and values, one pair a line; those without a value (None) are left out."""
    shown = [(clean(name), _cell(value)) for name, value in facts if value is not None]
    if not is_terminal():
        _print_plain(("", ""), shown, indent)
    elif shown:
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in shown:
            grid.add_row(Text(name), Text(value))
        _console().print(Padding(grid, (0, 0, 0, indent)))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; a column whose heading starts with `>` is set to the right, one with `*` may be wrapped."""
    headings = [clean(column.lstrip(">*")) for column in columns]
    if not is_terminal():
        _print_plain(columns, [headings, *([_cell(cell, ", ") for cell in row] for row in rows)])
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
        table.add_row(*(Text(_cell(cell)) for cell in row))
    _console().print(table)


def print_document(document: object, most: int | None = 20, more: str = " (--json lists all)") -> None:
    """Print for people what ``--json`` gives to machines, under the same names: facts, then tables and parts.

    Names tell units: ``bytes`` in them means sizes, ``_s`` or ``seconds`` at their end times, ``share`` shares. What is
    empty is left out. Records, in a list or by name, are a table.
    """
    shown = {name: value for name, value in plain(document).items() if value not in (None, "", [], {})}
    parts = {name: value for name, value in shown.items() if _is_nested(value) or _is_long(value)}
    print_facts((name, value_text(name, value)) for name, value in shown.items() if name not in parts)
    for name, part in parts.items():
        records = _records(part)
        if records:
            print_heading(name)
            _print_records(records[:most])
            print_more(0 if most is None else len(records) - most, more)
            continue
        for one in part if isinstance(part, list) and isinstance(part[0], dict) else [part]:
            print_heading(name)
            if isinstance(one, dict):
                print_document(one, most, more)
            else:
                print_list((value_text(name, text) for text in one), _LISTED)


def _is_nested(value: Any) -> bool:
    """Whether a value has names in it."""
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_is_nested, value)))


def _is_long(value: Any) -> bool:
    return isinstance(value, list) and sum(map(len, map(str, value))) > _LINE


def _records(value: Any) -> list[dict[str, Any]]:
    """The rows of a table; none where a value is something else."""
    if isinstance(value, dict) and all(isinstance(one, dict) for one in value.values()):
        value = [{"": name, **one} for name, one in value.items()]
    is_table = isinstance(value, list) and all(isinstance(one, dict) for one in value)
    return value if is_table and not any(map(_is_nested, itertools.chain(*map(dict.values, value)))) else []


def _print_records(records: Sequence[Mapping[str, Any]]) -> None:
    names = list(dict.fromkeys(name for record in records for name in record))
    numbers = {
        name for record in records for name, value in record.items() if isinstance(value, (int, float))
    }
    print_table(
        [f"{'>' if name in numbers else '*'}{name}" for name in names],
        [[value_text(name, record.get(name, "")) for name in names] for record in records],
    )


def value_text(name: str, value: object) -> str:
    """A value of a document for people, in the unit that its name tells."""
    if isinstance(value, (list, tuple)):
        more = [f"… and {count_text(len(value) - _LISTED)} more"] if len(value) > _LISTED else []
        texts = (
            " ".join(map(str, one)) if isinstance(one, list) else value_text(name, one)
            for one in value[:_LISTED]
        )
        return ", ".join([*texts, *more])
    if value is None or isinstance(value, bool):
        return "–" if value is None else "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return str(value)
    if ("bytes" in name.split("_") or name in _SIZES) and value >= 0:
        return bytes_text(round(value))
    if name.endswith(("_s", "seconds")):
        return duration_text(value)
    if name.endswith("share"):
        return f"{100 * value:.3g} %"
    if isinstance(value, int):
        return count_text(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _print_plain(columns: Sequence[str], lines: Sequence[Sequence[str]], indent: int = 0) -> None:
    from rich.cells import cell_len

    widths = [max(map(cell_len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        cells = []
        for column, cell, width in zip(columns, line, widths, strict=True):
            room = " " * (width - cell_len(cell))
            cells.append(room + cell if column.startswith(">") else cell + room)
        sys.stdout.write(" " * indent + "  ".join(cells).rstrip() + "\n")


def _cell(value: object, between: str = "\n") -> str:
    return between.join(map(_cell, value)) if isinstance(value, list) else clean(str(value))


def print_more(left_out: int, where: str = " (--json lists all)") -> None:
    """Say that there is more than was shown, and where; nothing where there is not."""
    if left_out > 0:
        print_line(f"… and {count_text(left_out)} more{where}")


def print_list(lines: Iterable[str], most: int) -> None:
    """Print the first lines of a list, indented, and how many more there are."""
    given = list(lines)
    for line in given[:most]:
        print_line(f"  {line}")
    print_more(len(given) - most)


def pyplot(command: str) -> Any:
    """`matplotlib.pyplot`, for pictures in files."""
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
    """A file that is made, open for writing."""
    try:
        return path.open("xb")
    except OSError as error:
        raise StoreError(f"{path}: cannot be made ({error.strerror}); name a new file in a folder") from error


class LogHandler(logging.Handler):
    """Lines of the library's log on standard error; a status line that stands there makes room."""

    def emit(self, record: logging.LogRecord) -> None:
        start = "\r\x1b[K" if sys.stderr.isatty() else ""
        sys.stderr.write(f"{start}{clean(record.getMessage())}\n")
        sys.stderr.flush()


class StatusLine:
    """One line of standard error that is kept up to date while somebody looks; nothing elsewhere."""

    def __init__(self) -> None:
        self._is_seen = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def show(self, text: str) -> None:
        if self._is_seen:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\x1b[K{text[:width]}")
            sys.stderr.flush()

    def clear(self) -> None:
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


# ---- Values


def is_terminal() -> bool:
    """Whether a person looks at standard output (TTY_COMPATIBLE=1 says yes where it cannot be seen)."""
    from rich.console import Console  # where it is needed: pages of help need none of rich

    return Console().is_terminal


def clean(text: str) -> str:
    """Text on one line, with what is not printable as a backslash escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        one
        if one.isprintable() and unicodedata.category(one) not in ("Cf", "Co")
        else one.encode("unicode_escape").decode()
        for one in text
    )


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
    """A time for people: 12.1 ms, 1.8 s, 42 s, 3:07 min, 5:20 h."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms" if seconds > 0 else "0 s"
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
