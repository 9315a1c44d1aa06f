"""What is leased ahead of a loop is given up where finding more of it fails, or it would stay for ever."""

from __future__ import annotations

import numpy as np
import pytest

from shardkit.errors import PlanError
from shardkit.loader.block_window import BlockWindow
from shardkit.loader.schedule import StepGroup
from shardkit.loader.scout import Scout, ScoutSettings
from shardkit.testing.block_sources import block_source


def _group(numbers: range) -> StepGroup:
    if numbers.start > 0:
        raise PlanError("no more steps")
    rows = np.zeros(len(numbers), dtype=np.int64)
    counts, borders = np.ones((len(numbers), 1), dtype=np.int64), np.arange(len(numbers) + 1)
    return StepGroup(numbers, rows, rows, counts, borders, [0, 1, 2, 3], rows, rows)


def test_a_scout_that_fails_ahead_of_its_loop_holds_nothing() -> None:
    window = BlockWindow(block_source(), budget=100, threads=1)
    settings = ScoutSettings(
        rows_per_step=1,
        bytes_per_step=1,
        over_memory=lambda step, size: None,
        leased=lambda: None,
    )
    scout = Scout(_group, window, range(50), [0], settings)
    with pytest.raises(PlanError, match="no more steps"):
        scout.run_ahead(lambda: False)
    assert not scout.suits(range(50), [0])
    lease = window.lease([0, 1, 2, 3], lambda: False)
    lease.wait(60, lambda waited: None)
    lease.release()
    window.budget = 0  # drops whatever nobody holds
    assert window.nbytes == 0
    window.close()
