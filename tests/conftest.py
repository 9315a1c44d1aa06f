"""What holds for all tests: fast ones first, ids that are equal in every worker, hypothesis that does not time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

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
