"""Pages, manifests and log entries that were made to harm, under digests that are right: refused, in bounded memory."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.documents import encode, sha256_digest
from shardkit.errors import FormatError, IntegrityError, NotFoundError, ShardkitError, StoreError
from shardkit.formats.columns import pack_columns, unpack_columns
from shardkit.formats.schema import Schema
from shardkit.manifest import Manifest, Selection, ShardRecord, ShardTable, merge, pack_page
from shardkit.repository.log import LogEntry
from shardkit.repository.repository import Repository
from shardkit.repository.versions import Version, load_manifest, put_location, put_manifest, put_selection
from shardkit.stores.local import LocalStore
from tests.property.shard_tables import composed, made_up_digest, made_up_table

SCHEMA = Schema.parse({"x": "int64"})
Arrays = dict[str, np.ndarray[Any, Any]]


def plain(table: ShardTable) -> tuple[Manifest, list[bytes]]:
    return composed(table, [("a",), ("b",), ("c",)], schema=SCHEMA, axes=("label",))


def with_page(page: bytes) -> bytes:
    """A root that names the page by its true digest and size."""
    manifest, (original,) = plain(made_up_table(1, 4))
    document = json.loads(manifest.to_bytes())
    document["pages"][0].update(digest=sha256_digest(page), size=len(page))
    assert sha256_digest(original) != sha256_digest(page)
    return encode(document)


def changed(change: Callable[[Arrays], object], meta: dict[str, Any] | None = None) -> bytes:
    columns = unpack_columns(pack_page(made_up_table(1, 4)), "page")
    arrays = {name: array.copy() for name, array in columns.arrays.items()}
    change(arrays)
    return pack_columns("page", columns.meta if meta is None else meta, arrays)


def segments_without_end(arrays: Arrays) -> None:
    arrays["segments"][:] = 2**32 - 1  # 17 billion segments, were they believed


def a_bomb(arrays: Arrays) -> None:
    arrays["segment_rows"] = np.zeros(2**22, np.int64)


PAGES: dict[str, bytes] = {
    "empty": b"",
    "noise": bytes(range(256)) * 10,
    "another kind": pack_columns("selection", {}, {}),
    "no columns": pack_columns("page", {"shards": 0, "segments": 0}, {}),
    "a column missing": changed(lambda a: a.pop("size")),
    "a column too many": changed(lambda a: a.update(more=a["size"])),
    "another dtype": changed(lambda a: a.update(size=a["size"].astype(np.uint64))),
    "a wrong length": changed(lambda a: a.update(size=a["size"][:3])),
    "a wrong shape": changed(lambda a: a.update(size=a["size"].reshape(2, 2))),
    "segments of another shape": changed(lambda a: a.update(segments=a["segments"].reshape(2, 2))),
    "one shard fewer everywhere": pack_page(made_up_table(1, 4).take(range(3))),
    "segments without end": changed(segments_without_end),
    "segments without end, confirmed": changed(
        segments_without_end, {"shards": 4, "segments": 4 * (2**32 - 1)}
    ),
    "a bomb": changed(a_bomb),
    "negative rows": changed(lambda a: a["rows"].__imul__(-1)),
    "rows that overflow": changed(lambda a: a["segment_rows"].__imul__(2**61)),
    "a stratum that is not there": changed(lambda a: a["segment_stratum"].__iadd__(3)),
    "meta of another type": changed(lambda a: None, {"shards": "4", "segments": []}),
    "another table": pack_page(made_up_table(2, 4)),
}


@pytest.mark.parametrize("what", PAGES)
def test_hostile_pages(tmp_path: Path, what: str) -> None:
    repository = Repository.create(tmp_path)
    page = PAGES[what]
    if page:
        repository.put_object(page, "page")
        root = repository.put_object(with_page(page), "manifest")
    else:
        root = repository.put_object(encode({"format": "shardkit-manifest/1"}), "manifest")
    tracemalloc.start()
    with pytest.raises(FormatError, match=r"page|manifest") as caught:
        load_manifest(repository, root.digest)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 2**20
    if page and what != "another table":
        assert sha256_digest(page) in str(caught.value), "the message names the page"


def test_a_page_of_another_size_is_not_even_read(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path)
    manifest, pages = plain(made_up_table(1, 4))
    put_manifest(repository, manifest, pages)
    path = (
        tmp_path
        / "objects"
        / "sha256"
        / manifest.pages[0].digest[7:9]
        / f"{manifest.pages[0].digest[7:]}.page"
    )
    with path.open("r+b") as file:
        file.truncate(2**40)  # sparse: it takes no room, and reading it would take all memory
    with pytest.raises(IntegrityError, match="1099511627776 bytes"):
        load_manifest(repository, manifest.id)


def version_with_selection(repository: Repository, chosen: list[int]) -> Version:
    """One shard of two segments of four rows; its page says that two rows of each are selected."""
    put = put_selection(repository, Selection.from_mask([row in chosen for row in range(8)]))
    record = ShardRecord(
        digest=made_up_digest("shard"), size=800, index_digest=made_up_digest("index"), index_size=99, block_rows=2,
        largest_block=200, raw_bytes=800, segment_stratum=[0, 2], segment_rows=[4, 4], segment_selected=[2, 2],
        selection_digest=put.digest,
    )  # fmt: skip
    manifest, pages = plain(ShardTable.from_records([record]))
    put_manifest(repository, manifest, pages)
    return load_manifest(repository, manifest.id)


def test_a_selection_must_be_what_its_page_says(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path)
    told = version_with_selection(repository, [1, 3, 4, 7]).load_selection(0)
    assert told.mask().nonzero()[0].tolist() == [1, 3, 4, 7]
    for lying in ([0, 1, 2, 7], [1, 3, 4], [1, 3, 4, 5, 7], [], [4, 5, 6, 7]):
        with pytest.raises(FormatError, match="other numbers of rows"):
            version_with_selection(repository, lying).load_selection(0)
    manifest, pages = plain(made_up_table(1, 2))
    put_manifest(repository, manifest, pages)
    with pytest.raises(FormatError, match="all its rows"):
        load_manifest(repository, manifest.id).load_selection(0)


def test_merged_versions_load_from_where_their_parts_lie(tmp_path: Path) -> None:
    homes = {name: Repository.create(tmp_path / name) for name in ("web", "code")}
    parts = []
    for seed, name in enumerate(homes):
        manifest, pages = plain(made_up_table(seed, 3 + seed))
        put_manifest(homes[name], manifest, pages)
        parts.append((name, manifest))
    here = Repository.create(tmp_path / "merged")
    merged = merge(parts)
    put_manifest(here, merged, [])
    with pytest.raises(NotFoundError):
        load_manifest(here, merged.id)
    for name, manifest in parts:
        put_location(here, name, manifest.id, homes[name])
    version = load_manifest(here, merged.id)
    assert [part.first_shard for part in version.parts] == [0, 3]
    assert [version.part_of(shard).name for shard in range(7)] == ["web"] * 3 + ["code"] * 4
    tables = [made_up_table(0, 3), made_up_table(1, 4)]
    assert version.table.digest.tobytes() == b"".join(table.digest.tobytes() for table in tables)
    assert version.table.segment_stratum.tolist() == [
        *tables[0].segment_stratum.tolist(), *(number + 3 for number in tables[1].segment_stratum.tolist())
    ]  # fmt: skip
    # A part that is merged itself could go round in circles.
    document = json.loads(merged.to_bytes())
    document["parts"] = [["web", parts[0][1].id], ["code", merged.id]]
    knot = here.put_object(encode(document), "manifest")
    with pytest.raises(FormatError, match="merged itself"):
        load_manifest(here, knot.digest)


Forged = Callable[[dict[str, Any]], object]
ENTRIES: dict[str, Forged] = {
    "another number": lambda d: d.update(n=7),
    "another repository": lambda d: d.update(repository="0" * 36),
    "a broken chain": lambda d: d.update(previous=sha256_digest(b"")),
    "a tag moved": lambda d: d["tags"].update(v1=sha256_digest(b"")),
    "a tag removed": lambda d: d["tags"].clear(),
    "a ref that is a path": lambda d: d["refs"].update({"../x": sha256_digest(b"")}),
    "a ref to a URL": lambda d: d["refs"].update(main="http://x"),
    "a time that is a number": lambda d: d.update(time=1),
    "an unknown key": lambda d: d.update(extra=1),
}


@pytest.mark.parametrize("what", ENTRIES)
def test_forged_log_entries(tmp_path: Path, what: str) -> None:
    """With a self-digest that is right: chain, numbers, tags and shapes are checked all the same."""
    repository = Repository.create(tmp_path)
    manifest = repository.put_object(b"m", "manifest").digest
    repository.commit({"main": manifest}, {"v1": manifest}, message="1")
    repository.commit({"val": manifest}, message="2")
    path = tmp_path / "log" / f"{2:020d}.json"
    document = json.loads(path.read_bytes())
    ENTRIES[what](document)
    del document["digest"]
    document["digest"] = sha256_digest(encode(document))
    path.write_bytes(encode(document))
    with pytest.raises((IntegrityError, FormatError)):
        Repository.open(tmp_path).log()


def test_an_endless_log_entry_is_not_read(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path)
    manifest = repository.put_object(b"m", "manifest").digest
    repository.commit({"main": manifest}, message="1")
    os.truncate(tmp_path / "log" / f"{1:020d}.json", 2**40)
    with pytest.raises(IntegrityError, match="at most"):
        repository.head()


def test_links_in_a_root_are_refused(tmp_path: Path) -> None:
    """A root from somebody else may hold links to anything; none is followed, to read or to write."""
    outside = tmp_path / "outside"
    (outside / "sha256").mkdir(parents=True)
    (outside / "secret").write_bytes(b"secret")
    root = tmp_path / "root"
    root.mkdir()
    (root / "objects").symlink_to(outside)
    (root / "log").mkdir()
    (root / "log" / "1").symlink_to(outside / "secret")
    os.mkfifo(root / "log" / "pipe")
    store = LocalStore(root)
    for name in ("objects/secret", "log/1", "log/pipe"):
        actions: list[Callable[[], object]] = [
            lambda name=name: store.get(name, max_bytes=100),  # type: ignore[misc]
            lambda name=name: store.get_range(name, 0, 1),  # type: ignore[misc]
            lambda name=name: store.head(name),  # type: ignore[misc]
            lambda name=name: store.local_path(name),  # type: ignore[misc]
            lambda name=name: store.put_new(name, b"x"),  # type: ignore[misc]
        ]
        for action in actions:
            with pytest.raises(StoreError, match=r"symbolic link|regular file"):
                action()
    with pytest.raises(StoreError, match="symbolic link"):
        store.put_new("objects/new", b"x")
    assert sorted(path.name for path in outside.iterdir()) == ["secret", "sha256"]
    (root / "tmp").symlink_to(outside)
    with pytest.raises(StoreError, match="symbolic link"):
        store.put_new("log/2", b"x")
    LocalStore(root)  # the sweep does not follow it either
    assert (outside / "secret").read_bytes() == b"secret"


def test_a_link_to_the_root_itself_is_the_owners_choice(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    repository = Repository.create(tmp_path / "data" / "cats")
    assert Repository.open(tmp_path / "disk" / "cats").id == repository.id


def test_commits_refuse_what_no_reader_would_take(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path)
    manifest = repository.put_object(b"m", "manifest").digest
    for refs, tags, message in (
        ({"bad name": manifest}, {}, ""),
        ({"a@b": manifest}, {}, ""),
        ({"sha256:00": manifest}, {}, ""),
        ({"main": "latest"}, {}, ""),
        ({"main": manifest}, {"main": manifest}, ""),
        ({"main": manifest}, {}, "x" * 10_001),
        ({"main": manifest}, {}, "\ud800"),
    ):
        with pytest.raises(ShardkitError):
            repository.commit(refs, tags, message=message)
    assert repository.head().n == 0
    assert isinstance(repository.commit({"main": manifest}, message="Größe ✓"), LogEntry)
