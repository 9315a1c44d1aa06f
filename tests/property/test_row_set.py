"""Sets of rows: members, ranks and restricted populations equal those of plain arrays."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.plan import Population
from shardkit.plan.row_set import RowSet
from tests.property.populations import populations


@settings(max_examples=60, deadline=None)
@given(populations(max_rows=700), st.data())
def test_a_set_numbers_its_rows(population: Population, data: st.DataObject) -> None:
    size = population.rows
    chosen = data.draw(st.sets(st.integers(0, size - 1), max_size=size))
    rows = np.array(sorted(chosen), dtype=np.int64)
    shuffled = np.array(data.draw(st.permutations(rows.tolist())), dtype=np.int64)
    cut = data.draw(st.integers(0, len(rows)))
    found = RowSet(size, [shuffled[:cut], shuffled[cut:]])
    assert len(found) == len(rows)
    assert found.all().tolist() == rows.tolist()
    borders = np.arange(size + 1)
    assert found.ranks(borders).tolist() == np.searchsorted(rows, borders).tolist()
    assert [s for s in range(size) if s in found] == rows.tolist()
    ranks = np.array([[-1, *range(0, len(rows), 3)]], dtype=np.int64)
    assert found.members(ranks).tolist() == [[-1, *rows[::3].tolist()]]
    segment = np.repeat(np.arange(len(population.segment_rows)), population.segment_rows)
    left = np.bincount(segment[rows], minlength=len(population.segment_rows))
    assert found.of(population).segment_rows.tolist() == left.tolist()
