"""A scrub that could not read what a version needs does not call it clean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.errors import StoreError
from shardkit.stores.store import Store, read_object
from tests.command_line import call, output_of


def test_a_version_that_cannot_be_read_now_is_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shardkit.create(tmp_path / "data", {"value": "int64"}) as writer:
        writer.add({"value": 1})

    def silent(store: Store, digest: str, extension: str, *given: Any, **named: Any) -> bytes:
        if extension == "manifest":
            raise StoreError("the store does not answer")
        return read_object(store, digest, extension, *given, **named)

    assert call("scrub", tmp_path / "data")[0] == 0
    monkeypatch.setattr("shardkit.reading.inventory.read_object", silent)
    said = output_of("scrub", tmp_path / "data", code=3)
    assert "the store does not answer" in said
