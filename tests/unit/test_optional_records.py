"""Fields that are written only where they are used: old ids stay, and no content has two spellings."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from shardkit.documents import encode
from shardkit.errors import FormatError, IntegrityError, NotFoundError, ShardkitError, UsageError
from shardkit.manifest import Lookup, LookupPiece, Manifest
from shardkit.reading.adopted_places import location_name
from shardkit.repository.log import LogEntry, check_succession
from shardkit.repository.repository import Repository
from shardkit.repository.versions import PartLocation, find_part, put_location
from tests.property.shard_tables import composed, made_up_digest, made_up_table


def manifest() -> Manifest:
    return composed(made_up_table(1, 4, strata=1))[0]


def lookup(field: str, *shards: int) -> Lookup:
    return Lookup(
        field, tuple(LookupPiece(made_up_digest(field, n), 10, count, 5) for n, count in enumerate(shards))
    )


def test_a_manifest_without_them_has_the_bytes_of_old() -> None:
    plain = manifest()
    assert set(json.loads(plain.to_bytes())) & {"about", "lookups"} == set()
    told = msgspec.structs.replace(
        plain, about=made_up_digest("a"), lookups=(lookup("key", 1, 3), lookup("x", 4))
    )
    assert Manifest.from_bytes(told.to_bytes()) == told
    assert told.id != plain.id


@pytest.mark.parametrize(
    "lookups",
    [
        [lookup("x", 3)],
        [lookup("x", 4, 1)],
        [lookup("none", 4)],
        [lookup("x", 4), lookup("key", 4)],
        [lookup("x", 4), lookup("x", 4)],
    ],
)
def test_lookups_that_do_not_fit_are_refused(lookups: list[Lookup]) -> None:
    with pytest.raises(FormatError):
        msgspec.structs.replace(manifest(), lookups=tuple(lookups))


@pytest.mark.parametrize(
    "change",
    [
        {"lookups": []},
        {"about": None},
        {"about": "sha256:12"},
        {"lookups": [{"field": "x"}]},
        {"lookups": [{"field": "x", "pieces": [{"digest": "x", "size": 1, "shards": 4, "entries": 1}]}]},
        {"lookups": {"x": []}},
        {"other": 1},
    ],
)
def test_other_spellings_are_refused(change: dict[str, Any]) -> None:
    document = {**json.loads(manifest().to_bytes()), **change}
    with pytest.raises(FormatError):
        Manifest.from_bytes(encode(document))


def entry(n: int, previous: LogEntry | None, **names: dict[str, str]) -> LogEntry:
    from shardkit.formats import sha256_digest

    return LogEntry(
        n=n, repository="r", previous=sha256_digest(previous.to_bytes()) if previous else made_up_digest("i"),
        txn="0" * 32, time="2026-11-20T00:00:00Z", author="", message="", refs=names.get("refs", {}),
        tags=names.get("tags", {}), software="", withdrawn=names.get("withdrawn", {}),
    )  # fmt: skip


def test_tags_go_only_by_being_withdrawn_and_never_come_back() -> None:
    old, new = made_up_digest("old"), made_up_digest("new")
    first = entry(1, None, tags={"v1": old})
    assert b"withdrawn" not in first.to_bytes()
    gone = entry(2, first, withdrawn={"v1": old})
    assert LogEntry.from_bytes(gone.to_bytes(), "2") == gone
    check_succession(first, first.to_bytes(), gone, "2")
    check_succession(gone, gone.to_bytes(), entry(3, gone, withdrawn={"v1": old}), "3")
    forged = [
        (first, entry(2, first)),
        (first, entry(2, first, withdrawn={"v1": new})),
        (first, entry(2, first, tags={"v1": old}, withdrawn={"v1": old})),
        (gone, entry(3, gone)),
        (gone, entry(3, gone, tags={"v1": old}, withdrawn={"v1": old})),
        (gone, entry(3, gone, tags={"v1": new})),
    ]
    for before, after in forged:
        with pytest.raises(IntegrityError):
            check_succession(before, before.to_bytes(), after, "forged")


def test_the_place_of_a_part_is_configuration(tmp_path: Any) -> None:
    root, holder = Repository.create(tmp_path / "root"), Repository.create(tmp_path / "holder")
    part = made_up_digest("part")
    assert put_location(root, "p", part, root) is None
    with pytest.raises(NotFoundError, match="does not say"):
        find_part(root, "p", part)
    placed = put_location(root, "p", part, holder)
    assert placed is not None
    assert put_location(root, "p", part, holder) == placed, "told again, it is replaced by itself"
    assert PartLocation.from_bytes(placed.to_bytes(), "x") == placed
    with pytest.raises(NotFoundError, match="holder"):
        find_part(root, "p", part)
    (tmp_path / "root" / location_name(part)).write_bytes(b'{"urls":["/etc"]}')
    with pytest.raises(ShardkitError):
        find_part(root, "p", part)


def test_a_withdrawal_needs_the_tag(tmp_path: Any) -> None:
    repository = Repository.create(tmp_path)
    with pytest.raises(ShardkitError, match="v1"):
        repository.commit(message="x", withdraw={"v1": made_up_digest("none")})
    with pytest.raises(UsageError):
        repository.commit(message="x", withdraw={"not a name": made_up_digest("none")})
    assert repository.head().n == 0
