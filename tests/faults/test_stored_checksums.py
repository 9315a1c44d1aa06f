"""Stores that keep the checksum an object was put with: repair believes the bytes that it read, not the checksum."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardkit
from shardkit.stores.local import LocalStore
from tests.command_line import output_of


def test_repair_replaces_wrong_bytes_under_a_good_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.1 said "Healed: 1 copy" and left the wrong bytes where they were."""
    root = tmp_path / "root"
    with shardkit.create(root, {"value": "int64"}, shard_size="8KiB", block_size="1KiB") as writer:
        for number in range(300):
            writer.add({"value": number})
    output_of("place", str(root), "--location", f"b={tmp_path / 'b'},domain=b", "--copies", "2")
    shard = next(path for path in sorted((root / "objects").rglob("*")) if path.suffix in (".tar", ".arrow"))
    good = shard.read_bytes()
    shard.chmod(0o644)
    shard.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    head = LocalStore.head

    def as_it_was_put(store: LocalStore, name: str) -> object:
        found = head(store, name)
        is_object = found is not None and name.startswith("objects/")
        return type(found)(found.size, Path(name).name.partition(".")[0]) if found and is_object else found

    monkeypatch.setattr(LocalStore, "head", as_it_was_put)
    output_of("repair", str(root), "--level", "read")
    assert shard.read_bytes() == good
