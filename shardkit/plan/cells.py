"""From draws to cells: put each step's draws together and permute every cell (SPEC.md §4)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .permutation import order_rows

__all__ = ["assemble", "chunk_steps", "permute_cells"]


def chunk_steps(global_batch: int, lanes: int, most: int) -> int:
    """Steps that are drawn at once and kept: at most 2**16 samples of a lane and 2**20 of all lanes."""
    return max(1, min(most, (1 << 20) // global_batch, (1 << 16) * lanes // global_batch))


def assemble(draws: NDArray[np.int64], counts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Deal draws over steps.

    Args:
        draws: int64[sum(counts)], group after group, each group's in drawing order.
        counts: int64[steps, groups], how many of each group every step takes.
        size: m, slots of a cell.

    Returns:
        int64[steps, m]: the step's draws, group after group; -1 in the slots that are left.
    """
    steps = len(counts)
    out = np.full(steps * size, -1, dtype=np.int64)
    slot = np.cumsum(counts, axis=1) - counts + np.arange(steps, dtype=np.int64)[:, None] * size
    lengths = counts.T.ravel()
    ends = np.cumsum(lengths)
    out[np.arange(len(draws)) + np.repeat(slot.T.ravel() - (ends - lengths), lengths)] = draws
    return out.reshape(steps, size)


def permute_cells(cells: NDArray[np.int64], keys: NDArray[np.uint64], filled: int) -> NDArray[np.int64]:
    """Permute the first ``filled`` slots of each cell under its key.

    Args:
        cells: int64[steps, m].
        keys: uint64[steps].
        filled: slots that hold a sample; the others hold -1 and stay last.
    """
    ranks = order_rows(keys, filled)
    if filled == cells.shape[1]:
        return np.take_along_axis(cells, ranks, axis=1)
    out = cells.copy()
    out[:, :filled] = np.take_along_axis(cells, ranks, axis=1)
    return out
