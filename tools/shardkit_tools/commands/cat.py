"""`shardkit cat`: one sample, as a person would want to see it, or one field of it as a file."""

from __future__ import annotations

import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np

import shardkit
from shardkit.dataset.lookups import is_number
from shardkit.errors import NotFoundError, UsageError
from shardkit.formats.tar_members import sniff_extension
from shardkit.formats.values import logical_text
from shardkit.stores.file_operations import explained
from shardkit_tools import console, options
from shardkit_tools.console import bytes_text, clean, count_text, is_terminal
from shardkit_tools.options import argument, option

_DUMP_BYTES = 64
_WHOLE_DUMP_BYTES = 1024
_TEXT_LINES = 20
_TEXT_CHARACTERS = 2000
_JSON_ITEMS = 10_000
_SPACES = str.maketrans("\t\n\r", "   ")


def cat(
    root: options.VersionArgument,
    row: Annotated[str, argument("ROW", "The sample's number, from 0.")],
    field: Annotated[str | None, option("--field -f NAME", "Only this field, and whole.")] = None,
    out: Annotated[
        Path | None,
        option(
            "--out -o FILE", "Write the field's bytes to this new file; arrays as NumPy if it ends in .npy."
        ),
    ] = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Print one sample, verified on the way.

    With --field, a value that is not for a terminal goes to a pipe or to --out as it is.

    Example: shardkit cat data/cats 17 --field image --out cat.jpg
    """
    if out is not None and field is None:
        raise UsageError("--out takes the bytes of one field; name it with --field")
    dataset = shardkit.open(root)
    if field is not None and field not in dataset.schema:
        raise NotFoundError(f"{root} has no field {field!r}; its fields are {', '.join(dataset.schema)}")
    number = _number(row)
    sample, source = dataset[number], dataset.source(number)
    if out is not None and field is not None:
        data = _payload(sample[field], npy=out.suffix == ".npy")
        with console.new_file(out) as stream, explained(f"write {out}", writing=True):
            stream.write(data)
        console.print_line(f"{out}: {bytes_text(len(data))}")
    elif as_json:
        fields = {name: _plain(sample[name]) for name in ([field] if field is not None else sample)}
        console.print_json({"sample": number, "key": dataset.key(number), "fields": fields, "source": source})
    elif field is not None:
        _print_whole(sample[field])
    else:
        came = f", from {source[0]} row {source[1]}" if source is not None else ""
        about = f"sample {number} of {count_text(len(dataset))}, key {dataset.key(number)}{came}"
        console.print_line(about, "bold")
        for name, value in sample.items():
            has_class = name == "label" and dataset.classes and isinstance(value, int)
            label = f" ({dataset.classes[value]})" if has_class else ""
            _print_field(f"{name}: {dataset.schema[name]}", value, label)


def _number(text: str) -> int:
    if not is_number(text):
        raise UsageError(
            f"ROW: {text[:40]!r} is no sample number; expected a number without leading zeros; the number of a key: "
            f"shardkit find ROOT --field key={text[:40]}"
        )
    return int(text)


def _print_field(head: str, value: Any, label: str) -> None:
    if isinstance(value, bytes):
        text = _as_text(value)
        kind = sniff_extension(value) if text is None else "UTF-8 text"
        console.print_heading(f"{head}, {bytes_text(len(value))}, {kind}")
        if text is None:
            _print_dump(value, _DUMP_BYTES)
        else:
            _print_text(text)
    elif isinstance(value, str):
        console.print_heading(f"{head}, {count_text(len(value), 'character')}")
        _print_text(value)
    elif isinstance(value, np.ndarray):
        has_range = value.size and value.dtype.kind in "iuf"
        span = f", {value.min()} to {value.max()}" if has_range else ""
        console.print_heading(f"{head}, shape {list(value.shape)}{span}")
        text = np.array2string(value, threshold=40, edgeitems=3, max_line_width=90, precision=6)
        for line in text.splitlines():
            console.print_line(line)
    elif isinstance(value, (dict, list)):
        console.print_heading(head)
        _print_text(json.dumps(_plain(value), indent=2, ensure_ascii=False))
    elif value is None:
        console.print_heading(f"{head}, no value")
    else:
        console.print_heading(head)
        console.print_line(f"{logical_text(value) or value}{label}")


def _as_text(data: bytes) -> str | None:
    """Return bytes as text if they are printable UTF-8, otherwise None."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return text if text and clean(text.translate(_SPACES)) == text.translate(_SPACES) else None


def _print_text(text: str) -> None:
    lines = text[:_TEXT_CHARACTERS].splitlines()[:_TEXT_LINES]
    for line in lines:
        console.print_line(line.expandtabs(4))
    shown = len("\n".join(lines))
    if shown + 1 < len(text):
        console.print_line(f"… {count_text(len(text) - shown, 'character')} more", "dim")


def _print_dump(data: bytes, most: int) -> None:
    for start in range(0, min(most, len(data)), 16):
        part = data[start : min(start + 16, most)]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        console.print_line(f"{start:08x}  {part.hex(' '):<47}  {text}")
    if len(data) > most:
        console.print_line(f"… {count_text(len(data) - most, 'byte')} more", "dim")


def _print_whole(value: Any) -> None:
    if not is_terminal():
        sys.stdout.flush()
        sys.stdout.buffer.write(_payload(value))
    elif isinstance(value, (bytes, np.ndarray)):
        _print_dump(_payload(value), _WHOLE_DUMP_BYTES)
    else:
        text = _payload(value).decode()
        sys.stdout.write("\n".join(map(clean, text.split("\n"))) + "\n")


def _payload(value: Any, *, npy: bool = False) -> bytes:
    if npy and not isinstance(value, (bytes, str, dict, list)):
        stream = io.BytesIO()
        np.save(stream, np.asarray(value), allow_pickle=False)
        return stream.getvalue()
    if isinstance(value, bytes):
        return value
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, str):
        return value.encode()
    return (logical_text(value) or json.dumps(_plain(value), ensure_ascii=False)).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        digest = hashlib.sha256(value).hexdigest()
        return {"bytes": len(value), "sha256": digest, "kind": sniff_extension(value)}
    if isinstance(value, np.ndarray):
        items = value.tolist() if value.size <= _JSON_ITEMS else None
        return {"dtype": value.dtype.name, "shape": list(value.shape), "items": items}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return logical_text(value) or value
