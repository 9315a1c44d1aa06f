"""Removing and erasing: exactly the others are left, equal in every sample, and no byte of the erased ones."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit
import shardkit_tools.building.rebuilding as rebuilding
from shardkit.copies import collecting
from shardkit.copies.place import PlacementChange, place
from shardkit.copies.verify import verify
from shardkit.dataset.lookups import find_samples, hash_values
from shardkit.dataset.merging import merge_datasets
from shardkit.dataset.removing import erase, remove, resume_erasures
from shardkit.dataset.rewriting import ErasureJournal
from shardkit.dataset.selecting import put_selected
from shardkit.errors import CommitConflict, IntegrityError, NotFoundError, UsageError
from shardkit.repository import garbage
from shardkit.repository.policy import LocationRecord, Policy
from shardkit.repository.repository import Repository
from shardkit.stores.local import LocalStore
from shardkit.stores.store import object_name

SCHEMA = {"secret": "str", "n": "int64", "kind": "str"}


def secret(number: int) -> str:
    """A text that occurs nowhere else."""
    return f"<<{number:05d}|{number * 7919 % 104729:06d}>>"


def row(number: int) -> dict[str, Any]:
    kind = f"rare{number % 5}" if number % 11 == 0 else "ab"[number % 2]
    return {"secret": secret(number), "n": number, "kind": kind}


def make(root: Path, numbers: range, *, keys: bool = True, **settings: Any) -> shardkit.Dataset:
    settings = {"stratify": "kind", "shard_size": "8KiB", "block_size": "2KiB", **settings}
    with shardkit.create(root, SCHEMA, **settings) as writer:
        for number in numbers:
            writer.add(row(number), key=f"key-{number:05d}" if keys else None)
    return shardkit.open(root)


def contents(url: object) -> dict[str, dict[str, Any]]:
    ds = shardkit.open(str(url))
    found = {ds.key(sample): ds[sample] for sample in range(len(ds))}
    assert len(found) == len(ds)
    counts: dict[str, int] = {}
    for sample in found.values():
        counts[sample["kind"]] = counts.get(sample["kind"], 0) + 1
    if not ds.manifest.parts and ds.manifest.axes:
        assert {name: n for name, n in ds.strata.items() if n} == counts
    return found


def select(root: Path, ref: str, where: str) -> None:
    view = shardkit.open(root).select(where=where)
    repository = Repository.open(root)
    put_selected(repository, view.version)
    repository.commit({ref: view.manifest.id}, message=where)


def search(root: Path, number: int) -> list[str]:
    """Files of a root that hold the bytes of a sample."""
    texts = (secret(number).encode(), f"key-{number:05d}".encode())
    return [
        str(path) for path in root.rglob("*") if path.is_file() and any(t in path.read_bytes() for t in texts)
    ]


@pytest.mark.slow
@settings(max_examples=6)
@given(data=st.data(), format=st.sampled_from(["tar", "arrow"]), split=st.booleans())
def test_exactly_the_others_are_left(data: st.DataObject, format: str, split: bool) -> None:
    count = data.draw(st.integers(20, 40))
    gone = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=count // 2))
    with TemporaryDirectory() as folder:
        root = Path(folder, "d")
        shares = {"train": 0.6, "val": 0.4} if split else None
        make(root, range(count), format=format, split=shares, lookup="key,n")
        select(root, "low", "n < 15")
        repository = Repository.open(root)
        tag_id = repository.refs["main"]
        repository.commit(set_tags={"v1": tag_id}, message="v1")
        refs = dict(repository.refs)
        before = {ref: contents(f"{root}@{ref}") for ref in refs}
        keys = {f"key-{number:05d}" for number in gone}
        if any(not set(held) - keys for held in before.values()):
            return  # a ref would be empty: another test
        report = erase(str(root), keys=sorted(keys), reason="asked to")
        assert report.rows == len(gone)
        for ref, held in before.items():
            assert contents(f"{root}@{ref}") == {key: held[key] for key in held if key not in keys}
        if format == "tar":  # keys in a compressed index are no bytes to search for, payloads of a tar are
            assert all(not search(root, number) for number in gone)
            assert search(root, min(set(range(count)) - gone)), "the search can find what is there"
        assert verify(root, level="decode").exit_code == 0
        check_look_ups(root, count, gone)
        assert set(report.tags) == {"v1"}
        with pytest.raises(NotFoundError, match="withdrawn"):
            repository.resolve("v1")
        with pytest.raises(NotFoundError):
            shardkit.open(f"{root}@{tag_id}")
        assert report.versions[tag_id] == repository.refs["main"]


def check_look_ups(root: Path, count: int, gone: set[int]) -> None:
    ds = shardkit.open(root)
    field, hashes = hash_values(ds.schema, "n", [str(number) for number in range(count)])
    matches = find_samples(ds, field, hashes)
    assert set(matches.value.tolist()) == set(range(count)) - gone
    assert [ds[sample]["n"] for sample in matches.sample.tolist()] == matches.value.tolist()


def test_removed_samples_leave_every_ref_and_stay_in_tags(tmp_path: Path) -> None:
    make(tmp_path, range(60), split={"train": 0.5, "val": 0.5})
    repository = Repository.open(tmp_path)
    repository.commit(set_tags={"v1": repository.refs["main"]}, message="v1")
    before = {ref: contents(f"{tmp_path}@{ref}") for ref in repository.refs}
    shards = sorted(tmp_path.rglob("*.tar"))
    ds = shardkit.open(tmp_path)
    keys = {ds.key(3), ds.key(40)}
    removal = remove(str(tmp_path), rows=[3, 40, 3], reason="wrong label", author="me")
    assert removal.samples == 2
    assert removal.still == ("v1 (tag)",)
    for ref, held in before.items():
        assert contents(f"{tmp_path}@{ref}") == {key: held[key] for key in held if key not in keys}
    assert contents(f"{tmp_path}@v1") == before["main"]
    assert sorted(tmp_path.rglob("*.tar")) == shards
    assert "wrong label" in repository.log()[0].message
    again = remove(f"{tmp_path}@val", keys=[next(iter(contents(f"{tmp_path}@val")))], reason="x")
    assert list(again.refs) == ["val"]
    assert "main" in again.still


def test_copies_in_rebuilt_versions_go_too_and_samples_that_are_others_stay(tmp_path: Path) -> None:
    root = tmp_path / "d"
    make(root, range(50))
    rebuilding.rebuild(root, format="arrow", shard_size="4KiB", stratify=[], ref="arrow")
    with shardkit.create(root, SCHEMA, ref="other") as writer:  # other samples under keys that are the same
        for number in range(50):
            writer.add(row(number + 1000), key=f"key-{number:05d}")
    other = contents(f"{root}@other")
    report = erase(str(root), keys=["key-00007"], reason="x")
    assert report.rows == 2
    assert contents(f"{root}@other") == other
    assert any("key-00007" in note and "other content" in note for note in report.not_reached)
    held = [path for path in search(root, 7) if secret(7).encode() in Path(path).read_bytes()]
    assert not held
    assert len(contents(f"{root}@arrow")) == len(contents(root)) == 49


def test_what_other_versions_share_stays(tmp_path: Path) -> None:
    """Old versions that no ref names, parents and merged versions go on, without the rows."""
    first = make(tmp_path, range(40)).manifest.id
    make(tmp_path, range(40, 60), append=True)
    merge_datasets({"a": f"{tmp_path}@{first}", "b": str(tmp_path)}, tmp_path, ref="both")
    report = erase(str(tmp_path), keys=["key-00050", "key-00002"], reason="x")
    new_first = report.versions[first]
    main = shardkit.open(tmp_path).manifest
    assert main.parent == new_first
    assert len(contents(f"{tmp_path}@{new_first}")) == 39
    both = shardkit.open(f"{tmp_path}@both")
    assert len(both) == 39 + 58
    assert dict(both.manifest.parts) == {"a": new_first, "b": main.id}
    assert verify(tmp_path).exit_code == 0
    make(tmp_path, range(60, 63), append=True)
    assert len(shardkit.open(tmp_path)) == 61


def test_a_merged_version_that_lacks_a_part_stops_an_erasure_until_the_part_is_back(tmp_path: Path) -> None:
    """It would name the old version of the part that is erased from, whose objects go."""
    root, other, away = tmp_path / "root", tmp_path / "other", tmp_path / "away"
    make(root, range(40))
    make(other, range(100, 120))
    merge_datasets({"a": str(root), "b": str(other)}, root, ref="both")
    other.rename(away)
    with pytest.raises(IntegrityError, match=r"put it back.*nothing was deleted"):
        erase(str(root), keys=["key-00002"], reason="x")
    away.rename(other)
    assert len(shardkit.open(f"{root}@both")) == 60
    (report,) = resume_erasures(str(root))
    assert report.rows == 1
    assert len(shardkit.open(f"{root}@both")) == 59
    assert verify(root).exit_code == 0


def test_generated_keys_go_on_where_they_would_have(tmp_path: Path) -> None:
    make(tmp_path, range(30), keys=False)
    erase(str(tmp_path), keys=["0000000004", "0000000029"], reason="x")
    make(tmp_path, range(30, 33), keys=False, append=True)
    expected = {f"{number:010d}" for number in range(33)} - {"0000000004", "0000000029"}
    assert set(contents(tmp_path)) == expected


def test_whole_shards_strata_and_refs_may_go(tmp_path: Path) -> None:
    make(tmp_path, range(24), shard_size="1B")  # a shard each
    select(tmp_path, "one", "n == 5")
    select(tmp_path, "rare", "kind == 'rare0'")
    report = erase(str(tmp_path), keys=["key-00005", "key-00000"], reason="x")
    assert report.dropped == 2
    assert report.refs["one"] == ""
    assert "one" not in Repository.open(tmp_path).refs
    assert any("'rare0'" in note for note in report.not_reached)
    assert len(contents(tmp_path)) == 22
    assert verify(tmp_path, level="decode").exit_code == 0


def test_what_cannot_be_removed_is_refused_and_nothing_is_committed(tmp_path: Path) -> None:
    root = tmp_path / "d"
    make(root, range(20))
    merge_datasets({"d": root}, tmp_path / "m")
    for call in (remove, erase):
        with pytest.raises(NotFoundError, match="key-99999"):
            call(str(root), keys=["key-99999"], reason="x")
        with pytest.raises(NotFoundError, match="20"):
            call(str(root), rows=[20], reason="x")
        with pytest.raises(UsageError, match="reason"):
            call(str(root), rows=[1], reason=" ")
        with pytest.raises(UsageError):
            call(str(root), rows=[], reason="x")
        with pytest.raises(UsageError, match="no sample"):
            call(str(root), rows=list(range(20)), reason="x")
        with pytest.raises(UsageError, match="merged"):
            call(str(tmp_path / "m"), rows=[1], reason="x")
    assert len(Repository.open(root).log()) == 1
    assert resume_erasures(str(root)) == []


def test_a_withdrawn_name_is_never_used_again(tmp_path: Path) -> None:
    make(tmp_path, range(20))
    repository = Repository.open(tmp_path)
    repository.commit(set_tags={"v1": repository.refs["main"]}, message="v1")
    erase(str(tmp_path), rows=[0], reason="x")
    for use in ({"set_tags": {"v1": repository.refs["main"]}}, {"set_refs": {"v1": repository.refs["main"]}}):
        with pytest.raises(CommitConflict, match="withdrawn"):
            repository.commit(**use, message="again")  # type: ignore[arg-type]
    repository.commit(set_tags={"v2": repository.refs["main"]}, message="v2")
    erase(str(tmp_path), rows=[0], reason="x")
    assert set(repository.log()[0].withdrawn) == {"v1", "v2"}


@pytest.mark.parametrize("has_copy", [True, False])
@pytest.mark.parametrize("damaged", ["manifest", "page"])
def test_erasing_beside_a_damaged_version_takes_nothing_from_it(
    tmp_path: Path, damaged: str, has_copy: bool
) -> None:
    """It shares shards with the one that is erased from, and must not look as if it needed nothing."""
    root = tmp_path / "root"
    first = make(root, range(40)).manifest.id
    repository = Repository.open(root)
    repository.commit(set_refs={"first": first}, message="first")
    make(root, range(40, 60), append=True)
    if has_copy:
        copy = LocationRecord("copy", str(tmp_path / "copy"), "copy")
        place(repository, PlacementChange(locations=(copy,), policy=lambda _: Policy(copies=2)))
    main = shardkit.open(root).manifest
    bad = (
        object_name(main.id, "manifest")
        if damaged == "manifest"
        else object_name(main.pages[1].digest, "page")
    )
    (root / bad).write_bytes(b"")
    before = set(repository.store.list_after("objects/"))
    if has_copy:
        erase(f"{root}@first", keys=["key-00002"], reason="x")
        assert contents(str(root)).keys() == {f"key-{number:05d}" for number in range(60) if number != 2}
    else:
        with pytest.raises(IntegrityError, match=r"nothing was deleted; run: shardkit repair .* --resume"):
            erase(f"{root}@first", keys=["key-00002"], reason="x")
        assert before <= set(repository.store.list_after("objects/"))


def test_a_tag_that_races_is_withdrawn_before_anything_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, range(32))
    old = Repository.open(tmp_path).refs["main"]
    commit, delete, tags, named = Repository.commit, LocalStore.delete, [{"late": old}], list[bool]()

    def tagged_first(self: Repository, *given: Any, **options: Any) -> Any:
        if tags:
            commit(Repository.open(tmp_path), set_tags=tags.pop(), message="late")
        return commit(self, *given, **options)

    def watched(self: LocalStore, name: str) -> None:
        if name.startswith("objects/"):
            named.append(old in Repository.open(tmp_path, read_only=True).tags.values())
        delete(self, name)

    monkeypatch.setattr(Repository, "commit", tagged_first)
    monkeypatch.setattr(LocalStore, "delete", watched)
    erase(str(tmp_path), keys=["key-00003"], reason="asked for")
    assert named
    assert not any(named)
    assert "late" not in Repository.open(tmp_path).tags


@pytest.mark.parametrize("moment", ["before the announcement", "while objects are deleted", "after the end"])
def test_a_version_prepared_before_an_erasure_is_not_committed_over_what_it_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    make(tmp_path, range(32))
    view, writer = shardkit.open(tmp_path).select(where="n < 20"), Repository.open(tmp_path)
    put_selected(writer, view.version)
    told: list[str] = []

    def commit_late() -> None:
        if not told:
            told.append("")
            try:
                writer.commit({"late": view.manifest.id}, message="late")
                told[0] = "committed"
            except CommitConflict as error:
                told[0] = str(error)

    put_list, delete = garbage.put_list, LocalStore.delete

    def listed(*given: Any) -> Any:
        commit_late()
        return put_list(*given)

    def deleted(self: LocalStore, name: str) -> None:
        if name.startswith("objects/"):
            commit_late()
        delete(self, name)

    if moment == "before the announcement":
        monkeypatch.setattr(collecting, "put_list", listed)
    elif moment == "while objects are deleted":
        monkeypatch.setattr(LocalStore, "delete", deleted)
    erase(str(tmp_path), keys=["key-00003"], reason="asked for")
    commit_late()
    left = {f"key-{number:05d}" for number in range(32) if number != 3}
    assert contents(str(tmp_path)).keys() == left
    if moment == "before the announcement":
        assert told == ["committed"]
        assert contents(f"{tmp_path}@late").keys() == {key for key in left if key < "key-00020"}
    else:
        assert "deleted" in told[0]
        assert "run the same command again" in told[0]
        assert "late" not in Repository.open(tmp_path).refs
    assert search(tmp_path, 3) == []
    assert verify(str(tmp_path)).exit_code == 0


@pytest.mark.parametrize("lost", ["index", "shard", "page"])
def test_an_erasure_does_not_pass_over_a_version_that_is_named_and_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """It would report success, and the rows would be back as soon as the version is repaired."""
    root, away = tmp_path / "root", tmp_path / "away"
    made = make(root, range(40), format="tar")
    sample = next(sample for sample in range(40) if made.key(sample) == "key-00002")
    shard = int(made.rows.locate(np.array([sample])).shard[0])
    digest = {
        "index": bytes(made.table.index_digest[shard]).hex(),
        "shard": bytes(made.table.digest[shard]).hex(),
        "page": made.manifest.pages[0].digest.removeprefix("sha256:"),
    }[lost]
    name = object_name(f"sha256:{digest}", "tar" if lost == "shard" else lost)
    begin = ErasureJournal.begin

    def begun(self: ErasureJournal) -> None:
        begin(self)
        (root / name).rename(away)

    with monkeypatch.context() as patch:
        patch.setattr(ErasureJournal, "begin", begun)
        with pytest.raises(IntegrityError, match="nothing was deleted; run: shardkit repair"):
            erase(str(root), keys=["key-00002"], reason="x")
    assert search(tmp_path, 2)
    away.rename(root / name)
    (report,) = resume_erasures(str(root))
    assert report.rows == 1
    assert contents(root).keys() == {f"key-{number:05d}" for number in range(40) if number != 2}
    assert not search(tmp_path, 2)
