"""What holds for all tests: fast ones first, ids that are equal in every worker, hypothesis that does not time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from shardkit.testing.fault_proxy import FaultProxy
from shardkit.testing.servers import Unavailable, moto, s3_environment

# Correctness tests must not depend on timing, and their machines are shared.
settings.register_profile(
    "shardkit", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("SHARDKIT_HYPOTHESIS", "shardkit"))

_ORDER = ("unit", "property", "compat", "integration", "faults")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cheap rooms first, so that a mistake shows early; slow tests last within all of them."""

    def rank(item: pytest.Item) -> tuple[bool, int]:
        room = Path(item.path).relative_to(Path(__file__).parent).parts[0]
        return item.get_closest_marker("slow") is not None, _ORDER.index(room) if room in _ORDER else len(
            _ORDER
        )

    items.sort(key=rank)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """S3 as moto serves it, with the buckets that the test's module names in ``BUCKETS``; its endpoint."""
    try:
        with moto(*request.module.BUCKETS) as endpoint:
            yield endpoint
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy before the server, to which the AWS environment points."""
    with FaultProxy(server) as made:
        for name, value in s3_environment(made.endpoint).items():
            monkeypatch.setenv(name, value)
        yield made
