"""From draws to cells: put each step's draws together and permute every cell (SPEC.md §4)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .permutation import order_rows
from .rounding import ragged

__all__ = ["assemble", "chunk_steps", "permute_cells"]


def chunk_steps(global_batch: int, lanes: int, most: int) -> int:
    """Steps that are drawn at once and kept: at most 2**16 samples of a lane and 2**20 of all lanes."""
    return max(1, min(most, (1 << 20) // global_batch, (1 << 16) * lanes // global_batch))


def assemble(draws: NDArray[np.int64], counts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Deal draws over steps.

    Args:
        draws: int64[sum(counts)], lane after lane, group after group, each group's in drawing order.
        counts: int64[lanes, steps, groups], how many of each group every step of a lane takes.
        size: m, slots of a cell.

    Returns:
        int64[lanes, steps, m]: the step's draws, group after group; -1 in the slots that are left.
    """
    lanes, steps = counts.shape[:2]
    out = np.full(lanes * steps * size, -1, dtype=np.int64)
    first = np.arange(lanes * steps, dtype=np.int64).reshape(lanes, steps, 1) * size
    slot = np.cumsum(counts, axis=2) - counts + first
    out[ragged(slot.transpose(0, 2, 1).ravel(), counts.transpose(0, 2, 1).ravel())] = draws
    return out.reshape(lanes, steps, size)


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
