"""What of the Ray engine can be shown without Ray: versions that differ, errors."""

from __future__ import annotations

import platform
from types import SimpleNamespace

import pytest

from shardkit.errors import RunError, SampleError, StoreError
from shardkit_tools.building import engines


@pytest.mark.parametrize(
    ("address", "joined", "is_remote"),
    [(None, False, False), (None, True, True), ("auto", False, True), ("10.0.0.5:6379", True, True)],
)
def test_workers_of_a_cluster_that_was_there_may_be_anywhere(
    address: str | None, joined: bool, is_remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_import_ray", lambda: SimpleNamespace(is_initialized=lambda: joined))
    assert engines.RayEngine(2, address).is_remote is is_remote


def test_tasks_are_as_many_as_the_cluster_has_processors_now(monkeypatch: pytest.MonkeyPatch) -> None:
    resources = {"CPU": 1.0}
    fake = SimpleNamespace(is_initialized=lambda: True, cluster_resources=lambda: resources)
    monkeypatch.setattr(engines, "_import_ray", lambda: fake)
    free, bounded = engines.RayEngine(), engines.RayEngine(2)
    assert (free._slots(), bounded._slots()) == (1, 1)
    resources["CPU"] = 8.0  # nodes have joined
    assert (free._slots(), bounded._slots()) == (8, 2)
    resources.clear()  # all are gone: one task waits for a node
    assert (free._slots(), bounded._slots()) == (1, 1)


def test_a_node_with_other_versions_is_refused() -> None:
    found = engines._own_versions()
    assert {"shardkit", "zstandard", "pyarrow"} <= set(found)
    given = engines._Driver("driver", {**found, "zstandard": "0.1"})
    with pytest.raises(RunError, match=rf"zstandard {found['zstandard']}, not 0\.1.*same versions"):
        engines._worker("a list of tasks", [], given)


def test_errors_of_files_say_what_every_node_must_see() -> None:
    error = StoreError("read /data/x: No such file or directory")
    assert engines._with_reason(error, platform.node()) is error
    elsewhere = engines._with_reason(error, "another node")
    assert isinstance(elsewhere, StoreError)
    assert "every node of the cluster must see" in str(elsewhere)
    sample = SampleError("row 3: no number")
    assert engines._with_reason(sample, "another node") is sample
