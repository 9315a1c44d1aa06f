"""Sizes as people write them."""

from __future__ import annotations

import pytest

from shardkit.errors import ConfigurationError
from shardkit.ranges import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("256MiB", 268_435_456),
        ("2 GB", 2_000_000_000),
        ("1.5KiB", 1536),
        ("0", 0),
        ("7", 7),
        ("4k", 4096),
        (12, 12),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 XB", "1e9", -5])
def test_other_things_are_refused(text: str | int) -> None:
    with pytest.raises(ConfigurationError):
        parse_size(text)
