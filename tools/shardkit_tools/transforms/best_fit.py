"""Best-fit packing of documents into rows of a fixed length; pure.

Best-fit decreasing (Johnson et al., "Worst-case performance bounds for simple one-dimensional packing algorithms",
1974; for training data Ding et al., "Fewer Truncations Improve Language Modeling", 2024): the longest document first,
each into the fullest row that takes it. Only a document longer than a row is cut, into full rows and a rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Which pieces of which documents a row holds, in document order.

    Attributes:
        row_start: int64[rows + 1]; the pieces of row r are row_start[r] … row_start[r + 1].
        document, start, length: int64[pieces]; a piece is items start … start + length of a document.
    """

    row_start: NDArray[np.int64]
    document: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.row_start) - 1


def pack(lengths: NDArray[np.int64], capacity: int) -> Packing:
    """Pack documents; a function of the lengths alone.

    Args:
        lengths: int64[n] items of each document; empty ones are in no row.
        capacity: items of a row, at least 1.

    Returns:
        Rows in the order of their first piece; every item is in exactly one of them.
    """
    pieces = -(-lengths // capacity)
    document = np.repeat(np.arange(len(lengths)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = number * capacity
    length = np.minimum(lengths[document] - start, capacity)
    row = _best_fit(length, capacity)
    # Rows are numbered by their first piece; a stable sort keeps pieces of a row in document order.
    _, first, inverse = np.unique(row, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    row = rank[inverse]
    order = np.argsort(row, kind="stable")
    counts = np.bincount(row, minlength=len(first))
    return Packing(
        row_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        document=document[order],
        start=start[order],
        length=length[order],
    )


def _best_fit(length: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The row of each piece. Rows with the same room are a stack; bit r of ``rooms`` says that one has room r."""
    row = np.empty(len(length), dtype=np.int64)
    stacks: dict[int, list[int]] = {}
    rooms = 0
    rows = 0
    order = np.argsort(-length, kind="stable")
    for piece, size in zip(order.tolist(), length[order].tolist(), strict=True):
        enough = rooms >> size
        if enough:
            room = size + (enough & -enough).bit_length() - 1
            stack = stacks[room]
            taken = stack.pop()
            if not stack:
                rooms ^= 1 << room
        else:
            room, taken = capacity, rows
            rows += 1
        row[piece] = taken
        left = room - size
        if left:
            stacks.setdefault(left, []).append(taken)
            rooms |= 1 << left
    return row
