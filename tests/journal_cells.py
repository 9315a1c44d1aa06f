"""Steps of a journal as tests write them: cell by cell."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from shardkit.ledger import Journal


def record_cells(journal: Journal, step: int, cells: Iterable[tuple[int, NDArray[np.int64]]]) -> None:
    """Append one step of (lane, samples) pairs, lanes ascending."""
    lanes, samples = zip(*cells, strict=True)
    journal.record_step(step, lanes, [len(one) for one in samples], np.concatenate(samples))
