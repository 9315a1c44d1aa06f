"""Rank and world are found, never guessed."""

from __future__ import annotations

import pytest

from shardkit.errors import ConfigurationError
from shardkit.loader import find_topology


def test_arguments_win_over_the_environment() -> None:
    found = find_topology(2, 4, {"RANK": "0", "WORLD_SIZE": "8"})
    assert (found.rank, found.world) == (2, 4)


def test_environment_of_torchrun_is_read() -> None:
    found = find_topology(None, None, {"RANK": "3", "WORLD_SIZE": "5"})
    assert (found.rank, found.world) == (3, 5)


def test_a_lone_process_is_rank_0_of_1() -> None:
    found = find_topology(None, None, {})
    assert (found.rank, found.world) == (0, 1)


@pytest.mark.parametrize(
    ("rank", "world", "environ", "names"),
    [
        (1, None, {}, "world=None"),
        (4, 4, {}, "rank 4 of 4"),
        (-1, 4, {}, "rank = -1"),
        (None, None, {"RANK": "1"}, "WORLD_SIZE=None"),
        (None, None, {"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one'"),
        (None, None, {"SLURM_NTASKS": "8"}, "SLURM_NTASKS is 8"),
        (None, None, {"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is 2"),
    ],
)
def test_contradictions_are_refused(
    rank: int | None, world: int | None, environ: dict[str, str], names: str
) -> None:
    with pytest.raises(ConfigurationError, match=names):
        find_topology(rank, world, environ)


def test_a_launcher_of_one_task_is_a_lone_process() -> None:
    assert find_topology(None, None, {"SLURM_NTASKS": "1"}).world == 1
