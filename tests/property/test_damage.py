"""One flipped bit, or any other damage, anywhere in a repository's own files: found, never silently accepted."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkit.errors import FormatError, IntegrityError, NotFoundError
from shardkit.formats.schema import Schema
from shardkit.manifest import ShardTable, merge
from shardkit.repository.repository import Repository
from shardkit.repository.versions import load_manifest, put_manifest, put_selection
from tests.drills import drill_count
from tests.property.shard_tables import composed, made_up_records

SCHEMA = Schema.parse({"image": "bytes", "label": "int64"})


def build(root: Path) -> None:
    """Two versions and their merger, with selections, over three commits."""
    repository = Repository.create(root)
    versions = []
    for seed in (1, 2):
        records, selections = made_up_records(seed, 5, 3, selected=True)
        for selection in selections.values():
            put_selection(repository, selection)
        table = ShardTable.from_records(records)
        strata = [("a",), ("b",), ("c",)]
        manifest, pages = composed(table, strata, schema=SCHEMA, axes=("label",), build={"seed": seed})
        put_manifest(repository, manifest, pages)
        repository.commit({f"v{seed}": manifest.id}, {f"tag{seed}": manifest.id}, message=f"version {seed}")
        versions.append((f"v{seed}", manifest))
    merged = merge(versions)
    put_manifest(repository, merged, [])
    repository.commit({"main": merged.id}, message="both, as one")


def read_everything(root: Path) -> object:
    """All that a repository says; a value that two equal repositories share."""
    repository = Repository.open(root, read_only=True)
    said: list[object] = [repository.id]
    for entry in repository.log():
        said.append((entry.to_bytes(), sorted(entry.refs.items()), sorted(entry.tags.items())))
        for manifest in entry.refs.values():
            version = load_manifest(repository, manifest)
            said.append(
                (
                    version.manifest.to_bytes(),
                    version.table.digest.tobytes(),
                    version.table.segment_rows.tobytes(),
                )
            )
            with_selection = version.table.has_selection.nonzero()[0].tolist()
            said.extend(version.load_selection(shard).bits.tobytes() for shard in with_selection)
    return said


@pytest.fixture(scope="module")
def pristine() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder) / "root")
        yield Path(folder) / "root"


def files_of(root: Path) -> list[Path]:
    files = sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())
    kinds = {path.suffix for path in files} | {path.parts[0] for path in files}
    assert kinds >= {".page", ".manifest", ".selection", "log", "shardkit.json"}
    return files


def expect_refusal(root: Path, damaged: Path, data: bytes | None) -> None:
    """Put `data` where a file is (None: remove the file), read everything, and put the file back."""
    path = root / damaged
    before = path.read_bytes()
    if data == before:
        return
    try:
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)
        refusals = (
            (IntegrityError, FormatError, NotFoundError) if data is None else (IntegrityError, FormatError)
        )
        with pytest.raises(refusals) as caught:
            read_everything(root)
        assert len(str(caught.value)) > 40
    finally:
        path.write_bytes(before)


@pytest.mark.drill
def test_every_bit_of_the_newest_entry_and_of_the_identity(pristine: Path) -> None:
    """Nothing names these by digest: their own must find it."""
    step = 1 if drill_count(20) == 20 else 13
    for file in (Path("shardkit.json"), max(path for path in files_of(pristine) if path.parts[0] == "log")):
        content = (pristine / file).read_bytes()
        for bit in range(0, 8 * len(content), step):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << (bit % 8)
            (pristine / file).write_bytes(flipped)
            try:
                with pytest.raises((IntegrityError, FormatError)):
                    Repository.open(pristine, read_only=True).head()
            finally:
                (pristine / file).write_bytes(content)


def test_files_of_another_repository(pristine: Path, tmp_path: Path) -> None:
    """The same content built elsewhere: only identity and log differ, and neither fits here."""
    build(tmp_path / "other")
    for file in files_of(pristine):
        if file.parts[0] == "objects":
            assert (tmp_path / "other" / file).read_bytes() == (pristine / file).read_bytes()
        else:
            expect_refusal(pristine, file, (tmp_path / "other" / file).read_bytes())


def test_a_missing_file(pristine: Path) -> None:
    newest = max(path for path in files_of(pristine) if path.parts[0] == "log")
    for file in files_of(pristine):
        if file != newest:  # without memory or a witness, a log that ends earlier is simply an earlier one
            expect_refusal(pristine, file, None)


def test_a_log_that_went_back_is_noticed_by_who_has_seen_more(pristine: Path, tmp_path: Path) -> None:
    shutil.copytree(pristine, tmp_path / "root")
    repository = Repository.open(tmp_path / "root")
    head = repository.head()
    (tmp_path / "root" / "log" / f"{head.n:020d}.json").unlink()
    with pytest.raises(IntegrityError, match="entry 3 is missing"):
        repository.head()
