"""Files of JSON lines: appended to by several processes, torn by kills, read as if a stranger had written them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_WHOLE: Final = 1 << 62


def append_line(path: Path, line: bytes) -> int:
    """Append a line, with its newline, in one write; a last line that a kill has torn is closed first.

    The file is opened each time, because others may move or delete the files of a run.

    Returns:
        Bytes of the file afterwards.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        return size + os.write(descriptor, line)
    finally:
        os.close(descriptor)


def append_document(path: Path, document: Mapping[str, object]) -> None:
    """Append a JSON object, likewise."""
    append_line(path, json.dumps(document, separators=(",", ":")).encode() + b"\n")


def read_lines(path: Path, tail_bytes: int = _WHOLE) -> list[bytes]:
    """The whole lines among the last `tail_bytes` of a file; none where there is no such regular file."""
    if tail_bytes <= 0:
        return []
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return []
    with open(descriptor, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - tail_bytes)
        file.seek(start)
        data = file.read(size - start)
    lines = data.split(b"\n")
    if start:
        lines = lines[1:]  # begun before
    return [line for line in lines[:-1] if line]  # what has no newline yet is torn or under way


def read_documents(path: Path, tail_bytes: int = _WHOLE, *, most_bytes: int = _WHOLE) -> list[dict[str, Any]]:
    """The JSON objects among those lines; torn ones, those longer than `most_bytes` and other values are left out."""
    found = []
    for line in read_lines(path, tail_bytes):
        if len(line) > most_bytes:
            continue
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            found.append(document)
    return found
