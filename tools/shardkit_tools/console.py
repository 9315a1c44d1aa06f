"""Print the results of commands: pages and tables on a terminal, plain lines otherwise, JSON on request.

On a terminal, tables fit the window: ids are shortened and columns without a value left out. Otherwise nothing is left
out, and columns are separated by at least two spaces, so that `awk` and `grep` work. Unprintable characters are always
escaped. The last section formats values: sizes, counts, times, shares, digests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import typer

from shardkit.errors import MissingDependency, StoreError, UsageError
from shardkit.exit_codes import ExitCode
from shardkit.extras import install_command

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

LINE_INTERVAL_S = 30.0
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_ID_DIGITS = 12
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SIZES = ("size", "block_size", "shard_size")  # further names of values in bytes
_LISTED = 20  # number of printed entries of a list
_LINE = 100  # largest number of characters of a list printed on one line


Facts = Sequence[tuple[str, object]]
"""Names and values; a value that is None is not printed."""


def print_json(document: object) -> None:
    """Print a value as one JSON document to standard output, converted by `plain`."""
    sys.stdout.write(json.dumps(plain(document), indent=2, ensure_ascii=False) + "\n")


def plain(value: Any) -> Any:
    """Convert a value to JSON types. Dataclasses and named tuples become objects, infinity becomes null.

    The properties ``verdict`` and ``exit_code`` of a result are listed after its fields.
    """
    if dataclasses.is_dataclass(value):
        names = [one.name for one in dataclasses.fields(value)]
        names += [name for name in ("verdict", "exit_code") if hasattr(value, name)]
        value = {name: getattr(value, name) for name in names}
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
    """Print a result, and end the command if the exit code is not 0.

    Without `page`, the document is printed as text by `print_document`.
    """
    if as_json:
        print_json(document())
    elif page is None:
        print_document(document())
    else:
        page()
    if exit_code:
        raise typer.Exit(exit_code)


def print_line(text: str = "", style: str = "") -> None:
    """Print a line of text without inserting line breaks, so that long paths and digests can be copied."""
    if is_terminal():
        from rich.text import Text

        _console().print(Text(clean(text), style=style), soft_wrap=True)
    else:
        sys.stdout.write(clean(text) + "\n")


def print_heading(text: str) -> None:
    """Print an empty line and a heading."""
    print_line()
    print_line(text, "bold")


def print_facts(facts: Iterable[tuple[str, object]], indent: int = 0) -> None:
    """Print names and values, one pair per line. Values that are None are skipped."""
    shown = [(clean(name), _cell(value)) for name, value in facts if value is not None]
    if not is_terminal():
        _print_plain(("", ""), shown, indent)
    elif shown:
        from rich.cells import cell_len, set_cell_size
        from rich.text import Text

        terminal = _console()
        names = indent + max(cell_len(name) for name, _ in shown) + 2
        for name, value in shown:
            text = Text(value)  # a value of one word, such as an id, is not broken: it can be copied
            lines = text.wrap(terminal, max(1, terminal.width - names)) if " " in value else text.split("\n")
            for number, line in enumerate(lines):
                label = set_cell_size("" if number else " " * indent + name, names)
                terminal.print(Text.assemble((label, "dim"), line), soft_wrap=True)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    heading: str = "",
    most: int | None = None,
    more: str = " (--json lists all)",
) -> None:
    """Print a table. A column whose heading starts with `>` is right-aligned; one with `*` may be wrapped.

    A table with a `heading` is not printed if it has no rows. Rows after the first `most` are counted.
    """
    given = list(rows)
    if heading and given:
        print_heading(heading)
    if given or not heading:
        _print_rows(columns, given[:most])
    print_more(0 if most is None else len(given) - most, more)


def _print_rows(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    headings = [clean(column.lstrip(">*")) for column in columns]
    if not is_terminal():
        _print_plain(columns, [headings, *([_cell(cell, ", ") for cell in row] for row in rows)])
        return
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    cells = [[short_ids(_cell(cell)) for cell in row] for row in rows]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    filled = [i for i in range(len(columns)) if not cells or any(row[i] not in ("", "–") for row in cells)]
    for column, heading in ((columns[i], headings[i]) for i in filled):
        wraps = column.startswith("*")
        table.add_column(
            heading,
            justify="right" if column.startswith(">") else "left",
            no_wrap=not wraps,
            overflow="fold" if wraps else "ellipsis",
            min_width=cell_len(heading),
        )
    for row in cells:
        table.add_row(*(Text(row[i]) for i in filled))
    _console().print(table)


def print_document(document: object, most: int | None = 20, more: str = " (--json lists all)") -> None:
    """Print the document of ``--json`` as text under the same names: single values, then tables and nested parts.

    Names determine units (`value_text`). Empty values are skipped. Records, in a list or by name, form a table.
    """
    shown = {name: value for name, value in plain(document).items() if value not in (None, "", [], {})}
    parts = {name: value for name, value in shown.items() if _is_nested(value) or _is_long(value)}
    print_facts((name, value_text(name, value)) for name, value in shown.items() if name not in parts)
    for name, part in parts.items():
        records = _records(part)
        if records:
            _print_records(name, records, most, more)
            continue
        for one in part if isinstance(part, list) and isinstance(part[0], dict) else [part]:
            print_heading(name)
            if isinstance(one, dict):
                print_document(one, most, more)
            else:
                print_list((value_text(name, text) for text in one), _LISTED)


def _is_nested(value: Any) -> bool:
    """Return True if a value is or contains a mapping."""
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_is_nested, value)))


def _is_long(value: Any) -> bool:
    return isinstance(value, list) and sum(map(len, map(str, value))) > _LINE


def _records(value: Any) -> list[dict[str, Any]]:
    """Return the value as rows of a table, or an empty list if it is not a table of plain values."""
    if isinstance(value, dict) and all(isinstance(one, dict) for one in value.values()):
        value = [{"": name, **one} for name, one in value.items()]
    is_table = isinstance(value, list) and all(isinstance(one, dict) for one in value)
    return value if is_table and not any(map(_is_nested, itertools.chain(*map(dict.values, value)))) else []


def _print_records(heading: str, records: Sequence[Mapping[str, Any]], most: int | None, more: str) -> None:
    names = list(dict.fromkeys(name for record in records[:most] for name in record))
    numbers = {
        name for record in records[:most] for name, value in record.items() if isinstance(value, (int, float))
    }
    rows = [[value_text(name, record.get(name, "")) for name in names] for record in records]
    columns = [f"{'>' if name in numbers else '*'}{name}" for name in names]
    print_table(columns, rows, heading=heading, most=most, more=more)


def print_findings(
    heading: str, found: Iterable[tuple[str, Facts]], style: str, *, are_grouped: bool = False
) -> None:
    """Print findings, each as its name and facts; nothing if there are none.

    If `are_grouped`, findings with equal facts are printed once, with the number of the remaining ones.
    """
    groups: dict[object, tuple[str, Facts, int]] = {}
    for number, (name, facts) in enumerate(found):
        key = tuple(facts) if are_grouped else number
        first, _, others = groups.get(key, (name, facts, -1))
        groups[key] = first, facts, others + 1
    if groups:
        print_heading(heading)
    for name, facts, others in list(groups.values())[:_LISTED]:
        print_line(f"{name} and {count_text(others)} more" if others else name, style)
        print_facts(facts, indent=2)
    print_more(len(groups) - _LISTED)


def value_text(name: str, value: object) -> str:
    """Return a value of a document as text, in the unit given by its name.

    Names with ``bytes`` are sizes, names ending in ``_s`` or ``seconds`` times, names ending in ``share`` shares.
    """
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
    """Print the number of omitted entries and where to find them, if any were omitted."""
    if left_out > 0:
        print_line(f"… and {count_text(left_out)} more{where}")


def print_list(lines: Iterable[str], most: int) -> None:
    """Print the first `most` lines of a list, indented, and the number of further lines."""
    given = list(lines)
    for line in given[:most]:
        print_line(f"  {line}")
    print_more(len(given) - most)


def pyplot(command: str) -> Any:
    """Import `matplotlib.pyplot` with a backend that draws to files.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl

        mpl.use("agg")
        from matplotlib import pyplot as plt
    except ImportError:
        raise MissingDependency(
            f"{command}: --plot needs matplotlib; run: {install_command('plot')}"
        ) from None
    return plt


def save_figure(plt: Any, figure: Any, path: Path) -> None:
    """Write a figure of `pyplot` into a file, and close it.

    Raises:
        UsageError: the file cannot be written, or its name has no extension of a picture.
    """
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path}: {error}; name a picture in a folder, such as plan.png") from None
    finally:
        plt.close(figure)


def new_file(path: Path) -> BinaryIO:
    """Create a file and open it for writing.

    Raises:
        StoreError: the file exists or cannot be created.
    """
    try:
        return path.open("xb")
    except OSError as error:
        raise StoreError(f"{path}: cannot be made ({error.strerror}); name a new file in a folder") from error


class LogHandler(logging.Handler):
    """Write the library's log to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"{clean(record.getMessage())}\n")
        sys.stderr.flush()


class StatusLine:
    """Progress on standard error: a line that is updated in place on a terminal, elsewhere a new line every 30 s."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._written = time.monotonic()

    def show(self, text: str) -> None:
        if self._live is None and sys.stderr.isatty():
            self._live = _start_live()
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(clean(text), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif time.monotonic() - self._written >= LINE_INTERVAL_S:
            self._written = time.monotonic()
            sys.stderr.write(f"{clean(text)}\n")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _start_live() -> Live | None:
    """Return a started display on standard error, or None if the terminal cannot update a line in place."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    if not console.is_interactive:
        return None
    # Nothing moves between updates, so no thread is needed. Standard output may be another place.
    live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
    live.start()
    return live


@contextlib.contextmanager
def long_work() -> Iterator[StatusLine]:
    """Yield a status line and clear it at the end."""
    status = StatusLine()
    try:
        yield status
    finally:
        status.clear()


def _console() -> Console:
    from rich.console import Console  # imported late: help pages do not need rich

    return Console(highlight=False, markup=False, emoji=False)


# ---- Values


def is_terminal() -> bool:
    """Return True if standard output is a terminal, or if TTY_COMPATIBLE=1 is set."""
    from rich.console import Console  # imported late: help pages do not need rich

    return Console().is_terminal


def clean(text: str) -> str:
    """Return the text on one line, with unprintable characters as backslash escapes."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        one
        if one.isprintable() and unicodedata.category(one) not in ("Cf", "Co")
        else one.encode("unicode_escape").decode()
        for one in text
    )


def short_ids(text: str) -> str:
    """Return the text with its digests shortened by `short_id`."""
    return _DIGEST.sub(lambda found: short_id(found[0]), text)


def short_id(digest: str) -> str:
    """Return a digest, shortened if standard output is a terminal."""
    kind, colon, digits = digest.partition(":")
    return f"{kind}{colon}{digits[:_ID_DIGITS]}…" if is_terminal() and len(digits) > _ID_DIGITS else digest


def bytes_text(size: int) -> str:
    """Return a size with its unit, such as 812 bytes, 1.46 MiB, 12.3 GiB, 256 MiB."""
    value, unit = float(size), 0
    while value >= 1024 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    if not unit:
        return f"{size} byte{'s' if size != 1 else ''}"
    digits = f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
    return f"{digits.removesuffix('.00').removesuffix('.0')} {_UNITS[unit]}"


def count_text(count: int, noun: str = "", nouns: str = "") -> str:
    """Return a number with thousands separators, followed by the noun in singular or plural."""
    if not noun:
        return f"{count:,}"
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def range_text(least: str, most: str) -> str:
    """Return two values as a range, or one if they are equal."""
    return most if least == most else f"{least} to {most}"


def duration_text(seconds: float) -> str:
    """Return a duration with its unit, such as 12.1 ms, 1.8 s, 42 s, 3:07 min, 5:20 h."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms" if seconds > 0 else "0 s"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = int(seconds) // 60
    return (
        f"{minutes}:{int(seconds) % 60:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"
    )


def share_text(part: int, whole: int) -> str:
    """Return a share in per cent, with more digits for small shares."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.{1 if share >= 0.95 or not part else 2 if share >= 0.095 else 3}f} %"
