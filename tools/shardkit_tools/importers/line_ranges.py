"""Cut files of lines into ranges for processes to read, with the number of every line known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence, Sized
from typing import BinaryIO

from shardkit.errors import SourceError
from shardkit.formats.line_blocks import line_starts
from shardkit_tools.importers.protocol import SourceFile, SourceTask
from shardkit_tools.importers.source_files import (
    group_files,
    is_compressed,
    open_plain,
)

_RANGE_BYTES = 64 << 20
READ_BYTES = 4 << 20
"""Number of bytes that are read and parsed at once; the end of their last line is added."""

_MAX_LINE_BYTES = 1 << 30

INFERRED_BYTES = 256 << 20
"""Size of a source up to which types are inferred from every row, in one process before its tasks."""


def rows_to_infer(files: Sequence[SourceFile], rows: int) -> int | None:
    """Return the number of rows that types are inferred from: None, which means all, up to 256 MiB of files."""
    return None if sum(file.size for file in files) <= INFERRED_BYTES else rows


def cut_lines(
    files: Sequence[SourceFile],
    whole: Collection[str] = (),
    starts_of: Callable[[bytes], Sized | None] = line_starts,
) -> tuple[SourceTask, ...]:
    """Return tasks in source order: large files are split at line ends, small ones are grouped.

    Args:
        files: the source's files; large ones are read.
        whole: names of files that are not split.
        starts_of: returns where the lines of a piece begin, or None if the file cannot be split.
    """
    tasks: list[SourceTask] = []
    small: list[SourceFile] = []
    for file in files:
        is_small = file.name in whole or is_compressed(file) or file.size <= 2 * _RANGE_BYTES
        borders = [] if is_small else _borders(file, starts_of)
        if not borders:
            small.append(file)
            continue
        tasks += group_files(small)
        small = []
        stops = [start for start, _ in borders[1:]] + [file.size]
        for (start, line), stop in zip(borders, stops, strict=True):
            tasks.append(SourceTask(f"{file.name}:{line}", (file,), stop - start, start, stop, line))
    return (*tasks, *group_files(small))


def read_lines(file: SourceFile, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """Yield the lines of a file without line ends, or of a range that starts and stops at line ends."""
    for piece in read_pieces(file, start, stop):
        lines = piece.split(b"\n")
        for line in lines if lines[-1] else lines[:-1]:
            yield line.removesuffix(b"\r")


def read_pieces(
    file: SourceFile, start: int = 0, stop: int | None = None, *, returns: bool = False
) -> Iterator[bytes]:
    """Yield the bytes of a file, or of a range that starts and stops at line ends, in pieces of whole lines."""
    with open_plain(file) as stream:
        if start:
            stream.seek(start)
        yield from whole_lines(stream, file.path, None if stop is None else stop - start, returns=returns)


def whole_lines(
    stream: BinaryIO, path: str, size: int | None = None, *, returns: bool = False
) -> Iterator[bytes]:
    """Yield the next bytes of a stream, `size` or all, in pieces of whole lines.

    With `returns`, a piece without line feeds ends after a carriage return, which ends the lines of such a file.

    Raises:
        SourceError: The rest cannot be read, or a line is too long; the lines before were yielded.
    """
    damage: SourceError | None = None
    held = b""  # the beginning of a line
    while size != 0 and damage is None:
        left = (READ_BYTES if size is None else min(READ_BYTES, size)) - len(held)
        parts = [held] if held else []
        held = b""
        try:
            while left > 0 and (part := stream.read1(left)):  # type: ignore[attr-defined]  # it is buffered
                parts.append(part)
                left -= len(part)
            if returns and left <= 0:
                parts, held = _cut_at_return(parts)
            if parts and not held and not parts[-1].endswith(b"\n"):
                parts.append(stream.readline(_MAX_LINE_BYTES))
                if len(parts[-1]) == _MAX_LINE_BYTES:
                    damage = SourceError(
                        f"{path}: a line is longer than {_MAX_LINE_BYTES} bytes; is it a file of lines?"
                    )
        except SourceError as error:
            damage = error
        piece = b"".join(parts)
        if damage is not None:
            piece = piece[: piece.rfind(b"\n") + 1]
        elif not piece:
            return
        if size is not None:
            size -= len(piece)
        if piece:
            yield piece
    if damage is not None:
        raise damage


def _cut_at_return(parts: list[bytes]) -> tuple[list[bytes], bytes]:
    """Return the lines of bytes without line feeds, and the beginning of the next; other bytes as they are."""
    if any(b"\n" in part for part in parts):
        return parts, b""
    read = b"".join(parts)
    cut = read.rfind(b"\r", 0, -1) + 1  # not the last byte: a line feed may follow it
    return ([read[:cut]], read[cut:]) if cut else (parts, b"")


def _borders(file: SourceFile, starts_of: Callable[[bytes], Sized | None]) -> list[tuple[int, int]]:
    """Return (first byte, line number) of ranges that start at a line and have at least the range size."""
    borders = [(0, 0)]
    at = line = 0
    for piece in read_pieces(file):
        starts = starts_of(piece)
        if starts is None:
            return []
        if at - borders[-1][0] >= _RANGE_BYTES:
            borders.append((at, line))
        at, line = at + len(piece), line + len(starts)
    return borders
