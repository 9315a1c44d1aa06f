"""What a rehearsal says of lanes is what the loaders of the next start take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardkit.errors import StateError
from shardkit_tools.commands.rehearse import Rehearsal, _move_lanes


def _lanes_then(
    owners: list[list[int]], dead: list[int], lanes: int, *, near: bool = False
) -> dict[int, int]:
    last: Any = {rank: SimpleNamespace(lanes=own, host=f"node-{rank}") for rank, own in enumerate(owners)}
    found = Rehearsal(dead=dead, survivors=[rank for rank in last if rank not in dead])
    _move_lanes(found, last, cast(Any, SimpleNamespace(plan=SimpleNamespace(lanes=lanes))), near=near)
    then = {lane: rank for rank, own in enumerate(owners) for lane in own}
    return then | {lane: new for lane, (_, new) in found.moves.items()}


def test_lanes_go_where_the_next_start_deals_them() -> None:
    then = _lanes_then([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]], [1], 12)
    assert [then[lane] for lane in range(12)] == [0] * 4 + [2] * 4 + [3] * 4
    then = _lanes_then([[0, 1], [2, 3], [4, 5, 6], [7, 8]], [0, 3], 9)
    assert [then[lane] for lane in range(9)] == [1] * 4 + [2] * 5


def test_where_nodes_cache_only_lanes_of_the_dead_move() -> None:
    owners = [[9, 10, 11], [0, 1, 2], [6, 7, 8], [3, 4, 5]]
    then = _lanes_then(owners, [1], 12, near=True)
    assert all(then[lane] == rank for rank in (0, 2, 3) for lane in owners[rank])
    assert sorted(then[lane] for lane in owners[1]) == [0, 2, 3]


def test_a_lane_without_an_owner_is_named() -> None:
    with pytest.raises(StateError, match="lane 1 has no owner"):
        _lanes_then([[0], [2, 3]], [1], 4)
