"""RateLimiter, hours, copying one object, proof before a drop, and what a commit waits for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import shardkit
from shardkit.copies.place import PlacementChange, place, promote, undo
from shardkit.copies.placement import find_needed, look
from shardkit.copies.repair import repair
from shardkit.copies.replicate import find_lag, replicate
from shardkit.errors import ConfigurationError, IntegrityError, StoreError, UsageError
from shardkit.reading.objects import Location, copy_object
from shardkit.repository.locations import read_table
from shardkit.repository.policy import LocationRecord, Policy
from shardkit.repository.repository import Repository
from shardkit.stores.local import LocalStore
from shardkit.stores.waiting import Hours, RateLimiter, parse_bandwidth
from tests.flips import flip


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("200MB/s", 200_000_000),
        ("1KiB/s", 1024),
        ("2048", 2048),
        ("1.5 GiB/s", 3 * 2**29),
        ("10mb", 10_000_000),
    ],
)
def test_bandwidths(text: str, found: int) -> None:
    assert parse_bandwidth(text) == found


@pytest.mark.parametrize("text", ["", "fast", "0", "-1MB/s", "1KB/s", "10MB/h"])
def test_what_is_no_bandwidth(text: str) -> None:
    with pytest.raises(ConfigurationError, match="200MB/s"):
        parse_bandwidth(text)


def test_hours_over_midnight_and_within_a_day() -> None:
    night, noon = Hours.parse("22:00-06:00"), Hours.parse("11:30-13:00")
    assert [night.wait_s(m) for m in (22 * 60, 23 * 60, 0, 359)] == [0, 0, 0, 0]
    assert night.wait_s(6 * 60) == 16 * 3600
    assert night.wait_s(21 * 60 + 59, 30) == 30
    assert (noon.wait_s(690), noon.wait_s(779), noon.wait_s(780)) == (0, 0, 1350 * 60)
    for text in ("22:00", "25:00-06:00", "22:60-06:00", "22-6"):
        with pytest.raises(ConfigurationError, match="22:00-06:00"):
            Hours.parse(text)
    with pytest.raises(ConfigurationError, match="no time at all"):
        Hours.parse("06:00-06:00")


class Clock:
    """Time that passes only by waiting."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wait(self, seconds: float) -> bool:
        assert seconds > 0
        self.seconds += seconds
        return False

    def now(self) -> tuple[int, int]:
        minutes = int(self.seconds // 60)
        return minutes % 1440, int(self.seconds % 60)


def test_a_pace_keeps_to_its_rate_and_its_hours() -> None:
    clock = Clock()
    pace = RateLimiter(1_000, clock=lambda: clock.seconds, wait=clock.wait)
    for _ in range(10):
        pace.take(500)
    assert clock.seconds == pytest.approx(4.5)  # the tenth piece may begin when nine have gone through
    told: list[int] = []
    clock = Clock()
    pace = RateLimiter(
        hours=Hours.parse("01:00-02:00"),
        clock=lambda: clock.seconds,
        now=clock.now,
        wait=clock.wait,
        waiting=told.append,
    )
    pace.take(1)
    assert clock.seconds == 3600
    assert told[0] == 3600
    pace.stop()
    with pytest.raises(KeyboardInterrupt):
        pace.take(1)


def _location(path: Path, name: str) -> Location:
    return Location(name=name, store=LocalStore(path), domain=name)


def test_a_copy_is_verified_while_it_is_made(tmp_path: Path) -> None:
    good, bad, target = (_location(tmp_path / name, name) for name in ("good", "bad", "target"))
    data = bytes(range(256)) * 50_000  # more than one piece
    repository = Repository.create(tmp_path / "good")
    name = repository.put_object(data, "tar").name
    bad.store.put_new(name, b"\1" + data[1:])
    refused = copy_object(name, [bad, _location(tmp_path / "empty", "empty")], target)
    assert (refused.source, refused.bad) == ("", "bad: wrong, empty: missing")
    assert isinstance(refused.problem, IntegrityError)
    assert target.store.head(name) is None
    moved: list[int] = []
    assert copy_object(name, [bad, good], target, pace=moved.append) == ("good", len(data), None, "")
    assert target.store.get(name, max_bytes=len(data)) == data
    assert sum(moved) == 2 * len(data)
    copy_object(name, [good], bad)  # over bad bytes
    assert bad.store.get(name, max_bytes=len(data)) == data


def _make(root: Path, ref: str = "main", first: int = 0) -> None:
    with shardkit.create(
        root, {"value": "int64", "kind": "str"}, stratify="kind", format="tar", ref=ref, shard_size="8KiB",
        block_size="1KiB",
    ) as writer:  # fmt: skip
        for number in range(first, first + 100):
            writer.add({"value": number, "kind": "gold" if number < first + 20 else "tin"})


def _change(tmp_path: Path, *names: str, **policy: object) -> PlacementChange:
    def changed(before: Policy) -> Policy:
        return before.changed(**policy)  # type: ignore[arg-type]

    return PlacementChange(
        locations=tuple(LocationRecord.parse(f"{name}={tmp_path / name}") for name in names), policy=changed
    )


def _dataset(tmp_path: Path, *names: str, mode: str = "sync") -> Path:
    """A dataset with two copies of each shard."""
    root = tmp_path / "root"
    place(Repository.create(root), _change(tmp_path, *names, copies=2, mode=mode))
    _make(root)
    return root


def _missing(root: Path) -> int:
    repository = Repository.open(root, read_only=True)
    table = read_table(repository.store, repository.id)
    assert table is not None
    return len(look(repository, table, find_needed(repository, table, repository.versions)).missing)


def _shards(path: Path) -> int:
    return len(list(path.glob("objects/**/*.tar")))


def test_what_a_commit_waits_for(tmp_path: Path) -> None:
    root = _dataset(tmp_path, "a", "b")
    assert _missing(root) == 0
    place(Repository.open(root), _change(tmp_path, mode="async"))
    before = _shards(tmp_path / "a") + _shards(tmp_path / "b")
    _make(root, "later", 1_000)
    assert _shards(tmp_path / "a") + _shards(tmp_path / "b") == before
    lag = find_lag(Repository.open(root))
    assert (lag.exit_code, lag.lag_before > 0) == (5, True)
    done = replicate(Repository.open(root))
    assert (done.exit_code, done.lag_before, done.lag_after) == (0, lag.lag_before, 0)
    assert replicate(Repository.open(root)).objects == 0


def test_hybrid_waits_for_metadata_and_for_critical_strata(tmp_path: Path) -> None:
    root = tmp_path / "root"
    change = _change(tmp_path, "a", "b", copies=2, mode="hybrid", critical=["gold=3"])
    place(Repository.create(root), change)
    _make(root)
    repository = Repository.open(root, read_only=True)
    table = read_table(repository.store, repository.id)
    assert table is not None
    needed = find_needed(repository, table, repository.versions)
    missing = {one.name for one in look(repository, table, needed).missing}
    critical = {name for name, one in needed.items() if one.is_critical}
    assert missing == needed.keys() - critical - {name for name, one in needed.items() if len(one.where) == 1}
    assert any(name.endswith(".tar") for name in critical)
    assert all(len(needed[name].where) == 3 for name in critical if name.endswith(".tar"))


def test_sync_commits_nothing_when_a_location_is_away(tmp_path: Path) -> None:
    root = tmp_path / "root"
    place(Repository.create(root), _change(tmp_path, "a", copies=2, mode="sync"))
    (tmp_path / "a").rename(tmp_path / "away")
    with pytest.raises(StoreError, match=r"nothing was committed.*a: .*not mounted"):
        _make(root)
    assert Repository.open(root).refs == {}
    assert not (tmp_path / "a").exists()  # what is not mounted is not made
    (tmp_path / "away").rename(tmp_path / "a")
    _make(root)
    assert _missing(root) == 0


def test_a_lost_location_is_forgotten_and_its_copies_are_made_elsewhere(tmp_path: Path) -> None:
    root = _dataset(tmp_path, "a", "b")
    shutil.rmtree(tmp_path / "a")
    assert replicate(Repository.open(root)).exit_code == 3
    placing = place(Repository.open(root), PlacementChange(forget=("a",)))
    assert placing.committed
    assert _missing(root) == 0
    assert _shards(tmp_path / "b") == _shards(root)
    with pytest.raises(UsageError, match="no location 'a'"):
        place(Repository.open(root), PlacementChange(forget=("a",)))


def test_a_new_disk_is_filled_again(tmp_path: Path) -> None:
    root = _dataset(tmp_path, "a")
    shutil.rmtree(tmp_path / "a")
    placing = place(Repository.open(root), PlacementChange(refill=("a",)))
    assert not placing.committed
    assert placing.copies.lag_after == 0
    assert _missing(root) == 0


def test_moves_wait_for_the_grace_and_can_be_undone(tmp_path: Path) -> None:
    root = _dataset(tmp_path, "a")
    shards = _shards(root)
    placing = place(
        Repository.open(root), PlacementChange(locations=_change(tmp_path, "b").locations, empty=("a",))
    )
    assert (placing.drops.objects, placing.surplus > 0) == (0, True)
    assert (_shards(tmp_path / "a"), _shards(tmp_path / "b")) == (shards, shards)
    back = undo(Repository.open(root))
    assert back.copies.objects == 0  # nothing had been deleted: nothing to copy
    assert [one.name for one in back.table.locations if one.weight] == ["root", "a"]  # type: ignore[union-attr]
    undo(Repository.open(root))
    place(Repository.open(root), PlacementChange(), grace_s=0)
    assert (_shards(tmp_path / "a"), _shards(tmp_path / "b")) == (0, shards)
    assert _missing(root) == 0


def _truncate(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, _truncate, Path.unlink])
def test_nothing_is_dropped_without_proof_of_good_copies(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    root = _dataset(tmp_path, "a")
    place(Repository.open(root), PlacementChange(locations=_change(tmp_path, "b").locations, empty=("a",)))
    victim = min((tmp_path / "b").glob("objects/**/*.tar"))
    damage(victim)
    name = str(victim.relative_to(tmp_path / "b"))
    placing = place(Repository.open(root), PlacementChange(), grace_s=0)
    assert placing.drops.kept == [("a", name)]
    assert (tmp_path / "a" / name).exists()
    assert _shards(tmp_path / "a") == 1


def test_an_object_that_is_good_nowhere_is_named(tmp_path: Path) -> None:
    root = _dataset(tmp_path, "a", mode="async")
    victim = min(root.glob("objects/**/*.tar"))
    flip(victim)
    done = replicate(Repository.open(root))
    assert done.exit_code == 4
    assert done.lost == [str(victim.relative_to(root))]
    assert _missing(root) == 1  # all others were copied


def test_a_copy_takes_the_place_of_a_lost_root(tmp_path: Path) -> None:
    root = _dataset(tmp_path, "a", "b")
    with pytest.raises(UsageError, match="answers: it must be gone"):
        promote(tmp_path / "a")
    with pytest.raises(UsageError, match="is no copy"):
        promote(root)
    shutil.rmtree(root)
    table = promote(tmp_path / "a")
    assert [one.name for one in table.locations] == ["root", "b"]
    done = replicate(Repository.open(tmp_path / "a"))
    # What lay in the root and in b only is in both again, and what lay in the lost root and in a is in b too.
    assert (done.exit_code, done.lost) == (0, [])
    assert _shards(tmp_path / "a") == _shards(tmp_path / "b")
    ds = shardkit.open(tmp_path / "a")
    assert sorted(int(ds[i]["value"]) for i in range(len(ds))) == list(range(100))
    _make(tmp_path / "a", "next", 1_000)
    assert _missing(tmp_path / "a") == 0
    with pytest.raises(UsageError, match="is no copy"):
        promote(tmp_path / "a")


def test_a_root_that_returns_after_a_promotion_adds_nothing_to_the_log_of_the_new_root(
    tmp_path: Path,
) -> None:
    """Otherwise the new root gets commits that it was promoted without, or its log is forked."""
    root, new = tmp_path / "root", tmp_path / "a"
    place(Repository.create(root), _change(tmp_path, "a", copies=2, mode="async"))
    _make(root)
    replicate(Repository.open(root))
    _make(root, "next", 1_000)  # not copied yet
    root.rename(tmp_path / "away")
    promote(new, copies=1)
    (tmp_path / "away").rename(root)
    entries = sorted(path.name for path in (new / "log").iterdir())
    repair(str(root))
    replicate(Repository.open(root))
    assert sorted(path.name for path in (new / "log").iterdir()) == entries
