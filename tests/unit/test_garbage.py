"""Marks and lists of garbage: what is damaged starts over or is a conflict, and old lists go unread."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit
from shardkit.copies.collecting import collect
from shardkit.errors import FormatError, IntegrityError, NotFoundError
from shardkit.repository.garbage import forget_lists, put_list, read_list, read_marks, write_marks
from shardkit.repository.repository import Repository
from shardkit.stores.local import LocalStore
from shardkit.testing.memory_store import MemoryStore


def name_of(number: int) -> str:
    return f"objects/sha256/{number % 256:02x}/{number % 256:02x}{number:062x}.tar"


@given(st.dictionaries(st.integers(0, 10**6).map(name_of), st.integers(0, 2**31)))
def test_marks_are_read_as_they_were_written(marks: dict[str, int]) -> None:
    store = MemoryStore()
    write_marks(store, {name_of(1): 7})
    write_marks(store, marks)
    assert read_marks(store) == marks


@pytest.mark.parametrize(
    "data", [b"", b"{}", b'{"format":"shardkit-marked/1","rounds":[{"time":1}]}', b"\xff"]
)
def test_damaged_marks_start_over(data: bytes) -> None:
    store = MemoryStore()
    store.put_new("gc/marked.json", data)
    assert read_marks(store) == {}
    write_marks(store, {name_of(1): 7})
    assert read_marks(store) == {name_of(1): 7}


def test_a_damaged_list_is_never_believed() -> None:
    store = MemoryStore()
    deletion = put_list(store, 3, [name_of(1)])
    (name,) = store.list_after("gc/lists/")
    assert read_list(store, deletion) == (name_of(1),)
    store.replace(name, store.get(name, max_bytes=10**6).replace(b"tar", b"rat"))
    with pytest.raises(IntegrityError):
        read_list(store, deletion)
    with pytest.raises(FormatError):  # nothing but objects
        read_list(store, put_list(store, 4, ["shardkit.json"]))


def test_all_but_the_newest_lists_go() -> None:
    store = MemoryStore()
    made = [put_list(store, number, [name_of(number)]) for number in range(1, 101)]
    forget_lists(store, None)
    assert len(list(store.list_after("gc/lists/"))) == 64
    assert read_list(store, made[-1]) == (name_of(100),)
    with pytest.raises(NotFoundError):
        read_list(store, made[0])


def test_rounds_of_gc_do_not_read_the_lists_of_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With garbage to collect in each round, a round reads its own list only."""
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
        for _ in range(2):  # marked, then deleted
            done = collect(Repository.open(root), delete=True, grace_s=0, history_s=0)
        assert done.deleted["root"] > 0
        assert read["gc/lists"] == turn + 1
