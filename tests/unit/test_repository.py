"""Repositories: identity, log, names, objects and garbage."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit
from shardkit.copies.collecting import collect
from shardkit.documents import encode, sha256_digest
from shardkit.errors import CommitConflict, FormatError, IntegrityError, NotFoundError, StoreError, UsageError
from shardkit.repository.garbage import forget_lists, put_list, read_list, read_marks, write_marks
from shardkit.repository.log import NO_COMMIT, Identity, parse_dataset_url
from shardkit.repository.repository import Repository
from shardkit.stores.file_operations import store_error
from shardkit.stores.local import LocalStore, open_store
from shardkit.stores.store import object_name, parse_object_name
from shardkit.testing.memory_store import MemoryStore

# ---- Repositories, refs and URLs: what a user types, and what they are told


DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("url", "root", "ref"),
    [
        ("data/cats", "data/cats", None),
        ("data/cats@val", "data/cats", "val"),
        ("/data/cats@v1.0-rc_2", "/data/cats", "v1.0-rc_2"),
        (f"data/cats@{DIGEST}", "data/cats", DIGEST),
        ("cats@val", "cats", "val"),
        ("home@work/cats", "home@work/cats", None),
        ("home@work/cats@val", "home@work/cats", "val"),
        ("data/cats@home/", "data/cats@home/", None),
        ("s3://bucket/cats@val", "s3://bucket/cats", "val"),
        ("file:///data/cats@val", "file:///data/cats", "val"),
        (".", ".", None),
        ("/", "/", None),
    ],
)
def test_dataset_urls(url: str, root: str, ref: str | None) -> None:
    assert parse_dataset_url(url) == (root, ref)
    if not url.endswith("/"):  # a path drops the slash at its end
        assert parse_dataset_url(Path(url)) == (str(Path(root)), ref) or "://" in url


@pytest.mark.parametrize(
    "url",
    ["", "@val", "data/cats@", "data/cats@a b", "data/cats@sha256:12", "data/cats@-x", "x@" + "y" * 200],
)
def test_urls_that_name_nothing(url: str) -> None:
    with pytest.raises(UsageError, match="expected all 64" if "sha256" in url else "expected"):
        parse_dataset_url(url)


def test_stores_by_url(tmp_path: Path) -> None:
    assert open_store(tmp_path).url == str(tmp_path)
    assert open_store(f"file://{tmp_path}/a%20b").url == f"{tmp_path}/a b"
    assert open_store(f"file://localhost{tmp_path}").url == str(tmp_path)
    with pytest.raises(UsageError, match="file:///"):
        open_store("file://elsewhere/x")
    with pytest.raises(UsageError, match="password") as caught:
        open_store("s3://key:secret@bucket/x?token=hidden")
    assert "secret" not in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_create_and_open(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"shardkit build"):
        Repository.open(tmp_path / "root")
    assert not (tmp_path / "root").exists(), "looking makes nothing"
    repository = Repository.create(tmp_path / "root")
    assert Repository.create(tmp_path / "root").id == repository.id
    assert (repository.head(), repository.log(), repository.refs, repository.tags) == (NO_COMMIT, [], {}, {})
    identity = json.loads((tmp_path / "root" / "shardkit.json").read_bytes())
    assert identity.keys() == {"format", "id", "features", "digest"}


def test_a_newer_repository_is_refused_by_name(tmp_path: Path) -> None:
    Repository.create(tmp_path)
    said = json.loads((tmp_path / "shardkit.json").read_bytes())
    del said["digest"]
    for wrong, message in (
        ({**said, "features": ["erasure-sets"]}, "erasure-sets.*newer shardkit"),
        ({**said, "format": "shardkit-repository/2"}, "shardkit-repository/2"),
    ):
        (tmp_path / "shardkit.json").write_bytes(encode({**wrong, "digest": sha256_digest(encode(wrong))}))
        with pytest.raises(FormatError, match=message):
            Repository.open(tmp_path)
    (tmp_path / "shardkit.json").write_text("{}")
    with pytest.raises(IntegrityError, match="without a digest"):
        Repository.open(tmp_path)


def test_resolving(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path)
    with pytest.raises(NotFoundError, match="nothing was committed yet"):
        repository.resolve()
    one, two = (repository.put_object(data, "manifest").digest for data in (b"1", b"2"))
    repository.commit({"main": one, "train": two}, {"v1": one}, message="first", author="me")
    assert [repository.resolve(name) for name in (None, "main", "train", "v1", DIGEST)] == [
        one,
        one,
        two,
        one,
        DIGEST,
    ]
    with pytest.raises(NotFoundError, match="did you mean 'main'"):
        repository.resolve("maim")
    with pytest.raises(NotFoundError, match="main, train, v1"):
        repository.resolve("zzz")
    with pytest.raises(UsageError):
        repository.resolve("../x")


def test_the_log_holds_no_credential(tmp_path: Path) -> None:
    """It is permanent, and every copy has it."""
    repository = Repository.create(tmp_path)
    one = repository.put_object(b"1", "manifest").digest
    secret = "read from https://user:hunter2@host/x?sig=hunter2"
    repository.commit({"main": one}, message=secret, author=f"Jane <jane@host.org> {secret}")
    assert "hunter2" not in (tmp_path / "log" / "00000000000000000001.json").read_text()
    assert repository.log()[0].author.startswith("Jane <jane@host.org> read from")


def test_what_a_log_entry_holds(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path)
    one = repository.put_object(b"1", "manifest").digest
    entry = repository.commit({"main": one}, {"v1": one}, message="first", author="me")
    again = repository.commit({"main": None}, message="dropped")
    assert repository.log() == [again, entry]
    assert repository.head() == again
    document = json.loads((tmp_path / "log" / "00000000000000000001.json").read_bytes())
    assert document["refs"] == {"main": one}
    assert document["tags"] == {"v1": one}
    assert (document["n"], document["author"], document["message"]) == (1, "me", "first")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", document["time"])
    assert document["digest"] == entry.digest
    assert dict(again.refs) == {}
    assert dict(again.tags) == {"v1": one}
    assert repository.find_commit(entry.txn) == entry


def test_tags_stay_and_names_are_one_of_them(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path)
    one, two = (repository.put_object(data, "manifest").digest for data in (b"1", b"2"))
    repository.commit({"main": one}, {"v1": one}, message="")
    repository.commit({}, {"v1": one}, message="the same again")
    with pytest.raises(CommitConflict, match="never moved"):
        repository.commit({}, {"v1": two}, message="")
    with pytest.raises(CommitConflict, match="a ref and a tag"):
        repository.commit({"v1": one}, message="")
    with pytest.raises(CommitConflict, match="a ref and a tag"):
        repository.commit({}, {"main": one}, message="")
    assert len(repository.log()) == 2


def test_a_dangling_ref_cannot_be_committed(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path)
    with pytest.raises(NotFoundError, match=DIGEST):
        repository.commit({"main": DIGEST}, message="")
    with pytest.raises(NotFoundError, match=DIGEST):
        repository.commit({}, {"v1": DIGEST}, message="")
    assert repository.head().n == 0


def test_reading_the_head_reads_one_entry(tmp_path: Path) -> None:
    """Listing names is all that grows with the log."""
    repository = Repository.create(tmp_path)
    one = repository.put_object(b"1", "manifest").digest
    for number in range(20):
        repository.commit({"main": one}, message=str(number))
    for number in range(1, 20):
        (tmp_path / "log" / f"{number:020d}.json").write_bytes(b"unreadable")
    assert Repository.open(tmp_path).head().message == "19"
    with pytest.raises(IntegrityError, match=r"log/0{18}19\.json"):
        repository.log()


class Blinking(MemoryStore):
    """A listing that was begun before others committed: it shows a later entry and not an earlier one."""

    hidden: tuple[str, ...] = ()

    def list_after(self, prefix: str, after: str = "") -> Iterator[str]:
        return (name for name in super().list_after(prefix, after) if name not in self.hidden)


@pytest.mark.parametrize("hidden", [(2,), (1, 2), (3,), (1, 2, 3)])
def test_a_listing_may_lack_entries_that_are_there(hidden: tuple[int, ...]) -> None:
    store, identity = Blinking(), Identity.new()
    repository = Repository(store, identity, read_only=False)
    one = repository.put_object(b"1", "manifest").digest
    for number in range(3):
        repository.commit({"main": one}, message=str(number))
    store.hidden = tuple(f"log/{number:020d}.json" for number in hidden)
    assert [entry.message for entry in repository.log()] == ["2", "1", "0"]
    del store.objects[store.hidden[0]]
    with pytest.raises(IntegrityError, match=f"entry {hidden[0]} is missing"):
        repository.head()


def test_an_entry_with_an_absurd_number(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path)
    repository.store.put_new(f"log/{10**19}.json", b"{}")
    with pytest.raises(IntegrityError, match="entry 1 is missing"):
        repository.head()


def test_object_names() -> None:
    name = object_name(DIGEST, "arrow")
    assert name == f"objects/sha256/ab/{'ab' * 32}.arrow"
    assert parse_object_name(name) == (DIGEST, "arrow")
    with pytest.raises(UsageError, match="exe"):
        object_name(DIGEST, "exe")
    for wrong in (
        f"objects/sha256/cd/{'ab' * 32}.tar",
        f"objects/sha256/ab/{'ab' * 32}.exe",
        "objects/x",
        "shardkit.json",
    ):
        with pytest.raises(FormatError):
            parse_object_name(wrong)


def test_errors_of_the_system_are_explained() -> None:
    import errno

    for number in errno.errorcode:
        for writing in (False, True):
            error = store_error(OSError(number, os.strerror(number)), "write log/1 in /data", writing=writing)
            assert "write log/1 in /data" in str(error)
            assert ";" in str(error)
    assert "hard links" in str(store_error(OSError(errno.EPERM, "", "a", None, "b"), "write x", writing=True))


def _id_in_a_child(repository: Repository) -> tuple[str, str]:
    put = repository.put_object(b"from a child", "tar")
    return repository.id, repository.get_object(put.digest, "tar").decode()


def test_repositories_travel_to_other_processes(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path)
    copy = pickle.loads(pickle.dumps(repository))
    assert (copy.id, copy.url) == (repository.id, repository.url)
    store = pickle.loads(pickle.dumps(LocalStore(tmp_path, read_only=True)))
    assert store.read_only
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_id_in_a_child, (repository,)) == (repository.id, "from a child")


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    folder = Path("/proc/self/fd")
    if not folder.exists():
        pytest.skip("the system does not list open files")
    repository = Repository.create(tmp_path)
    before = len(list(folder.iterdir()))
    one = repository.put_object(b"1", "manifest").digest
    with repository.stage_object("tar") as stage:
        stage.write(b"x")
        repository.publish(stage, "tar")
    repository.commit({"main": one}, message="")
    list(repository.store.list_after(""))
    for name in ("missing", "objects/missing", "no/folder"):
        with pytest.raises(NotFoundError):
            repository.store.get(name, max_bytes=1)
    with pytest.raises(StoreError):
        repository.store.get("objects", max_bytes=1)
    with pytest.raises(StoreError):
        repository.store.get("shardkit.json/x", max_bytes=1)
    assert len(list(folder.iterdir())) == before


# ---- Marks and lists of garbage: what is damaged starts over or is a conflict, and old lists go unread


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
    forget_lists(store, NO_COMMIT)
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
