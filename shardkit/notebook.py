"""Facts as a notebook shows them: a line and tables, without scripts or addresses, everything escaped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

_TABLE = ' style="border-collapse:collapse;margin:0 0 1em"'
_LEFT = (
    ' style="text-align:left;padding:2px 16px 2px 0"'  # notebooks align numbers, and heads, each in their way
)

pages: dict[type, Callable[[Any], str]] = {}
"""Class → what makes its page; packages say it, so that a class need not know what reports on it."""


class Shown:
    """What a notebook shows as its page."""

    def _repr_html_(self) -> str:
        return pages[type(self)](self)


def escape(text: str) -> str:
    """Text as HTML shows it."""
    import html  # here, for it brings a table of all entities

    return html.escape(text)


def table(names: Sequence[str], rows: Iterable[Sequence[object]], most: int = 12) -> str:
    """HTML of the first rows, and how many more there are."""
    given = list(rows)
    head = "".join(f'<th scope="col"{_LEFT}>{escape(name)}</th>' for name in names)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in given[:most])
    more = f"<p>… and {len(given) - most:,} more</p>" if len(given) > most else ""
    return f"<table{_TABLE}><tr>{head}</tr>{body}</table>{more}"


def page(kind: str, name: str, said: str, *parts: str) -> str:
    """What it is, its name, one line of facts, and parts that are HTML already."""
    head = f"<p><b>shardkit {escape(kind)}</b> <code>{escape(name)}</code>, {escape(said)}</p>"
    return f"<div>{head}{''.join(parts)}</div>"


def _cell(value: object) -> str:
    return f"<td{_LEFT}>{escape(f'{value:,}' if isinstance(value, int) else str(value))}</td>"
