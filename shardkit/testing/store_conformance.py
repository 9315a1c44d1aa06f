"""Conformance tests of stores: subclass `StoreConformance`, define `new_store`, and run pytest.

::

    class TestMyStore(StoreConformance):
        def new_store(self, tmp_path):
            return MyStore(tmp_path)

The suite uses public names only, so it runs on any implementation.
"""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardkit.errors import IntegrityError, NotFoundError, UsageError
from shardkit.stores.store import Store

BAD_NAMES = (
    "",
    "/etc/passwd",
    "../outside",
    "objects/../../outside",
    "objects/..",
    "objects//x",
    "objects/",
    "./x",
    ".hidden",
    "objects/.hidden",
    "-rf",
    "objects/-rf",
    "with space",
    "new\nline",
    "nul\0byte",
    "back\\slash",
    "Größe",
    "UPPER",
    "a" * 600,
    "tmp/mine",
    "tmp",
)
"""Object names that every store must reject."""


class StoreConformance:
    """Tests of the `Store` protocol; each starts with an empty store."""

    def new_store(self, tmp_path: Path) -> Store:
        """Return an empty store of the implementation under test."""
        raise NotImplementedError

    def reopened(self, store: Store) -> Store:
        """Return the same store as another process would open it."""
        copy: Store = pickle.loads(pickle.dumps(store))  # noqa: S301 (our own object, in a test)
        return copy

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return self.new_store(tmp_path)

    def test_implements_the_protocol(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert isinstance(store.url, str)

    def test_put_then_get(self, store: Store) -> None:
        for name, data in {
            "one": b"1",
            "deep/er/name.json": b"",
            "objects/x.tar": bytes(range(256)) * 300,
        }.items():
            assert store.put_new(name, data) is True
            assert store.get(name, max_bytes=len(data)) == data
            stat = store.head(name)
            assert stat is not None
            assert stat.size == len(data)
            assert stat.sha256 in (None, hashlib.sha256(data).hexdigest())
            assert self.reopened(store).get(name, max_bytes=len(data)) == data

    def test_put_never_overwrites(self, store: Store) -> None:
        assert store.put_new("log/1", b"first") is True
        assert store.put_new("log/1", b"second") is False
        assert self.reopened(store).put_new("log/1", b"third") is False
        assert store.get("log/1", max_bytes=100) == b"first"

    def test_missing_names(self, store: Store) -> None:
        assert store.put_new("folder/there", b"x")
        for name in ("missing", "folder/missing", "no/such/folder"):
            assert store.head(name) is None
            assert store.local_path(name) is None
            store.delete(name)
            with pytest.raises(NotFoundError, match=name):
                store.get(name, max_bytes=10)
            with pytest.raises(NotFoundError, match=name):
                store.get_range(name, 0, 1)

    def test_get_refuses_what_is_larger_than_expected(self, store: Store) -> None:
        assert store.put_new("big", bytes(1_001))
        assert store.get("big", max_bytes=1_001) == bytes(1_001)
        with pytest.raises(IntegrityError, match=r"1001 bytes.*1000"):
            store.get("big", max_bytes=1_000)

    def test_ranges(self, store: Store) -> None:
        data = bytes(range(256)) * 4
        assert store.put_new("r", data)
        wanted = [(0, 1), (1_023, 1), (0, 1_024), (100, 0), (1_024, 0), (500, 24), (10, 20), (0, 1)]
        for offset, length in wanted:
            assert store.get_range("r", offset, length) == data[offset : offset + length]

    def test_ranges_past_the_end_or_below_zero(self, store: Store) -> None:
        assert store.put_new("r", bytes(10))
        for offset, length in ((0, 11), (10, 1), (9, 2), (2**40, 1)):
            with pytest.raises(IntegrityError, match="r"):
                store.get_range("r", offset, length)
        for offset, length in ((-1, 1), (0, -1)):
            with pytest.raises(UsageError):
                store.get_range("r", offset, length)

    def test_list_is_sorted_and_recursive(self, store: Store) -> None:
        names = ["log/2", "log/1", "log/10", "a/x", "a-b", "a/b/c", "a.b", "z"]
        for name in names:
            assert store.put_new(name, b"")
        assert list(store.list_after("")) == sorted(names)
        assert list(store.list_after("log/")) == ["log/1", "log/10", "log/2"]
        assert list(store.list_after("a/")) == ["a/b/c", "a/x"]
        assert list(store.list_after("none/")) == []
        for after in [*names, "a/", "a/b", "a/zz", "log/10x", "zz", "A"]:
            assert list(store.list_after("", after)) == [name for name in sorted(names) if name > after]
            assert list(store.list_after("log/", after)) == [
                n for n in sorted(names) if n[:4] == "log/" and n > after
            ]

    def test_delete(self, store: Store) -> None:
        assert store.put_new("d/x", b"1")
        store.delete("d/x")
        store.delete("d/x")
        assert store.head("d/x") is None
        assert list(store.list_after("")) == []
        assert store.put_new("d/x", b"2") is True
        assert store.get("d/x", max_bytes=1) == b"2"

    def test_replace(self, store: Store) -> None:
        assert store.put_new("objects/bad", b"rotten bytes")
        store.replace("objects/bad", b"good")
        assert store.get("objects/bad", max_bytes=100) == b"good"
        store.replace("objects/lost", b"found")
        assert store.get("objects/lost", max_bytes=100) == b"found"

    def test_stage(self, store: Store) -> None:
        pieces: list[bytes | bytearray | memoryview] = [
            b"abc",
            bytearray(b"defg"),
            memoryview(bytes(100_000)),
            b"",
        ]
        whole = b"".join(bytes(piece) for piece in pieces)
        with store.stage("tar") as stage:
            for piece in pieces:
                assert stage.write(piece) == len(piece)
            assert list(store.list_after("")) == [], "nothing is visible before it is published"
            assert stage.size == len(whole)
            assert stage.digest == hashlib.sha256(whole).hexdigest()
            assert stage.publish("objects/staged.tar") is True
        assert store.get("objects/staged.tar", max_bytes=len(whole)) == whole
        assert list(store.list_after("")) == ["objects/staged.tar"]

    def test_stage_onto_a_name_that_exists(self, store: Store) -> None:
        assert store.put_new("x", b"old")
        with store.stage() as stage:
            stage.write(b"new")
            assert stage.publish("x") is False
            assert store.get("x", max_bytes=10) == b"old"
            assert stage.publish("x", replace=True) is True
        assert store.get("x", max_bytes=10) == b"new"

    def test_a_dropped_stage_leaves_nothing(self, store: Store) -> None:
        def change_my_mind() -> None:
            with store.stage() as stage:
                stage.write(b"half")
                raise RuntimeError("changed my mind")

        with pytest.raises(RuntimeError, match="changed my mind"):
            change_my_mind()
        with store.stage() as stage:
            stage.write(b"half")
        assert list(store.list_after("")) == []

    @pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: repr(name[:20]))
    def test_names_that_no_store_takes(self, store: Store, name: str) -> None:
        actions: list[Callable[[], object]] = [
            lambda: store.put_new(name, b""),
            lambda: store.get(name, max_bytes=1),
            lambda: store.get_range(name, 0, 1),
            lambda: store.head(name),
            lambda: store.delete(name),
            lambda: store.replace(name, b""),
            lambda: store.local_path(name),
        ]
        for action in actions:
            with pytest.raises(UsageError):
                action()
        with store.stage() as stage, pytest.raises(UsageError):
            stage.publish(name)

    def test_a_prefix_is_a_folder(self, store: Store) -> None:
        for prefix in ("log", "/", "../", "a//", ".x/"):
            with pytest.raises(UsageError):
                list(store.list_after(prefix))

    def test_local_path_shows_the_same_bytes(self, store: Store) -> None:
        assert store.put_new("objects/here", b"bytes")
        path = store.local_path("objects/here")
        assert path is None or path.read_bytes() == b"bytes"

    def test_one_winner(self, store: Store) -> None:
        """Put one name from sixteen threads: one creates the object, and its bytes are read afterwards."""
        for turn in range(5):
            name, gate = f"race/{turn}", threading.Barrier(16)

            def put(number: int, name: str = name, gate: threading.Barrier = gate) -> bool:
                gate.wait()
                return store.put_new(name, b"%d" % number)

            with ThreadPoolExecutor(16) as pool:
                created = list(pool.map(put, range(16)))
            assert created.count(True) == 1
            assert store.get(name, max_bytes=2) == b"%d" % created.index(True)

    def test_errors_survive_pickling(self, store: Store) -> None:
        with pytest.raises(NotFoundError) as caught:
            store.get("missing", max_bytes=1)
        copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 (our own object, in a test)
        assert str(copy) == str(caught.value)
