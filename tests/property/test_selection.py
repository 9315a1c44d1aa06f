"""Selections and sets of rows count, rank and select as plain Python does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardkit.errors import FormatError, UsageError
from shardkit.formats.columns import pack_columns
from shardkit.manifest import Selection, max_selection_bytes
from shardkit.plan import Population
from shardkit.plan.population import RowSet
from tests.property.populations import populations

# ---- Selections count, rank and select as plain Python over lists does


masks = st.lists(st.booleans(), max_size=300) | st.builds(
    lambda runs: [bit for length, bit in runs for _ in range(length)],
    st.lists(st.tuples(st.integers(0, 200), st.booleans()), max_size=6),
)


@settings(max_examples=150, deadline=None)
@given(mask=masks)
@example(mask=[True] * 64)
@example(mask=[True] * 65)
@example(mask=[False] * 64 + [True])
@example(mask=[False] * 63 + [True] * 130)
def test_rank_and_select(mask: list[bool]) -> None:
    selection = Selection.from_mask(mask)
    rows = [row for row, bit in enumerate(mask) if bit]
    assert (selection.rows, selection.count, len(selection)) == (len(mask), len(rows), len(rows))
    assert selection.mask().tolist() == mask
    assert selection.rank(range(len(mask) + 1)).tolist() == [sum(mask[:row]) for row in range(len(mask) + 1)]
    assert selection.select(range(len(rows))).tolist() == rows
    backwards = np.arange(len(rows))[::-1]
    assert selection.select(backwards).tolist() == rows[::-1]


@settings(max_examples=80, deadline=None)
@given(mask=masks)
def test_bytes(mask: list[bool]) -> None:
    selection = Selection.from_mask(mask)
    data = selection.to_bytes()
    assert len(data) <= max_selection_bytes(len(mask))
    assert Selection.from_bytes(data, len(mask)) == selection
    # Bit order is part of the format: row r is bit r % 8 of byte r // 8.
    for row, bit in enumerate(mask):
        assert bool(int(selection.bits[row // 8]) >> (row % 8) & 1) == bit


@given(mask=masks.filter(bool), outside=st.integers())
def test_outside_is_refused(mask: list[bool], outside: int) -> None:
    selection = Selection.from_mask(mask)
    outside %= 2**40
    for wrong in (-1 - outside, len(mask) + 1 + outside):
        with pytest.raises(UsageError, match=str(wrong)):
            selection.rank([0, wrong])
    for wrong in (-1 - outside, selection.count + outside):
        with pytest.raises(UsageError, match=str(wrong)):
            selection.select([wrong])


def test_rare_and_dense_selections_are_small() -> None:
    for every in (1, 100_000):
        mask = np.arange(1_000_000) % every == 0
        assert len(Selection.from_mask(mask).to_bytes()) < 3_000


@pytest.mark.parametrize(
    ("meta", "columns"),
    [
        ({"rows": 20, "selected": 3}, {"bits": np.array([7, 0, 16], np.uint8)}),  # row 20 does not exist
        ({"rows": 20, "selected": 2}, {"bits": np.array([7, 0, 0], np.uint8)}),
        ({"rows": 20, "selected": True}, {"bits": np.array([1, 0, 0], np.uint8)}),
        ({"rows": 21, "selected": 3}, {"bits": np.array([7, 0, 0], np.uint8)}),
        ({"rows": 20, "selected": 3, "more": 0}, {"bits": np.array([7, 0, 0], np.uint8)}),
        ({"rows": 20, "selected": 3}, {"bits": np.array([7, 0, 0, 0], np.uint8)}),
        ({"rows": 20, "selected": 3}, {"bits": np.array([7, 0], np.uint8)}),
        ({"rows": 20, "selected": 3}, {"bits": np.array([[7, 0, 0]], np.uint8)}),
        ({"rows": 20, "selected": 3}, {"bits": np.array([7, 0, 0], np.int8)}),
        ({"rows": 20, "selected": 3}, {"bits": np.array([7, 0, 0], np.uint8), "b": np.zeros(0, np.uint8)}),
        ({"rows": 20, "selected": 3}, {}),
        ({"rows": 20, "selected": 0}, {"bits": np.zeros(10**6, np.uint8)}),
    ],
)
def test_hostile_selections(meta: dict[str, object], columns: dict[str, np.ndarray]) -> None:
    with pytest.raises(FormatError, match="selection sha256"):
        Selection.from_bytes(pack_columns("selection", meta, columns), 20)


# ---- Sets of rows: members, ranks and restricted populations equal those of plain arrays


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
