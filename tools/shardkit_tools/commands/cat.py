"""`shardkit cat`: one sample, as a person would want to see it, or one field of it as a file."""

from __future__ import annotations

import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import shardkit
from shardkit.errors import NotFoundError, UsageError
from shardkit.formats.logical import logical_text
from shardkit.formats.tar_members import sniff_extension
from shardkit.stores.file_operations import explained
from shardkit_tools import console, options
from shardkit_tools.texts import bytes_text, clean, count_text, is_terminal

_DUMP_BYTES = 64
_TEXT_LINES = 20
_TEXT_CHARACTERS = 2000
_JSON_ITEMS = 10_000
_SPACES = str.maketrans("\t\n\r", "   ")


def cat(
    root: options.VersionArgument,
    row: Annotated[int, typer.Argument(metavar="ROW", help="The sample's number, from 0.")],
    field: Annotated[
        str | None, typer.Option("--field", "-f", metavar="NAME", help="Only this field, and whole.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Write the field's bytes to this new file; arrays as NumPy if it ends in .npy.",
        ),
    ] = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Print one sample, verified on the way.

    With --field, what is not for a terminal goes to a pipe or to --out as it is.

    Example: shardkit cat data/cats 17 --field image --out cat.jpg
    """
    if out is not None and field is None:
        raise UsageError("--out takes the bytes of one field; name it with --field")
    dataset = shardkit.open(root)
    if field is not None and field not in dataset.schema:
        raise NotFoundError(f"{root} has no field {field!r}; its fields are {', '.join(dataset.schema)}")
    sample = dataset[row]
    if out is not None and field is not None:
        _write(out, _payload(sample[field], npy=out.suffix == ".npy"))
        return
    if as_json:
        names = [field] if field is not None else list(sample)
        document = {"sample": row, "key": dataset.key(row), "fields": {n: _plain(sample[n]) for n in names}}
        console.print_json({**document, "source": dataset.source(row)})
        return
    if field is not None:
        _print_whole(sample[field])
        return
    source = dataset.source(row)
    came = f", from {clean(source[0])} row {source[1]}" if source is not None else ""
    console.print_line(
        f"sample {row} of {count_text(len(dataset))}, key {clean(dataset.key(row))}{came}", "bold"
    )
    for name, value in sample.items():
        label = (
            dataset.classes[value] if name == "label" and dataset.classes and isinstance(value, int) else None
        )
        _print_field(name, str(dataset.schema[name]), value, label)


def _print_field(name: str, kind: str, value: Any, label: str | None) -> None:
    text = _as_text(value) if isinstance(value, bytes) else None
    if text is not None:
        console.print_heading(f"{name}: {kind}, {bytes_text(len(value))}, UTF-8 text")
        _print_text(text)
    elif isinstance(value, bytes):
        console.print_heading(f"{name}: {kind}, {bytes_text(len(value))}, {sniff_extension(value)}")
        _print_dump(value[:_DUMP_BYTES], len(value))
    elif isinstance(value, str):
        console.print_heading(f"{name}: {kind}, {count_text(len(value), 'character')}")
        _print_text(value)
    elif isinstance(value, np.ndarray):
        console.print_heading(f"{name}: {kind}, shape {list(value.shape)}{_range(value)}")
        console.print_line(np.array2string(value, threshold=40, edgeitems=3, max_line_width=90, precision=6))
    elif isinstance(value, (dict, list)):
        console.print_heading(f"{name}: {kind}")
        _print_text(json.dumps(_plain(value), indent=2, ensure_ascii=False))
    elif value is None:
        console.print_heading(f"{name}: {kind}, no value")
    else:
        console.print_heading(f"{name}: {kind}")
        shown = logical_text(value) or str(value)
        console.print_line(f"{shown} ({clean(label)})" if label is not None else shown)


def _as_text(data: bytes) -> str | None:
    """Bytes that a person can read as they are."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return text if text and clean(text.translate(_SPACES)) == text.translate(_SPACES) else None


def _print_text(text: str) -> None:
    lines = text[:_TEXT_CHARACTERS].splitlines()[:_TEXT_LINES]
    for line in lines:
        console.print_line(clean(line.expandtabs(4)))
    shown = len("\n".join(lines))
    if shown + 1 < len(text):
        console.print_line(f"… {count_text(len(text) - shown, 'character')} more", "dim")


def _print_dump(data: bytes, size: int) -> None:
    for start in range(0, len(data), 16):
        part = data[start : start + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        console.print_line(f"{start:08x}  {part.hex(' '):<47}  {text}")
    if size > len(data):
        console.print_line(f"… {count_text(size - len(data), 'byte')} more", "dim")


def _print_whole(value: Any) -> None:
    if not isinstance(value, (bytes, np.ndarray)):
        text = value if isinstance(value, str) else _json(value)
        sys.stdout.write("\n".join(map(clean, text.split("\n"))) + "\n" if is_terminal() else text)
    elif is_terminal():
        what = value if isinstance(value, bytes) else value.tobytes()
        _print_dump(what[:1024], len(what))
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(_payload(value))


def _payload(value: Any, *, npy: bool = False) -> bytes:
    if npy and not isinstance(value, (bytes, str, dict, list)):
        stream = io.BytesIO()
        np.save(stream, np.asarray(value), allow_pickle=False)
        return stream.getvalue()
    if isinstance(value, bytes):
        return value
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return value.encode() if isinstance(value, str) else _json(value).encode()


def _write(path: Path, data: bytes) -> None:
    with console.new_file(path) as stream, explained(f"write {path}", writing=True):
        stream.write(data)
    console.print_line(f"{path}: {bytes_text(len(data))}")


def _json(value: Any) -> str:
    return logical_text(value) or json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {
            "bytes": len(value),
            "sha256": hashlib.sha256(value).hexdigest(),
            "kind": sniff_extension(value),
        }
    if isinstance(value, np.ndarray):
        items = value.tolist() if value.size <= _JSON_ITEMS else None
        return {"dtype": value.dtype.name, "shape": list(value.shape), "items": items}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return logical_text(value) or value


def _range(value: np.ndarray[Any, Any]) -> str:
    return f", {value.min()} to {value.max()}" if value.size and value.dtype.kind in "iuf" else ""
