"""What of the Ray engine can be shown without Ray: progress of tasks that run twice, versions that differ, errors."""

from __future__ import annotations

import platform

import pytest

from shardkit.errors import RunError, SampleError, StoreError
from shardkit_tools.building import ray_engine


def test_a_task_that_runs_again_counts_once() -> None:
    told: list[tuple[int, int]] = []
    counted = ray_engine._Counted(lambda rows, size: told.append((rows, size)))
    counted.add({0: (10, 100), 1: (5, 50)})
    counted.add({0: (2, 20)})  # its worker died, another one begins anew
    counted.add({0: (10, 100)})
    counted.add({0: (30, 300)})  # the result of the whole task
    counted.add({1: (5, 50)})
    assert sum(rows for rows, _ in told) == 35
    assert sum(size for _, size in told) == 350
    assert all(rows >= 0 and size >= 0 for rows, size in told)


def test_a_node_with_other_versions_is_refused() -> None:
    found = ray_engine._own_versions()
    assert {"shardkit", "zstandard", "pyarrow"} <= set(found)
    given = ray_engine._Given("driver", {**found, "zstandard": "0.1"}, None)
    with pytest.raises(RunError, match=rf"zstandard {found['zstandard']}, not 0\.1.*same versions"):
        ray_engine._worker("a list of tasks", [], given)


def test_errors_of_files_say_what_every_node_must_see() -> None:
    error = StoreError("read /data/x: No such file or directory")
    assert ray_engine._told(error, platform.node()) is error
    elsewhere = ray_engine._told(error, "another node")
    assert isinstance(elsewhere, StoreError)
    assert "every node of the cluster must see" in str(elsewhere)
    sample = SampleError("row 3: no number")
    assert ray_engine._told(sample, "another node") is sample
