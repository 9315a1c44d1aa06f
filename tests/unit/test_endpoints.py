"""Endpoints of object stores that the environment names wrongly."""

from __future__ import annotations

import pytest

import shardkit
from shardkit.errors import UsageError


@pytest.mark.parametrize(
    ("variable", "url"),
    [
        ("AWS_ENDPOINT_URL", "s3://bucket/x"),
        ("AWS_ENDPOINT_URL_S3", "s3://bucket/x"),
        ("STORAGE_EMULATOR_HOST", "gs://bucket/x"),
    ],
)
@pytest.mark.parametrize(
    "endpoint",
    ["not a url", "http://127.0.0.1:99999", "http://127.0.0.1:port", "http://", "ftp://host", "http://[::1", "http://h\n"],
)  # fmt: skip
def test_an_endpoint_that_is_no_url_is_named(
    variable: str, url: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, endpoint)
    with pytest.raises(UsageError, match=f"{variable}=.* is no address of an object store"):
        shardkit.open(url)
