r"""Large tables cut into ranges of rows, where it is plain where a row begins.

Which line ends are those of rows, only who reads a table from its start knows: a quoted cell may hold others. So a file
is cut only where it holds no quote at all; and, so that rows can be counted as lines are, no empty line and no line end
but ``\n`` and ``\r\n``. One pass of counting bytes tells.
"""

from __future__ import annotations

from shardkit_tools.importers.protocol import SourceFile
from shardkit_tools.importers.source_files import open_file

__all__ = ["cut_rows"]

_RANGE_BYTES = 64 << 20
_PIECE_BYTES = 4 << 20


def cut_rows(file: SourceFile) -> tuple[tuple[int, int], ...]:
    """(first byte, number of the first row, the header not counted) of ranges of a table.

    The first range begins with the header. Empty where the file is small, compressed, or cannot be cut.

    Raises:
        SourceError: it cannot be read.
    """
    if file.size <= 2 * _RANGE_BYTES or file.name.lower().endswith((".gz", ".tgz", ".zst")):
        return ()
    borders = [(0, 0)]
    wanted = _RANGE_BYTES
    at = lines = 0
    before = b"\n"  # an empty first line is one, too
    with open_file(file) as stream:
        while piece := stream.read(_PIECE_BYTES):
            if _is_unclear(before + piece):
                return ()
            if at + len(piece) > wanted:
                end = piece.find(b"\n", max(0, wanted - at))
                if end >= 0 and at + end + 1 < file.size:
                    borders.append((at + end + 1, lines + piece.count(b"\n", 0, end + 1) - 1))
                    wanted = at + end + 1 + _RANGE_BYTES
            lines += piece.count(b"\n")
            at += len(piece)
            before = piece[-1:]
    return tuple(borders) if before != b"\r" else ()


def _is_unclear(piece: bytes) -> bool:
    """Whether a piece, with the byte before it, holds quotes, empty lines or line ends of another kind."""
    # A carriage return at the very end is looked at with the next piece.
    alone = piece.count(b"\r", 0, len(piece) - 1) != piece.count(b"\r\n")
    return b'"' in piece or b"\n\n" in piece or b"\n\r" in piece or alone
