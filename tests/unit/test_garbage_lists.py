"""Lists of old collections go when they are old enough, and a round reads none of them to know."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import shardkit
from shardkit.copies.collecting import collect
from shardkit.errors import NotFoundError
from shardkit.repository.garbage_lists import forget_lists, put_list, read_list
from shardkit.repository.repository import Repository
from shardkit.stores.local import LocalStore
from shardkit.testing.memory_store import MemoryStore

DAY = 86_400
NOW = 1_800_000_000  # 2027-01-15 08:00 UTC
YEAR = 365 * DAY


class Counting(MemoryStore):
    """Remembers which names were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: Counter[str] = Counter()

    def get(self, name: str, *, max_bytes: int) -> bytes:
        self.read[name] += 1
        return super().get(name, max_bytes=max_bytes)


def name_of(number: int) -> str:
    return f"objects/sha256/{number % 256:02x}/{number % 256:02x}{number:062x}.tar"


@pytest.fixture
def store() -> Counting:
    return Counting()


def lists(store: MemoryStore | LocalStore) -> set[str]:
    return {f"sha256:{name[9:73]}" for name in store.list_after("gc/lists/")}


def test_old_lists_go_and_none_is_read(store: Counting) -> None:
    made = {days: put_list(store, NOW - days * DAY, [name_of(days)]) for days in (0, 1, 364, 365, 367, 900)}
    forget_lists(store, NOW, YEAR, [made[900]])
    assert lists(store) == {made[days] for days in (0, 1, 364, 365, 900)}, "900 is still being collected"
    assert not store.read
    with pytest.raises(NotFoundError):
        read_list(store, made[367])
    assert read_list(store, made[900]) == (name_of(900),)
    forget_lists(store, NOW, YEAR, [])
    assert lists(store) == {made[days] for days in (0, 1, 364, 365)}
    forget_lists(store, NOW + 2 * YEAR, YEAR, [])
    assert list(store.list_after("gc/")) == [], "nothing of theirs is left behind"


def test_a_list_without_an_age_is_read_once(store: Counting) -> None:
    """As those are that were made before ages were put."""
    made = [put_list(store, NOW - days * DAY, [name_of(days)]) for days in range(300, 500)]
    for age in list(store.list_after("gc/ages/")):
        store.delete(age)
    for turn in range(4):
        forget_lists(store, NOW, YEAR, [])
        assert sum(store.read.values()) == min(64 * (turn + 1), len(made)), "a bounded number in each round"
    forget_lists(store, NOW, YEAR, [])
    assert max(store.read.values()) == 1
    assert lists(store) == set(made[: 365 - 300 + 1])


def test_a_damaged_list_stays_a_year(store: Counting) -> None:
    digest = put_list(store, NOW - 900 * DAY, [name_of(1)])
    (name,) = store.list_after("gc/lists/")
    for age in list(store.list_after("gc/ages/")):
        store.delete(age)
    store.replace(name, b"{}")
    forget_lists(store, NOW, YEAR, [])
    assert lists(store) == {digest}, "who needs it is told that it cannot be read"
    forget_lists(store, NOW + YEAR + 2 * DAY, YEAR, [])
    assert lists(store) == set()


def test_killed_between_a_list_and_its_age(store: Counting) -> None:
    digest = put_list(store, NOW - 2 * YEAR, [name_of(1)])
    (name,), (age,) = store.list_after("gc/lists/"), store.list_after("gc/ages/")
    store.delete(name)  # killed before the age went, or before the list was put
    forget_lists(store, NOW, YEAR, [digest])
    assert list(store.list_after("gc/")) == [age], "it may be about to be put"
    forget_lists(store, NOW, YEAR, [])
    assert list(store.list_after("gc/")) == []


def test_foreign_names_are_left_alone(store: Counting) -> None:
    foreign = ["gc/ages/2020-01-01/mine", "gc/ages/none", "gc/lists/mine.json"]
    for name in foreign:
        store.put_new(name, b"")
    forget_lists(store, NOW, YEAR, [])
    assert sorted(store.list_after("gc/")) == sorted(foreign)
    assert not store.read


def test_rounds_of_gc_do_not_read_the_lists_of_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With garbage to collect in each round, the number of lists that a round reads stays the same."""
    read: Counter[str] = Counter()
    get = LocalStore.get

    def counted(self: LocalStore, name: str, *, max_bytes: int) -> bytes:
        read[name.rpartition("/")[0]] += 1
        return get(self, name, max_bytes=max_bytes)

    root = str(tmp_path / "root")
    monkeypatch.setattr(LocalStore, "get", counted)
    for turn in range(4):
        with shardkit.create(root, {"value": "int64"}) as writer:
            writer.add({"value": turn})
        Repository.open(root).commit({"main": None}, message="drop")
        for _ in range(2):  # noted, then deleted
            done = collect(Repository.open(root), delete=True, grace_s=0, history_s=0)
        assert done.deleted["root"] > 0
        assert read["gc/lists"] == 0, "no writer is under way that would look for what went"
    assert len(lists(LocalStore(root))) == 4
