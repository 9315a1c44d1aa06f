"""Policy, location tables, and roots that find their copies by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardkit.copies.place import commit_table
from shardkit.errors import (
    CommitConflict,
    ConfigurationError,
    IntegrityError,
    ShardkitError,
    UsageError,
)
from shardkit.repository.locations import COPY_NAME, SPARE_NAME, first_root, prepare_copy, read_table
from shardkit.repository.log import entry_name
from shardkit.repository.policy import Critical, LocationRecord, LocationTable, Parity, Policy
from shardkit.repository.repository import Repository
from shardkit.stores.local import LocalStore


def test_a_policy_is_what_a_command_line_says() -> None:
    policy = Policy().changed(copies=2, critical=["gold=3"], parity="8+2", mode="hybrid", max_scrub_age="30d")
    assert policy.copies == 2
    assert policy.critical == (Critical("gold", 3),)
    assert policy.parity == Parity(8, 2)
    assert policy.mode == "hybrid"
    assert policy.max_scrub_age_s == 2_592_000
    assert (policy.copies_of(["a"]), policy.copies_of(["a", "gold"]), policy.most_copies) == (2, 3, 3)
    assert policy.changed() == policy
    assert policy.changed(critical=[], parity="none") == Policy(copies=2)
    assert msgspec.json.decode(msgspec.json.encode(policy), type=Policy) == policy


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"copies": 0}, "from 1 to 16"),
        ({"parity": "8+3"}, "2 parity objects"),
        ({"parity": "8"}, "such as 8\\+2"),
        ({"parity": "-1+2"}, "such as 8\\+2"),
        ({"parity": "x+2"}, "such as 8\\+2"),
        ({"parity": "٨+2"}, "such as 8\\+2"),
        ({"parity": "0+2"}, "such as 8\\+2"),
        ({"parity": "129+2"}, "such as 8\\+2"),
        ({"parity": "eight"}, "such as 8\\+2"),
        ({"mode": "later"}, "sync, async, hybrid"),
        ({"max_scrub_age": "soon"}, "such as 30d"),
        ({"critical": ["gold"]}, "a stratum and its copies"),
        ({"critical": ["gold=x"]}, "a stratum and its copies"),
        ({"critical": ["g=2", "g=3"]}, "each once"),
    ],
)
def test_a_wrong_policy_is_refused_with_what_was_expected(said: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Policy().changed(**said)


def test_a_location_is_parsed_and_never_holds_a_credential(tmp_path: Path) -> None:
    found = LocationRecord.parse("mirror=s3://bucket/cats,domain=aws,rank=2,weight=50")
    assert found == LocationRecord("mirror", "s3://bucket/cats", "aws", 2, 50)
    assert LocationRecord.parse(f"near={tmp_path}").domain == "near"
    assert LocationRecord.parse("near=some/where").url == str(Path("some/where").absolute())
    for text in ("s3://key:CANARY@bucket/cats", "s3://bucket/cats?sig=CANARY", "sftp://me:CANARY@host/cats"):
        with pytest.raises(ShardkitError) as caught:
            LocationRecord.parse(f"mirror={text}")
        assert "CANARY" not in str(caught.value)
    for text in (
        "mirror",
        "=x",
        "A=x",
        "a=x,colour=red",
        "a=x,rank=near",
        "a=http://host:1",
        "a=x,weight=-1",
    ):
        with pytest.raises(UsageError):
            LocationRecord.parse(text)


@pytest.fixture
def root(tmp_path: Path) -> Repository:
    return Repository.create(tmp_path / "root")


def _commit(root: Repository, base: LocationTable | None, *urls: str, copies: int = 1) -> LocationTable:
    others = map(LocationRecord.parse, urls)
    table = LocationTable(policy=Policy(copies=copies), locations=(first_root(root.store), *others))
    return commit_table(root, base, table, message="test")


def test_the_log_records_every_table(root: Repository) -> None:
    assert read_table(root.store, root.id) is None
    base = None
    for count in range(1, 5):
        base = _commit(root, base, *(f"m{i}=/copies/{i}" for i in range(count)))
        assert read_table(root.store, root.id) == base
        assert base.n == count
    root.append(lambda _: {}, root.head(), "another commit")
    assert [entry.locations.n for entry in root.log() if entry.locations] == [4, 4, 3, 2, 1]
    assert read_table(root.store, root.id) == base


def test_of_two_writers_the_second_is_told(root: Repository) -> None:
    base = _commit(root, None, "a=/copies/a")
    won = _commit(root, base, "a=/copies/a", "b=/copies/b")
    with pytest.raises(CommitConflict, match="changed by somebody else"):
        _commit(root, base, "c=/copies/c")
    with pytest.raises(CommitConflict):
        _commit(root, None, "c=/copies/c")
    assert read_table(root.store, root.id) == won


def test_a_policy_that_cannot_be_met_is_refused(root: Repository) -> None:
    with pytest.raises(ConfigurationError, match="2 copies need as many failure domains, and there are 1"):
        _commit(root, None, "a=/copies/a,domain=root", copies=2)
    with pytest.raises(ConfigurationError, match="named twice"):
        _commit(root, None, "a=/copies/a", "a=/copies/b")
    with pytest.raises(ConfigurationError, match="named twice"):
        _commit(root, None, "a=/copies/a", "b=/copies/a")
    _commit(root, None, "a=/copies/a", copies=2)


@pytest.mark.parametrize("damage", ["wrong", "missing"])
def test_a_damaged_table_is_read_from_its_second_copy(root: Repository, tmp_path: Path, damage: str) -> None:
    table = _commit(root, None, "a=/copies/a")
    entry, spare = tmp_path / "root" / entry_name(1), tmp_path / "root" / SPARE_NAME
    good = entry.read_bytes()
    for path in (entry, spare):
        path.chmod(0o644)
    if damage == "missing":
        entry.unlink()
    else:
        entry.write_bytes(good.replace(b"/copies/a", b"/copies/b"))
    assert read_table(root.store, root.id) == table
    spare.write_bytes(spare.read_bytes().replace(b"/copies/a", b"/copies/b"))
    with pytest.raises(IntegrityError, match="digest"):
        read_table(root.store, root.id)
    entry.write_bytes(good)
    assert read_table(root.store, root.id) == table


def test_a_table_of_another_repository_is_refused(root: Repository, tmp_path: Path) -> None:
    _commit(root, None, "a=/copies/a")
    with pytest.raises(IntegrityError, match="of repository"):
        read_table(root.store, "another")
    assert Repository.open(tmp_path / "root", read_only=True).id == root.id


def test_a_root_is_no_copy_of_itself_nor_of_another(tmp_path: Path) -> None:
    one, two = Repository.create(tmp_path / "one"), Repository.create(tmp_path / "two")
    with pytest.raises(UsageError, match="holds another dataset"):
        prepare_copy(one.store, LocalStore(tmp_path / "two"), "mirror", one.id)
    (tmp_path / "alias").symlink_to(tmp_path / "one")
    with pytest.raises(UsageError, match="is the root itself"):
        prepare_copy(one.store, LocalStore(tmp_path / "alias"), "mirror", one.id)
    assert one.store.head(COPY_NAME) is None
    prepare_copy(one.store, LocalStore(tmp_path / "three"), "mirror", one.id)
    with pytest.raises(IntegrityError, match="expected 'other'"):
        prepare_copy(one.store, LocalStore(tmp_path / "three"), "other", one.id)
    assert two.id != one.id
