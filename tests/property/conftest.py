"""What several property tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardkit.loader import gather


@pytest.fixture(scope="module", params=["compiled", "in Python"])
def copies(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test of a file, with the compiled copies and without them."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "in Python":
            patch.setattr(gather, "row_copies", None)
        elif gather.row_copies is None:
            pytest.skip("the module is not compiled here")
        yield
