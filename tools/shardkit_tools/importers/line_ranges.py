"""Files of lines, cut into ranges that processes can read apart, with the number of every line known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from shardkit.errors import SourceError
from shardkit_tools.importers.protocol import SourceFile, SourceTask
from shardkit_tools.importers.source_files import group_files, is_compressed, open_file, open_plain

__all__ = ["LineTasks", "cut_lines", "cut_rows", "read_lines"]

_RANGE_BYTES = 64 << 20
_PIECE_BYTES = 4 << 20
_MAX_LINE_BYTES = 1 << 30


@dataclass(frozen=True)
class LineTasks:
    """Tasks over files of lines.

    Attributes:
        tasks: in source order; large files are cut at line ends, small ones grouped.
        first_lines: (file name, first byte) → number of the line that starts there, for ranges that do not
        start at 0.
    """

    tasks: tuple[SourceTask, ...]
    first_lines: dict[tuple[str, int], int]

    def read(self, task: SourceTask) -> Iterator[tuple[SourceFile, int, bytes]]:
        """(file, line number from 0, line without its end) of a task's lines."""
        for file in task.files:
            for number, line in self.read_file(file, task):
                yield file, number, line

    def read_file(self, file: SourceFile, task: SourceTask) -> Iterator[tuple[int, bytes]]:
        """`read` of one file of the task."""
        first = self.first_lines.get((file.name, task.start), 0)
        return enumerate(read_lines(file, task.start, task.stop), first)


def cut_lines(files: tuple[SourceFile, ...], whole: Collection[str] = ()) -> LineTasks:
    """Cut files into tasks, but not those of the names ``whole``. Large files are read once to count their lines."""
    tasks: list[SourceTask] = []
    first_lines: dict[tuple[str, int], int] = {}
    small: list[SourceFile] = []
    for file in files:
        if file.name in whole or is_compressed(file) or file.size <= 2 * _RANGE_BYTES:
            small.append(file)
            continue
        tasks += group_files(small)
        small = []
        borders = _borders(file)
        for number, (start, line) in enumerate(borders):
            stop = borders[number + 1][0] if number + 1 < len(borders) else file.size
            first_lines[file.name, start] = line
            tasks.append(SourceTask(f"{file.name}:{line}", (file,), stop - start, start, stop))
    return LineTasks((*tasks, *group_files(small)), first_lines)


def read_lines(file: SourceFile, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """The lines of a file without their ends, or of a range of it that starts and stops at line ends.

    Raises:
        SourceError: the file cannot be read, or a line is longer than 1 GiB.
    """
    with open_plain(file) as stream:
        if start:
            stream.seek(start)
        at = start
        while stop is None or at < stop:
            line = stream.readline(_MAX_LINE_BYTES)
            if not line:
                return
            at += len(line)
            if len(line) == _MAX_LINE_BYTES:
                raise SourceError(
                    f"{file.path}: a line is longer than {_MAX_LINE_BYTES} bytes; is it a file of lines?"
                )
            yield line.removesuffix(b"\n").removesuffix(b"\r")


def cut_rows(file: SourceFile) -> tuple[tuple[int, int], ...]:
    r"""(first byte, number of the first row, the header not counted) of ranges of a large table.

    Which line ends are those of rows, only who reads a table from its start knows: a quoted cell may hold others. So a
    file is cut only where it holds no quote at all; and, so that rows can be counted as lines are, no empty line and no
    line end but ``\n`` and ``\r\n``. The first range begins with the header. Empty where the file is small, compressed,
    or cannot be cut.

    Raises:
        SourceError: it cannot be read.
    """
    if file.size <= 2 * _RANGE_BYTES or is_compressed(file):
        return ()
    return tuple((start, max(0, line - 1)) for start, line in _borders(file, _is_plain))


def _borders(
    file: SourceFile, is_plain: Callable[[bytes], bool] = lambda piece: True
) -> list[tuple[int, int]]:
    """(first byte, line number) of ranges that start at a line and are at least the range size long.

    Args:
        file: is read once, to count its lines.
        is_plain: whether a piece, with the byte before it, may be cut; none are cut of a file that has others.
    """
    borders = [(0, 0)]
    wanted = _RANGE_BYTES
    at = lines = 0
    before = b"\n"  # an empty first line is one, too
    with open_file(file) as stream:
        while piece := stream.read(_PIECE_BYTES):
            if not is_plain(before + piece):
                return []
            if at + len(piece) > wanted:
                end = piece.find(b"\n", max(0, wanted - at))
                if end >= 0 and at + end + 1 < file.size:
                    borders.append((at + end + 1, lines + piece.count(b"\n", 0, end + 1)))
                    wanted = at + end + 1 + _RANGE_BYTES
            lines += piece.count(b"\n")
            at += len(piece)
            before = piece[-1:]
    return borders if is_plain(before + b"\0") else []


def _is_plain(piece: bytes) -> bool:
    """Whether a piece of a table, with the byte before it, holds no quote, empty line or line end of another kind."""
    # A carriage return at the very end is looked at with the next piece.
    alone = piece.count(b"\r", 0, len(piece) - 1) != piece.count(b"\r\n")
    return not (b'"' in piece or b"\n\n" in piece or b"\n\r" in piece or alone)
