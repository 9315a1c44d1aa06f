"""Short texts for printed values, and escaped HTML pages and tables, without scripts, for notebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

_TABLE = ' style="border-collapse:collapse;margin:0 0 1em"'
_LEFT = ' style="text-align:left;padding:2px 16px 2px 0"'  # notebooks differ in how they align numbers and headings

pages: dict[type, Callable[[Any], str]] = {}
"""Class → function that returns its HTML page. Packages register it, so that classes do not import reports."""


class NotebookPage:
    """Base of classes that a notebook shows as their page in `pages`."""

    def _repr_html_(self) -> str:
        return pages[type(self)](self)


def escape(text: str) -> str:
    """Escape text for HTML."""
    import html  # slow to import: it loads the table of all entities

    return html.escape(text)


_TEXT = 60  # characters shown of a text
_NUMBERS = 8  # longest array whose items are shown


def value_text(value: Any) -> str:
    """Return one short line that describes a value of a sample or a column of a batch.

    Examples: ``48 × bytes, 6 to 87 KiB``, ``int32[2048]``, ``'the first words…'``. Numbers and small arrays are shown
    in full.
    """
    if isinstance(value, bytes):
        return f"bytes, {_size_text(len(value))}"
    if isinstance(value, str):
        return repr(value if len(value) <= _TEXT else value[: _TEXT - 1] + "…")
    if isinstance(value, tuple) and len(value) in (2, 3) and all(hasattr(part, "shape") for part in value):
        lengths = value[1][1:] - value[1][:-1]
        spread = f", {int(lengths.min())} to {int(lengths.max())} items" if len(lengths) else ""
        return f"{len(lengths)} × {_dtype_text(value[0])}[*]{spread}"
    if isinstance(value, list):
        return _list_text(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        if value.shape and (len(value.shape) > 1 or value.shape[0] > _NUMBERS):
            return f"{_dtype_text(value)}[{','.join(map(str, value.shape))}]"
        return str(value.tolist())
    text = repr(value)
    return text if len(text) <= _TEXT else text[: _TEXT - 1] + "…"


def _list_text(items: list[Any]) -> str:
    if not items:
        return "[]"
    kinds = {type(item).__name__ for item in items if item is not None} or {"None"}
    kind = kinds.pop() if len(kinds) == 1 else "values"
    missing = sum(item is None for item in items)
    more = f", {missing} missing" if missing and kind != "None" else ""
    if kind == "bytes":
        sizes = [len(item) for item in items if item is not None]
        low, high = _size_text(min(sizes)), _size_text(max(sizes))
        unit = f" {high.split()[1]}"
        more = f", {low}{more}" if low == high else f", {low.removesuffix(unit)} to {high}{more}"
    elif kind == "str":
        more = f", {value_text(next(item for item in items if item is not None))} …{more}"
    return f"{len(items)} × {kind}{more}"


def _dtype_text(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def _size_text(num_bytes: int) -> str:
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} bytes"


def table(names: Sequence[str], rows: Iterable[Sequence[object]], most: int = 12) -> str:
    """Return an HTML table of the first `most` rows and the number of rows that follow."""
    given = list(rows)
    head = "".join(f'<th scope="col"{_LEFT}>{escape(name)}</th>' for name in names)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in given[:most])
    more = f"<p>… and {len(given) - most:,} more</p>" if len(given) > most else ""
    return f"<table{_TABLE}><tr>{head}</tr>{body}</table>{more}"


def page(kind: str, name: str, said: str, *parts: str) -> str:
    """Return an HTML page: kind, name, one line of facts (`said`), and parts that are already HTML."""
    head = f"<p><b>shardkit {escape(kind)}</b> <code>{escape(name)}</code>, {escape(said)}</p>"
    return f"<div>{head}{''.join(parts)}</div>"


def _cell(value: object) -> str:
    return f"<td{_LEFT}>{escape(f'{value:,}' if isinstance(value, int) else str(value))}</td>"
